"""Logits of a model in fp32, with the rounding noise or the routing of experts of another model.

`fidelity.py` explains what the noise and the fixed routing are for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.trainable_tokens import TrainableTokensLayer
from torch import Tensor, nn

from ..modeling.architectures import runs_experts
from ..modeling.layer import decoder_layers
from ..modeling.task_models import head_outputs
from ..tensor import QuantizedTensor

Document = tuple[Tensor, Tensor]  # int64 [T] ids; bool [T], the counted tokens
Choices = list[tuple[Tensor, Tensor]]  # per layer: experts int [T, k] and weights [T, k]
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # including the implied bit


@dataclass(frozen=True)
class Rounding:
    """Roundings of a merged model's weights to reproduce in its reference model.

    Attributes:
        noise_on: names of the rounded parameters, to perturb by up to half an ulp.
        cast: parameter name → dtype that the reference casts it to.
        errors: stack of experts → fp32 [E, N], RMS quantization error of each row.
    """

    noise_on: Collection[str] = ()
    cast: Mapping[str, torch.dtype] = field(default_factory=dict)
    errors: Mapping[str, Tensor] = field(default_factory=dict)


NO_ROUNDING = Rounding()


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, rounding: Rounding = NO_ROUNDING, seed: int = 0) -> Tensor:
    """Return fp32 logits [rows, T, vocabulary] of `ids` [rows, T], on the CPU; of a classifier [rows, T, labels].

    Args:
        rounding: differences to apply to the weights; `seed` is for its noise.
    """
    device = next(model.parameters()).device
    with in_float32(model.eval(), rounding, seed):
        return head_outputs(model, ids.to(device)).float().cpu()


@torch.no_grad()
def token_losses(model: nn.Module, documents: Iterable[Document]) -> Tensor:
    """Return the loss of each counted token of `documents`, fp64 [tokens] on the CPU, one document at a time."""
    device = next(model.parameters()).device
    losses = []
    with in_float32(model.eval()):
        for ids, counts in documents:
            predicted = model(input_ids=ids[None].to(device), use_cache=False).logits[0, :-1].float()
            all_losses = F.cross_entropy(predicted, ids[1:].to(device), reduction="none").cpu()
            losses.append(all_losses[counts[1:]].double())
    return torch.cat(losses)


@contextlib.contextmanager
def in_float32(model: nn.Module, rounding: Rounding = NO_ROUNDING, seed: int = 0) -> Iterator[None]:
    """Compute in fp32 inside this context; each module's weights are widened only while it runs.

    Layers of hybrids read weights of modules that they do not call (a convolution's weight, a norm's dtype), and so do
    PEFT's rows of single tokens: all weights of such a layer are widened while it runs.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    stored: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}
    packed: dict[tuple[nn.Module, str], Any] = {}

    def widen(module: nn.Module, _inputs: Any) -> None:
        owners = [] if module in in_layers else module.modules() if module in readers else [module]
        stored[module] = [(parameter, parameter.data) for owner in owners for parameter in _parameters_to_widen(owner)]
        for parameter, data in stored[module]:
            name = names.get(id(parameter), "")
            values = data.to(rounding.cast.get(name, data.dtype)).float()
            parameter.data = values + _half_ulp_noise(data, generator) if name in rounding.noise_on else values

        for key, parameter in _stacks(module):
            if (name := names.get(id(parameter), "")) in rounding.noise_on and name in rounding.errors:
                packed[module, key] = parameter
                noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
                values = parameter.data.dequantize(torch.float32).add_(noise.mul_(rounding.errors[name][..., None]))
                setattr(module, key, nn.Parameter(values, requires_grad=False))

    def restore(module: nn.Module, _inputs: Any, _output: Any) -> None:
        for key in [key for owner, key in packed if owner is module]:
            setattr(module, key, packed.pop((module, key)))
        for parameter, data in stored.pop(module, ()):
            parameter.data = data

    hooks = []
    hybrid = any(isinstance(module, nn.Conv1d) for module in model.modules())
    layers = set(decoder_layers(model)[1]) if hybrid else set()
    in_layers = {module for layer in layers for module in layer.modules()} - layers
    readers = layers | {module for module in model.modules() if isinstance(module, TrainableTokensLayer)}
    for module in model.modules():
        if isinstance(module, StoredLinear):
            module.generator = generator if f"{module.name}.weight" in rounding.noise_on else None
        elif module in readers or any(True for _ in _parameters_to_widen(module)) or _stacks(module):
            if module in in_layers and not _stacks(module):
                continue
            hooks.append(module.register_forward_pre_hook(widen))
            hooks.append(module.register_forward_hook(restore, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class StoredLinear(nn.Module):
    """A linear layer of another module, computed in fp32 from its stored values.

    Args:
        name: of the layer in its model.
        values: returns the weight [N, K], fp32; called in every forward.
        error: fp32 [N], RMS quantization error of each row.
        bias: of the layer.
    """

    def __init__(self, name: str, values: Callable[[], Tensor], error: Tensor, bias: Tensor | None):
        super().__init__()
        self.name = name
        self._values = values
        self._error = error
        self._bias = bias
        self.generator: torch.Generator | None = None  # noise source; None: no noise

    def forward(self, x: Tensor) -> Tensor:
        weight = self._values()
        if self.generator is not None:
            noise = torch.randn(weight.shape, generator=self.generator, device=weight.device)
            weight = weight + self._error[:, None] * noise
        return F.linear(x.float(), weight, None if self._bias is None else self._bias.float())


def _parameters_to_widen(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the floating-point parameters; quantized ones dequantize themselves in the input's dtype, fp32."""
    for parameter in module.parameters(recurse=False):
        if not isinstance(parameter.data, QuantizedTensor) and parameter.is_floating_point():
            yield parameter


def _stacks(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the quantized stacks of experts among a module's own parameters, with their names."""
    parameters = module.named_parameters(recurse=False)
    return [(key, p) for key, p in parameters if isinstance(p.data, QuantizedTensor) and p.dim() == 3]


def _half_ulp_noise(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return fp32 noise, uniform within half the spacing of `weight`'s dtype at each value."""
    _, exponent = torch.frexp(weight.float())
    ulp = torch.exp2((exponent - SIGNIFICAND_BITS[weight.dtype]).float())
    return ulp * (torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5)


@dataclass
class Routing:
    """The expert choices of the tokens of one forward, per layer.

    Attributes:
        chosen: choices of the reference model, on the CPU.
        preferred: choices that tokens would have made in the last forward inside `held`, as `chosen`.
    """

    chosen: Choices = field(default_factory=list)
    preferred: Choices = field(default_factory=list)

    @property
    def choices(self) -> int:
        """Number of tokens times layers."""
        return sum(len(index) for index, _ in self.chosen)

    @contextlib.contextmanager
    def recorded(self, model: nn.Module) -> Iterator[None]:
        """Record the choices of a forward of the reference model."""

        def note(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.chosen.append((inputs[1].cpu(), inputs[2].cpu()))

        self.chosen.clear()
        with _hooked(model, lambda layer: note):
            yield

    @contextlib.contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Apply the recorded choices to a forward of another model on the same tokens."""

        def hold(layer: int, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights, *options = inputs
            self.preferred.append((index.cpu(), weights.cpu()))
            chosen_index, chosen_weights = (tensor.to(index.device) for tensor in self.chosen[layer])
            moved = _differ(index, chosen_index)[:, None]
            index = torch.where(moved, chosen_index.to(index.dtype), index)
            return hidden, index, torch.where(moved, chosen_weights.to(weights), weights), *options

        self.preferred = []
        with _hooked(model, lambda layer: partial(hold, layer)) if self.chosen else contextlib.nullcontext():
            yield


def count_moved(first: Choices, second: Choices) -> int:
    """Count the tokens with different experts, over all layers."""
    return sum(int(_differ(a, b).sum()) for (a, _), (b, _) in zip(first, second, strict=True))


def _differ(first: Tensor, second: Tensor) -> Tensor:
    """Return bool [T]: whether the experts of each token, int [T, k], differ as sets."""
    return (first.sort(1).values != second.to(first.dtype).sort(1).values).any(1)


@contextlib.contextmanager
def _hooked(model: nn.Module, hook_of: Callable[[int], Any]) -> Iterator[None]:
    """Call `hook_of(layer)` before the experts of each layer run."""
    experts = (module for module in model.modules() if runs_experts(module))
    handles = [module.register_forward_pre_hook(hook_of(layer)) for layer, module in enumerate(experts)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
