"""Whether a merge into a quantized format is worth keeping: the update must be in it, and the loss must not have moved.

Two ways to lose what was trained. The update may be gone: a dequantized base lies on the grid of the format it comes
from, and storing the sum in that format again snaps most of it back. And the format may cost more than the one that was
trained on: a run on 4-bit weights has paid for 4 bits already, so that a target which costs more on top is refused,
with its number. A run on 16-bit weights, or a model without an adapter, pays that price when it is quantized; there it
is measured and said. Both are samples, of weights and of tokens: what the standard errors leave in doubt passes.
"""

from __future__ import annotations

from halfbyte.utils.errors import ConfigError

from .fidelity import Loss
from .kept import Kept
from .packing import Packing
from .weights import Target

# bits from which → share of the update to be kept; the few codes of 2 and 3 bits bring 0.90 and 0.97 from any base
KEPT = {8: 0.99, 4: 0.98, 0: 0.8}
EXCESS = 0.01  # nats per token of the run's held-out text
FEW_BITS = 4  # below them every format costs more
CERTAIN = 2  # standard errors
IN_16_BITS = "merge in 16 bits (without --quantize)"


def kept_needed(packing: Packing) -> float:
    """The share of the update that must be in the weights of `packing`."""
    return next(share for bits, share in KEPT.items() if packing.bits >= bits)


def update_is_lost(kept: Kept, packing: Packing, target: Target, original: bool) -> ConfigError | None:
    """The refusal of a merge that lost its update; None for one that kept it.

    Args:
        original: there is an original base to merge onto.
    """
    needed = kept_needed(packing)
    if not packing.formats or kept.share + CERTAIN * kept.error >= needed:
        return None
    if target == "dequantized" and original:
        fix = "merge onto the original base (--base original, or auto)"
    elif target == "dequantized":
        fix = f"{IN_16_BITS}, or name the 16-bit model as model_name_or_path in the run's config.resolved.yaml"
    else:
        fix = f"{IN_16_BITS}, or into 8 bits (--quantize fp8-block)"
    return ConfigError(
        f"quantize: in {packing.name} on the {target} base {kept}, of {needed:.0%} that are needed: rounding to the"
        " format's grid takes back what training changed",
        fix,
    )


def loss_is_higher(loss: Loss | None, packing: Packing, trained_quantized: bool) -> ConfigError | None:
    """The refusal of a merge that lost accuracy beyond what its run was trained with; None for one that did not.

    Args:
        trained_quantized: the run trained on quantized weights. That it trained on these formats is no excuse: the
            update is rounded now, too, and the 16-bit merge is better.
    """
    if loss is None or not trained_quantized or packing.bits < FEW_BITS:
        return None
    if loss.excess - CERTAIN * loss.error <= EXCESS:
        return None
    return ConfigError(
        f"quantize: {packing.name} loses more than the run was trained with: {loss}, where {EXCESS} passes",
        f"{IN_16_BITS}, or into 8 bits (--quantize fp8-block); --no-verify writes it all the same",
    )
