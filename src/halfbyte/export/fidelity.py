"""How far a merged model is from its base with the adapter, and whether rounding explains it.

All logits are computed in fp32 from the weights as they are stored, so that two models differ by their weights alone.

The bound. Every merged weight is rounded once, which moves it by at most half a unit in the last place (ulp). What
that does to the logits is measured, not guessed: the merged weights are moved again, by uniform noise of up to half an
ulp, and the logits compared with those before. Rounding errors and this noise have the same size and distribution: on
a trained 40M model the largest differences agree within 4% and the KLs within 3%. A merge passes while it is within
`MARGIN` times what the noise does (KL, which grows with the square, within its square). A damaged tensor is off by
factors of hundreds.

Noise is not all that rounding does. Where the base's weights are exact in the written dtype (a bf16 base merged in
bf16), an update below half an ulp rounds away, in every weight alike. What share of the update was lost is summed while
writing, and that share of the adapter's own effect is added to the bound: nearly nothing after a full training run.

A weight that is stored quantized is moved again by normal noise with the size that its quantization error has in each
row. The logits' bound is the same then, but wide where bits are few; so that verify.py also compares every weight.

Where tokens choose experts, rounding sends one elsewhere now and then, which few draws of the noise would show. Such
tokens are held to the other model's choice and counted (routing.py); as many as the noise moves are rounding's.

What is not quantized may have been cast for training: an fp16 checkpoint's embeddings and norms, say, in a run that
computed in bf16. The merged model keeps the checkpoint's values, so that the cast lies between the two models. It is
rounding, too, and known: the noisy model takes these weights as they were cast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfbyte.modeling.layer import decoder_layers
from halfbyte.tensor import QuantizedTensor

from .kept import Kept

MARGIN = 2.0
FLOAT32_ERROR = 2e-5  # of the largest logit: the order of summation differs between x·W + (x·A)·B and x·(W + A·B)
Document = tuple[Tensor, Tensor]  # int64 [T] ids; bool [T], which of them count
BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # of the significand, the implied one included
DRAWS = 2  # of the noise; the larger effect counts
MOVED = 0.01  # share of the choices of experts that may be other ones beside what the noise moves


@dataclass(frozen=True)
class Distance:
    """Between the next-token distributions of two models on the same text.

    Attributes:
        kl: mean over tokens of KL(first ‖ second), in nats.
        max_logit_difference: largest absolute difference of two logits.
    """

    kl: float
    max_logit_difference: float


@dataclass(frozen=True)
class Loss:
    """Cross-entropy of a merged model and of the 16-bit merge, on the same tokens.

    There are two of those, onto the base trained on and onto the original one, either of them a fair result of the run:
    the worse one counts.

    Attributes:
        merged, in_16_bits: means over the tokens, in nats.
        error: standard error of their difference.
        tokens: how many there are.
        held_out: the run was not trained on them.
    """

    merged: float
    in_16_bits: float
    error: float
    tokens: int
    held_out: bool

    @classmethod
    def between(cls, merged: Tensor, in_16_bits: Iterable[Tensor], held_out: bool) -> Loss:
        """Of the models' losses of each token, fp64 [tokens]."""
        worse = max(in_16_bits, key=lambda losses: float(losses.mean()))
        error = float((merged - worse).std(correction=0)) / len(merged) ** 0.5
        return cls(float(merged.mean()), float(worse.mean()), error, len(merged), held_out)

    @property
    def excess(self) -> float:
        """What the merged model loses, in nats per token."""
        return self.merged - self.in_16_bits

    def __str__(self) -> str:
        text = "held-out text" if self.held_out else "the run's text"
        return (
            f"loss {self.merged:.4f} on {self.tokens} tokens of {text}, {self.in_16_bits:.4f} in 16 bits"
            f" ({self.excess:+.4f} ± {self.error:.4f})"
        )


@dataclass(frozen=True)
class Fidelity:
    """A merged model against what it was merged from.

    Attributes:
        trained: distance from the model as it was trained: the quantized base with the adapter.
        exact: distance from the same merge without rounding: the base merged onto, with the adapter unmerged.
        noise: what moving each rounded weight by up to half an ulp does, the most of `DRAWS` draws.
        adapter: what the adapter does, unmerged: distance of the base from the base with it.
        lost: share of the update that rounding dropped, or added.
        largest_logit: the scale of the logits.
        kept: what of the update is in the weights as they are stored.
        loss: where weights are quantized, that of the merged model beside the 16-bit merge's.
        moved: of a mixture, how many choices of experts were other ones, and held, in `exact`; how many the noise
            changes, the most of a draw; and how many choices there are.
    """

    trained: Distance
    exact: Distance
    noise: Distance
    adapter: Distance
    lost: float
    largest_logit: float
    kept: Kept
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
        """Whether `exact` is within what rounding does (False for NaN, too)."""
        own, noise, choices = self.moved
        routed = own <= MARGIN**2 * noise + MOVED * choices
        return routed and self.exact.max_logit_difference <= self.bound and self.exact.kl <= self.kl_bound


