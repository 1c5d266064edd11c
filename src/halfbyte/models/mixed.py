"""A format for each layer under a memory budget, from the error that each format makes on calibration text.

The error of a format in a layer is ‖(W − Q(W))·X‖² over ‖W·X‖², with X the inputs that the text gives the layer in the
16-bit model: what the layer's output loses, whatever the scale of the outputs there. Layers are taken as independent,
so the best choice is a multiple-choice knapsack. On the convex hull of each layer's (bytes, error) points, taking steps
in the order of error saved per byte is its optimum but for the last step that no longer fits (Sinha and Zoltners, "The
multiple-choice knapsack problem", Operations Research 27(3), 1979).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SIXTEEN
from ..errors import ModelError
from ..formats import Format
from ..tensor import QuantizedTensor
from .head import backbone_inputs
from .quantizer import quantizable


@dataclass(frozen=True)
class Option:
    """One way to store a layer.

    Attributes:
        format: name as in `quantization:`.
        nbytes: stored size of the weight.
        error: squared output error over the squared output.
    """

    format: str
    nbytes: float
    error: float


@dataclass(frozen=True)
class Mixture:
    """A format for every layer.

    Attributes:
        layers: module name → what was chosen.
        bits: mean bits per weight of these layers, scales included.
    """

    layers: dict[str, Option]
    bits: float

    @property
    def error(self) -> float:
        """Sum of the layers' errors."""
        return sum(option.error for option in self.layers.values())

    def patterns(self) -> dict[str, str]:
        """What `quantization:` takes: the layers that differ from the commonest format by name, and that as "*"."""
        counts = Counter(option.format for option in self.layers.values())
        commonest = counts.most_common(1)[0][0]
        named = {name: option.format for name, option in self.layers.items() if option.format != commonest}
        return named | {"*": commonest}


@torch.inference_mode()
def measure(
    model: nn.Module, formats: Mapping[str, Format], batches: Iterable[Mapping[str, Any]]
) -> dict[str, list[Option]]:
    """What each format costs and loses in each linear layer, 16 bits included.

    Weights are quantized while the text passes their layer and dropped, so memory grows by one layer; every batch
    quantizes again.

    Args:
        model: a causal language model in 16 (or 32) bits.
        formats: name → format.
        batches: arguments of the model's forward, on its device.

    Raises:
        ModelError: a weight cannot be stored in a format, or no token reached a layer (an expert, say).
    """
    linears = quantizable(model)
    lost = {name: dict.fromkeys(formats, 0.0) for name in linears}
    total = dict.fromkeys(linears, 0.0)

    def hook_for(name: str) -> Any:
        def hook(module: nn.Linear, args: tuple[Tensor]) -> None:
            x = args[0].reshape(-1, module.in_features).float()
            weight = module.weight.detach()
            total[name] += _energy(x, weight.float())
            for key, format_ in formats.items():
                lost[name][key] += _energy(x, weight.float() - _stored(weight, format_, name))

        return hook

    handles = [module.register_forward_pre_hook(hook_for(name)) for name, module in linears.items()]
    try:
        for batch in batches:
            model(**backbone_inputs(model, batch), use_cache=False)  # with a cache, packed documents see each other
    finally:
        for handle in handles:
            handle.remove()
    found = {}
    for name, module in linears.items():
        if not total[name]:
            raise ModelError(f"no token of the calibration text reached {name}", "give more text")
        shape, weights = tuple(module.weight.shape), module.weight.numel()
        found[name] = [Option(SIXTEEN, 2 * weights, 0.0)] + [
            Option(key, format_.bits_per_weight(shape) * weights / 8, lost[name][key] / total[name])
            for key, format_ in formats.items()
        ]
    return found


def _stored(weight: Tensor, format: Format, name: str) -> Tensor:
    try:
        return QuantizedTensor.quantize(weight, format).dequantize(torch.float32)
    except ModelError as error:
        raise ModelError(f"{name}.weight: {error.message}", error.fix) from error


def _energy(x: Tensor, weight: Tensor) -> float:
    return float((x @ weight.T).square().sum(dtype=torch.float64))


def mix(options: Mapping[str, Sequence[Option]], bits: float) -> Mixture:
    """The options of least summed error whose mean bits per weight stay within `bits`.

    Args:
        options: module name → ways to store it, 16 bits among them (as `measure` gives them).

    Raises:
        ModelError: even the smallest options take more.
    """
    weights = sum(next(o.nbytes for o in each if o.format == SIXTEEN) / 2 for each in options.values())
    hulls = {name: lower_hull(each) for name, each in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    room = bits / 8 * weights - sum(option.nbytes for option in chosen.values())
    if room < 0:
        least = 8 * sum(option.nbytes for option in chosen.values()) / weights
        raise ModelError(f"{bits} bits per weight: the smallest formats take {least:.3f}", "raise it, or add a format")
    steps = [
        ((one.error - two.error) / (two.nbytes - one.nbytes), name, one, two)
        for name, hull in hulls.items()
        for one, two in itertools.pairwise(hull)
    ]
    for _, name, one, two in sorted(steps, key=lambda step: -step[0]):
        if chosen[name] is one and two.nbytes - one.nbytes <= room:
            chosen[name] = two
            room -= two.nbytes - one.nbytes
    return Mixture(chosen, 8 * sum(option.nbytes for option in chosen.values()) / weights)


def lower_hull(options: Iterable[Option]) -> list[Option]:
    """The options on the lower convex hull of (bytes, error), by size: each saves less per byte than the one before."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(one: Option, two: Option) -> float:
    return (two.error - one.error) / (two.nbytes - one.nbytes)
