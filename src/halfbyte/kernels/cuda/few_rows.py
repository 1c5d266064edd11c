"""Products of few rows of x with 4-bit weights on tensor cores, from Turing on: `cuda/few_rows.cuh` and its formats.

Up to 8 rows take one launch. With more rows K is divided among blocks, and a second launch adds their sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch import Op
from ...formats.bitplane import linear_bitplane
from ...formats.blockwise4 import linear_blockwise4
from ...formats.codebooks import codebook4
from ...formats.e2m1 import linear_e2m1
from ...formats.hqq import linear_hqq
from ...formats.int4 import linear_int4
from ...formats.linear import PackedProduct
from ...ops.decode import PackedLinear, packed_linears
from ..device import AMPERE, TURING, architecture_of, device_of, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, gemm4, gemv4, linear_planes, remembered

TILE, UNIT = 16, 256  # rows of W in a tile, columns of a unit
WHOLE_ROWS = 8  # rows of x up to which a block computes all of K
MOST_ROWS = 64
MOST_SMALL = 48  # with nested scales and `SMALL` shared memory
FEWEST_OUTPUTS = 2 * TILE
SMALL = 64 * 1024  # shared memory of a block with which tables have fewer copies (Turing)


class E2m1Weight(ctypes.Structure):
    """The struct `Weight` of `cuda/few_rows_e2m1.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "of_all")),
        *((name, ctypes.c_uint32) for name in ("rows", "columns")),
        ("read_factor", ctypes.c_float),  # set by the kernel
    )


class Int4Weight(ctypes.Structure):
    """The struct `Weight` of `cuda/few_rows_int4.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "zeros", "scales")),
        *((name, ctypes.c_uint32) for name in ("rows", "columns")),
    )


class PlanesWeight(ctypes.Structure):
    """The struct `Weight` of `cuda/few_rows_planes.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("packed", "scales", "zeros", "codebook")),
        *((name, ctypes.c_uint32) for name in ("rows", "columns")),
        ("of_all", ctypes.c_void_p),
        ("read_factor", ctypes.c_float),  # set by the kernel
    )


class Operand(NamedTuple):
    """A packed weight as a kernel's argument.

    Args:
        source: the CUDA source with its decoder.
        struct: `Weight` of this source.
        constants: of this source.
        tables: what the decoder's table is made of, besides constants.
        number: name and value of the field of `struct` that the decoder's `build` reads from memory.
    """

    source: str
    struct: Any
    constants: dict[str, int]
    tables: tuple[Tensor, ...] = ()
    number: tuple[str, Tensor | None] | None = None

    @property
    def type(self) -> type[ctypes.Structure]:
        return type(self.struct)


def enlarged(dtype: torch.dtype) -> float:
    """`ENLARGED` of `cuda/few_rows.cuh` for x of this dtype."""
    return 1.0 if dtype is torch.bfloat16 else 256.0


class Blocks(NamedTuple):
    """Constants of `cuda/few_rows.cuh`: `rt` tiles at a time, `wr` groups of `wk` warps."""

    rt: int
    wr: int
    wk: int


WHOLE = (Blocks(1, 1, 16), Blocks(1, 2, 8), Blocks(1, 4, 4), Blocks(2, 1, 8), Blocks(2, 2, 4))
SPLIT = Blocks(2, 8, 1)


def blocks_for(rows: int, columns: int, multiprocessors: int) -> Blocks:
    """Blocks with the fewest steps of the busiest warp.

    A step is a unit of one tile, with 16 warps per multiprocessor. Two tiles at a time, with 8 warps, share loads of x
    and take 0.95 steps; adding the sums of a group takes a third of one.
    """

    def steps(blocks: Blocks) -> float:
        passes = ceil_div(ceil_div(rows, TILE * blocks.rt), multiprocessors * blocks.wr)
        return passes * (ceil_div(columns // UNIT, blocks.wk) * (1.0 if blocks.rt == 1 else 0.95) + 0.35)

    return min(WHOLE, key=steps)


@remembered
def _kernel(
    operand_type: tuple[str, type[ctypes.Structure]], blocks: Blocks, tiles: int, bf16: bool,
    constants: tuple[tuple[str, int], ...], device: int, split: bool, one: bool,
) -> tuple[Kernel, ...]:  # fmt: skip
    """The product with `tiles` tiles of 8 rows of x, and if it is `split` the kernel that adds the blocks' sums."""
    name, struct = operand_type
    every = dict(zip(("RT", "WR", "WK"), blocks, strict=True)) | {"NT": tiles, "BF16": int(bf16), "SPLIT": int(split)}
    every |= dict(constants) | {"ORIGIN": origin_of(device), "ONE": int(one)}
    structs: list[Any] = [gemm4.parts_of(struct), gemm4.Sums] if split else [struct]
    image = cubin(name, architecture_of(device), every, structs)
    product = Kernel(image, name, image.shared_for(8 * tiles))
    return (product, Kernel(image, "add", 0)) if split else (product,)


