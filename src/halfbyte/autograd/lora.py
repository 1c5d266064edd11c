"""y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ for projections of one input, W frozen and possibly quantized, with derived gradients.

Shapes: M rows (tokens), K inputs, N outputs, r rank; x [M, K], W [N, K], A [r, K], B [N, r], y and dy = ∂L/∂y [M, N].
With u = x·Aᵀ [M, r], which the forward saves, and v = s·dy·B [M, r]:

    dB = s·dyᵀ·u        dA = vᵀ·x        dx = v·A + dy·W        db = Σ dy over rows

Projections i of one x (q, k, v; gate, up) stack their A. Then u = x·[A₁; A₂; …]ᵀ, [dA₁; dA₂; …] = [v₁, v₂, …]ᵀ·x and
the low-rank part of dx, [v₁, v₂, …]·[A₁; A₂; …], are one GEMM each; x is saved once, and dx is one buffer.

Order of multiplication. (x·Aᵀ)·Bᵀ takes M·r·(K+N) multiplications; an order that forms B·A or dyᵀ·x takes at least
M·N·K. The first is cheapest for every M if r < N·K/(N+K), which is 819 for the narrowest projection (k) of an 8B model.

Order of sums. The low-rank term is written first and the base GEMM accumulates onto it (β = 1). This has the same
memory traffic as adding the small term to a finished y, but overlaps it with arithmetic, and rounds the large term once
instead of twice. s is the GEMM's α. docs/what-did-not-work.md has the times of the alternatives.

Dropout. PEFT draws a mask per adapter: x in u and dA becomes x∘mᵢ/(1−p) with a mask mᵢ [M, K], and v·A becomes
v·A∘mᵢ/(1−p). A mask is a function of a seed (`ops.dropout`), drawn per adapter and call from torch's generator, and is
computed inside the low-rank GEMMs; nothing of its size is saved.

Dequantized weights. Each lives for one GEMM, and the next one reuses its memory, since torch's caching allocator reuses
freed blocks in stream order. The allocator thus provides a scratch buffer per device and stream, as large as the
largest weight, which activations can use in between. W is never saved and gets no gradient.

DoRA. y = c∘(x·Wᵀ + s·u·Bᵀ) + b with c = m/‖W + s·B·A‖, one factor per output, m [N] trained, the norm of each row
detached. The factors multiply W as it is dequantized, and B, so all GEMMs stay as they are with c∘W and c∘B instead.
Then dB = c∘d(c∘B), and dm = Σ dy∘(y - b) / m over rows, for which y is saved: a second GEMM of dyᵀ·x would take as
long as dy·W. If nothing writes to y (`OutputUse`), this takes no memory where another function saves y too, as
attention does with v. RoPE overwrites q and k, and computes their dm from the rotated values, which attention saves.
The outputs of o and down are the differences of two residual streams, which norms save (`autograd.dora.join`).
The norm needs neither W nor B·A: ‖W + s·B·A‖² = ‖W‖² + 2s·⟨W·Aᵀ, B⟩ + s²·⟨B·(A·Aᵀ), B⟩ by rows, with
‖W‖² computed once (`autograd.dora`).

With dropout, PEFT's DoRA is y = x·Wᵀ + (c−1)∘(x̃·Wᵀ) + s·u·(c∘B)ᵀ + b with x̃ = x∘m/(1−p): a second GEMM with W in the
forward and in the backward. dm then reads c∘(x̃·Wᵀ) + s·u·(c∘B)ᵀ, which is saved instead of y.

Several adapters. Equal ranges of rows may have adapters of their own (`RowLoRA`), without dropout. The GEMM with W is
one of all rows; those with A and B become batched GEMMs, [G, M/G, K] with [G, R, K], in as many launches as for one
adapter. Smaller ranks are filled with zeros, and s is multiplied into the copies of B. Rows of two ranges meet in no
sum, so that NaN in the rows of one adapter does not reach the gradients of another one.

Under torch.compile these are plain operations around the opaque `quantized_linear` (see `autograd.linear`).

Sources: LoRA (Hu et al. 2021, arXiv:2106.09685, §4.1); rsLoRA (Kalajdzievski 2023, arXiv:2312.03732) is another s; DoRA
(Liu et al. 2024, arXiv:2402.09353, §4.3 for the detached norm).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import on_compiler, to_compute_dtype
from ..formats.base import Weight, is_quantized
from ..ops import dora as ops
from ..ops.dropout import Dropout, drop, dropped_gradients, dropped_products
from ..ops.fp8_scaling import Codes, Slot
from ..utils.errors import ModelError
from .dora import StepNorms, magnitude_gradient, row_norms
from .function import OnceFunction
from .gemms import accumulate, cast, dense, gradient_dtype, product, rows_of, scale_rows, stack, summed

# Use of an output by the caller. "overwritten": it writes to the output's memory. "unchanged": it does not. "deferred":
# it also computes the gradient of DoRA's magnitude itself, from a `Scale` (`autograd.rope`, `autograd.dora.join`).
OutputUse = Literal["overwritten", "unchanged", "deferred"]


@dataclass(frozen=True)
class LoRA:
    """The adapter of one projection.

    Args:
        a: [r, K], any float dtype; as PEFT holds it.
        b: [N, r]; as PEFT holds it.
        scaling: s; alpha / r, or alpha / √r in rsLoRA.
        copies: a and b in another dtype, if they have been cast for this forward (`modeling.cast_cache`).
        magnitude: DoRA's m [N], any float dtype; None: LoRA.
        squares: ‖W‖² by rows, fp32 [N]; None: LoRA.
        step_norms: norms of this optimizer step; None: each call computes its own.
        first_column: index of a's first column in the full A, of which a rank may hold some columns.
    """

    a: Tensor
    b: Tensor
    scaling: float
    copies: tuple[Tensor, Tensor] | None = None
    magnitude: Tensor | None = None
    squares: Tensor | None = None
    step_norms: StepNorms | None = None
    first_column: int = 0

    def cast_to(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """The copies, or else the factors, if they are in `dtype`; None otherwise."""
        a, b = self.copies or (self.a, self.b)
        return (a, b) if a.dtype is dtype and b.dtype is dtype else None

    def norms(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """‖W + s·B·A‖ by rows for DoRA, fp32 [N] or fp64, detached; W·Aᵀ is computed in `dtype`."""
        assert self.squares is not None, "DoRA has the norms of W"
        if self.step_norms is not None and self.step_norms.are_of(self.a, self.b, dtype):
            return self.step_norms.values
        return row_norms([weight], [self.a], [self.b], [self.squares], self.scaling, dtype)[0]


@dataclass(frozen=True)
class RowLoRA:
    """The adapters of one projection for equal ranges of rows, in their order; plain LoRA of any ranks.

    Args:
        adapters: one for each of the G ranges; M must be a multiple of G.
    """

    adapters: tuple[LoRA, ...]

    magnitude = None  # plain LoRA


class Term(NamedTuple):
    """s·u·F, an adapter's term of an output."""

    u: Tensor  # [M, r]
    factor: Tensor  # [r, N], or [G, r, N]
    scale: float

    def add(self, out: Tensor, beta: int = 1) -> None:
        """out ← beta·out + s·u·F, for `out` [M, N]."""
        accumulate(out, self.u, self.factor, beta, self.scale)


