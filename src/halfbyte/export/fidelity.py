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

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modeling.architectures import runs_experts
from ..modeling.layer import decoder_layers
from ..tensor import QuantizedTensor

MARGIN = 2.0
FLOAT32_ERROR = 2e-5  # relative to the largest logit: x·W + (x·A)·B and x·(W + A·B) sum in different orders
Document = tuple[Tensor, Tensor]  # int64 [T] ids; bool [T], the counted tokens
Choices = list[tuple[Tensor, Tensor]]  # per layer: experts int [T, k] and weights [T, k]
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # including the implied bit
DRAWS = 2  # noise draws; the larger effect counts
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


@dataclass(frozen=True)
class RetainedUpdate:
    """How much of the adapter's update the stored weights contain; sums over weights.

    The update of a weight is ΔW = merged - base. Rounding may drop it: if the base's weights lie on the format's grid,
    as a dequantized NF4 base does on NF4's, updates below half a step snap back. The retained share is

        ⟨stored(base + ΔW) - stored(base), ΔW⟩ / ⟨ΔW, ΔW⟩

    over all weights that the adapter changes: 1 if rounding is unbiased, 0 if nothing is left. Rounding errors of
        single
    weights add noise, whose standard error is `error`.

    Attributes:
        along, total: sums of stored·ΔW and of ΔW².
        spread: sum of the squared deviations from the share.
    """

    along: float = 0.0
    total: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, stored: Tensor, without: Tensor, update: Tensor) -> RetainedUpdate:
        """Compare fp32 tensors: the stored weight, the stored weight without the update, and the update."""
        step = stored - without
        return cls(
            float((step * update).sum(dtype=torch.float64)),
            float(update.square().sum(dtype=torch.float64)),
            float(((step - update) * update).square().sum(dtype=torch.float64)),
        )

    @classmethod
    def sum(cls, parts: Iterable[RetainedUpdate]) -> RetainedUpdate:
        found = list(parts)
        return cls(*(math.fsum(getattr(each, name) for each in found) for name in ("along", "total", "spread")))

    @property
    def share(self) -> float:
        """Retained share of the update; 1.0 without an update."""
        return self.along / self.total if self.total else 1.0

    @property
    def error(self) -> float:
        """Standard error of `share`."""
        return math.sqrt(self.spread) / self.total if self.total else 0.0

    def __str__(self) -> str:
        return f"{self.share:.1%} of the update is kept (± {self.error:.1%})"


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
        kept: the retained update.
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
    kept: RetainedUpdate
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
        own, noise, choices = self.moved
        routed = own <= MARGIN**2 * noise + MAX_MOVED_SHARE * choices
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
    found = list(distances)
    return Distance(max(each.kl for each in found), max(each.max_logit_difference for each in found))


@dataclass(frozen=True)
class Rounding:
    """Differences to reproduce between a merged model's weights and those of its reference.

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
    """Return fp32 logits [rows, T, vocabulary] of `ids` [rows, T], on the CPU.

    Args:
        rounding: differences to apply to the weights; `seed` is for its noise.
    """
    device = next(model.parameters()).device
    with in_float32(model.eval(), rounding, seed):
        return model(input_ids=ids.to(device), use_cache=False).logits.float().cpu()


@torch.no_grad()
def token_losses(model: nn.Module, documents: Iterable[Document]) -> Tensor:
    """Return the loss of each counted token of `documents`, fp64 [tokens] on the CPU, one document at a time."""
    device, found = next(model.parameters()).device, []
    with in_float32(model.eval()):
        for ids, counts in documents:
            predicted = model(input_ids=ids[None].to(device), use_cache=False).logits[0, :-1].float()
            losses = F.cross_entropy(predicted, ids[1:].to(device), reduction="none").cpu()
            found.append(losses[counts[1:]].double())
    return torch.cat(found)


@contextlib.contextmanager
def in_float32(model: nn.Module, rounding: Rounding = NO_ROUNDING, seed: int = 0) -> Iterator[None]:
    """Compute in fp32 inside this context; each module's weights are widened only while it runs.

    Layers of hybrids read weights of modules that they do not call (a convolution's weight, a norm's dtype), so all
    weights of such a layer are widened while it runs.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    stored: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}
    packed: dict[tuple[nn.Module, str], Any] = {}

    def widen(module: nn.Module, _inputs: Any) -> None:
        inside = module.modules() if module in layers else [module]
        inside = [] if module in in_layers else inside
        stored[module] = [(parameter, parameter.data) for each in inside for parameter in _parameters_to_widen(each)]
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
        for owner, key in [each for each in packed if each[0] is module]:
            setattr(module, key, packed.pop((owner, key)))
        for parameter, data in stored.pop(module, ()):
            parameter.data = data

    hooks = []
    hybrid = any(isinstance(module, nn.Conv1d) for module in model.modules())
    layers = set(decoder_layers(model)[1]) if hybrid else set()
    in_layers = {each for layer in layers for each in layer.modules()} - layers
    for module in model.modules():
        if isinstance(module, StoredLinear):
            module.generator = generator if f"{module.name}.weight" in rounding.noise_on else None
        elif module in layers or any(True for _ in _parameters_to_widen(module)) or _stacks(module):
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
        self.name, self._values, self._error, self._bias = name, values, error, bias
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
    own = module.named_parameters(recurse=False)
    return [(key, each) for key, each in own if isinstance(each.data, QuantizedTensor) and each.dim() == 3]


def _half_ulp_noise(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return fp32 noise, uniform within half the spacing of `weight`'s dtype at each value."""
    _, exponent = torch.frexp(weight.float())
    ulp = torch.exp2((exponent - SIGNIFICAND_BITS[weight.dtype]).float())
    return ulp * (torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5)


# --- routing of experts -----------------------------------------------------------------------------------------------


@dataclass
class Routing:
    """The expert choices of the tokens of one forward, per layer.

    Attributes:
        chosen: choices of the reference model, on the CPU.
        own: choices that tokens would have made in the last forward inside `held`, as `chosen`.
    """

    chosen: Choices = field(default_factory=list)
    own: Choices = field(default_factory=list)

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
        with _hooked(_experts(model), [note] * len(_experts(model))):
            yield

    @contextlib.contextmanager
    def held(self, model: nn.Module) -> Iterator[None]:
        """Apply the recorded choices to a forward of another model on the same tokens."""

        def hold(layer: int, _module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, index, weights, *rest = inputs
            self.own.append((index.cpu(), weights.cpu()))
            theirs, their_weights = (each.to(index.device) for each in self.chosen[layer])
            other = _differ(index, theirs)[:, None]
            own = torch.where(other, theirs.to(index.dtype), index)
            return hidden, own, torch.where(other, their_weights.to(weights), weights), *rest

        self.own = []
        modules = _experts(model) if self.chosen else []
        with _hooked(modules, [partial(hold, layer) for layer in range(len(modules))]):
            yield


def count_moved(one: Choices, other: Choices) -> int:
    """Count the tokens with different experts, over all layers."""
    return sum(int(_differ(mine, theirs).sum()) for (mine, _), (theirs, _) in zip(one, other, strict=True))


def _differ(index: Tensor, other: Tensor) -> Tensor:
    """Return bool [T]: whether index and other, int [T, k], differ as sets."""
    return (index.sort(1).values != other.to(index.dtype).sort(1).values).any(1)


def _experts(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if runs_experts(module)]


@contextlib.contextmanager
def _hooked(modules: list[nn.Module], hooks: list[Any]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook) for module, hook in zip(modules, hooks, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
