"""A format for each layer under a memory budget, from what each format's errors do to the loss on calibration text.

A format changes a layer's outputs by δ = (Q(W) − W)·x. Near the model's weights the loss of the text then rises by
½ δᵀ·H·δ, and H is about the mean of g·gᵀ (the empirical Fisher matrix), g the gradient of the loss with respect to the
outputs. So a format costs ½ Σ (g·δ)² over the tokens, in nats, in which layers can be added up; Hassibi and Stork
("Second order derivatives for network pruning: Optimal Brain Surgeon", NIPS 1992) rate weights so. Errors between
tokens and between layers are taken as independent, so the best choice is a multiple-choice knapsack. On the convex hull
of each layer's (bytes, error) points, taking steps in the order of error saved per byte is its optimum but for the last
step that no longer fits (Sinha and Zoltners, "The multiple-choice knapsack problem", Operations Research 27(3), 1979).

An estimate is not the loss. `best` therefore compares the mixture, by its loss on text that had no part in choosing it,
with each format alone that fits the budget.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import SIXTEEN
from ..formats import Format
from ..modeling.head import causal_lm_loss
from ..modeling.layer import causal_lm_of
from ..optim import trained_parameters
from ..tensor import QuantizedTensor
from ..utils.errors import ModelError
from ..utils.notices import notice
from .expert_stacks import stackable
from .expert_views import Stacks, measurable_stacks, watch_experts
from .quantizer import quantizable


@dataclass(frozen=True)
class Option:
    """One way to store a layer.

    Attributes:
        format: name as in `quantization:`.
        nbytes: stored size of the weight.
        error: how much it is expected to raise the loss of a token, nats.
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


def measure(
    model: nn.Module, formats: Mapping[str, Format], batches: Iterable[Mapping[str, Any]]
) -> dict[str, list[Option]]:
    """What each format costs and loses in each linear layer and stack of experts, 16 bits included.

    Weights are quantized while gradients pass their layer and dropped, and decoder layers run again for their
    gradients, so memory grows by one layer and the inputs of the decoder layers; every batch quantizes again. An expert
    that no token reached is taken to lose what the others of its layer do on average.

    Args:
        model: a causal language model in 16 (or 32) bits.
        formats: name → format.
        batches: arguments of the model's forward and `labels`, on its device.

    Raises:
        ModelError: a weight cannot be stored in a format, no token reached a layer, or a gradient is NaN or Inf.
    """
    linears, stacks = quantizable(model), measurable_stacks(model)
    for name, each in stacks.items():
        _check_stackable(name, each, formats)
    risen = {name: dict.fromkeys(formats, 0.0) for name in (*linears, *stacks)}
    reached: dict[str, set[int]] = {name: set() for name in risen}
    tokens = 0

    def meet(name: str, expert: int, weight: Tensor, x: Tensor, gradient: Tensor) -> None:
        x, gradient = (each.reshape(-1, each.shape[-1]).float() for each in (x, gradient))
        if not bool(gradient.isfinite().all()):
            raise ModelError(f"the loss has a gradient of NaN or Inf at {name}", "use bfloat16 or float32 weights")
        if len(x):
            reached[name].add(expert)
        for key, format_ in formats.items():
            error = _stored(weight, format_, name, torch.float32) - weight.detach().float()
            risen[name][key] += 0.5 * float(((x @ error.T) * gradient).sum(-1).square().sum(dtype=torch.float64))

    with watch_experts(stacks, meet), _gradients(model, linears, meet):
        for batch in batches:
            loss, count = causal_lm_loss(model, batch)
            loss.backward()
            tokens += int(count)
    for name in risen:
        if not reached[name] or not tokens:
            raise ModelError(f"no token of the calibration text reached {name}", "give more text")
    shapes = {name: [module.weight] for name, module in linears.items()}
    shapes |= {name: list(each.matrices().values()) for name, each in stacks.items()}
    found = {}
    for name, weights in shapes.items():
        factor = _experts(stacks[name]) / len(reached[name]) / tokens if name in stacks else 1 / tokens
        found[name] = [Option(SIXTEEN, 2 * sum(weight.numel() for weight in weights), 0.0)]
        found[name] += [
            Option(key, sum(_nbytes(format_, weight) for weight in weights), risen[name][key] * factor)
            for key, format_ in formats.items()
        ]
    _say_unreached(stacks, reached)
    return found


def _experts(stacks: Stacks) -> int:
    return len(next(iter(stacks.matrices().values())))


def _nbytes(format: Format, weight: Tensor) -> float:
    shape = tuple(weight.shape)
    return (format if len(shape) == 2 else format.stacked()).bits_per_weight(shape) * weight.numel() / 8


def _check_stackable(name: str, stacks: Stacks, formats: Mapping[str, Format]) -> None:
    for leaf, stack in stacks.matrices().items():
        for key, format_ in formats.items():
            if why := stackable(format_, tuple(stack.shape)):
                others = ", ".join(other for other in formats if other != key) or "another one"
                raise ModelError(f"{name}: {leaf} cannot be stored in {key}: {why}", f"name other formats: {others}")


def _say_unreached(stacks: Mapping[str, Stacks], reached: Mapping[str, set[int]]) -> None:
    places = {id(each.module): (name, _experts(each)) for name, each in stacks.items()}
    total = sum(experts for _, experts in places.values())
    missed = sum(experts - len(reached[name]) for name, experts in places.values())
    if missed:
        said = f"no token of the calibration text reached {missed} of {total} experts"
        notice("mix-unreached", f"{said}: each is taken to lose what the others of its layer do; more text would tell")


