"""y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ for projections of one input, W frozen and quantized, with hand-derived gradients.

Shapes: M rows (tokens), K inputs, N outputs, r rank; x [M, K], W [N, K], A [r, K], B [N, r], y and dy = ∂L/∂y [M, N].
With u = x·Aᵀ [M, r], which forward saves, and v = s·dy·B [M, r]:

    dB = s·dyᵀ·u        dA = vᵀ·x        dx = v·A + dy·W        db = Σ dy over rows

Projections i of one x (q, k, v; gate, up) stack their A: u = x·[A₁; A₂; …]ᵀ, [dA₁; dA₂; …] = [v₁, v₂, …]ᵀ·x and the
low-rank part of dx, [v₁, v₂, …]·[A₁; A₂; …], are one product each; x is saved once, and dx is one buffer.

Brackets. (x·Aᵀ)·Bᵀ takes M·r·(K+N) multiplications; an order that forms B·A or dyᵀ·x takes at least M·N·K. The first is
the cheapest at every M while r < N·K/(N+K), which is 819 for the narrowest projection (k) of an 8B model.

Order of sums. The low-rank term is written first, and the base product accumulated onto it (the GEMM's β = 1): the same
memory traffic as adding the small term to a finished y, but hidden behind arithmetic; and the large term is rounded
once instead of twice. s is the GEMM's α. `benchmarks.lora` times this against its alternatives.

Dropout. PEFT drops the inputs of each adapter anew: x in u and dA becomes x∘mᵢ/(1−p) with a mask mᵢ [M, K], and v·A
becomes v·A∘mᵢ/(1−p), so only the columns of u and v can be stacked. Masks are saved, a byte a value: drawing them again
would need the generator's state, which cannot be read while a CUDA graph is captured.

Dequantized weights. Each lives for one product, and the next one takes its memory: torch's caching allocator hands the
freed block out again in stream order. So the allocator is the scratch buffer: one for each device and stream, as large
as the largest weight, from a graph's own pool while one is captured, and free for activations in between, which a
buffer of our own would not be. W is never saved, and gets no gradient.

Under torch.compile these are plain operations around the opaque `quantized_linear` (see `autograd.linear`).

Source: LoRA (Hu et al. 2021, arXiv:2106.09685, §4.1); rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) is another s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import on_compiler, to_compute_dtype
from ..ops.fp8_scaling import Codes, Slot
from ..ops.lora_read import lora_read, summed
from ..utils.errors import ModelError

if TYPE_CHECKING:
    from ..tensor import QuantizedTensor

    Weight = Tensor | QuantizedTensor


@dataclass(frozen=True)
class LoRA:
    """The adapter of one projection.

    Args:
        a: [r, K], any float dtype; PEFT's lora_A.weight.
        b: [N, r]; PEFT's lora_B.weight.
        scaling: s; alpha / r, or alpha / √r in rsLoRA.
        copies: a and b in another dtype, where somebody has cast them for this forward.
    """

    a: Tensor
    b: Tensor
    scaling: float
    copies: tuple[Tensor, Tensor] | None = None

    def cast_to(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The copies, or the factors themselves, if they are in `dtype`."""
        a, b = self.copies or (self.a, self.b)
        return (a, b) if a.dtype is dtype and b.dtype is dtype else None


class Term(NamedTuple):
    """s·u·F, an adapter's part of an output."""

    u: Tensor  # [M, r]
    factor: Tensor  # [r, N]
    scale: float

    def add(self, out: Tensor, beta: int = 1) -> None:
        """Add it to `out` [M, N]; with beta 0, write it there."""
        out.addmm_(self.u, self.factor, beta=beta, alpha=self.scale)


class Products(Protocol):
    """What the products of one input with its frozen weights are computed in, where not in x's dtype: a recipe.

    Adapters stay in x's dtype: their terms are added to what comes from here. No recipe runs under torch.compile.
    """

    name: ClassVar[str]  # of the recipe

    def slot_of_input(self, x: Tensor) -> Slot | None:
        """What casts x [M, K] to FP8, for whoever reads it before its product does; or None."""

    def slot_of_gradients(self, weights: Sequence[Weight], dtype: torch.dtype) -> tuple[Slot | None, Tensor | None]:
        """Likewise the outputs' gradients, in `dtype`; and factors of their columns."""

    def products(self, x: Any, weights: Sequence[Weight], outs: Sequence[Tensor]) -> None:
        """Write x·Wᵢᵀ, x [M, K] or its `Codes`, into `outs` [M, Nᵢ]."""

    def input_gradient(self, grads: Any, weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
        """dx = Σ dyᵢ·Wᵢ, `dtype` [M, K], of dy [M, Nᵢ] or their `Codes`."""


def lora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    lora: LoRA | None = None,
    dropout: float = 0.0,
    recipe: Products | None = None,
) -> Tensor:
    """One projection with its adapter: [..., K] → [..., N]. Arguments as in `lora_qkv`."""
    return lora_qkv(x, (weight,), (bias,), (lora,), dropout, recipe)[0]


