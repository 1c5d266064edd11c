"""4-bit blockwise quantization: the specification of NF4 and FP4 with optional nested scales.

A tensor is read flat, row-major, in blocks that may cross rows. Each block has one scale, its largest magnitude
(absmax). A weight's code is the nearest of 16 values after division by the scale. Two codes share a byte, the even
element in the high nibble. Nested scales (double quantization, QLoRA section 3) store absmax minus its mean in 8 bits
of the signed dynamic data type, in blocks of 256 scales.

Bytes equal those of bitsandbytes' CPU backend, values those of all its backends: value = fp32 codebook entry × fp32
scale, rounded once to the result's dtype. A nested scale is rounded twice (× then +), never a fused multiply-add.

Decoding runs linears y = x·Wᵀ + b for a few rows x [M, K]. These are bound by reading W [N, K], so kernels decode W in
registers and never write it: they move K·N/2 bytes of codes and a scale per block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..dispatch import op
from .blockwise8 import dequantize_blockwise8, quantize_blockwise8
from .codebooks import codebook4, thresholds4
from .linear import add_term, linear_rows

NESTED_BLOCK = 256


def _normalized(flat: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """fp32 values in [-1, 1] of a flat tensor, and fp32 absmax per block.

    As in bitsandbytes' CPU backend, full blocks multiply by the reciprocal and a partial last block divides; some codes
    differ between the two. An all-zero full block keeps absmax 0 and encodes zeros.
    """
    flat = flat.float()
    full = flat.numel() // blocksize * blocksize
    blocks = flat[:full].view(-1, blocksize)
    absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=1) if full else flat.new_empty(0)
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38)).unsqueeze(1)).clamp_(-1, 1).view(-1)
    if full < flat.numel():
        tail_max = flat[full:].abs().max().clamp(min=1e-38)
        absmax = torch.cat([absmax, tail_max.view(1)])
        scaled = torch.cat([scaled, (flat[full:] / tail_max).clamp_(-1, 1)])
    return scaled, absmax


@op("triton.blockwise4", "native.blockwise4")
def quantize_blockwise4(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    """Quantize a tensor of n values to packed codes and scales.

    Args:
        weight: any shape; fp32, fp16 or bf16.
        blocksize: values per scale, 32-4096.
        quant_type: "nf4" or "fp4".

    Returns:
        packed uint8 [(n+1)//2, 1] and absmax fp32 [⌈n/blocksize⌉]. With odd n the last low nibble encodes 0.
    """
    scaled, absmax = _normalized(weight.reshape(-1), blocksize)
    if scaled.numel() % 2:
        scaled = torch.nn.functional.pad(scaled, (0, 1))
    midpoints, code_of_rank = thresholds4(quant_type, weight.device)
    rank = torch.bucketize(scaled, midpoints, out_int32=True)
    codes = rank.to(torch.uint8) if quant_type == "nf4" else code_of_rank[rank]
    return ((codes[::2] << 4) | codes[1::2]).unsqueeze(1), absmax


@op("triton.blockwise4", "native.blockwise4")
def dequantize_blockwise4(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize packed codes.

    Args:
        packed: uint8, (numel+1)//2 bytes.
        absmax: fp32 [⌈numel/blocksize⌉], or uint8 of that length when `nested` is given.
        nested: fp32 [⌈blocks/256⌉] second-level scales, fp32 [256] their code, fp32 [] offset.
        blocksize: values per scale; even.
        quant_type: "nf4" or "fp4".
        numel: number of values.
        dtype: fp32, fp16 or bf16.

    Returns:
        `dtype` [numel].
    """
    scales = absmax if nested is None else dequantize_scales(absmax, *nested)
    codes = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1).view(-1)[:numel]
    values = codebook4(quant_type, packed.device)[codes.int()]
    return (values * scales.repeat_interleave(blocksize)[:numel]).to(dtype)


def quantize_scales(absmax: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize scales: uint8 [blocks], fp32 [⌈blocks/256⌉] second-level scales, fp32 [] offset (the mean).

    Args:
        absmax: fp32 [blocks].
        code: fp32 [256], sorted (`dynamic_map`).
    """
    offset = absmax.mean()
    quantized, second = quantize_blockwise8(absmax - offset, code, NESTED_BLOCK)
    return quantized, second, offset


def dequantize_scales(quantized: Tensor, second: Tensor, code: Tensor, offset: Tensor) -> Tensor:
    """Dequantize nested scales to fp32 [blocks]; arguments are as `quantize_scales` returns them."""
    return dequantize_blockwise8(quantized, second, code, NESTED_BLOCK, torch.float32).add_(offset)


def _scales_of(absmax: Tensor, nested: tuple[Tensor, Tensor, Tensor] | None, block: Tensor) -> Tensor:
    """Scales, fp32, of the blocks with these indices."""
    if nested is None:
        return absmax[block]
    second, code, offset = nested
    return code[absmax[block].int()] * second[block // NESTED_BLOCK] + offset


def dequantize_rows_blockwise4(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    width: int,
    rows: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Dequantize chosen rows of a [*, width] table, to `dtype` [rows, width]. See `dequantize_blockwise4`."""
    if width % blocksize == 0:  # whole blocks per row: gather bytes and scales, then dequantize a smaller table
        each = width // blocksize
        block = rows.long().unsqueeze(1) * each + torch.arange(each, device=packed.device)
        scales = _scales_of(absmax, nested, block).view(-1)
        codes = packed.view(-1, width // 2).index_select(0, rows).view(-1)
        found = dequantize_blockwise4(codes, scales, None, blocksize, quant_type, rows.numel() * width, dtype)
        return found.view(-1, width)
    element = rows.long().unsqueeze(1) * width + torch.arange(width, device=packed.device)
    byte = packed.view(-1)[element >> 1]
    codes = torch.where(element % 2 == 0, byte >> 4, byte & 15)
    scales = _scales_of(absmax, nested, element // blocksize)
    return (codebook4(quant_type, packed.device)[codes.int()] * scales).to(dtype)


@op("cuda.gemv4_row", "cuda.gemm4", "cuda.gemv4", "triton.gemv4", "native.decode4")
def linear_blockwise4(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
    bias: Tensor | None,
    term: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`F.linear` of rows with a packed weight, plus an adapter's term u·Bᵀ; no gradient.

    Kernels may sum in another order, and keep weights in fp32 where the reference rounds them to x's dtype.

    Args:
        x: [M, K]; fp32, fp16 or bf16.
        packed: uint8, (N·K+1)//2 bytes.
        absmax, nested, blocksize, quant_type: as in `dequantize_blockwise4`; blocks may cross rows.
        rows: N.
        bias: [N] in x's dtype, or None.
        term: u [M, r] with any row stride, and B [N, r], in x's dtype, or None.
    Returns:
        [M, N] in x's dtype.
    """
    return add_term(linear_rows(x, dequantized(x, packed, absmax, nested, blocksize, quant_type, rows), bias), term)


@op("cuda.gemv4_row")
def linears_blockwise4(x: Tensor, weights: Sequence[tuple]) -> list[Tensor]:
    """`linear_blockwise4` of one x with several weights, each given as its arguments after x, without the term."""
    return [linear_blockwise4(x, *weight) for weight in weights]


def dequantized(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
) -> Tensor:
    """Dequantized weight of `linear_blockwise4`, [N, K] in x's dtype."""
    numel = rows * x.shape[1]
    values = dequantize_blockwise4(packed, absmax, nested, blocksize, quant_type, numel, x.dtype)
    return values.view(rows, x.shape[1])