class GemmRecipe(Protocol):
    """A low-precision recipe: computes the GEMMs of one input with its frozen weights in another dtype than x's.

    Adapters are computed in x's dtype and their terms are added to the result. No recipe runs under torch.compile.
    """

    name: ClassVar[str]  # name of the recipe

    def slot_of_input(self, x: Tensor) -> Slot | None:
        """The FP8 scaling of x [M, K], so that an earlier kernel that reads x can cast it; None if there is none."""

    def slot_of_gradients(self, weights: Sequence[Weight], dtype: torch.dtype) -> tuple[Slot | None, Tensor | None]:
        """The FP8 scaling of the outputs' gradients in `dtype`, and the factors of their columns; or None."""

    def outputs(self, x: Any, weights: Sequence[Weight], outs: Sequence[Tensor]) -> None:
        """Write x·Wᵢᵀ into `outs` [M, Nᵢ], for x [M, K] or its `Codes`."""

    def input_gradient(self, grads: Any, weights: Sequence[Weight], dtype: torch.dtype) -> Tensor:
        """dx = Σ dyᵢ·Wᵢ, `dtype` [M, K], for dyᵢ [M, Nᵢ] or their `Codes`."""


def lora_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    lora: LoRA | RowLoRA | None = None,
    dropout: float = 0.0,
    recipe: GemmRecipe | None = None,
    use: OutputUse = "overwritten",
) -> Tensor:
    """One projection with its adapter: [..., K] → [..., N]. Arguments as in `lora_qkv`."""
    return lora_qkv(x, (weight,), (bias,), (lora,), dropout, recipe, (use,))[0]


