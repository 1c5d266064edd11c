"""`cuda/lora_glu.cu`: the gated unit with its low-rank products, near a copy's time.

It takes a Hopper GPU or newer (griddepcontrol), 16-bit tensors whose width is a multiple of 8, ranks of 8 and 16, SiLU
and tanh's GELU; the rest is Triton's. Measured on an H200, r = 16, bf16, µs; a copy is one of as many bytes:

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
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.float8 import E5M2
from ...ops.fp8_scaling import Slot
from ...ops.lora_glu import Factors, Gradients
from ..device import HOPPER, device_at, device_of, multiprocessors_of
from ..tiling import ceil_div
from . import Attempts, Kernel, cubin, remembered

ACTIVATIONS = ("gelu_tanh", "silu")
RANKS = (8, 16)
ROWS, LANE_COLUMNS, FINISH_THREADS = 16, 8, 256  # rows of a step; columns of a lane; threads of a block of `finish`


class Blocks(NamedTuple):
    """Constants of `cuda/lora_glu.cu`: warps of a block, blocks of a multiprocessor, stages of a warp's ring."""

    warps: int
    blocks: int
    stages: int

    def grid(self, rows: int, width: int, multiprocessors: int) -> tuple[int, int, int]:
        """Strips of columns, blocks, and steps of a block: all blocks run at once."""
        strips, steps = ceil_div(width, 32 * self.warps), ceil_div(rows, ROWS)
        share = ceil_div(strips * steps, multiprocessors * self.blocks)
        return strips, ceil_div(strips * steps, share), share


FORWARD, BACKWARD = Blocks(16, 1, 2), Blocks(12, 1, 2)  # what a sweep on an H200 found best


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
            for name in ("partial", "gradients", "sum", "gradient", "columns", "scale", "newest")
        ),
        *((name, ctypes.c_uint32) for name in ("rows", "width", "strips", "share")),
        ("scales", ctypes.c_float * 2),
    )

    def of(self, pointers: dict[str, Tensor | list[Tensor]], numbers: dict[str, int]) -> Unit:
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
    columns: bool,
) -> tuple[Kernel, Kernel]:  # fmt: skip
    """The kernel, and the one that adds what its blocks leave."""
    names = ("WARPS", "BLOCKS", "STAGES", "R_GATE", "R_UP", "R_DOWN")
    constants = dict(zip(names, (*blocks, *ranks), strict=True)) | {
        "BACKWARD": int(backward), "BF16": int(bf16), "SILU": int(activation == "silu"), "FLOAT8": float8,
        "COLUMNS": int(columns),
    }  # fmt: skip
    image = cubin("lora_glu", device_at(device).capability, constants, [Unit])
    return Kernel(image, "lora_glu"), Kernel(image, "finish", 0)


