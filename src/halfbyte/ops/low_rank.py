"""Projections of gradients, as torch functions: bases by subspace iteration or at random, and their storage."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

SPARE = 1e-6  # share of the last basis in a new one, so that its columns are independent for any gradient


def refresh_basis(gradient: Tensor, start: Tensor, rank: int, sweeps: int, align: bool = False) -> Tensor:
    """Approximate the leading left singular vectors of matrices by subspace iteration.

    Columns are orthonormalized by Cholesky factors of fp64 Gram matrices, twice (Yamamoto et al. 2015, CholeskyQR2):
    a batched QR on a GPU loops over the matrices, these matmuls do not. Devices without fp64 use QR.

    Args:
        gradient: G [*, m, n], fp32 or fp64.
        start: [*, m, k] with independent columns, r ≤ k ≤ min(m, n), in G's dtype.
        rank: r.
        sweeps: products with G Gᵀ.
        align: whether to keep the order and signs of the columns of `start` [*, m, r], so that moments stay valid when
            the basis changes little. Otherwise the columns are ordered by decreasing singular value.

    Returns:
        [*, m, r] with orthonormal columns.
    """
    basis = start if align else _orthonormal(start, start)
    for _ in range(sweeps):
        across = _orthonormal(gradient.mT @ basis)
        basis = _orthonormal(gradient @ across, basis)
    if align:
        return basis * torch.where((basis * start).sum(-2, keepdim=True) < 0, -1.0, 1.0).to(basis.dtype)
    exact = torch.float64 if _has_fp64(gradient.device) else gradient.dtype
    inside = (basis.mT @ gradient).to(exact)
    vectors = torch.linalg.eigh(inside @ inside.mT).eigenvectors.flip(-1)[..., :rank]
    return (basis.to(exact) @ vectors).to(gradient.dtype)


def _orthonormal(columns: Tensor, spare: Tensor | None = None) -> Tensor:
    """Return an orthonormal basis [*, m, k] of the span of columns [*, m, k], in their dtype.

    Args:
        spare: independent columns [*, m, k], added with the weight `SPARE` so that dependent columns are replaced.
            None: dependent columns become small, and the result is a whitening only.
    """
    if not _has_fp64(columns.device):
        return torch.linalg.qr(columns).Q
    size = torch.linalg.vector_norm(columns, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    basis = columns.double() / size.clamp_min(torch.finfo(torch.float64).tiny)
    if spare is not None:
        basis = basis + SPARE * spare
    for _ in range(1 if spare is None else 2):
        gram = basis.mT @ basis
        if spare is None:
            gram.diagonal(dim1=-2, dim2=-1).add_(SPARE**2)
        factor = torch.linalg.cholesky_ex(gram).L
        basis = torch.linalg.solve_triangular(factor.mT, basis, upper=True, left=False)
    return basis.to(columns.dtype)


def _has_fp64(device: torch.device) -> bool:
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def gaussian(rows: int, columns: int, like: Tensor, *key: int, count: int | None = None) -> Tensor:
    """Return normal random numbers on `like`'s device, at least fp32, determined by `key`.

    Returns:
        [rows, columns], or [count, rows, columns].
    """
    digest = hashlib.blake2s("/".join(map(str, key)).encode(), digest_size=4).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest, "little"))
    shape = (rows, columns) if count is None else (count, rows, columns)
    drawn = torch.randn(shape, generator=generator, device=like.device)
    return drawn.to(torch.promote_types(like.dtype, torch.float32))


def quantize_basis(basis: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """Quantize a basis uniformly between the smallest and the largest value of each group of elements.

    Args:
        basis: fp32, any shape.
        bits: 4 or 8.
        group: consecutive elements per scale.

    Returns:
        codes: uint8 [⌈numel · bits / 8⌉], the first of two 4-bit codes in the low bits.
        scales: fp32 [2, ⌈numel / group⌉], steps and smallest values.
    """
    flat = basis.reshape(-1)
    groups = math.ceil(flat.numel() / group)
    padded = torch.cat([flat, flat[-1:].expand(groups * group - flat.numel())]).view(groups, group)
    low, high = padded.aminmax(dim=1)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    codes = ((padded - low[:, None]) / step[:, None]).round().clamp(0, 2**bits - 1).to(torch.uint8)
    codes = codes.view(-1)[: flat.numel()]
    if bits == 4:
        pairs = nn.functional.pad(codes, (0, codes.numel() % 2)).view(-1, 2)
        codes = pairs[:, 0] | pairs[:, 1] << 4
    return {"codes": codes.contiguous(), "scales": torch.stack([step, low])}


def dequantize_basis(stored: Mapping[str, Tensor], bits: int, group: int, shape: Sequence[int]) -> Tensor:
    """Return the fp32 basis of this shape that `quantize_basis` stored."""
    codes, (step, low) = stored["codes"], stored["scales"]
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=1).view(-1)
    groups = torch.arange(math.prod(shape), device=codes.device) // group  # of each element
    return (codes[: groups.numel()] * step[groups] + low[groups]).view(*shape)