def lora_qkv(
    x: Tensor,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    loras: Sequence[LoRA | RowLoRA | None],
    dropout: float = 0.0,
    recipe: GemmRecipe | None = None,
    uses: Sequence[OutputUse] | None = None,
) -> tuple[Tensor, ...]:
    """Several projections of one input, each with its adapter: q, k and v, or gate and up.

    Args:
        x: [..., K] float. The GEMMs run in its dtype, or in autocast's; fp32 adapters are cast to it once per call, and
            their gradients are in their own dtype.
        weights: [Nᵢ, K] each, frozen; quantized or plain.
        biases: [Nᵢ] or None.
        loras: adapter of each projection, or adapters of equal ranges of rows, or None.
        dropout: probability of dropping an adapter's inputs, drawn per adapter; 0 outside training.
        recipe: low-precision recipe of the GEMMs with the weights; None: x's dtype.
        uses: what the caller does with each output, for DoRA without dropout; default: "overwritten".

    Returns:
        [..., Nᵢ] each, in the dtype of the GEMMs.

    Raises:
        ModelError: shapes do not match (the message names them), a weight requires a gradient, or a recipe is used
            under torch.compile.
    """
    x = to_compute_dtype(x)
    check("lora_qkv", x, weights, biases, loras)
    if on_compiler():
        refuse_compiled(recipe)
        return composed(x, weights, biases, loras, dropout)
    projections, cast_biases, a, b = Projections.of(x, weights, biases, loras, dropout, recipe)
    uses = ["overwritten"] * len(loras) if uses is None else uses
    undeferred = [None if use == "deferred" else lora for lora, use in zip(loras, uses, strict=True)]
    return _LoRA.apply(x, projections, uses, *cast_biases, *a, *b, *magnitudes(undeferred))


def magnitudes(loras: Sequence[LoRA | RowLoRA | None]) -> list[Tensor]:
    """DoRA's m of the adapters that have one."""
    return [lora.magnitude for lora in loras if lora is not None and lora.magnitude is not None]


def refuse_compiled(recipe: GemmRecipe | None) -> None:
    """Raise a ModelError for a recipe: graphs capture neither its state nor its random numbers."""
    if recipe is not None:
        raise ModelError(f"recipe {recipe.name} does not run under torch.compile", "run the model uncompiled")


def check(op: str, x: Tensor, weights: Sequence, biases: Sequence, loras: Sequence) -> None:
    """Raise a ModelError that names the first argument with a wrong shape, dtype or requires_grad."""
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
        for adapter in lora.adapters if isinstance(lora, RowLoRA) else (lora,):
            rank = adapter.a.shape[0]
            if tuple(adapter.a.shape) != (rank, columns) or tuple(adapter.b.shape) != (rows, rank):
                raise ModelError(
                    f"{op}: the adapter of weight {i} is A {list(adapter.a.shape)}, B {list(adapter.b.shape)}, and the"
                    f" weight {list(weight.shape)}",
                    "give A [r, K] and B [N, r]",
                )
        if isinstance(lora, RowLoRA):
            if x.shape[:-1].numel() % len(lora.adapters):
                wrong = f"{op}: {x.shape[:-1].numel()} rows for {len(lora.adapters)} adapters of equal ranges of rows"
                raise ModelError(wrong, "give each adapter as many rows")
            continue
        if lora.magnitude is not None and (lora.squares is None or tuple(lora.magnitude.shape) != (rows,)):
            raise ModelError(f"{op}: the magnitude of weight {i} is {list(lora.magnitude.shape)}, not [{rows}]")


