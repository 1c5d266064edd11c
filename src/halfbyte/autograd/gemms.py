"""GEMMs with adapters' factors and dequantized weights, and casts of the factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats.base import Weight, is_quantized


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The values of a frozen weight in `dtype`; callers drop them right after launching their GEMM."""
    return weight.dequantize(dtype) if is_quantized(weight) else weight.detach().to(dtype)


def product(a: Tensor, b: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """scale · a·b, written to `out` if given. Uses an in-place op, which autocast does not cast."""
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[-1])
    return accumulate(out, a, b, 0, scale)


def accumulate(out: Tensor, a: Tensor, b: Tensor, beta: int = 1, alpha: float = 1.0) -> Tensor:
    """out ← beta·out + alpha·a·b, for out [M, N], a [M, K] and b [K, N], or [G, K, N] for G equal ranges of rows."""
    if b.dim() == 2:
        return out.addmm_(a, b, beta=beta, alpha=alpha)
    ranges = b.shape[0], -1
    out.unflatten(0, ranges).baddbmm_(a.unflatten(0, ranges), b, beta=beta, alpha=alpha)
    return out


def summed(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · a·b for matrices, or for each pair of [G, N, M] and [G, M, K].

    Sums are in fp32 and rounded once to `dtype` where the device's GEMM supports it.
    """
    batched = a.dim() == 3
    half = a.dtype in (torch.float16, torch.bfloat16)
    if a.is_cuda and torch.version.hip is None and dtype is torch.float32 and half:  # ROCm's GEMM has no out_dtype
        result = (torch.bmm if batched else torch.mm)(a, b, out_dtype=torch.float32)
        return result if scale == 1.0 else result.mul_(scale)
    result = a.new_empty(*a.shape[:-1], b.shape[-1])
    return (result.baddbmm_ if batched else result.addmm_)(a, b, beta=0, alpha=scale).to(dtype)


def scale_rows(matrix: Tensor, by: Tensor) -> Tensor:
    """matrix [N, K] times `by` [N], a new tensor in the matrix's dtype, rounded once."""
    return torch.mul(matrix, by.unsqueeze(1), out=torch.empty_like(matrix))


def gradient_dtype(factor: Tensor) -> torch.dtype:
    """Dtype of a factor's gradient; `parallel.shard.optimizer` sets a wider `grad_dtype`."""
    return (factor.grad_dtype if factor.is_leaf else None) or factor.dtype


def cast(a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A stacked [R, K], and B, in `dtype`: cast in one launch, or views if no cast or copy is needed."""
    if len(a) == 1 and a[0].dtype is dtype and b[0].dtype is dtype:
        return a[0].detach(), (b[0].detach(),)
    ranks = [factor.shape[0] for factor in a]
    stacked = a[0].new_empty((sum(ranks), a[0].shape[1]), dtype=dtype)
    copies = tuple(factor.new_empty(factor.shape, dtype=dtype) for factor in b)
    torch._foreach_copy_([*stacked.split(ranks), *copies], [*a, *b])
    return stacked, copies


def stack(factors: Sequence[Tensor]) -> Tensor:
    """[rᵢ, K] each as [R, K]; a view if the factors are contiguous in one storage, else a copy."""
    first, at = factors[0], factors[0].storage_offset()
    for factor in factors:
        if factor.untyped_storage()._cdata != first.untyped_storage()._cdata or factor.storage_offset() != at:
            return torch.cat(list(factors))
        at += factor.numel()
    return first.as_strided((sum(factor.shape[0] for factor in factors), first.shape[1]), (first.shape[1], 1))


def rows_of(tensor: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])