def _launch(
    operand: Operand, x: Tensor, products: Sequence[gemm4.Product], blocks: Blocks | None = None
) -> list[Tensor]:
    """[M, N] = x·Wᵀ + b + u·Bᵀ of one weight, or of up to three with more than `WHOLE_ROWS` rows of x."""
    x = x.contiguous()
    device = x.get_device()
    batch = x.shape[0]
    rows = products[0].rows
    multiprocessors = multiprocessors_of(device)
    split = batch > WHOLE_ROWS
    blocks = blocks or (SPLIT if split else blocks_for(rows, x.shape[1], multiprocessors))
    tile, threads = TILE * blocks.rt * blocks.wr, 32 * blocks.wr * blocks.wk
    bf16, key = x.dtype is torch.bfloat16, tuple(operand.constants.items())
    tiles, operand_type = gemm4.tiles_of(batch) if split else 1, (operand.source, operand.type)
    with torch.cuda.device(device):
        kernels = _kernel(operand_type, blocks, tiles, bf16, key, device, split, batch == 1)
        if split:
            return gemm4.launch(kernels, products, x, tile, threads)
        out = torch.empty(batch, rows, dtype=x.dtype, device=x.device)
        tensors = gemm4.pointers(x, products[0].bias, out)
        grid = min(ceil_div(rows, tile), multiprocessors)
        kernels[0](grid, threads, [operand.struct, *tensors, ctypes.c_uint32(batch)])
    return [out]


def _product(operand: Operand, x: Tensor, bias: Tensor | None, blocks: Blocks | None) -> Tensor:
    return _launch(operand, x, [gemm4.Product(operand.struct, operand.struct.rows, bias)], blocks)[0]


def _small(x: Tensor) -> bool:
    return device_of(x).shared_bytes <= SMALL


def _obstacle(x: Tensor, rows: int, *tensors: Tensor) -> str | None:
    """Return why the kernels refuse a weight of `rows` rows, or None."""
    if not 1 <= x.shape[0] <= MOST_ROWS:
        return "takes 1 to 64 rows of x"
    if x.dtype is torch.float32:
        return "needs 16 bits"
    if not device_of(x).at_least(TURING if x.dtype is torch.float16 else AMPERE):
        return "needs Ampere, or Turing for fp16"
    if x.shape[1] % UNIT or not x.shape[1] or rows % TILE or rows < FEWEST_OUTPUTS:
        return "needs K in multiples of 256, and N in multiples of 16 from 32"
    if any(tensor.data_ptr() % 16 for tensor in (x, *tensors)):
        return "needs tensors at multiples of 16 bytes"
    return None


# --- NF4 and FP4 -----------------------------------------------------------------------------------------------------


def blockwise4_obstacle(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: gemv4.Nested, blocksize: int, quant_type: str, rows: int, *_: Any
) -> str | None:
    if nested is not None and x.shape[0] > MOST_SMALL and _small(x):
        return "needs more than 64 KiB of shared memory for more than 48 rows with nested scales"
    return _obstacle(x, rows, packed, absmax)


