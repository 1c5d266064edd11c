"""`cuda/lora_read.cu`: adapters' low-rank GEMMs and an FP8 cast in one pass.

Measured on an H200 at 8,192 rows, r = 16, bf16, in µs:

                                        here  separate
    dy of 4,096 columns, FP8              41        72
    dq, dk, dv (4,096, 1,024 twice), FP8  56       138
    x of 4,096, FP8, no gradient          37        50
    dy of 4,096, no FP8                   31        41
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.float8 import E5M2
from ...ops.checks import row_stride
from ...ops.fp8_scaling import Slot
from ...ops.lora_read import Read, lora_read
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of
from ..tiling import ceil_div
from . import Kernel, cubin, remembered

PARTS, RANKS = 3, (8, 16)
# rows per step; columns per lane; threads per block of `finish`
ROWS = 16
LANE_COLUMNS = 8
FINISH_THREADS = 256
FRAGMENTS = 64  # groups of four values in 16 rows of v


class Blocks(NamedTuple):
    """Constants of `cuda/lora_read.cu`: warps per block, blocks per multiprocessor, stages of the ring buffer."""

    warps: int
    blocks: int
    stages: int


BLOCKS = Blocks(8, 2, 4)


class Part(ctypes.Structure):
    """The struct of this name in `cuda/lora_read.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "factor", "gradient")),
        *((name, ctypes.c_uint32) for name in ("width", "stride", "rank", "first_rank", "first_strip", "first_column")),
        ("scale", ctypes.c_float),
    )


class Operands(ctypes.Structure):
    """The struct `Read` in `cuda/lora_read.cu`."""

    _fields_ = (
        ("parts", Part * PARTS),
        *(
            (name, ctypes.c_void_p)
            for name in ("low", "codes", "partial", "gradients", "sum", "columns", "scale", "newest")
        ),
        *((name, ctypes.c_uint32) for name in ("rows", "width", "ranks", "strips", "share")),
    )


@remembered
def _kernel(
    blocks: Blocks, device: int, bf16: bool, learn: bool, transposed: bool, float8: int, columns: bool
) -> tuple[Kernel, Kernel]:
    """The kernel, and the one that adds its blocks' partial sums."""
    own = {"bf16": bf16, "learn": learn, "transposed": transposed, "float8": float8, "columns": columns}
    upper = {name.upper(): int(value) for name, value in (blocks._asdict() | own).items()}
    image = cubin("lora_read", device_at(device).capability, upper, [Part, Operands])
    return Kernel(image, "lora_read"), Kernel(image, "finish", 0)


def _is_transposed(factor: Tensor) -> bool:
    """Return whether `factor` is the transpose of a contiguous tensor."""
    return not factor.is_contiguous()


def _parts(
    tensors: Sequence[Tensor], factors: Sequence[Tensor | None], scalings: Sequence[float], gradients: Sequence[Tensor],
) -> list[Part]:  # fmt: skip
    """The struct of each tensor, with its first rank, strip and column among all."""
    scales, written = iter(scalings), iter(gradients)
    parts = []
    rank = 0
    strip = 0
    column = 0
    for x, factor in zip(tensors, factors, strict=True):
        part = Part(x.data_ptr(), width=x.shape[1], stride=row_stride(x))
        part.first_rank = rank
        part.first_strip = strip
        part.first_column = column
        if factor is not None:
            part.factor = factor.data_ptr()
            part.rank = factor.shape[1]
            part.scale = next(scales)
            part.gradient = next(gradient.data_ptr() for gradient in written) if gradients else None
        parts.append(part)
        rank = rank + part.rank
        strip = strip + ceil_div(part.width, 32 * BLOCKS.warps)
        column = column + part.width
    unused = [Part(first_strip=2**32 - 1, first_column=2**32 - 1)] * (PARTS - len(parts))
    return [*parts, *unused]


def _run(
    tensors: Sequence[Tensor], factors: Sequence[Tensor | None], scalings: Sequence[float], low: Tensor | None,
    slot: Slot | None, columns: Tensor | None,
) -> Read:  # fmt: skip
    """`lora_read` with fp32 gradients."""
    x, given = tensors[0], [factor for factor in factors if factor is not None]
    rows = x.shape[0]
    width = sum(t.shape[1] for t in tensors)
    ranks = sum(f.shape[1] for f in given)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    gradients = [] if low is None else [empty(factor.shape) for factor in given]
    parts = _parts(tensors, factors, scalings, gradients)
    strips, steps = sum(ceil_div(t.shape[1], 32 * BLOCKS.warps) for t in tensors), ceil_div(rows, ROWS)
    share = ceil_div(strips * steps, multiprocessors_of(x.get_device()) * BLOCKS.blocks)
    total = torch.empty(rows, ranks, dtype=x.dtype, device=x.device)
    codes = None if slot is None else torch.empty(rows, width, dtype=slot.dtype, device=x.device)
    pointers = {
        "low": low, "codes": codes, "partial": empty(strips, steps, 4 * FRAGMENTS), "sum": total, "columns": columns,
        "gradients": empty(ceil_div(steps, share) + 1, 16, width) if gradients else None,
    }  # fmt: skip
    if slot is not None:
        pointers |= {"scale": slot.scale, "newest": slot.newest}
    addresses = {name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()}
    numbers = {"rows": rows, "width": width, "ranks": ranks, "strips": strips, "share": share}
    operands = Operands((Part * PARTS)(*parts), **addresses, **numbers)
    float8 = 0 if slot is None else 2 if slot.dtype is E5M2 else 1
    with torch.cuda.device(x.get_device()):
        bf16 = x.dtype is torch.bfloat16
        learn = bool(gradients)
        transposed = _is_transposed(given[0])
        kernel, finish = _kernel(BLOCKS, x.get_device(), bf16, learn, transposed, float8, columns is not None)
        kernel(ceil_div(strips * steps, share), 32 * BLOCKS.warps, [operands])
        threads = PARTS * steps * FRAGMENTS + (width * 4 if gradients else 0)
        finish(ceil_div(threads, FINISH_THREADS), FINISH_THREADS, [operands])
    return Read(total, gradients, codes)


def obstacle(
    x: Tensor, more: Sequence[Tensor], factors: Sequence[Tensor | None], scalings: Sequence[float], low: Tensor | None,
    *_: Any,
) -> str | None:  # fmt: skip
    if not device_of(x).at_least(HOPPER):  # griddepcontrol
        return NEEDS_HOPPER
    tensors, given = (x, *more), [factor for factor in factors if factor is not None]
    if x.dtype not in (torch.float16, torch.bfloat16) or len(tensors) > PARTS or not x.shape[0] or not given:
        return "takes one to three tensors of 16 bits, with rows and an adapter"
    if any(factor.shape[1] not in RANKS for factor in given):
        return "needs ranks of 8 or 16"
    if any(tensor.shape[1] % LANE_COLUMNS or (row_stride(tensor) or 1) % LANE_COLUMNS for tensor in tensors):
        return "needs widths and strides in multiples of 8"
    contiguous = all((factor.t() if _is_transposed(given[0]) else factor).is_contiguous() for factor in given)
    if not contiguous or not (low is None or low.is_contiguous()) or not all(t.shape[1] for t in tensors):
        return "needs contiguous factors"
    others = given if low is None else [*given, low]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (*tensors, *others))
    return None if aligned else "needs tensors at multiples of 16 bytes"


@lora_read.kernel("cuda", unless=obstacle)
def read(
    x: Tensor,
    more: Sequence[Tensor],
    factors: Sequence[Tensor | None],
    scalings: Sequence[float],
    low: Tensor | None,
    dtype: torch.dtype,
    slot: Slot | None,
    columns: Tensor | None,
) -> Read:
    found = _run((x, *more), factors, scalings, low, slot, columns)
    return found._replace(gradients=[gradient.to(dtype) for gradient in found.gradients])
