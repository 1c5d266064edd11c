"""C: linears of a few rows with 4-bit weights, and all decoder layers of a decoding step in one call.

Both compute in fp32; the cache may be bf16. A row's sums do not depend on the other rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...formats.blockwise4 import linear_blockwise4
from ...formats.codebooks import codebook4
from ...ops.decode import DecoderLayer, PackedLinear, Projections, Run, Stack, one_launch
from . import library
from .blockwise4 import CPU

_pointer, _int64 = ctypes.c_void_p, ctypes.c_int64
VECTOR = 16
HALF = torch.bfloat16, torch.float16
CACHES = {torch.float32: VECTOR, torch.bfloat16: 2 * VECTOR}  # by dtype: head sizes are multiples of this
PARTS = "qkv", "out", "gate_up", "down"
GEMV_ROWS = 4  # rows per call
ROWS = 16  # for more rows, dequantizing is cheaper; up to here it takes 1 to 4 times as long in fp32


class Weight(ctypes.Structure):
    """`weight4` of native/decode4.c. The tensors behind its pointers must outlive it."""

    _fields_ = (
        *[(name, _pointer) for name in ("packed", "absmax", "second", "code", "codebook", "bias", "up")],
        *[(name, _int64) for name in ("rows", "columns", "blocksize", "begin", "rank")],
        ("offset", ctypes.c_float),
    )


lib = library("decode4")
lib.halfbyte_gemv4.argtypes = [_pointer] * 3 + [ctypes.c_int] * 2
lib.halfbyte_gemv4.restype = ctypes.c_int


def gemv_obstacle(x: Tensor, packed: Tensor, absmax: Tensor, nested: Any, blocksize: int, *_: Any) -> str | None:
    suits = 1 <= x.shape[0] <= ROWS and not x.shape[1] % blocksize
    return None if suits else "takes 1 to 16 rows, of whole blocks"


@linear_blockwise4.kernel("cpu", unless=gemv_obstacle, rank=1)
def gemv(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    blocksize: int,
    quant_type: str,
    rows: int,
    bias: Tensor | None,
) -> Tensor:
    batch, columns = x.shape
    exact, y = x.float().contiguous(), torch.empty(batch, rows)
    packed = packed.contiguous()
    absmax = absmax.contiguous()
    codebook = codebook4(quant_type, CPU)
    weight = Weight(packed.data_ptr(), absmax.data_ptr(), codebook=codebook.data_ptr(), rows=rows, columns=columns,
                    blocksize=blocksize)  # fmt: skip
    if nested is not None:
        second, code = nested[0].contiguous(), nested[1].contiguous()  # keep references during the call
        weight.second = second.data_ptr()
        weight.code = code.data_ptr()
        weight.offset = float(nested[2])
    for row_group, out in zip(exact.split(GEMV_ROWS), y.split(GEMV_ROWS), strict=True):
        threads = torch.get_num_threads()
        if lib.halfbyte_gemv4(ctypes.byref(weight), row_group.data_ptr(), out.data_ptr(), len(row_group), threads):
            raise MemoryError(f"gemv4: no memory for {len(row_group)} rows of {columns} values")
    if bias is not None:
        y += bias
    return y.to(x.dtype)


class _Projections(ctypes.Structure):
    _fields_ = (("w", Weight * 3), ("down", _pointer), ("mask", _pointer), ("ranks", _int64))


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(name, _Projections) for name in PARTS],
        *[(name, _pointer) for name in ("norm", "post_norm", "q_norm", "k_norm", "keys", "values")],
        ("window", _int64),
    )


class _Stack(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *[(name, _pointer) for name in ("cos", "sin", "padding", "slot", "scratch")],
        *[(name, _int64) for name in ("count", "heads", "kv_heads", "size", "slots")],
        *[(name, _int64) for name in ("rotated", "width", "inner", "ranks")],
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("batch", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("bf16", ctypes.c_int32),
    )


lib.halfbyte_decode_scratch.argtypes, lib.halfbyte_decode_scratch.restype = [_pointer], _int64
lib.halfbyte_decode.argtypes, lib.halfbyte_decode.restype = [_pointer] * 2, None


class _Refused(Exception):
    """The C code does not support this tensor's dtype, shape or layout."""