def blockwise4_operand(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: gemv4.Nested, blocksize: int, quant_type: str, rows: int
) -> Operand:
    weight = gemv4.weight_of(x, packed, absmax, nested, quant_type, rows)
    constants = {"BLOCK": blocksize, "NESTED": int(nested is not None)}
    codebook = codebook4(quant_type, x.device)
    if nested is None:
        return Operand("few_rows4", weight, constants, (codebook,))
    _, code, offset = nested
    return Operand("few_rows4", weight, constants, (codebook, code), ("shift", offset))


@linear_blockwise4.kernel("cuda", unless=blockwise4_obstacle, rank=4)  # after gemv4, which is faster on Hopper
def few_rows_blockwise4(
    x: Tensor, packed: Tensor, absmax: Tensor, nested: gemv4.Nested, blocksize: int, quant_type: str, rows: int,
    bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    return _product(blockwise4_operand(x, packed, absmax, nested, blocksize, quant_type, rows), x, bias, blocks)


# --- NVFP4 and MXFP4 -------------------------------------------------------------------------------------------------


def e2m1_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], *_: Any
) -> str | None:
    return _obstacle(x, packed.shape[0], packed, scales)


def e2m1_operand(x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int]) -> Operand:
    pointers = [tensor.data_ptr() for tensor in (packed, scales, scales if factor is None else factor)]
    weight = E2m1Weight(*pointers, packed.shape[0], x.shape[1])
    return Operand("few_rows_e2m1", weight, {"BLOCK": tile[1], "TALL": tile[0]}, (), ("read_factor", factor))


@linear_e2m1.kernel("cuda", unless=e2m1_obstacle)
def few_rows_e2m1(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    return _product(e2m1_operand(x, packed, scales, factor, tile), x, bias, blocks)


# --- GPTQ, AWQ and compressed-tensors --------------------------------------------------------------------------------


def int4_obstacle(
    x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, *_: Any
) -> str | None:
    groups, rows = scales.shape
    group = x.shape[1] // max(groups, 1)
    if group_index is not None:
        return "needs groups of equal sizes"
    if scales.dtype is torch.float32:
        return "needs scales of 16 bits"
    if group % 8:
        return "needs groups of a multiple of 8"
    return _obstacle(x, rows, qweight, qzeros, scales)


def int4_operand(
    x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, order: Tensor | None,
    zero_shift: int,
) -> Operand:  # fmt: skip
    groups, rows = scales.shape
    weight = Int4Weight(*[tensor.data_ptr() for tensor in (qweight, qzeros, scales)], rows, x.shape[1])
    constants = {"GROUP": x.shape[1] // groups, "SHIFT": zero_shift, "SCALES_BF16": int(scales.dtype is torch.bfloat16)}
    return Operand("few_rows_int4", weight, constants)


@linear_int4.kernel("cuda", unless=int4_obstacle)
def few_rows_int4(
    x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, order: Tensor | None,
    zero_shift: int, bias: Tensor | None, blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    x = x if order is None else x.index_select(1, order[0])
    return _product(int4_operand(x, qweight, qzeros, scales, group_index, None, zero_shift), x, bias, blocks)


# --- k-bit formats and HQQ -------------------------------------------------------------------------------------------


def bitplane_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, *_: Any
) -> str | None:
    return _obstacle(x, rows, packed, scales)


def bitplane_operand(x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int) -> Operand:
    pointers = [tensor.data_ptr() for tensor in (packed, scales, scales, codebook)]  # zeros are not read
    weight = PlanesWeight(*pointers, rows, x.shape[1], factor.data_ptr())
    bits = codebook.numel().bit_length() - 1
    constants = {"BITS": bits, "GROUP": 0, "SCALES_BF16": 0, "SMALL": int(_small(x))}
    return Operand("few_rows_planes", weight, constants, (codebook,), ("read_factor", factor))


@linear_bitplane.kernel("cuda", unless=bitplane_obstacle, rank=4)
def few_rows_bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    return _product(bitplane_operand(x, packed, scales, factor, codebook, rows), x, bias, blocks)


def hqq_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, *_: Any
) -> str | None:
    if bits not in linear_planes.HQQ_BITS:
        return "takes 2, 3, 4 and 8 bits"
    if scales.dtype is torch.float32 or zeros.dtype is not torch.float16:
        return "needs scales of 16 bits and fp16 zeros"
    return _obstacle(x, rows, packed, scales, zeros)


def hqq_operand(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int) -> Operand:
    pointers = [tensor.data_ptr() for tensor in (packed, scales, zeros)]
    weight = PlanesWeight(*pointers, None, rows, x.shape[1], None)
    bf16, small = int(scales.dtype is torch.bfloat16), int(_small(x))
    constants = {"BITS": bits, "GROUP": group, "SCALES_BF16": bf16, "SMALL": small}
    return Operand("few_rows_planes", weight, constants, (), ("read_factor", None))


@linear_hqq.kernel("cuda", unless=hqq_obstacle, rank=3)
def few_rows_hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None,
    blocks: Blocks | None = None,
) -> Tensor:  # fmt: skip
    return _product(hqq_operand(x, packed, scales, zeros, bits, group, rows), x, bias, blocks)