def _launch(
    backward: bool, tensors: list[Tensor], low: Tensor, factors: Factors, activation: str, slot: Slot | None,
    columns: Tensor | None, pointers: dict,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The sums over columns [M, r] and, in fp32, over rows: of dB_g, dB_u and dA_d, one after another.

    `pointers` are the other tensors of `Unit`.
    """
    gate, blocks = tensors[0], BACKWARD if backward else FORWARD
    (rows, width), device = gate.shape, gate.get_device()
    ranks = factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0]
    strips, count, share = blocks.grid(rows, width, multiprocessors_of(device))
    steps, rank = ceil_div(rows, ROWS), ranks[0] + ranks[1] if backward else ranks[2]
    fresh = functools.partial(torch.empty, device=gate.device)
    partial = fresh((strips, steps, 512 if backward else 256), dtype=gate.dtype if backward else torch.float32)
    total = fresh((rows, rank), dtype=gate.dtype)
    gradients = fresh((ceil_div(steps, share) + 1 if backward else 0, sum(ranks), width), dtype=torch.float32)
    gradient = fresh(sum(ranks) * width if backward else 0, dtype=torch.float32)
    pointers |= {
        "tensors": tensors, "low": low, "factors": list(factors[:3]), "partial": partial, "gradients": gradients,
        "sum": total, "gradient": gradient,
    }  # fmt: skip
    if slot is not None:
        pointers |= {"scale": slot.scale, "newest": slot.newest}
    if columns is not None:
        pointers |= {"columns": columns}
    numbers = {"rows": rows, "width": width, "strips": strips, "share": share}
    unit = Unit(scales=(factors.gate_scale, factors.up_scale)).of(pointers, numbers)
    float8 = 0 if slot is None else 2 if slot.dtype is E5M2 else 1
    with torch.cuda.device(device):
        bf16 = gate.dtype is torch.bfloat16
        kernel, finish = _kernel(backward, blocks, device, bf16, activation, ranks, float8, columns is not None)
        kernel(count, 32 * blocks.warps, [unit])
        threads = steps * (128 if backward else 64) + gradient.numel() // 4
        finish(ceil_div(threads, FINISH_THREADS), FINISH_THREADS, [unit])
    return total, gradient


def forward(
    gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: str, slot: Slot | None
) -> tuple[Tensor, Tensor]:
    """`lora_glu` or, with a slot, `lora_glu_float8` of tensors that `takes` accepts.

    Raises:
        Unavailable: the kernel does not compile here.
    """
    out = torch.empty_like(gate) if slot is None else torch.empty_like(gate, dtype=slot.dtype)
    total, _ = _launch(False, [gate, up], low, factors, activation, slot, None, {"out": [out]})
    return out, total


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: str,
    slot: Slot | None, columns: Tensor | None,
) -> tuple[Gradients, Tensor | None]:  # fmt: skip
    """Likewise `lora_glu_backward_` or `lora_glu_backward_float8`, and then the codes."""
    rows, width = gate.shape
    codes = None if slot is None else torch.empty(rows, 2 * width, dtype=slot.dtype, device=gate.device)
    out = [gate, up] if codes is None else [codes, codes[:, width:]]
    v, gradient = _launch(
        True, [gate, up, grad], low, factors, activation, slot, columns, {"out": out, "v_down": v_down}
    )
    parts = gradient.split([factor.numel() for factor in factors[:3]])
    shaped = [part.view(factor.shape) for part, factor in zip(parts, factors[:3], strict=True)]
    return Gradients(v, *shaped), codes


_attempt = Attempts("lora-glu-cuda", "the gated unit with its adapters runs in Triton instead, more slowly")


def takes(activation: str, factors: Factors, *tensors: Tensor) -> bool:
    """True if the kernel can run: the device, the activation, dtypes, ranks, and how tensors are aligned."""
    gate = tensors[0]
    ranks = factors.b_gate.shape[1], factors.b_up.shape[1], factors.a_down.shape[0]
    return (
        device_of(gate).at_least(HOPPER)
        and gate.dtype is not torch.float32
        and activation in ACTIVATIONS
        and all(rank in RANKS for rank in ranks)
        and gate.shape[0] > 0 < gate.shape[1]
        and gate.shape[1] % LANE_COLUMNS == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in (*tensors, *factors[:3]))
    )


def try_forward(
    gate: Tensor, up: Tensor, low: Tensor, factors: Factors, activation: str, slot: Slot | None
) -> tuple[Tensor, Tensor] | None:
    """`forward` where it can run, else None; says once why it cannot be compiled."""
    if not takes(activation, factors, gate, up, low):
        return None
    return _attempt(forward, gate, up, low, factors, activation, slot)


def try_backward(
    grad: Tensor, gate: Tensor, up: Tensor, low: Tensor, v_down: Tensor, factors: Factors, activation: str,
    slot: Slot | None, columns: Tensor | None,
) -> tuple[Gradients, Tensor | None] | None:  # fmt: skip
    """Likewise `backward`."""
    if not takes(activation, factors, gate, up, grad, low, v_down):
        return None
    return _attempt(backward, grad, gate, up, low, v_down, factors, activation, slot, columns)
