"""`cuda/expert_rows4.cu`: the experts of a few tokens, with 4-bit weights, in two launches."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...formats.blockwise4 import Blockwise4
from ...ops.expert_rows import expert_rows as reference
from ...ops.experts import StackedWeight
from ...ops.experts_unit import Unit
from ..device import device_at, multiprocessors_of, origin_of
from ..tiling import ceil_div
from . import Kernel, cubin, remembered
from .gemv4 import BLOCKSIZE, STEP, Weight, mma_obstacle, weight_of

SLOTS = 16  # of all tokens; with more, some share an expert, and products by expert read it once
ROWS = 16  # of W in a tile
# Of a block, warps of one, and units that are on their way, by kernel: 13.9 µs both for a token of Qwen3-30B-A3B on an
# H200, 13.9 to 20 with others.
GROUPS = (2, 8, 2), (1, 12, 1)


class _Table(ctypes.Structure):
    """The struct `Table4` of `cuda/table4.cuh`."""

    _fields_ = Weight._fields_[:-1]


_FIELDS = [field[0] for field in _Table._fields_]


class _Chosen(ctypes.Structure):
    """The struct `Chosen` of `cuda/expert_rows4.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "experts", "weights", "out")),
        *((name, ctypes.c_uint32) for name in ("tokens", "top_k", "wide")),
    )


@remembered
def _kernel(down: int, groups: tuple[int, int, int], device: int, bf16: bool, nested: bool) -> Kernel:
    constants = {
        "DOWN": down,
        "WR": groups[0],
        "WK": groups[1],
        "AHEAD": groups[2],
        "NESTED": int(nested),
        "BF16": int(bf16),
    }
    constants |= {"ORIGIN": origin_of(device)}
    return Kernel(cubin("expert_rows4", device_at(device).capability, constants, [_Table, _Chosen]), "expert_rows4")


def obstacle(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor
) -> str | None:
    if index.numel() > SLOTS or index.dtype is not torch.int64:
        return f"takes int64 choices, {SLOTS} at most"
    if unit.activation != "silu" or not unit.plain or unit.interleaved:
        return "computes silu(gate) · up, gate first"
    for stack in (first, second):
        if not isinstance(stack.format, Blockwise4) or stack.format.blocksize != BLOCKSIZE:
            return "takes 4-bit weights in blocks of 64"
        if stack.shape[1] % ROWS or stack.shape[2] % STEP:
            return "needs N in multiples of 16, and K of 256"
    if routed.dtype not in (x.dtype, torch.float32):
        return "takes weights in x's dtype or fp32"
    return mma_obstacle(x, first.parts["packed"], second.parts["packed"])


@reference.kernel("cuda", unless=obstacle)
def expert_rows(
    x: Tensor, first: StackedWeight, second: StackedWeight, unit: Unit, index: Tensor, routed: Tensor,
    groups: Any = GROUPS,
) -> Tensor:  # fmt: skip
    (tokens, top_k), device, given = index.shape, x.get_device(), x.contiguous()
    index, routed = index.contiguous(), routed.contiguous()
    with torch.cuda.device(device):
        for down, stack in enumerate((first, second)):
            format_: Any = stack.format
            rows, nested = stack.shape[1], format_.nested_parts(stack.parts)
            shape = (tokens, rows) if down else (tokens * top_k, rows // 2)
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
            whole = weight_of(given, stack.parts["packed"], stack.parts["absmax"], nested, format_.quant_type, rows)
            table = _Table(*[getattr(whole, name) for name in _FIELDS])
            pointers = [tensor.data_ptr() for tensor in (given, index, routed, out)]
            chosen = _Chosen(*pointers, tokens, top_k, int(routed.dtype is torch.float32))
            kernel = _kernel(down, groups[down], device, x.dtype is torch.bfloat16, nested is not None)
            tiles = rows // ROWS * tokens * (1 if down else top_k)
            grid = min(ceil_div(tiles, groups[down][0]), multiprocessors_of(device))
            kernel(grid, 32 * groups[down][0] * groups[down][1], [table, chosen])
            given = out
    return given