# --- other kernels with these decoders -------------------------------------------------------------------------------

OPERANDS: dict[Op, tuple[Callable[..., Operand], Callable[..., str | None]]] = {
    linear_blockwise4: (blockwise4_operand, blockwise4_obstacle),
    linear_e2m1: (e2m1_operand, e2m1_obstacle),
    linear_int4: (int4_operand, int4_obstacle),
    linear_bitplane: (bitplane_operand, bitplane_obstacle),
    linear_hqq: (hqq_operand, hqq_obstacle),
}


def operand_obstacle(x: Tensor, product: PackedProduct) -> str | None:
    """Return why no decoder takes a weight, or None."""
    if product.op not in OPERANDS:
        return f"has no decoder of {product.op.reference.__name__}"
    return OPERANDS[product.op][1](x, *product.arguments)


def operand_of(x: Tensor, product: PackedProduct) -> Operand:
    return OPERANDS[product.op][0](x, *product.arguments)


def several_obstacle(x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[gemv4.Term]) -> str | None:
    products = [linear.product for linear in linears]
    if x.shape[0] <= WHOLE_ROWS or len(products) > gemm4.PRODUCTS:
        return f"takes {WHOLE_ROWS + 1} to {MOST_ROWS} rows and 1 to {gemm4.PRODUCTS} weights"
    refusals = (reason for product in products if (reason := operand_obstacle(x, product)))
    return gemm4.terms_obstacle(terms) or next(refusals, None) or formats_obstacle(x, linears)


def formats_obstacle(x: Tensor, linears: Sequence[PackedLinear]) -> str | None:
    """Return why one launch cannot take the weights of these linears, or None."""
    decoders = {(operand.source, *operand.constants.items()) for operand in (operand_of(x, p.product) for p in linears)}
    one_order = len({id(linear.product.order) for linear in linears}) == 1
    return None if len(decoders) == 1 and one_order else "needs weights of one format and one order of inputs"


@packed_linears.kernel("cuda", unless=several_obstacle, rank=3)
def several(x: Tensor, linears: Sequence[PackedLinear], terms: Sequence[gemv4.Term]) -> list[Tensor]:
    order = linears[0].product.order
    x = x if order is None else x.index_select(1, order[0])
    operands = [operand_of(x, linear.product) for linear in linears]
    products = [
        gemm4.Product(operand.struct, linear.rows, linear.bias, term=term)
        for operand, linear, term in zip(operands, linears, terms, strict=True)
    ]
    return _launch(operands[0], x, products)
