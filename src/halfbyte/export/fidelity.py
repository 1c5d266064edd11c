"""How far a merged model is from its base with the adapter, and whether rounding explains the difference.

All logits are computed in fp32 from the stored weights, so two models differ only by their weights.

**Bound.** A merge rounds every weight once, by at most half a unit in the last place (ulp). The effect on the logits is
measured: the merged weights are perturbed by uniform noise of up to half an ulp, and the logits compared with those
before. On a trained 40M model the largest differences of rounding and of this noise agree within 4%, the KLs within 3%.
A merge passes if its difference is at most `MARGIN` times the noise's (KL grows with the square, so its factor is
squared). A damaged tensor exceeds the bound by factors of hundreds.

**Lost updates.** If the base's weights are exact in the written dtype (a bf16 base merged in bf16), updates below half
an ulp round away in all weights. The lost share of the update is summed while writing, and the same share of the
adapter's own effect is added to the bound.

**Quantized weights** are perturbed by normal noise with the RMS quantization error of each row. With few bits this
bound is wide, so verify.py also compares every weight.

**Experts.** Rounding sometimes routes a token to another expert, which changes its logits far more than rounding does
and which few noise draws would show. Such tokens take the other model's experts and weights, and are counted; the noise
determines how many are allowed. All other tokens are routed by the model's own routers.

**Casts.** Weights that are not quantized may have been cast for training (an fp16 checkpoint's norms in a bf16 run).
The merged model keeps the checkpoint's values, so the noisy model uses the cast ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from ..formats.retained_update import RetainedUpdate

MARGIN = 2.0
FLOAT32_ERROR = 2e-5  # relative to the largest logit: x·W + (x·A)·B and x·(W + A·B) sum in different orders
DRAWS = 2  # noise draws; the larger effect counts
# minimum bits → share of the update to retain; formats of 2 and 3 bits reach 0.90 and 0.97 on any base
MIN_RETAINED = {8: 0.99, 4: 0.98, 0: 0.8}
STANDARD_ERRORS = 2  # allowance for measurement noise
MAX_MOVED_SHARE = 0.01  # share of expert choices that may differ in addition to those moved by the noise


@dataclass(frozen=True)
class Distance:
    """Difference of the next-token distributions of two models on the same text.

    Attributes:
        kl: mean over tokens of KL(first ‖ second), in nats.
        max_logit_difference: largest absolute difference of two logits.
    """

    kl: float
    max_logit_difference: float

    def __str__(self) -> str:
        return f"{self.max_logit_difference:.3g} (KL {self.kl:.3g})"


@dataclass(frozen=True)
class Loss:
    """Cross-entropy of a quantized merge and of the 16-bit merge on the same tokens.

    The 16-bit merge onto the trained base and the one onto the original base are both valid results of the run; the one
    with the higher loss is the reference.

    Attributes:
        merged, in_16_bits: means over the tokens, in nats.
        error: standard error of their difference.
        tokens: number of tokens.
        held_out: whether the run was not trained on them.
    """

    merged: float
    in_16_bits: float
    error: float
    tokens: int
    held_out: bool

    @classmethod
    def between(cls, merged: Tensor, in_16_bits: Iterable[Tensor], held_out: bool) -> Loss:
        """Compare losses per token, fp64 [tokens]."""
        worse = max(in_16_bits, key=lambda losses: float(losses.mean()))
        error = float((merged - worse).std(correction=0)) / len(merged) ** 0.5
        return cls(float(merged.mean()), float(worse.mean()), error, len(merged), held_out)

    @property
    def excess(self) -> float:
        """Increase of the loss over the 16-bit merge, in nats per token."""
        return self.merged - self.in_16_bits

    def __str__(self) -> str:
        text = "held-out text" if self.held_out else "the run's text"
        return (
            f"loss {self.merged:.4f} on {self.tokens} tokens of {text}, {self.in_16_bits:.4f} in 16 bits"
            f" ({self.excess:+.4f} ± {self.error:.4f})"
        )


def required_share(bits: float, minimum: float | None = None) -> float:
    """Return the share of the update that weights of `bits` must retain; `minimum` overrides the usual one."""
    return next(share for least, share in MIN_RETAINED.items() if bits >= least) if minimum is None else minimum


def is_lost(retained: RetainedUpdate, needed: float) -> bool:
    """Return whether less than the needed share of the update is retained, beyond measurement noise."""
    return retained.share + STANDARD_ERRORS * retained.error < needed


@dataclass(frozen=True)
class Fidelity:
    """A merged model compared with the models that it was merged from.

    Attributes:
        trained: distance from the model as it was trained: the quantized base with the adapter.
        exact: distance from the same merge without rounding: its base with the adapter unmerged.
        noise: effect of perturbing each rounded weight by up to half an ulp; the maximum of `DRAWS` draws.
        adapter: effect of the unmerged adapter: distance between the base with and without it.
        lost: share of the update that rounding dropped or added.
        largest_logit: scale of the logits.
        loss: of a quantized merge, compared with the 16-bit merge.
        moved: for mixtures: number of expert choices that differed in `exact`; the maximum that a noise draw changes;
            and the number of choices.
    """

    trained: Distance
    exact: Distance
    noise: Distance
    adapter: Distance
    lost: float
    largest_logit: float
    loss: Loss | None = None
    moved: tuple[int, int, int] = (0, 0, 0)

    @property
    def bound(self) -> float:
        """Largest logit difference that rounding explains."""
        lost = self.lost * self.adapter.max_logit_difference
        return MARGIN * (self.noise.max_logit_difference + lost) + FLOAT32_ERROR * self.largest_logit

    @property
    def kl_bound(self) -> float:
        """Largest KL that rounding explains; it grows with the square of the difference."""
        return MARGIN**2 * (self.noise.kl + self.lost**2 * self.adapter.kl) + FLOAT32_ERROR**2

    @property
    def explained(self) -> bool:
        """Whether rounding explains `exact` (False for NaN)."""
        moved, moved_by_noise, choices = self.moved
        routed = moved <= MARGIN**2 * moved_by_noise + MAX_MOVED_SHARE * choices
        return routed and self.exact.max_logit_difference <= self.bound and self.exact.kl <= self.kl_bound


def distance(first: Tensor, second: Tensor) -> Distance:
    """Return the distance of logits [rows, T, vocabulary], fp32; computed row by row in fp64."""
    total, largest = 0.0, 0.0
    for p, q in zip(first, second, strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        largest = max(largest, float((p - q).abs().max().nan_to_num(nan=float("inf"))))
    return Distance(total / len(first), largest)


def elementwise_max(distances: Iterable[Distance]) -> Distance:
    """Return the maximum of each measure."""
    kls, differences = zip(*((distance.kl, distance.max_logit_difference) for distance in distances), strict=True)
    return Distance(max(kls), max(differences))