@contextlib.contextmanager
def _gradients(
    model: nn.Module, linears: Mapping[str, nn.Linear], meet: Callable[[str, int, Tensor, Tensor, Tensor], None]
) -> Iterator[None]:
    """Within it, a backward calls `meet` with each linear's inputs and its outputs' gradient, decoder layer by layer.

    No parameter gets a gradient: gradients begin at the embeddings.
    """

    def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone()  # a model may scale it in place

    def watch(name: str, module: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad:  # it does not in a decoder layer's first run
            output.register_hook(partial(meet, name, 0, module.weight, args[0].detach()))

    trained = list(trained_parameters(model).values())
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    forwards = [layer.__dict__.get("forward") for layer in layers]
    handles = [causal_lm_of(model).get_input_embeddings().register_forward_hook(begin)]
    handles += [module.register_forward_hook(partial(watch, name)) for name, module in linears.items()]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        for layer in layers:
            layer.forward = partial(_run_again, layer.forward)
        with torch.enable_grad():
            yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
        for handle in handles:
            handle.remove()
        for parameter in trained:
            parameter.requires_grad_(True)


def _run_again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`forward`, of which only the inputs are kept. Reentrant: the second run's hooks are those that are called."""
    if not any(isinstance(each, Tensor) and each.requires_grad for each in args):
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=True)


def _stored(weight: Tensor, format: Format, name: str, dtype: torch.dtype) -> Tensor:
    try:
        return QuantizedTensor.quantize(weight.detach(), format).dequantize(dtype)
    except ModelError as error:
        raise ModelError(f"{name}: {error.message}", error.fix) from error


@torch.no_grad()
def loss_as(model: nn.Module, layers: Mapping[str, Format], batches: Iterable[Mapping[str, Any]]) -> float:
    """Mean loss of a token, nats, with linear layers and stacks stored as `layers` says; what it lacks is left alone.

    Weights are quantized while the text passes their layer and dropped, so memory grows by one layer.

    Args:
        batches: as for `measure`.

    Raises:
        ModelError: a weight cannot be stored in its format.
    """
    whole: dict[tuple[str, str], Tensor] = {}
    stacks = {name: each for name, each in measurable_stacks(model).items() if name in layers}
    linears = {name: model.get_submodule(name) for name in layers if name not in stacks}
    places: dict[str, tuple[nn.Module, tuple[str, ...]]]
    places = {name: (module, ("weight",)) for name, module in linears.items()}
    places |= {name: (each.module, each.leaves) for name, each in stacks.items()}

    def store(name: str, module: nn.Module, args: Any) -> None:
        for leaf in places[name][1]:
            parameter = getattr(module, leaf)
            whole[name, leaf] = parameter.data
            parameter.data = _stored_as_it_lies(module, parameter, layers[name], f"{name}.{leaf}")

    def restore(name: str, module: nn.Module, *_: Any) -> None:
        for leaf in places[name][1]:
            getattr(module, leaf).data = whole.pop((name, leaf))

    handles = [module.register_forward_pre_hook(partial(store, name)) for name, (module, _) in places.items()]
    handles += [module.register_forward_hook(partial(restore, name)) for name, (module, _) in places.items()]
    total, tokens = 0.0, 0
    try:
        for batch in batches:
            loss, count = causal_lm_loss(model, batch)
            total, tokens = total + float(loss), tokens + int(count)
    finally:
        for handle in handles:
            handle.remove()
        for (name, leaf), weight in whole.items():  # of a forward that raised
            getattr(places[name][0], leaf).data = weight
    return total / max(tokens, 1)


def _stored_as_it_lies(module: nn.Module, weight: Tensor, format: Format, name: str) -> Tensor:
    """What a format makes of a linear's weight or of a stack, in its dtype."""
    if weight.dim() == 2:
        return _stored(weight, format, name, weight.dtype)
    turned = bool(getattr(module, "is_transposed", False))
    stored = _stored(weight.mT.contiguous() if turned else weight, format.stacked(), name, weight.dtype)
    return stored.mT if turned else stored


def best(
    model: nn.Module,
    formats: Mapping[str, Format],
    options: Mapping[str, Sequence[Option]],
    bits: float,
    batches: Sequence[Mapping[str, Any]],
) -> tuple[Mixture, dict[str, float]]:
    """The mixture of `mix` or a format alone within `bits`, whichever has the least loss on `batches`.

    Args:
        model, formats: as for `measure`.
        options: what `measure` found on other text.
        batches: arguments of the model's forward and `labels`, on its device.

    Returns:
        what is best, and the mean loss of a token of each that was compared, nats: "mixture", and formats by name.

    Raises:
        ModelError: even the smallest options take more than `bits`.
    """
    mixtures, weights = {"mixture": mix(options, bits)}, _weights(options)
    for key in (SIXTEEN, *formats):
        alone = _mixture({name: next(o for o in each if o.format == key) for name, each in options.items()}, weights)
        if alone.bits <= bits:
            mixtures[key] = alone
    losses = {}
    for key, each in mixtures.items():
        stored = {name: formats[o.format] for name, o in each.layers.items() if o.format != SIXTEEN}
        losses[key] = loss_as(model, stored, batches)
    return mixtures[min(losses, key=lambda key: (losses[key], key == "mixture"))], losses


def mix(options: Mapping[str, Sequence[Option]], bits: float) -> Mixture:
    """The options of least summed error whose mean bits per weight stay within `bits`.

    Args:
        options: module name → ways to store it, 16 bits among them (as `measure` gives them).

    Raises:
        ModelError: even the smallest options take more.
    """
    weights = _weights(options)
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
    return _mixture(chosen, weights)


def _weights(options: Mapping[str, Sequence[Option]]) -> float:
    return sum(next(o.nbytes for o in each if o.format == SIXTEEN) / 2 for each in options.values())


def _mixture(chosen: dict[str, Option], weights: float) -> Mixture:
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