class _Pointers:
    """Pointers of tensors, which this object keeps alive. 16-bit tensors are copied to fp32."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []

    def __call__(self, tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
        if tensor is None:
            return None
        if dtype is torch.float32 and tensor.dtype in HALF:
            tensor = tensor.float()
        if tensor.dtype is not dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise _Refused
        self.held.append(tensor)
        return tensor.data_ptr()

    def weight(self, linear: PackedLinear, columns: int, up: tuple[int, Tensor] | None) -> Weight:
        if linear.product.op is not linear_blockwise4:
            raise _Refused
        packed, absmax, nested, blocksize, quant_type, rows = linear.product.arguments
        if columns % blocksize or columns % VECTOR or rows % VECTOR:
            raise _Refused
        struct = Weight(rows=rows, columns=columns, blocksize=blocksize, bias=self(linear.bias))
        struct.packed = self(packed, torch.uint8)
        struct.absmax = self(absmax, torch.float32 if nested is None else torch.uint8)
        struct.codebook = self(codebook4(quant_type, CPU))
        if nested is not None:
            second, code, offset = nested
            struct.second = self(second)
            struct.code = self(code)
            struct.offset = float(offset)
        if up is not None:
            struct.begin = up[0]
            struct.up = self(up[1])
            struct.rank = up[1].shape[1]
        return struct

    def projections(self, projections: Projections, columns: int) -> _Projections:
        ups = projections.ups if projections.down is not None else [None] * len(projections.weights)
        struct = _Projections(down=self(projections.down), mask=self(projections.mask))
        struct.ranks = 0 if projections.down is None else len(projections.down)
        for i, (weight, up) in enumerate(zip(projections.weights, ups, strict=True)):
            struct.w[i] = self.weight(weight, columns, up)
        return struct

    def layer(self, layer: DecoderLayer, heads: int, width: int) -> _Layer:
        attention, inner = heads * layer.keys.shape[3], layer.gate_up.weights[0].rows
        return _Layer(
            self.projections(layer.qkv, width), self.projections(layer.out, attention),
            self.projections(layer.gate_up, width), self.projections(layer.down, inner),
            *[self(norm) for norm in (layer.norm, layer.post_norm, layer.q_norm, layer.k_norm)],
            *[self(cache, cache.dtype) for cache in (layer.keys, layer.values)], layer.window or 0,
        )  # fmt: skip


def obstacle(hidden: Tensor, stack: Stack) -> str | None:
    if not 1 <= hidden.shape[0] <= ROWS:
        return "takes 1 to 16 rows"
    cache = stack.layers[0].keys
    if cache.dtype not in CACHES:
        return "takes a cache in fp32 or bf16"
    shapes = {(layer.keys.shape, layer.gate_up.weights[0].rows) for layer in stack.layers}
    alike = len(shapes) == 1 and not cache.shape[3] % CACHES[cache.dtype]
    return None if alike else f"needs layers alike, and heads in multiples of {CACHES[cache.dtype]}"


def _layer_rows(layer: DecoderLayer, rows: slice) -> DecoderLayer:
    """The layer for some sequences of the batch."""
    changes: dict[str, Any] = {"keys": layer.keys[rows], "values": layer.values[rows]}
    for name in PARTS:
        projections = getattr(layer, name)
        if projections.mask is not None:
            changes[name] = replace(projections, mask=projections.mask[rows])
    return replace(layer, **changes)


@one_launch.kernel("cpu", unless=obstacle)
def one_call(hidden: Tensor, stack: Stack) -> Run | None:
    """Call the C code for groups of up to `GEMV_ROWS` sequences, one after another."""
    groups = [slice(at, at + GEMV_ROWS) for at in range(0, len(hidden), GEMV_ROWS)]
    captured: list[Run] = []
    for rows in groups:
        layers = [_layer_rows(layer, rows) for layer in stack.layers]
        run = _few(hidden[rows], replace(stack, layers=layers, padding=stack.padding[rows]))
        if run is None:
            return None
        captured.append(run)
    if len(captured) == 1:
        return captured[0]
    return lambda hidden: torch.cat([run(hidden[rows]) for run, rows in zip(captured, groups, strict=True)])


def _few(hidden: Tensor, stack: Stack) -> Run | None:
    """Run the layers for up to `GEMV_ROWS` sequences by one call, or return None if a tensor does not fit."""
    batch, width = hidden.shape
    _, kv_heads, slots, size = stack.layers[0].keys.shape
    inner = stack.layers[0].gate_up.weights[0].rows
    at = _Pointers()
    try:
        layers = (_Layer * len(stack.layers))(*[at.layer(layer, stack.heads, width) for layer in stack.layers])
        inputs = [linears for layer in layers for linears in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        call = _Stack(
            layers, at(stack.cos), at(stack.sin), at(stack.padding, torch.int32), at(stack.slot, torch.int64), None,
            len(layers), stack.heads, kv_heads, size, slots, stack.cos.shape[1], width, inner,
            max(linears.ranks for linears in inputs),
            stack.eps, stack.scale, batch, bf16=stack.layers[0].keys.dtype is torch.bfloat16,
        )  # fmt: skip
    except _Refused:
        return None
    scratch = torch.empty(lib.halfbyte_decode_scratch(ctypes.byref(call)))
    call.scratch = at(scratch)

    def run(hidden: Tensor, held: Any = (at, layers)) -> Tensor:
        out = torch.empty(hidden.shape).copy_(hidden)
        call.threads = torch.get_num_threads()
        lib.halfbyte_decode(ctypes.byref(call), out.data_ptr())
        return out.to(hidden.dtype)

    return run
