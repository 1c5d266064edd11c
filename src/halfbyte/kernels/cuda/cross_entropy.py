"""`cuda/cross_entropy.cu`: cross-entropy of rows that a multiprocessor can hold, read once and written once.

Measured on an H200 over chunks of 128 MiB: 79 µs for 512 rows of 128,256 logits
in bf16 where Triton took 99 (a copy's time is 62), 74 for 1,280 of 50,257 where it took 347, 79 for 2,048 of 32,000
where it took 91. Of the 79, loads and stores with little arithmetic take 73, loads and all the arithmetic 63.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.checks import row_stride
from ...ops.cross_entropy import Objective, RowLosses, check_cross_entropy, cross_entropy_
from ..device import HOPPER, NEEDS_HOPPER, device_at, device_of, multiprocessors_of
from ..operands import evenly_spaced, put_back
from ..tiling import ceil_div
from . import Kernel, cubin, remembered

LOG2_E = 1.4426950408889634


class Blocks(NamedTuple):
    """Constants of `cuda/cross_entropy.cu`."""

    threads: int
    kept: int
    ahead: int

    def chunks(self, vocabulary: int) -> int:
        """Of a row, in shared memory."""
        return ceil_div(vocabulary, 8 * self.threads) - self.kept

    def shared_bytes(self, vocabulary: int) -> int:
        """Of a block, as `LAYOUT` has it: the ring, and twice 16 bytes for each warp."""
        return (self.chunks(vocabulary) + self.ahead) * 16 * self.threads + self.threads


LARGEST = Blocks(512, 16, 6)


def blocks_for(vocabulary: int, shared_bytes: int) -> Blocks | None:
    """As much of a row in registers as leaves the ring a row's way to run ahead; None where a row does not fit into the
    shared memory that a block may have."""
    threads, kept, ahead = LARGEST
    blocks = Blocks(threads, min(kept, ceil_div(vocabulary, 8 * threads) - ahead), ahead)
    return blocks if blocks.kept > 0 and blocks.shared_bytes(vocabulary) <= shared_bytes else None


class Task(ctypes.Structure):
    """The struct of this name in `cuda/cross_entropy.cu`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "labels", "loss", "logsumexp", "entropy")),
        ("stride", ctypes.c_uint64),
        ("ignore", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("rows", "vocabulary", "chunks")),
        *((name, ctypes.c_float) for name in ("slope", "outer", "smoothing", "z_loss")),
    )


@remembered
def _kernel(device: int, blocks: Blocks, vocabulary: int, bf16: bool, smoothing: bool, entropy: bool) -> Kernel:
    constants = {"BF16": int(bf16), "SMOOTHING": int(smoothing), "ENTROPY": int(entropy)}
    constants |= {"THREADS": blocks.threads, "KEPT": blocks.kept, "AHEAD": blocks.ahead}
    image = cubin("cross_entropy", device_at(device).capability, constants, [Task])
    return Kernel(image, "cross_entropy", image.shared_for(blocks.chunks(vocabulary)))


def obstacle(
    logits: Tensor, labels: Tensor, objective: Objective, need_gradient: bool, need_entropy: bool
) -> str | None:
    device, (rows, vocabulary) = device_of(logits), logits.shape
    if not device.at_least(HOPPER):  # griddepcontrol
        return NEEDS_HOPPER
    if not need_gradient or not rows or objective.softcap is not None or objective.slope <= 0:
        return "makes gradients, without softcap and with a positive slope"
    if logits.dtype is torch.float32 or (row_stride(logits) or vocabulary) % 8 or logits.data_ptr() % 16:
        return "needs 16 bits, and rows at multiples of 16 bytes"
    return None if blocks_for(vocabulary, device.shared_bytes) else "needs rows that fit into shared memory"


@cross_entropy_.kernel("cuda", unless=obstacle, rank=1)
def gradient(
    logits: Tensor, labels: Tensor, objective: Objective, need_gradient: bool, need_entropy: bool
) -> RowLosses:
    check_cross_entropy(logits, labels)
    (rows, vocabulary), device = logits.shape, logits.get_device()
    spaced, stride = evenly_spaced(logits)
    labels, blocks = labels.contiguous(), blocks_for(vocabulary, device_of(logits).shared_bytes) or LARGEST
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    logsumexp = torch.empty_like(loss)
    entropy = torch.empty_like(loss) if need_entropy else None
    smoothing = objective.label_smoothing
    task = Task(
        *[None if tensor is None else tensor.data_ptr() for tensor in (spaced, labels, loss, logsumexp, entropy)],
        stride, objective.ignore_index, rows, vocabulary, blocks.chunks(vocabulary),
        objective.slope, objective.slope * LOG2_E, smoothing, objective.z_loss,
    )  # fmt: skip
    with torch.cuda.device(device):
        bf16 = logits.dtype is torch.bfloat16
        kernel = _kernel(device, blocks, vocabulary, bf16, smoothing > 0, need_entropy)
        kernel(min(rows, multiprocessors_of(device)), blocks.threads, [task])
    put_back([logits], [spaced])
    return RowLosses(loss, logsumexp, entropy)