def distance(first: Tensor, second: Tensor) -> Distance:
    """Between logits [rows, T, vocabulary], fp32; computed row by row in fp64."""
    total, largest = 0.0, 0.0
    for p, q in zip(first, second, strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        largest = max(largest, float((p - q).abs().max().nan_to_num(nan=float("inf"))))
    return Distance(total / len(first), largest)


def most(distances: Iterable[Distance]) -> Distance:
    """The largest of each measure."""
    found = list(distances)
    return Distance(max(each.kl for each in found), max(each.max_logit_difference for each in found))


@dataclass(frozen=True)
class Rounding:
    """What lies between the weights of a merged model and those that it is compared with.

    Attributes:
        noise_on: names of the parameters that were rounded, to move by up to half an ulp.
        cast: name of a parameter that the other model has in another dtype → that dtype.
        errors: stack of experts → fp32 [E, N]: root mean square of each row's quantization error.
    """

    noise_on: Collection[str] = ()
    cast: Mapping[str, torch.dtype] = field(default_factory=dict)
    errors: Mapping[str, Tensor] = field(default_factory=dict)


NONE = Rounding()


@torch.no_grad()
def logits(model: nn.Module, ids: Tensor, rounding: Rounding = NONE, seed: int = 0) -> Tensor:
    """fp32 logits [rows, T, vocabulary] of `ids` [rows, T], on the CPU.

    Args:
        rounding: to be done once more; `seed`: of its noise.
    """
    device = next(model.parameters()).device
    with in_float32(model.eval(), rounding, seed):
        return model(input_ids=ids.to(device), use_cache=False).logits.float().cpu()


@torch.no_grad()
def token_losses(model: nn.Module, documents: Iterable[Document]) -> Tensor:
    """fp64 [tokens], on the CPU: the loss of each token of `documents` that counts, one document at a time."""
    device, found = next(model.parameters()).device, []
    with in_float32(model.eval()):
        for ids, counts in documents:
            predicted = model(input_ids=ids[None].to(device), use_cache=False).logits[0, :-1].float()
            losses = F.cross_entropy(predicted, ids[1:].to(device), reduction="none").cpu()
            found.append(losses[counts[1:]].double())
    return torch.cat(found)


@contextlib.contextmanager
def in_float32(model: nn.Module, rounding: Rounding = NONE, seed: int = 0) -> Iterator[None]:
    """Within it, `model` computes in fp32; each module's weights are widened only while it runs.

    Layers of hybrids read the weights of modules that they do not call (a convolution's, the dtype of a norm's), so all
    weights of such a layer are widened while it runs.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    stored: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}
    packed: dict[tuple[nn.Module, str], Any] = {}

    def widen(module: nn.Module, _inputs: Any) -> None:
        inside = module.modules() if module in layers else [module]
        inside = [] if module in in_layers else inside
        stored[module] = [(parameter, parameter.data) for each in inside for parameter in _own(each)]
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
        elif module in layers or any(True for _ in _own(module)) or _stacks(module):
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
    """A linear layer that another module stores, computed in fp32 from the values that are stored.

    Args:
        name: of the layer in its model.
        values: the weight [N, K], fp32, made anew for every product.
        error: fp32 [N]: root mean square of each row's quantization error.
        bias: of the layer.
    """

    def __init__(self, name: str, values: Callable[[], Tensor], error: Tensor, bias: Tensor | None):
        super().__init__()
        self.name, self._values, self._error, self._bias = name, values, error, bias
        self.generator: torch.Generator | None = None  # of the noise; none is added without it

    def forward(self, x: Tensor) -> Tensor:
        weight = self._values()
        if self.generator is not None:
            noise = torch.randn(weight.shape, generator=self.generator, device=weight.device)
            weight = weight + self._error[:, None] * noise
        return F.linear(x.float(), weight, None if self._bias is None else self._bias.float())


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters to widen; quantized ones are dequantized in the dtype of the input, fp32, by themselves."""
    for parameter in module.parameters(recurse=False):
        if not isinstance(parameter.data, QuantizedTensor) and parameter.is_floating_point():
            yield parameter


def _stacks(module: nn.Module) -> list[tuple[str, Any]]:
    """The stacks of experts among a module's own parameters, by name."""
    own = module.named_parameters(recurse=False)
    return [(key, each) for key, each in own if isinstance(each.data, QuantizedTensor) and each.dim() == 3]


def _half_ulp_noise(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in ± half the distance between neighbouring values of `weight`'s dtype; fp32."""
    _, exponent = torch.frexp(weight.float())
    ulp = torch.exp2((exponent - BITS[weight.dtype]).float())
    return ulp * (torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5)
