"""C: linears of a few rows with weights in 2 to 8 bits, which are decoded in registers; x86-64 with AVX2 or AVX-512.

Sums are in fp32, of unrounded weights. A row's sums do not depend on the other rows. The C code is compiled for a
format when it is first used, in 1 to 2 seconds of CPU time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch import Unavailable
from ...formats.bitplane import BLOCK, linear_bitplane
from ...formats.blockwise4 import linear_blockwise4
from ...formats.codebooks import codebook4, constant
from ...formats.e2m1 import codebook_e2m1, linear_e2m1
from ...formats.float8 import TILE, Scaling, linear_float8
from ...formats.hqq import linear_hqq
from ...formats.int4 import PACK, linear_int4
from ...formats.int8 import INVERSE_127, linear_int8
from . import compiler, library
from .bitplane import DTYPES

ROWS = 16  # for more rows, dequantizing is cheaper
Form = dict[str, str | int]  # macros of few_rows.c
NIBBLES: Form = {"LAYOUT": "NIBBLES", "BITS": 4, "NARROW": 0, "ZEROS": 0}
PLAIN, NESTED, E4M3, E8M0, E4M4, BF16, FP16 = range(7)
FLOAT_SCALES = {torch.float32: PLAIN, torch.bfloat16: BF16, torch.float16: FP16}
WHOLE = 1 << 62  # block of a row with one scale
CPU = torch.device("cpu")

_pointer = ctypes.c_void_p
_int64 = ctypes.c_int64
_int32 = ctypes.c_int32


class PackedWeight(ctypes.Structure):
    """`packed_weight` of native/few_rows.c. The tensors behind its pointers must outlive it."""

    _fields_ = (
        *((name, _pointer) for name in ("packed", "scales", "zeros", "second", "code", "codebook")),
        *((name, _int64) for name in ("rows", "columns", "stride", "block", "scale_stride", "tall")),
        ("factor", ctypes.c_float),
        *((name, _int32) for name in ("scale", "swapped")),
    )


class Int4Weight(ctypes.Structure):
    """`int4_weight` of native/few_int4.c."""

    _fields_ = (
        *((name, _pointer) for name in ("codes", "zeros", "scales")),
        *((name, _int64) for name in ("rows", "columns", "groups")),
        *((name, _int32) for name in ("zero_shift", "dtype")),
    )


if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
    raise Unavailable("linears of a few rows need an x86-64 CPU with AVX2")
compiler()


@functools.cache
def _compiled(name: str, **macros: str | int) -> Callable[..., int] | Unavailable:
    """The function of a library. A failure is cached, too: a compiler can take seconds to fail."""
    try:
        function = getattr(library(name, **macros), f"halfbyte_{name}")
    except Unavailable as error:
        return error
    function.argtypes, function.restype = [_pointer] * 3 + [_int64, ctypes.c_int], ctypes.c_int
    return function


def product_function(name: str, form: Form) -> Callable[..., int]:
    """The C function of `<name>.c`, compiled with these macros.

    Raises:
        Unavailable: it does not compile.
    """
    function = _compiled(name, **form)
    if isinstance(function, Unavailable):
        raise Unavailable(str(function))
    return function


def _product(
    x: Tensor, rows: int, bias: Tensor | None, form: Form, tensors: dict[str, Tensor], **fields: Any
) -> Tensor:
    """x·Wᵀ + b in x's dtype.

    Args:
        form: the macros that differ from those of `NIBBLES`.
        tensors: by field of `PackedWeight`.
        fields: other fields of `PackedWeight`.
    """
    function = product_function("few_rows", NIBBLES | form)
    held = {name: tensor.contiguous() for name, tensor in tensors.items()}
    pointers = {name: tensor.data_ptr() for name, tensor in held.items()}
    fields = {"tall": 1, "factor": 1.0, "scale_stride": x.shape[1] // fields["block"]} | fields
    weight = PackedWeight(**pointers, **fields, rows=rows, columns=x.shape[1])
    return _run(function, weight, x, rows, bias)


def _run(function: Callable[..., int], weight: ctypes.Structure, x: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    exact, y = x.float().contiguous(), torch.empty(x.shape[0], rows)
    if function(ctypes.byref(weight), exact.data_ptr(), y.data_ptr(), len(x), torch.get_num_threads()):
        raise MemoryError(f"linear: no memory for {len(x)} rows of {x.shape[1]} values")
    if bias is not None:
        y += bias
    return y.to(x.dtype)


def _obstacle(x: Tensor, block: int = 1) -> str | None:
    suits = 1 <= x.shape[0] <= ROWS and x.shape[1] and not x.shape[1] % block
    return None if suits else "takes 1 to 16 rows, of whole blocks"


def _table(values: Tensor) -> Tensor:
    """The 2^k values of codes, repeated to 32: kernels for few bits leave garbage above a code."""
    return values.repeat(32 // len(values))


@constant
def table4(quant_type: str) -> Tensor:
    return _table(codebook_e2m1(CPU) if quant_type == "e2m1" else codebook4(quant_type, CPU))


@constant
def _integers(bits: int) -> Tensor:
    """The codes of HQQ, less half of their number."""
    return _table(torch.arange(min(1 << bits, 32), dtype=torch.float32, device=CPU) - (1 << bits - 1))


def blockwise4_obstacle(x: Tensor, packed: Tensor, absmax: Tensor, nested: Any, blocksize: int, *_: Any) -> str | None:
    return _obstacle(x, blocksize)


@linear_blockwise4.kernel("cpu", unless=blockwise4_obstacle)
def blockwise4(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    tensors = {"packed": packed, "scales": absmax}
    fields: dict[str, Any] = {"scale": PLAIN}
    if nested is not None:
        tensors["second"] = nested[0]
        tensors["code"] = nested[1]
        fields = {"scale": NESTED, "factor": float(nested[2])}
    tensors["codebook"] = table4(quant_type)
    fields |= {"swapped": 1, "block": blocksize, "stride": x.shape[1] // 2}
    return _product(x, rows, bias, {}, tensors, **fields)


def e2m1_obstacle(x: Tensor, *_: Any) -> str | None:
    return _obstacle(x)


@linear_e2m1.kernel("cpu", unless=e2m1_obstacle)
def e2m1(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor | None, tile: tuple[int, int], bias: Tensor | None
) -> Tensor:
    tensors = {"packed": packed, "scales": scales, "codebook": table4("e2m1")}
    return _product(
        x, packed.shape[0], bias, {"NARROW": 1}, tensors, block=tile[1], tall=tile[0], scale_stride=scales.shape[1],
        stride=packed.shape[1], scale=E8M0 if factor is None else E4M3, factor=1.0 if factor is None else float(factor),
    )  # fmt: skip


def bitplane_obstacle(x: Tensor, *_: Any) -> str | None:
    return _obstacle(x, BLOCK)


@linear_bitplane.kernel("cpu", unless=bitplane_obstacle)
def bitplane(
    x: Tensor, packed: Tensor, scales: Tensor, factor: Tensor, codebook: Tensor, rows: int, bias: Tensor | None
) -> Tensor:
    bits = codebook.numel().bit_length() - 1
    tensors = {"packed": packed, "scales": scales, "codebook": _table(codebook)}
    form: Form = {"LAYOUT": "PLANES", "BITS": bits}
    stride = x.shape[1] // 8 * bits
    return _product(x, rows, bias, form, tensors, block=BLOCK, stride=stride, scale=E4M4, factor=float(factor))


def hqq_obstacle(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, *_: Any
) -> str | None:
    if bits == 6 or zeros.dtype is not torch.float16:
        return "takes codes of 2, 3, 4, 5 or 8 bits with zeros in fp16"
    return _obstacle(x, group)


@linear_hqq.kernel("cpu", unless=hqq_obstacle)
def hqq(
    x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, group: int, rows: int, bias: Tensor | None
) -> Tensor:
    tensors = {"packed": packed, "scales": scales, "zeros": zeros, "codebook": _integers(bits)}
    form: Form = {"LAYOUT": "PLANES", "BITS": bits, "NARROW": int(bits != 5), "ZEROS": 1}
    return _product(
        x, rows, bias, form, tensors, block=group, stride=x.shape[1] // 8 * bits, scale=FLOAT_SCALES[scales.dtype]
    )


def int4_obstacle(
    x: Tensor, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_index: Tensor | None, *_: Any
) -> str | None:
    if group_index is not None or x.shape[1] // max(len(scales), 1) % PACK:
        return "needs groups of consecutive columns, in multiples of 8"
    return _obstacle(x)


@linear_int4.kernel("cpu", unless=int4_obstacle)
def int4(
    x: Tensor,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    group_index: Tensor | None,
    order: Tensor | None,
    zero_shift: int,
    bias: Tensor | None,
) -> Tensor:
    groups, rows = scales.shape
    held = [tensor.contiguous() for tensor in (qweight, qzeros, scales)]  # keeps references during the call
    weight = Int4Weight(*[tensor.data_ptr() for tensor in held], rows, x.shape[1], groups, zero_shift,
                        DTYPES[scales.dtype])  # fmt: skip
    return _run(product_function("few_int4", {}), weight, x if order is None else x[:, order[0]], rows, bias)


def bytes_obstacle(x: Tensor, *_: Any) -> str | None:
    return _obstacle(x)


@linear_int8.kernel("cpu", unless=bytes_obstacle)
def int8(x: Tensor, codes: Tensor, absmax: Tensor, bias: Tensor | None) -> Tensor:
    columns = x.shape[1]
    tensors = {"packed": codes, "scales": absmax}
    return _product(
        x, codes.shape[0], bias, {"LAYOUT": "INT8", "BITS": 8}, tensors, block=WHOLE, scale_stride=1, stride=columns,
        scale=PLAIN, factor=INVERSE_127,
    )  # fmt: skip


@linear_float8.kernel("cpu", unless=bytes_obstacle)
def float8(x: Tensor, codes: Tensor, scale: Tensor, scaling: Scaling, bias: Tensor | None) -> Tensor:
    rows, columns = codes.shape
    tall = {"tensor": rows, "row": 1, "tile": TILE}[scaling]
    block = TILE if scaling == "tile" else WHOLE
    return _product(
        x, rows, bias, {"LAYOUT": "FLOAT8", "BITS": 8}, {"packed": codes, "scales": scale}, block=block, stride=columns,
        tall=tall, scale_stride=scale.shape[-1] if scaling == "tile" else 1, scale=PLAIN,
    )  # fmt: skip