def composed(
    x: Tensor, weights: Sequence, biases: Sequence, loras: Sequence[LoRA | RowLoRA | None], dropout: float
) -> tuple[Tensor, ...]:
    """`lora_qkv` composed of torch operations, for torch.compile; arguments are checked, x is in the compute dtype.

    Raises:
        ModelError: ranges of rows have adapters of their own.
    """
    results = []
    for weight, bias, lora in zip(weights, biases, loras, strict=True):
        if isinstance(lora, RowLoRA):
            raise ModelError("adapters of ranges of rows do not run under torch.compile", "run the model uncompiled")
        values: Any = weight if is_quantized(weight) else weight.to(x.dtype)
        added = None if bias is None else bias.to(x.dtype)
        magnitude = None if lora is None else lora.magnitude
        result = F.linear(x, values, added if magnitude is None else None)
        if lora is not None:
            dropped = F.dropout(x, dropout) if dropout else x
            term = F.linear(F.linear(dropped, lora.a.to(x.dtype)), lora.b.to(x.dtype)) * lora.scaling
            if magnitude is None:
                result = result + term
            else:
                columns = (magnitude / lora.norms(weight, x.dtype)).to(x.dtype)
                scaled = F.linear(dropped, values) if dropout else result
                result = (result - scaled if dropout else 0) + (scaled + term) * columns
                result = result if added is None else result + added
        results.append(result)
    return tuple(results)


class _Dropped(OnceFunction):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.mask = mask
        return drop(rows_of(x), mask).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return drop(rows_of(grad), ctx.mask).view(grad.shape), None


def dropped(x: Tensor, probability: float, first_column: int = 0) -> Tensor:
    """x [..., K] after dropout by a mask of `ops.dropout` with a new seed; only the seed is saved for backward."""
    return _Dropped.apply(x, Dropout.drawn(probability, 1, x.device, first_column))


class State(NamedTuple):
    """Tensors that projections of one input save for backward; R is the sum of the adapters' ranks."""

    a: Tensor  # [R, K] stacked, in the compute dtype; [G, R, K] for G ranges of rows
    b: tuple[Tensor, ...]  # [Nᵢ, rᵢ] each, or [G, Nᵢ, rᵢ]
    u: Tensor  # [M, R]

    def flat(self) -> tuple[Tensor, ...]:
        """The tensors in the order of `unflat`, for `save_for_backward`."""
        return self.a, self.u, *self.b

    @classmethod
    def unflat(cls, tensors: Sequence[Tensor]) -> State:
        """Inverse of `flat`."""
        a, u, *b = tensors
        return cls(a, tuple(b), u)

    @property
    def ranks(self) -> list[int]:
        return [b.shape[-1] for b in self.b]

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """A of each adapter [rᵢ, K]."""
        return self.a.split(self.ranks)


