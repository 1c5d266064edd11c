"""Linear layers for inference: weights read once, the low-rank factors of all adapters of the batch stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from ..formats.linear import add_term, linear_rows
from ..layers.plain import PlainLinear, read_linear
from ..ops.decode import PackedLinear, Projections, low_rank_rows, packed_linears
from ..tensor import QuantizedTensor
from .adapters import Unsupported, module_of

Factors = dict[str, tuple[Tensor, Tensor, float]]  # by adapter: A [r, K], B [N, r], scaling


def _read(module: nn.Module, adapters: Sequence[str | None]) -> tuple[PlainLinear, Factors]:
    """Return the linear, and the factors of its adapters among `adapters`."""
    if isinstance(module, AuxiliaryTrainingWrapper):
        module = module_of(module, adapters)
    read = read_linear(module, sorted({name for name in adapters if name is not None}))
    if isinstance(read, str):
        raise Unsupported(read)
    return read, {adapter.name: (adapter.a, adapter.b, adapter.scaling) for adapter in read.adapters}


class _LinearWeights(NamedTuple):
    """Weight and bias of a linear in the compute dtype: the model's own memory, or copies."""

    weight: Any
    bias: Tensor | None

    @classmethod
    def of(cls, linear: PlainLinear, dtype: torch.dtype, unpacked: bool) -> _LinearWeights:
        weight: Any = linear.weight
        if not isinstance(weight, QuantizedTensor):
            weight = weight.detach().to(dtype)
        elif unpacked:
            weight = weight.dequantize(dtype)
        return cls(weight, None if linear.bias is None else linear.bias.detach().to(dtype))

    def renew(self, linear: PlainLinear) -> None:
        """Copy the current values. Fused optimizers do not bump tensor versions, so changes cannot be detected."""
        for target, source in ((self.weight, linear.weight), (self.bias, linear.bias)):
            if target is None or source is None or isinstance(target, QuantizedTensor):
                continue
            if isinstance(source, QuantizedTensor):
                target.copy_(source.dequantize(target.dtype))
            elif target.dtype is not source.dtype:
                target.copy_(source)


def _bound_gemm(linear: PlainLinear, plain: _LinearWeights) -> Callable[..., Tensor]:
    """Return a function [M, K] → [M, N]; arguments are bound once."""
    weight, bias = plain
    if isinstance(weight, QuantizedTensor):
        shape = linear.out_features, linear.in_features
        return partial(weight.format.linear, parts=weight.parts, shape=shape, bias=bias)
    return partial(linear_rows, weight=weight, bias=bias)


def _packed(linears: Sequence[PlainLinear], plain: Sequence[_LinearWeights]) -> list[PackedLinear]:
    """Return the linears for `ops.decode`, or none if an op does not multiply all of their weights as stored.

    Equal orders of inputs become one tensor, so that kernels need not compare them.
    """
    packed: list[PackedLinear] = []
    for linear, (weight, bias) in zip(linears, plain, strict=True):
        shape = linear.out_features, linear.in_features
        product = weight.format.product(weight.parts, shape) if isinstance(weight, QuantizedTensor) else None
        if product is None:
            return []
        first = packed[0].product.order if packed else None
        if first is not None and product.order is not None and torch.equal(first, product.order):
            product = product._replace(order=first)
        packed.append(PackedLinear(product, *shape, bias))
    return packed


RANKS, ALL_RANKS = 8, 16  # rank multiples of one linear and of all linears with one input; see ops.decode


