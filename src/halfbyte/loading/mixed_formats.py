"""Mixed formats: a format for each layer under a memory budget, by its effect on the loss on calibration text.

A format changes a layer's outputs by δ = (Q(W) − W)·x. Near the model's weights, the loss of the text then rises by
½ δᵀ·H·δ, and H is about the mean of g·gᵀ (the empirical Fisher matrix), g the gradient of the loss with respect to the
outputs. So a format costs ½ Σ (g·δ)² over the tokens, in nats, which adds up over layers. Hassibi and Stork ("Second
order derivatives for network pruning: Optimal Brain Surgeon", NIPS 1992) rate weights in the same way. Errors are
assumed independent between tokens and between layers, so the best choice is a multiple-choice knapsack. Its optimum,
except for the last step that does not fit, is found on the convex hull of each layer's (bytes, error) points, by taking
steps in the order of error saved per byte (Sinha and Zoltners, "The multiple-choice knapsack problem", Operations
Research 27(3), 1979).

An estimate is not the loss. `best` therefore compares the mixture with each uniform format that fits the budget, by the
loss on text that was not used for the estimate.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import SIXTEEN
from ..formats import Format
from ..modeling.architectures import expert_stacks
from ..modeling.experts import bias_of, matrices_of, names_of
from ..modeling.head import causal_lm_loss
from ..modeling.layer import causal_lm_of
from ..optim import trained_parameters
from ..tensor import QuantizedTensor
from ..utils.errors import ModelError
from ..utils.notices import notice
from .expert_stacks import stack_unsupported_reason
from .quantizer import quantizable

Visit = Callable[[str, int, Tensor, Tensor, Tensor], None]  # name, expert, matrix [N, K], rows, output gradient


class StackGroup(NamedTuple):
    """Stacks of a module that share a format: one stack, or both if the module is transposed (one orientation).

    Attributes:
        module: transformers' experts.
        leaves: attribute names of the stacks.
    """

    module: Any
    leaves: tuple[str, ...]

    def matrices(self) -> dict[str, Tensor]:
        """Return each stack as [E, N, K], in either orientation."""
        return {leaf: matrices_of(self.module, leaf).detach() for leaf in self.leaves}


@dataclass(frozen=True)
class Option:
    """A way to store a layer.

    Attributes:
        format: name for `quantization:`.
        nbytes: stored size of the weight.
        error: expected increase of the loss per token, nats.
    """

    format: str
    nbytes: float
    error: float


@dataclass(frozen=True)
class Mixture:
    """A format for every layer.

    Attributes:
        layers: module name → selected option.
        bits: mean bits per weight of these layers, scales included.
    """

    layers: dict[str, Option]
    bits: float

    @property
    def error(self) -> float:
        """Sum of the layers' errors."""
        return sum(option.error for option in self.layers.values())

    def patterns(self) -> dict[str, str]:
        """Return `quantization:` patterns: layers that differ from the most common format, and that format as "*"."""
        counts = Counter(option.format for option in self.layers.values())
        commonest = counts.most_common(1)[0][0]
        named = {name: option.format for name, option in self.layers.items() if option.format != commonest}
        return named | {"*": commonest}