def lora_qkv(
    x: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    loras: Sequence[LoRA | None],
    dropout: float = 0.0,
    recipe: Products | None = None,
) -> tuple[Tensor, ...]:
    """Any number of projections of one input, each with its adapter: q, k and v, or gate and up.

    Args:
        x: [..., K] float. Products run in its dtype, or autocast's; fp32 adapters are cast to it once a call, and their
            gradients come back in their own dtype.
        weights: [Nᵢ, K] each, frozen; quantized or plain.
        biases: [Nᵢ] or None.
        loras: None where a projection has no adapter.
        dropout: probability of dropping each adapter's inputs, drawn anew for each; 0 outside training.
        recipe: what the products with the weights are computed in; None: x's dtype.

    Returns:
        [..., Nᵢ] each, in the dtype of the products.

    Raises:
        ModelError: a shape that does not fit, by name, a weight that wants a gradient, or a recipe under torch.compile.
    """
    x = to_compute_dtype(x)
    check("lora_qkv", x, weights, biases, loras)
    if on_compiler():
        refuse_compiled(recipe)
        return composed(x, weights, biases, loras, dropout)
    projections, cast_biases, a, b = Projections.of(x, weights, biases, loras, dropout, recipe)
    return _LoRA.apply(x, projections, *cast_biases, *a, *b)


def refuse_compiled(recipe: Products | None) -> None:
    """A graph would hold neither the state of a recipe nor its random numbers."""
    if recipe is not None:
        raise ModelError(f"recipe {recipe.name} does not run under torch.compile", "run the model uncompiled")


def check(op: str, x: Tensor, weights: Sequence, biases: Sequence, loras: Sequence) -> None:
    """Raise a ModelError that names the argument which does not fit."""
    if not len(weights) == len(biases) == len(loras):
        raise ModelError(f"{op}: {len(weights)} weights, {len(biases)} biases and {len(loras)} loras")
    if not x.is_floating_point() or x.dim() == 0:
        raise ModelError(f"{op}: x is {x.dtype} {list(x.shape)}", "pass a float tensor [..., K]")
    for i, (weight, bias, lora) in enumerate(zip(weights, biases, loras, strict=True)):
        rows, columns = weight.shape
        if columns != x.shape[-1]:
            raise ModelError(f"{op}: weight {i} is {list(weight.shape)}, and x is {list(x.shape)}")
        if weight.requires_grad:
            raise ModelError(f"{op}: weight {i} requires a gradient", "freeze it, or run the module's own forward")
        if bias is not None and tuple(bias.shape) != (rows,):
            raise ModelError(f"{op}: bias {i} is {list(bias.shape)}, and weight {i} is {list(weight.shape)}")
        if lora is None:
            continue
        rank = lora.a.shape[0]
        if tuple(lora.a.shape) != (rank, columns) or tuple(lora.b.shape) != (rows, rank):
            raise ModelError(
                f"{op}: the adapter of weight {i} is A {list(lora.a.shape)}, B {list(lora.b.shape)}, and the weight"
                f" {list(weight.shape)}",
                "give A [r, K] and B [N, r]",
            )


def composed(
    x: Tensor, weights: Sequence, biases: Sequence, loras: Sequence[LoRA | None], dropout: float
) -> tuple[Tensor, ...]:
    """`lora_qkv` of operations that autograd and the compiler know; arguments checked, x in the compute dtype."""
    results = []
    for weight, bias, lora in zip(weights, biases, loras, strict=True):
        weight = weight if is_quantized(weight) else weight.to(x.dtype)
        result = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
        if lora is not None:
            u = F.linear(F.dropout(x, dropout), lora.a.to(x.dtype))
            result = result + F.linear(u, lora.b.to(x.dtype)) * lora.scaling
        results.append(result)
    return tuple(results)


