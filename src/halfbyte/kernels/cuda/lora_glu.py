"""`cuda/lora_glu.cu`: the gated unit with its low-rank GEMMs, close to a copy's time.

Measured on an H200, r = 16, bf16, in µs; "a copy" copies as many bytes:

                    [8192, 14336]          [4096, 3072]
                    here  Triton  a copy   here  Triton  a copy
    forward          201     252     168     31      46      18
    backward         347     460     280     54      75      30
    forward, FP8     184     298     140     30      53      15
    backward, FP8    341     706     224     54      98      24
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...formats.float8 import E5M2
from ...ops import lora_glu as ops
from ...ops.fp8_scaling import Slot
from ...ops.lora_glu import Factors, Gradients
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of
from ..operands import bump_versions
from ..tiling import ceil_div
from . import Kernel, cubin, remembered

ACTIVATIONS = ("gelu_tanh", "silu")
RANKS = (8, 16)
# rows per step; columns per lane; threads per block of `finish`
ROWS = 16
LANE_COLUMNS = 8
FINISH_THREADS = 256


class Blocks(NamedTuple):
    """Constants of `cuda/lora_glu.cu`: warps per block, blocks per multiprocessor, stages of a warp's ring buffer."""

    warps: int
    blocks: int
    stages: int

    def grid(self, rows: int, width: int, multiprocessors: int) -> tuple[int, int, int]:
        """Strips of columns, blocks, and steps per block, such that all blocks run concurrently."""
        strips, steps = ceil_div(width, 32 * self.warps), ceil_div(rows, ROWS)
        share = ceil_div(strips * steps, multiprocessors * self.blocks)
        return strips, ceil_div(strips * steps, share), share


FORWARD, BACKWARD = Blocks(16, 1, 2), Blocks(12, 1, 2)  # best of a sweep on an H200


class Unit(ctypes.Structure):
    """The struct of this name in `cuda/lora_glu.cu`."""

    _fields_ = (
        ("tensors", ctypes.c_void_p * 3),
        ("low", ctypes.c_void_p),
        ("v_down", ctypes.c_void_p),
        ("factors", ctypes.c_void_p * 3),
        ("out", ctypes.c_void_p * 2),
        *(
            (name, ctypes.c_void_p)
            for name in ("partial", "gradients", "sum", "gradient", "columns", "scale", "newest", "seed")
        ),
        *((name, ctypes.c_uint32) for name in ("rows", "width", "strips", "share", "first_column", "threshold")),
        ("scales", ctypes.c_float * 2),
        ("drop_scale", ctypes.c_float),
    )

    def of(self, pointers: dict[str, Tensor | list[Tensor]], numbers: dict[str, float]) -> Unit:
        for name, value in pointers.items():
            if isinstance(value, list):
                for i, tensor in enumerate(value):
                    getattr(self, name)[i] = tensor.data_ptr()
            else:
                setattr(self, name, value.data_ptr())
        for name, number in numbers.items():
            setattr(self, name, number)
        return self


@remembered
def _kernel(
    backward: bool, blocks: Blocks, device: int, bf16: bool, activation: str, ranks: tuple[int, int, int], float8: int,
    columns: bool, dropout: bool,
) -> tuple[Kernel, Kernel]:  # fmt: skip
    """The kernel, and the one that adds its blocks' partial sums."""
    names = ("WARPS", "BLOCKS", "STAGES", "R_GATE", "R_UP", "R_DOWN")
    constants = dict(zip(names, (*blocks, *ranks), strict=True)) | {
        "BACKWARD": int(backward), "BF16": int(bf16), "SILU": int(activation == "silu"), "FLOAT8": float8,
        "COLUMNS": int(columns), "DROPOUT": int(dropout),
    }  # fmt: skip
    image = cubin("lora_glu", device_at(device).capability, constants, [Unit])
    return Kernel(image, "lora_glu"), Kernel(image, "finish", 0)