def measure(
    model: nn.Module, formats: Mapping[str, Format], batches: Iterable[Mapping[str, Any]]
) -> dict[str, list[Option]]:
    """Estimate size and loss of each format, 16 bits included, for each linear layer and stack of experts.

    Weights are quantized while gradients pass their layer and then dropped, and decoder layers are rerun for their
    gradients. So memory grows by one layer and the inputs of the decoder layers; every batch quantizes again. An expert
    without tokens is assumed to lose as much as the average of its layer's other experts.

    Args:
        model: a causal language model in 16 (or 32) bits.
        formats: name → format.
        batches: arguments of the model's forward and `labels`, on its device.

    Raises:
        ModelError: a weight cannot be stored in a format, no token reached a layer, or a gradient is NaN or Inf.
    """
    linears, stacks = quantizable(model), measurable_stacks(model)
    for name, group in stacks.items():
        for (leaf, stack), (key, format_) in itertools.product(group.matrices().items(), formats.items()):
            if reason := stack_unsupported_reason(format_, tuple(stack.shape)):
                alternatives = ", ".join(format_name for format_name in formats if format_name != key) or "another one"
                fix = f"name other formats: {alternatives}"
                raise ModelError(f"{name}: {leaf} cannot be stored in {key}: {reason}", fix)
    risen = {name: dict.fromkeys(formats, 0.0) for name in (*linears, *stacks)}
    reached: dict[str, set[int]] = {name: set() for name in risen}
    tokens = 0

    def visit(name: str, expert: int, weight: Tensor, x: Tensor, gradient: Tensor) -> None:
        x = x.reshape(-1, x.shape[-1]).float()
        gradient = gradient.reshape(-1, gradient.shape[-1]).float()
        if not bool(gradient.isfinite().all()):
            raise ModelError(f"the loss has a gradient of NaN or Inf at {name}", "use bfloat16 or float32 weights")
        if len(x):
            reached[name].add(expert)
        for key, format_ in formats.items():
            error = _round_trip(weight, format_, name, torch.float32) - weight.detach().float()
            risen[name][key] += 0.5 * float(((x @ error.T) * gradient).sum(-1).square().sum(dtype=torch.float64))

    with hook_experts(stacks, visit), _gradients(model, linears, visit):
        for batch in batches:
            loss, count = causal_lm_loss(model, batch)
            loss.backward()
            tokens += int(count)
    for name in risen:
        if not reached[name] or not tokens:
            raise ModelError(f"no token of the calibration text reached {name}", "give more text")
    shapes = {name: [module.weight] for name, module in linears.items()}
    shapes |= {name: list(group.matrices().values()) for name, group in stacks.items()}
    options = {}
    for name, weights in shapes.items():
        factor = _expert_count(stacks[name]) / len(reached[name]) / tokens if name in stacks else 1 / tokens
        options[name] = [Option(SIXTEEN, 2 * sum(weight.numel() for weight in weights), 0.0)]
        options[name] += [
            Option(key, sum(_nbytes(format_, weight) for weight in weights), risen[name][key] * factor)
            for key, format_ in formats.items()
        ]
    experts = {id(group.module): (name, _expert_count(group)) for name, group in stacks.items()}
    missed = sum(count - len(reached[name]) for name, count in experts.values())
    if missed:
        total = sum(count for _, count in experts.values())
        message = f"no token of the calibration text reached {missed} of {total} experts"
        notice("mix-unreached", f"{message}: using the mean error of their layers' other experts; give more text")
    return options


def _expert_count(stacks: StackGroup) -> int:
    return len(next(iter(stacks.matrices().values())))


def _nbytes(format: Format, weight: Tensor) -> float:
    shape = tuple(weight.shape)
    return (format if len(shape) == 2 else format.stacked()).bits_per_weight(shape) * weight.numel() / 8