def is_quantized(weight: Tensor) -> bool:
    """Whether it is a QuantizedTensor, a type that lives a layer above this module."""
    return hasattr(weight, "format")


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values of a frozen weight; dropped by the caller as soon as its product is queued."""
    return weight.dequantize(dtype) if is_quantized(weight) else weight.detach().to(dtype)  # type: ignore[call-arg]


def product(a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """scale · a·b, into `out` where given. In place, because autocast leaves in-place products alone."""
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    return out.addmm_(a, b, beta=0, alpha=scale)


class State(NamedTuple):
    """What projections of one input keep for backward, over its n adapters; R is the sum of their ranks."""

    a: Tensor  # [R, K] stacked, in the compute dtype
    b: tuple[Tensor, ...]  # [Nᵢ, rᵢ] each
    u: Tensor  # [M, R]
    masks: tuple[Tensor, ...]  # bool [M, K] each; none without dropout

    def flat(self) -> tuple[Tensor, ...]:
        """For `save_for_backward`."""
        return self.a, self.u, *self.b, *self.masks

    @classmethod
    def unflat(cls, tensors: Sequence[Tensor], adapters: int) -> State:
        """The reverse of `flat`."""
        a, u, *rest = tensors
        return cls(a, tuple(rest[:adapters]), u, tuple(rest[adapters:]))

    @property
    def ranks(self) -> list[int]:
        return [b.shape[1] for b in self.b]


@dataclass(frozen=True)
class Projections:
    """The products of one input, and their gradients; what autograd does not trace.

    Args:
        weights: [Nᵢ, K] each.
        scalings: s of each; None where it has no adapter.
        dropout: probability.
        dtype: that of the factors' gradients.
        recipe: what the products with the weights are computed in; None: x's dtype.
        copies: (A, B) of each adapter in x's dtype, where all of them are cast already.
    """

    weights: tuple[Weight, ...]
    scalings: tuple[float | None, ...]
    dropout: float
    dtype: torch.dtype
    recipe: Products | None = None
    copies: tuple[tuple[Tensor, Tensor], ...] | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        weights: Sequence,
        biases: Sequence,
        loras: Sequence[LoRA | None],
        dropout: float,
        recipe: Products | None = None,
    ):
        """The projections, their biases in x's dtype, and the factors A and B of those that have an adapter."""
        adapters = [lora for lora in loras if lora is not None]
        scalings = tuple(None if lora is None else lora.scaling for lora in loras)
        dtype = gradient_dtype(adapters[0].a) if adapters else x.dtype
        copies = tuple(pair for lora in adapters if (pair := lora.cast_to(x.dtype)) is not None)
        whole = copies if len(copies) == len(adapters) else None
        projections = cls(tuple(weights), scalings, dropout, dtype, recipe, whole)
        biases = [None if bias is None else bias.to(x.dtype) for bias in biases]
        return projections, biases, [lora.a for lora in adapters], [lora.b for lora in adapters]

    @property
    def adapters(self) -> list[tuple[int, float]]:
        """(projection, s) of each adapter."""
        return [(i, scaling) for i, scaling in enumerate(self.scalings) if scaling is not None]

    def forward(
        self, x: Tensor, leading: torch.Size, biases: Sequence[Tensor | None], a: Sequence[Tensor], b: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], State]:
        """Outputs [*leading, Nᵢ] of x [M, K], and what backward needs beside x."""
        state, codes = self.low_rank(x, a, b)
        return self.outputs(x, leading, biases, state, codes), state

    def outputs(
        self,
        x: Tensor,
        leading: torch.Size,
        biases: Sequence[Tensor | None],
        state: State | None,
        codes: Codes | None = None,
    ) -> tuple[Tensor, ...]:
        """[*leading, Nᵢ]; without a state, of the frozen weights alone. `codes`: x as the recipe casts it, or None."""
        terms = {}
        if state is not None:
            pairs = zip(self.adapters, state.u.split(state.ranks, dim=1), state.b, strict=True)
            terms = {i: Term(u, b.t(), scaling) for (i, scaling), u, b in pairs}
        # Not views, since autograd restricts those we return.
        outputs = [x.new_empty(*leading, weight.shape[0]) for weight in self.weights]
        rows = [output.view(x.shape[0], output.shape[-1]) for output in outputs]
        if self.recipe is not None:
            self.recipe.products(x if codes is None else codes, self.weights, rows)
        for i, (out, weight, bias) in enumerate(zip(rows, self.weights, biases, strict=True)):
            if self.recipe is None:
                self._project(out, x, weight, bias, terms.get(i))
                continue
            if i in terms:
                terms[i].add(out)
            if bias is not None:
                out.add_(bias)
        return tuple(outputs)

    def low_rank(self, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> tuple[State, Codes | None]:
        """What backward needs beside x [M, K], and x as the recipe casts it where one pass over x gives both."""
        if not a:
            return State(x.new_empty(0, x.shape[1]), (), x.new_empty(x.shape[0], 0), ()), None
        stacked, copies = self.factors(a, b, x.dtype)
        if not self.dropout:
            slot = None if self.recipe is None else self.recipe.slot_of_input(x)
            if slot is None:
                return State(stacked, copies, product(x, stacked.t()), ()), None
            found = lora_read(x, (), (stacked.t(),), (1.0,), None, self.dtype, slot, None)
            return State(stacked, copies, found.low, ()), slot.of(found.codes)
        ranks, masks = [factor.shape[0] for factor in a], []
        u = x.new_empty(x.shape[0], sum(ranks))
        for factor, out in zip(stacked.split(ranks), u.split(ranks, dim=1), strict=True):
            dropped, mask = torch.native_dropout(x, self.dropout, True)
            product(dropped, factor.t(), out=out)
            masks.append(mask)
        return State(stacked, copies, u, tuple(masks)), None

    def factors(
        self, a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A stacked [R, K], and B, in `dtype`: copies where there are some, else cast in one launch."""
        if self.copies:
            stacked = stack([copy for copy, _ in self.copies])
            return stacked, tuple(copy for _, copy in self.copies)
        return cast(a, b, dtype)

    @staticmethod
    def _project(out: Tensor, x: Tensor, weight: Weight, bias: Tensor | None, term: Term | None) -> None:
        if term is None:
            values = dense(weight, x.dtype).t()
            torch.mm(x, values, out=out) if bias is None else torch.addmm(bias, x, values, out=out)
            return
        if bias is None:
            term.add(out, beta=0)
        else:
            torch.addmm(bias, term.u, term.factor, alpha=term.scale, out=out)
        out.addmm_(x, dense(weight, x.dtype).t())

    def read(
        self, grads: Sequence[Tensor], state: State, needed: Sequence[bool], product_follows: bool = True
    ) -> tuple[Tensor, list[Tensor | None], Codes | None]:
        """What one pass over `grads` [M, Nᵢ] gives.

        Args:
            needed: of each adapter's B, whether it wants a gradient.
            product_follows: whether `input_gradient` will be asked for.

        Returns:
            [v₁, v₂, …] [M, R]; dBᵢ [Nᵢ, rᵢ] in the factors' own dtype, None where it is not needed; and `grads` as the
            recipe casts them, None where it has to do that itself.
        """
        if not state.b:
            return grads[0].new_empty(grads[0].shape[0], 0), [], None
        slot = columns = None
        if self.recipe is not None and product_follows:
            slot, columns = self.recipe.slot_of_gradients(self.weights, grads[0].dtype)
        b = dict(zip([i for i, _ in self.adapters], state.b, strict=True))
        factors, scalings = [b.get(i) for i in range(len(grads))], [scaling for _, scaling in self.adapters]
        low = state.u if any(needed) else None
        found = lora_read(grads[0], grads[1:], factors, scalings, low, self.dtype, slot, columns)
        gradients = found.gradients or [None] * len(needed)
        codes = None if slot is None else slot.of(found.codes)
        return found.low, [grad if need else None for grad, need in zip(gradients, needed, strict=True)], codes

    def input_gradient(
        self, grads: Sequence[Tensor], v: Tensor | None, state: State, codes: Codes | None = None
    ) -> Tensor:
        """dx [M, K]: every projection is accumulated into one buffer; without v, no low-rank terms.

        `codes` is `grads` as the recipe casts them, if they are cast.
        """
        if self.recipe is not None:
            dx = self.recipe.input_gradient(codes or grads, self.weights, state.a.dtype)
            return dx if v is None else self._add_low_rank_gradient(dx, v, state, True)
        dx = grads[0].new_empty(grads[0].shape[0], self.weights[0].shape[1])
        written = bool(state.b) and v is not None
        if v is not None:
            dx = self._add_low_rank_gradient(dx, v, state, False)
        for grad, weight in zip(grads, self.weights, strict=True):
            dx.addmm_(grad, dense(weight, grad.dtype), beta=int(written))
            written = True
        return dx

    def _add_low_rank_gradient(self, dx: Tensor, v: Tensor, state: State, written: bool) -> Tensor:
        """dx, if it is written, with the low-rank terms; without adapters, as it is."""
        if not state.masks:
            return dx.addmm_(v, state.a, beta=int(written)) if state.b else dx
        parts = zip(v.split(state.ranks, dim=1), state.a.split(state.ranks), state.masks, strict=True)
        for part, a, mask in parts:
            term = self._drop(product(part, a), mask)
            dx = dx.add_(term) if written else term
            written = True
        return dx

    def a_gradients(self, x: Tensor, v: Tensor, state: State, needed: Sequence[bool]) -> list[Tensor | None]:
        """dAᵢ [rᵢ, K] in the factors' own dtype; None where it is not needed."""
        if not any(needed):
            return [None] * len(needed)
        parts = v.split(state.ranks, dim=1)
        if state.masks:
            pairs = zip(parts, state.masks, strict=True)
            grads = [summed(part.t(), self._drop(x, mask), 1.0, self.dtype) for part, mask in pairs]
        else:
            grads = summed(v.t(), x, 1.0, self.dtype).split(state.ranks)
        return [grad if need else None for grad, need in zip(grads, needed, strict=True)]

    def _drop(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - self.dropout) if self.dropout < 1 else 0.0)


def gradient_dtype(factor: Tensor) -> torch.dtype:
    """A parameter may want its gradients wider than it is (`parallel.shard.trained`)."""
    return (factor.grad_dtype if factor.is_leaf else None) or factor.dtype


def cast(a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A stacked [R, K], and B, in `dtype`: one launch for all of them, or none where they can serve as they are."""
    if len(a) == 1 and a[0].dtype is dtype and b[0].dtype is dtype:
        return a[0].detach(), (b[0].detach(),)
    ranks = [factor.shape[0] for factor in a]
    stacked = a[0].new_empty((sum(ranks), a[0].shape[1]), dtype=dtype)
    copies = tuple(factor.new_empty(factor.shape, dtype=dtype) for factor in b)
    torch._foreach_copy_([*stacked.split(ranks), *copies], [*a, *b])
    return stacked, copies


def stack(factors: Sequence[Tensor]) -> Tensor:
    """[rᵢ, K] each as [R, K]: no copy where they lie one after another."""
    first, at = factors[0], factors[0].storage_offset()
    for factor in factors:
        if factor.untyped_storage()._cdata != first.untyped_storage()._cdata or factor.storage_offset() != at:
            return torch.cat(list(factors))
        at += factor.numel()
    return first.as_strided((sum(factor.shape[0] for factor in factors), first.shape[1]), (first.shape[1], 1))


def rows_of(tensor: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


class _LoRA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, projections, *tensors):
        n, adapters = len(projections.weights), len(projections.adapters)
        biases, a, b = tensors[:n], tensors[n : n + adapters], tensors[n + adapters :]
        rows = rows_of(x)
        outputs, state = projections.forward(rows, x.shape[:-1], biases, a, b)
        need_a = any(ctx.needs_input_grad[2 + n : 2 + n + adapters])
        ctx.save_for_backward(rows if need_a else None, *state.flat())
        # An attribute: it holds frozen weights, which hooks that offload saved activations must not carry along.
        ctx.projections, ctx.shape = projections, x.shape
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        projections, needs = ctx.projections, ctx.needs_input_grad
        n, adapters = len(projections.weights), len(projections.adapters)
        need_biases, need_a, need_b = needs[2 : 2 + n], needs[2 + n : 2 + n + adapters], needs[2 + n + adapters :]
        rows, *saved = ctx.saved_tensors
        state, grads = State.unflat(saved, adapters), tuple(rows_of(grad) for grad in grads)
        v, db, codes = projections.read(grads, state, need_b, needs[0])
        da = projections.a_gradients(rows, v, state, need_a)
        dx = projections.input_gradient(grads, v, state, codes).view(ctx.shape) if needs[0] else None
        biases = [grad.sum(0) if need else None for grad, need in zip(grads, need_biases, strict=True)]
        return dx, None, *biases, *da, *db
