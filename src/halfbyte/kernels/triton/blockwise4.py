"""Triton: quantization and dequantization of 4-bit weights, one launch each, nested scales included.

Both are bound by memory. Dequantizing n values reads n/2 bytes of codes and a scale per block, and writes 2n bytes in
bf16: the floor is (2.5 n + scales) / bandwidth. A thread decodes a 4-byte word. Its 8 values are one 16-byte store, so
no value moves between threads, and the 64-byte codebook is one line of the L1 cache. Measured on an H200, where a copy
moves 4.2 TB/s: 4.0 TB/s at 28672×8192 with nested scales, against 3.2 for a kernel that decodes 16 bytes a thread and
2.6 for one that selects values arithmetically (docs/what-did-not-work.md).

The arithmetic follows the reference operation by operation, in fp32. `enable_fp_fusion=False` keeps the compiler from
contracting a nested scale's multiply and add into one rounding.

Conversion of a weight to E4M3, in either orientation, moves 1.5 bytes a weight. The transposing kernel reads a tile
whose rows are 64 bytes of packed codes, and writes rows of 128 bytes of E4M3.

`quantize_cuda` gives the bytes of bitsandbytes' CUDA kernels, with the reciprocal that they use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...formats.blockwise4 import NESTED_BLOCK, dequantize_blockwise4, quantize_blockwise4
from ...formats.codebooks import codebook4, thresholds4
from ...formats.float8 import E4M3, FP8_MAX
from ...ops.blockwise_cuda import SMALLEST, approximate_reciprocal, quantize_blockwise4_cuda, thresholds
from ...ops.float8 import float8_of_blockwise4
from ..device import device_of
from ..tiling import ceil_div
from .float8 import float8_obstacle, to_float8
from .launch import Launcher

WORDS = 512  # 4-byte words that a program decodes
VALUES = 4096  # values that a program encodes
BLOCK = 1024  # reciprocals of a program
TINY = tl.constexpr(SMALLEST)


@triton.jit
def _scales(absmax_ptr, second_ptr, code_ptr, offset_ptr, block, mask, NESTED: tl.constexpr, SIZE: tl.constexpr):
    """Scale of each block, fp32."""
    if NESTED:
        q = tl.load(absmax_ptr + block, mask=mask, other=0).to(tl.int32)
        second = tl.load(second_ptr + block // SIZE, mask=mask, other=0.0)
        scale = tl.load(code_ptr + q) * second + tl.load(offset_ptr)
    else:
        scale = tl.load(absmax_ptr + block, mask=mask, other=0.0)
    return scale


@triton.jit
def _dequantize(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, out_ptr, numel,
    WORDS: tl.constexpr, WORDS_PER_BLOCK: tl.constexpr, NESTED: tl.constexpr, NESTED_BLOCK: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word * 8 < numel
    codes = tl.load(packed_ptr.to(tl.pointer_type(tl.int32)) + word, mask=mask, other=0)
    block = word // WORDS_PER_BLOCK
    scale = _scales(absmax_ptr, second_ptr, code_ptr, offset_ptr, block, mask, NESTED, NESTED_BLOCK)
    lane = tl.arange(0, 8)
    # Bytes are in memory order, the high nibble first: lanes 0 to 7 are nibbles 1, 0, 3, 2, 5, 4, 7, 6 of the word.
    nibble = (codes[:, None] >> ((lane ^ 1) * 4)[None, :]) & 15
    values = (tl.load(codebook_ptr + nibble) * scale[:, None]).to(out_ptr.dtype.element_ty)
    element = word[:, None] * 8 + lane[None, :]
    tl.store(out_ptr + element, values, mask=element < numel, cache_modifier=".cs")


_dequantize_launcher = Launcher(_dequantize, enable_fp_fusion=False)


@dequantize_blockwise4.kernel("cuda", "xpu")
def dequantize(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    numel: int,
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty(numel, dtype=dtype, device=packed.device)
    if not numel:
        return out
    if packed.numel() % 4:  # the number of values is not a multiple of 8: small tensors in practice
        packed = torch.nn.functional.pad(packed.view(-1), (0, -packed.numel() % 4))
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    operands = packed, absmax, second, code, offset, codebook4(quant_type, packed.device), out
    # Most of a call's 30 µs on the host went into views and the launcher's own key: this key has all that varies.
    key = numel, blocksize, nested is not None, dtype, packed.dtype, packed.get_device()
    if not _dequantize_launcher.repeat(key, operands):
        constants = WORDS, blocksize // 8, nested is not None, NESTED_BLOCK
        _dequantize_launcher(ceil_div(numel, 8 * WORDS), operands, (numel,), constants, warps=4, key=key)
    return out


@triton.jit
def _quantize(
    weight_ptr, packed_ptr, absmax_ptr, midpoint_ptr, rank_ptr, numel, blocks,
    BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(weight_ptr + element, mask=element < numel, other=0.0).to(tl.float32)
    # NaN must reach absmax, which the caller checks: fmax would drop it.
    absmax = tl.max(tl.where(values == values, tl.abs(values), float("inf")), axis=1)
    floor = tl.maximum(absmax, tl.full((BLOCKS,), 1e-38, tl.float32))
    partial = (block + 1) * SIZE > numel
    stored = tl.where(partial, floor, absmax)
    tl.store(absmax_ptr + block, stored, mask=block < blocks)
    # As in the reference, a full block multiplies by the reciprocal and a partial one divides.
    by_reciprocal = values * tl.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), floor)[:, None]
    scaled = tl.where(partial[:, None], tl.div_rn(values, floor[:, None] + tl.zeros_like(values)), by_reciprocal)
    scaled = tl.minimum(tl.maximum(scaled, -1.0), 1.0)
    rank = tl.zeros((BLOCKS, SIZE), dtype=tl.int32)
    for i in tl.static_range(15):
        rank += (scaled > tl.load(midpoint_ptr + i)).to(tl.int32)
    codes = tl.load(rank_ptr + rank).to(tl.int32)
    high, low = tl.split(tl.reshape(codes, (BLOCKS, SIZE // 2, 2)))
    byte = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    tl.store(packed_ptr + byte, ((high << 4) | low).to(tl.uint8), mask=2 * byte < numel)


_quantize_launcher = Launcher(_quantize, enable_fp_fusion=False)


@quantize_blockwise4.kernel("cuda", "xpu")
def quantize(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    numel = weight.numel()
    absmax = torch.empty(ceil_div(numel, blocksize), dtype=torch.float32, device=weight.device)
    packed = torch.empty((numel + 1) // 2, 1, dtype=torch.uint8, device=weight.device)
    midpoints, code_of_rank = thresholds4(quant_type, weight.device)
    blocks = max(VALUES // blocksize, 1)
    if numel:
        _quantize_launcher(
            ceil_div(absmax.numel(), blocks),
            (weight, packed, absmax, midpoints, code_of_rank),
            (numel, absmax.numel()),
            (blocks, blocksize),
            warps=4,
        )
    return packed, absmax


TILE_ROWS, TILE_WORDS = 128, 16  # tile that a program transposes: 128×128 weights
LIMIT = FP8_MAX[E4M3]


@triton.jit
def _float8(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, factor_ptr, out_ptr, words, width,
    out_stride, WORDS: tl.constexpr, WORDS_PER_BLOCK: tl.constexpr, NESTED: tl.constexpr, SIZE: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    word = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = word < words
    codes = tl.load(packed_ptr + word, mask=mask, other=0)
    block = word // WORDS_PER_BLOCK
    scale = _scales(absmax_ptr, second_ptr, code_ptr, offset_ptr, block, mask, NESTED, SIZE)
    lane = tl.arange(0, 8)
    # Bytes are in memory order, the high nibble first: lanes 0 to 7 are nibbles 1, 0, 3, 2, 5, 4, 7, 6 of the word.
    nibble = (codes[:, None] >> ((lane ^ 1) * 4)[None, :]) & 15
    values = to_float8(tl.load(codebook_ptr + nibble) * scale[:, None], tl.load(factor_ptr), LIMIT)
    offset = word // (width // 8) * out_stride + word % (width // 8) * 8
    tl.store(out_ptr + offset[:, None] + lane[None, :], values.to(out_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def _float8_transposed(
    packed_ptr, absmax_ptr, second_ptr, code_ptr, offset_ptr, codebook_ptr, factor_ptr, out_ptr, rows, width,
    out_stride, ROWS: tl.constexpr, WORDS: tl.constexpr, WORDS_PER_BLOCK: tl.constexpr, NESTED: tl.constexpr,
    SIZE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, 8 * WORDS)
    row = ((tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    first = (tl.program_id(0) % across) * WORDS
    col_word = first + tl.arange(0, WORDS)
    mask = (row < rows)[:, None] & (col_word * 8 < width)[None, :]
    word = row[:, None] * (width // 8) + col_word[None, :]
    codes = tl.load(packed_ptr + word, mask=mask, other=0)
    scale = _scales(absmax_ptr, second_ptr, code_ptr, offset_ptr, word // WORDS_PER_BLOCK, mask, NESTED, SIZE)
    lane = tl.arange(0, 8)
    nibble = (codes[:, :, None] >> ((lane ^ 1) * 4)[None, None, :]) & 15
    values = to_float8(tl.load(codebook_ptr + nibble) * scale[:, :, None], tl.load(factor_ptr), LIMIT)
    tile = tl.trans(tl.reshape(values.to(out_ptr.dtype.element_ty), (ROWS, 8 * WORDS)))
    col = (first * 8 + tl.arange(0, 8 * WORDS)).to(tl.int64)
    inside = (col < width)[:, None] & (row < rows)[None, :]
    tl.store(out_ptr + col[:, None] * out_stride + row[None, :], tile, mask=inside)


_float8_launcher = Launcher(_float8, enable_fp_fusion=False)
_float8_transposed_launcher = Launcher(_float8_transposed, enable_fp_fusion=False)


@float8_of_blockwise4.kernel("cuda", "xpu", unless=float8_obstacle, rank=2)
def float8(
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    shape: tuple[int, int],
    factor: Tensor,
    transposed: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    rows, width = shape
    if out is None:
        out = torch.empty((width, rows) if transposed else shape, dtype=E4M3, device=packed.device)
    second, code, offset = nested if nested is not None else (absmax, absmax, absmax)
    codebook = codebook4(quant_type, packed.device)
    tensors = (packed.view(-1).view(torch.int32), absmax, second, code, offset, codebook, factor, out)
    decoding = (blocksize // 8, nested is not None, NESTED_BLOCK, LIMIT)
    if transposed:
        programs = ceil_div(rows, TILE_ROWS) * ceil_div(width, 8 * TILE_WORDS)
        constants = (TILE_ROWS, TILE_WORDS, *decoding)
        _float8_transposed_launcher(programs, tensors, (rows, width, out.stride(0)), constants, warps=8)
    else:
        words = rows * width // 8
        _float8_launcher(ceil_div(words, WORDS), tensors, (words, width, out.stride(0)), (WORDS, *decoding), warps=4)
    return out


@triton.jit
def _reciprocal(x, NVIDIA: tl.constexpr):
    if NVIDIA:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        inverse = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return inverse


@triton.jit
def _reciprocals(x_ptr, out_ptr, n, NVIDIA: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=1.0)
    tl.store(out_ptr + at, _reciprocal(x, NVIDIA), mask=at < n)


@triton.jit
def _quantize_cuda(
    weight_ptr, packed_ptr, absmax_ptr, threshold_ptr, code_ptr, numel, blocks,
    FP4: tl.constexpr, NVIDIA: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    values = tl.load(weight_ptr + element, mask=element < numel, other=0.0).to(tl.float32)
    smallest = tl.full((BLOCKS, SIZE), TINY, tl.float32)
    values = tl.where(tl.abs(values) < smallest, 0.0, values)
    # NaN must reach absmax, which the caller checks: fmax would drop it.
    absmax = tl.max(tl.where(values == values, tl.abs(values), float("inf")), axis=1)
    tl.store(absmax_ptr + block, absmax, mask=block < blocks)
    ratio = values * _reciprocal(absmax, NVIDIA)[:, None]  # NaN in a block of zeros: it exceeds no threshold
    compared = tl.abs(ratio) if FP4 else ratio
    rank = tl.zeros((BLOCKS, SIZE), dtype=tl.int32)
    for i in tl.static_range(7 if FP4 else 15):
        rank += (compared > tl.load(threshold_ptr + i)).to(tl.int32)
    codes = tl.load(code_ptr + rank).to(tl.int32)
    if FP4:
        codes += (ratio <= -smallest).to(tl.int32) * 8
    high, low = tl.split(tl.reshape(codes, (BLOCKS, SIZE // 2, 2)))
    byte = block[:, None] * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
    tl.store(packed_ptr + byte, ((high << 4) | low).to(tl.uint8), mask=2 * byte < numel)


_reciprocals_launcher = Launcher(_reciprocals, enable_fp_fusion=False)
_quantize_cuda_launcher = Launcher(_quantize_cuda, enable_fp_fusion=False)


@approximate_reciprocal.kernel("cuda")
def reciprocal(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    if len(x):
        _reciprocals_launcher(ceil_div(len(x), BLOCK), (x, out), (len(x),), (device_of(x).backend == "cuda", BLOCK), 4)
    return out


@quantize_blockwise4_cuda.kernel("cuda")
def quantize_cuda(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    weight = weight.contiguous()
    numel = weight.numel()
    absmax = torch.empty(ceil_div(numel, blocksize), dtype=torch.float32, device=weight.device)
    packed = torch.empty((numel + 1) // 2, 1, dtype=torch.uint8, device=weight.device)
    blocks = max(VALUES // blocksize, 1)
    if numel:
        _quantize_cuda_launcher(
            ceil_div(absmax.numel(), blocks),
            (weight, packed, absmax, *thresholds(quant_type, weight.device)),
            (numel, absmax.numel()),
            (quant_type == "fp4", device_of(weight).backend == "cuda", blocks, blocksize),
            warps=4,
        )
    return packed, absmax