@contextlib.contextmanager
def _gradients(
    model: nn.Module, linears: Mapping[str, nn.Linear], visit: Callable[[str, int, Tensor, Tensor, Tensor], None]
) -> Iterator[None]:
    """Call `visit` in backward with each linear's inputs and output gradient, decoder layer by decoder layer.

    Applies to backwards inside the context. No parameter gets a gradient: gradients begin at the embeddings.
    """

    def begin(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.detach().requires_grad_().clone()  # the model may scale it in place

    def watch(name: str, module: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad:  # not in a decoder layer's first run
            output.register_hook(partial(visit, name, 0, module.weight, args[0].detach()))

    trained = list(trained_parameters(model).values())
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    forwards = [layer.__dict__.get("forward") for layer in layers]
    handles = [causal_lm_of(model).get_input_embeddings().register_forward_hook(begin)]
    handles += [module.register_forward_hook(partial(watch, name)) for name, module in linears.items()]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        for layer in layers:
            layer.forward = partial(_checkpointed_forward, layer.forward)
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


def _checkpointed_forward(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `forward` and save only its inputs for backward; reentrant, so hooks fire in the rerun."""
    if not any(isinstance(argument, Tensor) and argument.requires_grad for argument in args):
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=True)


def _round_trip(weight: Tensor, format: Format, name: str, dtype: torch.dtype) -> Tensor:
    try:
        return QuantizedTensor.quantize(weight.detach(), format).dequantize(dtype)
    except ModelError as error:
        raise ModelError(f"{name}: {error.message}", error.fix) from error


def measurable_stacks(model: Any) -> dict[str, StackGroup]:
    """Return pattern for `quantization:` → stacks of `model` that may be quantized."""
    groups: dict[str, StackGroup] = {}
    for name, module in expert_stacks(model).items():
        module_name, _, leaf = name.rpartition(".")
        key = f"{module_name}.*" if module.is_transposed else name
        groups[key] = StackGroup(module, (*(groups[key].leaves if key in groups else ()), leaf))
    return groups


@contextlib.contextmanager
def hook_experts(stacks: Mapping[str, StackGroup], visit: Visit) -> Iterator[None]:
    """Call `visit` in backward for each matmul of an expert: name, expert, matrix [N, K], rows [S, K], gradient [S, N].

    Applies to backwards inside the context.
    """
    modules = {id(group.module): group.module for group in stacks.values()}
    names = {(id(group.module), leaf): name for name, group in stacks.items() for leaf in group.leaves}
    try:
        for module in modules.values():
            module.forward = partial(_forward, module, names, visit)
        yield
    finally:
        for module in modules.values():
            del module.forward


def _forward(
    module: Any,
    names: Mapping[tuple[int, str], str],
    visit: Visit,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Run transformers' weighted sum over each token's experts, one expert at a time."""
    total = torch.zeros_like(hidden_states)
    first, second = names_of(module)
    unit = module._apply_gate if module.has_gate else module.act_fn

    def product(leaf: str, expert: int, x: Tensor) -> Tensor:
        weight, biases = matrices_of(module, leaf).detach()[expert], bias_of(module, leaf)
        result = nn.functional.linear(x, weight, None if biases is None else biases[expert])
        name = names.get((id(module), leaf))
        if result.requires_grad and name is not None:
            result.register_hook(partial(visit, name, expert, weight, x.detach()))
        return result

    for expert in top_k_index.unique().tolist():
        tokens, slots = torch.where(top_k_index == expert)
        hidden = product(second, expert, unit(product(first, expert, hidden_states[tokens])))
        weighted = hidden * top_k_weights[tokens, slots, None].to(hidden.dtype)
        total = total.index_add(0, tokens, weighted.to(total.dtype))
    return total


@torch.no_grad()
def loss_with_formats(model: nn.Module, layers: Mapping[str, Format], batches: Iterable[Mapping[str, Any]]) -> float:
    """Return the mean loss per token, nats, with the linears and stacks of `layers` stored in these formats.

    Weights are quantized while the text passes their layer and then dropped, so memory grows by one layer.

    Args:
        batches: as in `measure`.

    Raises:
        ModelError: a weight cannot be stored in its format.
    """
    originals: dict[tuple[str, str], Tensor] = {}
    stacks = {name: group for name, group in measurable_stacks(model).items() if name in layers}
    linears = {name: model.get_submodule(name) for name in layers if name not in stacks}
    owners: dict[str, tuple[nn.Module, tuple[str, ...]]]
    owners = {name: (module, ("weight",)) for name, module in linears.items()}
    owners |= {name: (group.module, group.leaves) for name, group in stacks.items()}

    def store(name: str, module: nn.Module, args: Any) -> None:
        for leaf in owners[name][1]:
            parameter = getattr(module, leaf)
            originals[name, leaf] = parameter.data
            parameter.data = _round_trip_in_layout(module, parameter, layers[name], f"{name}.{leaf}")

    def restore(name: str, module: nn.Module, *_: Any) -> None:
        for leaf in owners[name][1]:
            getattr(module, leaf).data = originals.pop((name, leaf))

    handles = [module.register_forward_pre_hook(partial(store, name)) for name, (module, _) in owners.items()]
    handles += [module.register_forward_hook(partial(restore, name)) for name, (module, _) in owners.items()]
    total = 0.0
    tokens = 0
    try:
        for batch in batches:
            loss, count = causal_lm_loss(model, batch)
            total += float(loss)
            tokens += int(count)
    finally:
        for handle in handles:
            handle.remove()
        for (name, leaf), weight in originals.items():  # after a forward that raised
            getattr(owners[name][0], leaf).data = weight
    return total / max(tokens, 1)


def _round_trip_in_layout(module: nn.Module, weight: Tensor, format: Format, name: str) -> Tensor:
    """Quantize and dequantize a linear's weight or a stack, in its dtype and orientation."""
    if weight.dim() == 2:
        return _round_trip(weight, format, name, weight.dtype)
    transposed = bool(getattr(module, "is_transposed", False))
    stored = _round_trip(weight.mT.contiguous() if transposed else weight, format.stacked(), name, weight.dtype)
    return stored.mT if transposed else stored


def best(
    model: nn.Module,
    formats: Mapping[str, Format],
    options: Mapping[str, Sequence[Option]],
    bits: float,
    batches: Sequence[Mapping[str, Any]],
) -> tuple[Mixture, dict[str, float]]:
    """Return the mixture of `mix` or the uniform format within `bits` that has the smallest loss on `batches`.

    Args:
        model, formats: as in `measure`.
        options: result of `measure` on other text.
        batches: arguments of the model's forward and `labels`, on its device.

    Returns:
        The best mixture, and the mean loss per token, nats, of each candidate: "mixture", and formats by name.

    Raises:
        ModelError: even the smallest options take more than `bits`.
    """
    mixtures, weights = {"mixture": mix(options, bits)}, _weights(options)
    for key in (SIXTEEN, *formats):
        in_format = {name: next(o for o in layer if o.format == key) for name, layer in options.items()}
        uniform = _mixture(in_format, weights)
        if uniform.bits <= bits:
            mixtures[key] = uniform
    losses = {}
    for key, mixture in mixtures.items():
        stored = {name: formats[o.format] for name, o in mixture.layers.items() if o.format != SIXTEEN}
        losses[key] = loss_with_formats(model, stored, batches)
    return mixtures[min(losses, key=lambda key: (losses[key], key == "mixture"))], losses


def mix(options: Mapping[str, Sequence[Option]], bits: float) -> Mixture:
    """Return the options with the smallest sum of errors whose mean bits per weight are within `bits`.

    Args:
        options: module name → ways to store it, including 16 bits (from `measure`).

    Raises:
        ModelError: even the smallest options take more.
    """
    weights = _weights(options)
    hulls = {name: lower_hull(layer_options) for name, layer_options in options.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    headroom = bits / 8 * weights - sum(option.nbytes for option in chosen.values())
    if headroom < 0:
        smallest_bits = 8 * sum(option.nbytes for option in chosen.values()) / weights
        message = f"{bits} bits per weight: the smallest formats take {smallest_bits:.3f}"
        raise ModelError(message, "raise it, or add a format")
    steps = [
        ((smaller.error - larger.error) / (larger.nbytes - smaller.nbytes), name, smaller, larger)
        for name, hull in hulls.items()
        for smaller, larger in itertools.pairwise(hull)
    ]
    for _, name, smaller, larger in sorted(steps, key=lambda step: -step[0]):
        if chosen[name] is smaller and larger.nbytes - smaller.nbytes <= headroom:
            chosen[name] = larger
            headroom -= larger.nbytes - smaller.nbytes
    return _mixture(chosen, weights)


def _weights(options: Mapping[str, Sequence[Option]]) -> float:
    return sum(next(o.nbytes for o in layer_options if o.format == SIXTEEN) / 2 for layer_options in options.values())


def _mixture(chosen: dict[str, Option], weights: float) -> Mixture:
    return Mixture(chosen, 8 * sum(option.nbytes for option in chosen.values()) / weights)


def lower_hull(options: Iterable[Option]) -> list[Option]:
    """Return the options on the lower convex hull of (bytes, error), by size: each step saves less per byte."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda option: (option.nbytes, option.error)):
        if hull and option.error >= hull[-1].error:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(smaller: Option, larger: Option) -> float:
    return (larger.error - smaller.error) / (larger.nbytes - smaller.nbytes)