class Linears:
    """Linear layers with the same input, and the low-rank terms of all adapters in use.

    Args:
        modules: nn.Linear, or PEFT's LoRA or trained copies around one.
        adapters: the adapter of each row of the batch; None for none.
        dtype: of the GEMMs.
        unpacked: dequantize weights once into `dtype`, to the values that training multiplies by (default: each GEMM
            dequantizes them).

    Raises:
        Unsupported: a module computes something else.
    """

    def __init__(
        self, modules: Sequence[nn.Module], adapters: Sequence[str | None], dtype: torch.dtype, unpacked: bool = False
    ):
        self.modules, self.adapters = modules, adapters
        read = self._read()
        self.storage = _storage_of(read)
        self.plain = [_LinearWeights.of(base, dtype, unpacked) for base, _ in read]
        self.gemms = [_bound_gemm(base, plain) for (base, _), plain in zip(read, self.plain, strict=True)]
        self.packed = _packed([base for base, _ in read], self.plain)
        owners: list[str | None] = []  # the adapter of each row of A
        self.b: list[tuple[int, Tensor] | None] = []
        for base, factors in read:
            begin = len(owners)
            for name, (down, _, _) in factors.items():
                owners += [name] * len(down)
            if factors:
                owners += [None] * (-(len(owners) - begin) % RANKS)
                shape = base.out_features, len(owners) - begin
                self.b.append((begin, torch.zeros(shape, dtype=dtype, device=base.weight.device)))
            else:
                self.b.append(None)
        self.a: Tensor | None = None
        self.mask: Tensor | None = None
        if owners:
            owners += [None] * (-len(owners) % ALL_RANKS)
            base = read[0][0]
            self.a = torch.zeros(len(owners), base.in_features, dtype=dtype, device=base.weight.device)
            if len(set(adapters)) > 1:  # rows have different adapters
                rows = [[owner is not None and owner == adapter for owner in owners] for adapter in adapters]
                self.mask = torch.tensor(rows, dtype=dtype, device=self.a.device).unsqueeze(1)
        self.fused: _LinearWeights | None = None
        self.up: Tensor | None = None
        self.sizes = [base.out_features for base, _ in read]
        if unpacked and all(isinstance(base.weight, QuantizedTensor) for base, _ in read):
            self._fuse()
        self._fill(read)

    def _fuse(self) -> None:
        """Concatenate the weights and A into one matrix, and all B into another, so that one GEMM each suffices."""
        weight = torch.cat([*(linear.weight for linear in self.plain), *([] if self.a is None else [self.a])])
        bias = None
        if any(linear.bias is not None for linear in self.plain):  # missing biases become zeros
            bias = weight.new_zeros(len(weight))
            for rows, linear in zip(bias[: sum(self.sizes)].split(self.sizes), self.plain, strict=True):
                if linear.bias is not None:
                    rows.copy_(linear.bias)
        self.fused = _LinearWeights(weight, bias)
        *weights, a = weight.split([*self.sizes, 0 if self.a is None else len(self.a)])
        self.plain = [linear._replace(weight=weight) for linear, weight in zip(self.plain, weights, strict=True)]
        self.gemms = []
        if self.a is not None:
            self.a = a
            self.up = a.new_zeros(sum(self.sizes), len(a))
            self.b = [
                None if term is None else (term[0], rows[:, term[0] : term[0] + term[1].shape[1]])
                for term, rows in zip(self.b, self.up.split(self.sizes), strict=True)
            ]

    def _read(self) -> list[tuple[PlainLinear, Factors]]:
        return [_read(module, self.adapters) for module in self.modules]

    def _fill(self, read: list[tuple[PlainLinear, Factors]]) -> None:
        """Copy the adapters' current values."""
        for (_, factors), term in zip(read, self.b, strict=True):
            if self.a is not None and term is not None:
                begin, b = term
                column = 0
                for down, up, scaling in factors.values():
                    self.a[begin + column : begin + column + len(down)].copy_(down)
                    b[:, column : column + len(down)].copy_(up * scaling)
                    column += len(down)

    def renew(self) -> bool:
        """Refresh all values; return False if these linears must be rebuilt.

        Raises:
            Unsupported: a module now computes something else.
        """
        read = self._read()
        if _storage_of(read) != self.storage:
            return False
        for (base, _), plain in zip(read, self.plain, strict=True):
            plain.renew(base)
        self._fill(read)
        return True

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Return [B, T, Nᵢ] for each linear, for x [B, T, K]."""
        rows, u = x.flatten(0, 1), x
        mask = None if self.mask is None else self.mask.expand(-1, x.shape[1], -1).flatten(0, 1)
        if self.fused is not None:
            y = linear_rows(rows, *self.fused)
            if self.up is not None:
                y, u = y.split(list(self.up.shape), dim=-1)
                y = add_term(y, (u if mask is None else u * mask, self.up))
            return [output.unflatten(0, x.shape[:2]) for output in y.split(self.sizes, dim=-1)]
        if self.a is not None:
            u = low_rank_rows(rows, self.a, mask)
        terms = [
            None if factor is None else (u[:, factor[0] : factor[0] + factor[1].shape[1]], factor[1])
            for factor in self.b
        ]
        if self.packed:
            outs = packed_linears(rows, self.packed, terms)
        else:
            outs = [add_term(gemm(rows), term) for gemm, term in zip(self.gemms, terms, strict=True)]
        return [out.unflatten(0, x.shape[:2]) for out in outs]

    def projections(self) -> Projections | None:
        """Return these linears for `ops.decode`, or None unless all weights are multiplied as they are stored."""
        if not self.packed:
            return None
        return Projections(self.packed, self.a, self.b, None if self.mask is None else self.mask[:, 0])


def _storage_of(read: list[tuple[PlainLinear, Factors]]) -> list[Any]:
    """Return the data pointers, dtypes and adapter shapes that must not change while the linears are in use."""
    addresses: list[Any] = []
    for base, factors in read:
        weight: Any = base.weight
        tensors = list(weight.parts.values()) if isinstance(weight, QuantizedTensor) else [weight]
        tensors += [] if base.bias is None else [base.bias]
        addresses += [(tensor.data_ptr(), tensor.dtype) for tensor in tensors]
        addresses += [(name, down.shape) for name, (down, _, _) in factors.items()]
    return addresses