def _scaled_values(weight: Weight, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """c∘W in `dtype`; a dequantized weight is scaled in its own memory."""
    values = dense(weight, dtype).contiguous()
    return ops.scale_rows(values, columns, values if is_quantized(weight) else torch.empty_like(values))


@dataclass(frozen=True)
class Projections:
    """The GEMMs of one input and their gradients, without autograd.

    Args:
        weights: [Nᵢ, K] each.
        scalings: s of each projection; None without an adapter.
        dropout: masks of the adapters' inputs, or None.
        dtype: dtype of the factors' gradients.
        recipe: low-precision recipe of the GEMMs with the weights; None: x's dtype.
        copies: (A, B) of each adapter in x's dtype, if all of them have been cast already.
        columns: DoRA's factors c [Nᵢ] of each projection; None for LoRA.
    """

    weights: tuple[Weight, ...]
    scalings: tuple[float | None, ...]
    dropout: Dropout | None
    dtype: torch.dtype
    recipe: GemmRecipe | None = None
    copies: tuple[tuple[Tensor, Tensor], ...] | None = None
    columns: tuple[Tensor | None, ...] = ()

    by_rows: ClassVar[bool] = False  # whether ranges of rows have adapters of their own

    @classmethod
    def of(
        cls,
        x: Tensor,
        weights: Sequence,
        biases: Sequence,
        loras: Sequence[LoRA | RowLoRA | None],
        dropout: float,
        recipe: GemmRecipe | None = None,
    ):
        """The projections, their biases in x's dtype, and the factors A and B of the adapters."""
        if any(isinstance(lora, RowLoRA) for lora in loras):
            return RowProjections.of_rows(x, weights, biases, loras, dropout, recipe)
        adapters = [lora for lora in loras if isinstance(lora, LoRA)]
        scalings = tuple(lora.scaling if isinstance(lora, LoRA) else None for lora in loras)
        dtype = gradient_dtype(adapters[0].a) if adapters else x.dtype
        copies = tuple(pair for lora in adapters if (pair := lora.cast_to(x.dtype)) is not None)
        all_copies = copies if len(copies) == len(adapters) else None
        columns: list[Tensor | None] = []
        for lora, weight in zip(loras, weights, strict=True):
            if not isinstance(lora, LoRA) or lora.magnitude is None:
                columns.append(None)
                continue
            columns.append(lora.magnitude.detach() / lora.norms(weight, x.dtype))
        masks = None
        if dropout and adapters:
            masks = Dropout.drawn(dropout, len(adapters), x.device, adapters[0].first_column)
        projections = cls(tuple(weights), scalings, masks, dtype, recipe, all_copies, tuple(columns))
        biases = [None if bias is None else bias.to(x.dtype) for bias in biases]
        return projections, biases, [lora.a for lora in adapters], [lora.b for lora in adapters]

    @property
    def adapters(self) -> list[tuple[int, float]]:
        """(index of the projection, s) for each adapter."""
        return [(i, scaling) for i, scaling in enumerate(self.scalings) if scaling is not None]

    @property
    def factor_count(self) -> int:
        """Number of the factors A, and of the factors B."""
        return len(self.adapters)

    @property
    def scaled(self) -> list[int]:
        """Indices of the projections with DoRA."""
        return [i for i, columns in enumerate(self.columns) if columns is not None]

    @property
    def weight_columns(self) -> tuple[Tensor | None, ...]:
        """Factors [Nᵢ] of x·Wᵢᵀ: DoRA's c, or None; none with dropout, see `_add_dropped`."""
        return self.columns if self.dropout is None else (None,) * len(self.columns)

    def mask(self, index: int) -> Dropout:
        """Mask of the adapter of a projection."""
        assert self.dropout is not None
        return self.dropout.of([i for i, _ in self.adapters].index(index))

    def values(self, index: int, dtype: torch.dtype) -> Tensor:
        """W, or DoRA's c∘W, of a projection in `dtype`; callers drop it right after launching their GEMM."""
        weight, columns = self.weights[index], self.weight_columns[index]
        return dense(weight, dtype) if columns is None else _scaled_values(weight, columns, dtype)

    def outputs(
        self,
        x: Tensor,
        leading: torch.Size,
        biases: Sequence[Tensor | None],
        state: State | None,
        codes: Codes | None = None,
    ) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Return the outputs [*leading, Nᵢ] for x [M, K]; and what `_add_dropped` returns for each DoRA with dropout.

        Args:
            state: None: outputs without the adapters' terms.
            codes: x cast by the recipe, if it is cast already.
        """
        terms = {}
        if state is not None:
            pairs = zip(self.adapters, state.u.split(state.ranks, dim=1), state.b, strict=True)
            terms = {i: Term(u, b.mT, scaling) for (i, scaling), u, b in pairs}
        # Outputs must not be views, which autograd restricts.
        outputs = [x.new_empty(*leading, weight.shape[0]) for weight in self.weights]
        rows = [output.view(x.shape[0], output.shape[-1]) for output in outputs]
        if self.recipe is not None:
            self.recipe.outputs(x if codes is None else codes, self.weights, rows)
            for output, columns in zip(rows, self.weight_columns, strict=True):
                if columns is not None:
                    output.mul_(columns)
        dropped = []
        for i, (out, bias) in enumerate(zip(rows, biases, strict=True)):
            split = self.dropout is not None and self.columns[i] is not None
            term = None if split else terms.get(i)
            if self.recipe is None:
                self._project(i, out, x, bias, term)
            else:
                if term is not None:
                    term.add(out)
                if bias is not None:
                    out.add_(bias)
            if split:
                dropped.append(self._add_dropped(i, out, x, terms.get(i)))
        return tuple(outputs), dropped

    def _add_dropped(self, index: int, out: Tensor, x: Tensor, term: Term | None) -> Tensor:
        """Add to `out` what DoRA with dropout adds to x·Wᵀ + b; return c∘(x̃·Wᵀ) with the adapter's term."""
        columns = self.columns[index]
        assert columns is not None
        base = product(drop(x, self.mask(index)), dense(self.weights[index], x.dtype).t())
        added = torch.mul(base, columns - 1, out=torch.empty_like(base))
        if term is not None:
            term.add(added)
        out.add_(added)
        return base.add_(added)

    def low_rank(self, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor]) -> State:
        """The state to save for backward, for x [M, K]."""
        if not a:
            return State(x.new_empty(0, x.shape[1]), (), x.new_empty(x.shape[0], 0))
        stacked, copies = self.factors(a, b, x.dtype)
        if self.dropout is None:
            return State(stacked, copies, product(x, stacked.mT))
        return State(stacked, copies, dropped_products(x, stacked.split([len(factor) for factor in a]), self.dropout))

    def factors(
        self, a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A stacked [R, K], and B or DoRA's c∘B, in `dtype`: the existing copies, or else cast in one launch."""
        if self.copies:
            stacked, copies = stack([copy for copy, _ in self.copies]), tuple(copy for _, copy in self.copies)
        else:
            stacked, copies = cast(a, b, dtype)
        if not self.scaled:
            return stacked, copies
        columns = [self.columns[i] for i, _ in self.adapters]
        return stacked, tuple(c if by is None else scale_rows(c, by) for c, by in zip(copies, columns, strict=True))

    def _project(self, index: int, out: Tensor, x: Tensor, bias: Tensor | None, term: Term | None) -> None:
        if term is None:
            values = self.values(index, x.dtype).t()
            torch.mm(x, values, out=out) if bias is None else torch.addmm(bias, x, values, out=out)
            return
        if bias is None:
            term.add(out, beta=0)
        elif self.by_rows:
            out.copy_(bias.expand_as(out))
            term.add(out)
        else:
            torch.addmm(bias, term.u, term.factor, alpha=term.scale, out=out)
        out.addmm_(x, self.values(index, x.dtype).t())

    def low_rank_gradients(
        self, grads: Sequence[Tensor], state: State, needed: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """[v₁, v₂, …] [M, R] for dyᵢ [M, Nᵢ]; and dBᵢ [Nᵢ, rᵢ] in the factors' own dtype, None if not needed.

        With DoRA they are the gradients of c∘Bᵢ; `b_gradients` multiplies them by c.
        """
        v = grads[0].new_empty(grads[0].shape[0], sum(state.ranks))
        b_gradients: list[Tensor | None] = [None] * len(needed)
        v_parts, u_parts = v.split(state.ranks, dim=1), state.u.split(state.ranks, dim=1)
        for i, (index, scaling) in enumerate(self.adapters):
            accumulate(v_parts[i], grads[index], state.b[i], 0, scaling)
            if needed[i]:
                b_gradients[i] = self._summed(grads[index], u_parts[i], scaling)
        return v, b_gradients

    def gradients(
        self,
        x: Tensor | None,
        grads: Sequence[Tensor],
        v: Tensor | None,
        state: State,
        need_x: bool,
        codes: Codes | None = None,
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Return dx [M, K], accumulated over the projections, and dAᵢ [rᵢ, K] in the factors' own dtype.

        Args:
            x: None: no dAᵢ.
            v: None: dx without low-rank terms, and no dAᵢ.
            need_x: False: no dx.
            codes: `grads` cast by the recipe, if they are cast already.
        """
        dx = None
        if need_x:
            dx = grads[0].new_empty(grads[0].shape[0], self.weights[0].shape[1])
            if self.recipe is not None:
                pairs = zip(grads, self.weight_columns, strict=True)
                scaled = [grad if by is None else scale_rows(grad.t(), by).t() for grad, by in pairs]
                dx = self.recipe.input_gradient(codes or scaled, self.weights, state.a.dtype)
        written = self.recipe is not None
        a_gradients: list[Tensor | None] = [None] * self.factor_count
        if v is not None and state.b:
            a_gradients = self._low_rank_pass(x, v, state, dx, written)
            written = True
        if dx is None:
            return None, a_gradients
        for i, grad in enumerate(grads if self.recipe is None else ()):
            dx.addmm_(grad, self.values(i, grad.dtype), beta=int(written))
            written = True
        for i in self.scaled if self.dropout is not None else ():
            columns = self.columns[i]
            assert columns is not None
            values = _scaled_values(self.weights[i], columns - 1, dx.dtype)
            dx.add_(drop(product(grads[i], values), self.mask(i)))
        return dx, a_gradients

    def _low_rank_pass(
        self, x: Tensor | None, v: Tensor, state: State, dx: Tensor | None, written: bool
    ) -> list[Tensor | None]:
        """Write the low-rank terms to dx, or add them if it is `written`; return dAᵢ, None without x."""
        if self.dropout is not None:
            gradients = dropped_gradients(v, state.factors, self.dropout, x, dx, written)
            return [None if gradient is None else gradient.to(self.dtype) for gradient in gradients]
        if dx is not None:
            accumulate(dx, v, state.a, int(written))
        return [None] * self.factor_count if x is None else self._a_gradients(self._summed(v, x), state.ranks)

    def _a_gradients(self, stacked: Tensor, ranks: Sequence[int]) -> list[Tensor | None]:
        """Split the gradient of the stacked A into dAᵢ."""
        return [*stacked.split(ranks)]

    def _summed(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        """scale · leftᵀ·right, summed over the rows of left [M, N] and right [M, K], in the factors' own dtype."""
        return summed(left.t(), right, scale, self.dtype)

    def b_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """dBᵢ from the gradients of the factors that the GEMMs read: c∘ them with DoRA."""
        columns = [self.columns[i] for i, _ in self.adapters]
        return [
            grad if grad is None or by is None else scale_rows(grad, by)
            for grad, by in zip(gradients, columns, strict=True)
        ]


@dataclass(frozen=True)
class RowProjections(Projections):
    """Projections with adapters of their own for equal ranges of rows; factors are listed by projection, then range.

    Args:
        row_scalings: s of each range, for each projection with adapters; `scalings` are 1 there.
        row_ranks: the ranks of each range, for each projection with adapters.
    """

    row_scalings: tuple[tuple[float, ...], ...] = ()
    row_ranks: tuple[tuple[int, ...], ...] = ()

    by_rows: ClassVar[bool] = True

    @classmethod
    def of_rows(cls, x: Tensor, weights: Sequence, biases: Sequence, loras: Sequence, dropout: float, recipe: Any):
        """The projections, biases and factors, as in `Projections.of`.

        Raises:
            ModelError: the adapters have dropout.
        """
        if dropout:
            raise ModelError("adapters of ranges of rows have no dropout", "set lora_dropout: 0")
        members = [lora.adapters for lora in loras if lora is not None]
        projections = cls(
            weights=tuple(weights),
            scalings=tuple(None if lora is None else 1.0 for lora in loras),
            dropout=None,
            dtype=gradient_dtype(members[0][0].a),
            recipe=recipe,
            columns=(None,) * len(weights),
            row_scalings=tuple(tuple(adapter.scaling for adapter in adapters) for adapters in members),
            row_ranks=tuple(tuple(adapter.a.shape[0] for adapter in adapters) for adapters in members),
        )
        flat = [adapter for adapters in members for adapter in adapters]
        biases = [None if bias is None else bias.to(x.dtype) for bias in biases]
        return projections, biases, [adapter.a for adapter in flat], [adapter.b for adapter in flat]

    @property
    def ranges(self) -> int:
        return len(self.row_ranks[0])

    @property
    def factor_count(self) -> int:
        return len(self.row_ranks) * self.ranges

    def factors(
        self, a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """A stacked [G, R, K], and s·B [G, Nᵢ, rᵢ], in `dtype`, with the largest rank of each projection."""
        ranks = [max(by_range) for by_range in self.row_ranks]
        stacked = a[0].new_zeros((self.ranges, sum(ranks), a[0].shape[1]), dtype=dtype)
        outputs = [factor.shape[0] for factor in b[:: self.ranges]]
        copies = tuple(
            b[0].new_zeros((self.ranges, n, rank), dtype=dtype) for n, rank in zip(outputs, ranks, strict=True)
        )
        scaled = torch._foreach_mul(list(b), [s for by_range in self.row_scalings for s in by_range])
        targets = [*self._blocks(stacked.split(ranks, dim=1)), *self._blocks_of_b(copies)]
        torch._foreach_copy_(targets, [*a, *scaled])
        return stacked, copies

    def _blocks(self, by_projection: Sequence[Tensor]) -> list[Tensor]:
        """The parts [r, K] of each factor A in tensors [G, rᵢ, K], without what fills ranks up."""
        pairs = zip(by_projection, self.row_ranks, strict=True)
        return [factors[i, :rank] for factors, ranks in pairs for i, rank in enumerate(ranks)]

    def _blocks_of_b(self, by_projection: Sequence[Tensor]) -> list[Tensor]:
        """The parts [N, r] of each factor B in tensors [G, Nᵢ, rᵢ]."""
        pairs = zip(by_projection, self.row_ranks, strict=True)
        return [factors[i, :, :rank] for factors, ranks in pairs for i, rank in enumerate(ranks)]

    def low_rank_gradients(
        self, grads: Sequence[Tensor], state: State, needed: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        return super().low_rank_gradients(grads, state, [any(needed)] * len(self.row_ranks))

    def _a_gradients(self, stacked: Tensor, ranks: Sequence[int]) -> list[Tensor | None]:
        return [*self._blocks(stacked.split(ranks, dim=1))]

    def b_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """dB of each range and projection."""
        by_projection = [grad for grad in gradients if grad is not None]
        if not by_projection:
            return [None] * self.factor_count
        scalings = [s for by_range in self.row_scalings for s in by_range]
        return [*torch._foreach_mul(self._blocks_of_b(by_projection), scalings)]

    def _summed(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        """Return the products that `Projections` sums over all rows, one per range of rows: [G, N, K]."""
        ranges = self.ranges, -1
        return summed(left.unflatten(0, ranges).mT, right.unflatten(0, ranges), scale, self.dtype)


class _LoRA(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, projections, uses, *tensors):
        n, adapters = len(projections.weights), projections.factor_count
        biases = tensors[:n]
        a = tensors[n : n + adapters]
        b = tensors[n + adapters : n + 2 * adapters]
        magnitudes = tensors[n + 2 * adapters :]
        rows = rows_of(x)
        state = projections.low_rank(rows, a, b)
        outputs, scaled_outputs = projections.outputs(rows, x.shape[:-1], biases, state)
        need_a = any(ctx.needs_input_grad[3 + n : 3 + n + adapters])
        scaled = [i for i in projections.scaled if uses[i] != "deferred"]
        scaled_biases: list[Tensor | None] = [None] * len(scaled_outputs)
        if projections.dropout is None:
            scaled_outputs = [outputs[i] if uses[i] == "unchanged" else outputs[i].clone() for i in scaled]
            scaled_biases = [biases[i] for i in scaled]
        ctx.save_for_backward(rows if need_a else None, *magnitudes, *scaled_outputs, *scaled_biases, *state.flat())
        # An attribute, not save_for_backward: hooks that offload saved activations must not offload parameters.
        ctx.projections = projections
        ctx.scaled = scaled
        ctx.shape = x.shape
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        projections, needs = ctx.projections, ctx.needs_input_grad
        n = len(projections.weights)
        adapters = projections.factor_count
        scaled = len(ctx.scaled)
        need_biases = needs[3 : 3 + n]
        need_b = needs[3 + n + adapters : 3 + n + 2 * adapters]
        rows, *saved = ctx.saved_tensors
        magnitudes = saved[:scaled]
        scaled_outputs = saved[scaled : 2 * scaled]
        scaled_biases = saved[2 * scaled : 3 * scaled]
        state, grads = State.unflat(saved[3 * scaled :]), tuple(rows_of(grad) for grad in grads)
        dm = [
            magnitude_gradient(ops.column_dots(grads[index], rows_of(output)), grads[index], bias, magnitude)
            for index, output, bias, magnitude in zip(
                ctx.scaled, scaled_outputs, scaled_biases, magnitudes, strict=True
            )
        ]
        v, db = projections.low_rank_gradients(grads, state, need_b)
        dx, da = projections.gradients(rows, grads, v, state, needs[0])
        dx = None if dx is None else dx.view(ctx.shape)
        biases = [grad.sum(0) if need else None for grad, need in zip(grads, need_biases, strict=True)]
        return dx, None, None, *biases, *da, *projections.b_gradients(db), *dm