def _launch(
    backward: bool, tensors: list[Tensor], low: Tensor, factors: Factors, activation: str, slot: Slot | None,
    columns: Tensor | None, pointers: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums over columns [M, r] and the fp32 sums over rows (dB_g, dB_u and dA_d, concatenated).

    `pointers`: the other tensors of `Unit`.
    """
    gate, blocks = tensors[0], BACKWARD if backward else FORWARD
    (rows, width), device = gate.shape, gate.get_device()
    ranks = factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0]
    strips, count, share = blocks.grid(rows, width, multiprocessors_of(device))
    steps, rank = ceil_div(rows, ROWS), ranks[0] + ranks[1] if backward else ranks[2]
    empty = functools.partial(torch.empty, device=gate.device)
    partial = empty((strips, steps, 512 if backward else 256), dtype=gate.dtype if backward else torch.float32)
    total = empty((rows, rank), dtype=gate.dtype)
    gradients = empty((ceil_div(steps, share) + 1 if backward else 0, sum(ranks), width), dtype=torch.float32)
    gradient = empty(sum(ranks) * width if backward else 0, dtype=torch.float32)
    pointers |= {
        "tensors": tensors, "low": low, "factors": list(factors[:3]), "partial": partial, "gradients": gradients,
        "sum": total, "gradient": gradient,
    }  # fmt: skip
    if slot is not None:
        pointers |= {"scale": slot.scale, "newest": slot.newest}
    if columns is not None:
        pointers |= {"columns": columns}
    numbers: dict[str, float] = {"rows": rows, "width": width, "strips": strips, "share": share}
    dropout = factors.dropout
    if dropout is not None:
        pointers |= {"seed": dropout.seeds}
        numbers |= {"first_column": dropout.first_column, "threshold": dropout.threshold}
        numbers |= {"drop_scale": dropout.scale}
    unit = Unit(scales=(factors.gate_scale, factors.up_scale)).of(pointers, numbers)
    float8 = 0 if slot is None else 2 if slot.dtype is E5M2 else 1
    with torch.cuda.device(device):
        bf16 = gate.dtype is torch.bfloat16
        kernel, finish = _kernel(
            backward, blocks, device, bf16, activation, ranks, float8, columns is not None, dropout is not None
        )
        kernel(count, 32 * blocks.warps, [unit])
        threads = steps * (128 if backward else 64) + gradient.numel() // 4
        finish(ceil_div(threads, FINISH_THREADS), FINISH_THREADS, [unit])
    return total, gradient


def _obstacle(activation: str, factors: Factors, gate: Tensor, *tensors: Tensor) -> str | None:
    if not device_of(gate).at_least(HOPPER):  # griddepcontrol
        return NEEDS_HOPPER
    ranks = factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0]
    if activation not in ACTIVATIONS or any(rank not in RANKS for rank in ranks):
        return "takes SiLU or tanh's GELU, and ranks of 8 or 16"
    if gate.dtype is torch.float32 or not gate.numel() or gate.shape[1] % LANE_COLUMNS:
        return "needs 16 bits, and a width in multiples of 8"
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (gate, *tensors, *factors[:3]))
    return None if aligned else "needs tensors at multiples of 16 bytes"


def forward_obstacle(gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: str, *_: Any) -> str | None:
    return _obstacle(activation, factors, gate, up, low)


def backward_obstacle(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: str, *_: Any
) -> str | None:
    return _obstacle(activation, factors, gate, up, grad, low, v_down)


@ops.lora_glu.kernel("cuda", unless=forward_obstacle, rank=1)
@ops.lora_glu_float8.kernel("cuda", unless=forward_obstacle, rank=1)
def forward(
    gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: str, slot: Slot | None = None
) -> tuple[Tensor, Tensor]:
    ops.check_lora_glu(gate, up, low, factors, activation)
    out = torch.empty_like(gate) if slot is None else torch.empty_like(gate, dtype=slot.dtype)
    total, _ = _launch(False, [gate, up], low, factors, activation, slot, None, {"out": [out]})
    return out, total


@ops.lora_glu_backward_.kernel("cuda", unless=backward_obstacle, rank=1)
def backward_(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: str
) -> Gradients:
    gradients = _backward(grad, gate, up, low, v_down, factors, activation, None, None, [gate, up])
    bump_versions(gate, up)
    return gradients


@ops.lora_glu_backward_float8.kernel("cuda", unless=backward_obstacle, rank=1)
def backward_float8(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: str, slot: Slot,
    columns: Tensor | None,
) -> tuple[Gradients, Tensor]:  # fmt: skip
    rows, width = gate.shape
    codes = torch.empty(rows, 2 * width, dtype=slot.dtype, device=gate.device)
    out = [codes, codes[:, width:]]
    return _backward(grad, gate, up, low, v_down, factors, activation, slot, columns, out), codes


def _backward(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: str,
    slot: Slot | None, columns: Tensor | None, out: list[Tensor],
) -> Gradients:  # fmt: skip
    ops.check_lora_glu(gate, up, low, factors, activation)
    ops.check_gradients(grad, v_down, gate, factors)
    pointers = {"out": out, "v_down": v_down}
    v, gradient = _launch(True, [gate, up, grad], low, factors, activation, slot, columns, pointers)
    pieces = gradient.split([factor.numel() for factor in factors[:3]])
    return Gradients(v, *[piece.view(factor.shape) for piece, factor in zip(pieces, factors[:3], strict=True)])
