"""`cuda/cross_entropy.cu`: cross-entropy of rows that a multiprocessor can hold, read once and written once.

It takes a Hopper GPU or newer (griddepcontrol), logits in 16 bits whose rows are aligned, no softcap, and a gradient
that is wanted; the rest is Triton's. Measured on an H200 over chunks of 128 MiB: 79 µs for 512 rows of 128,256 logits
in bf16 where Triton took 99 (a copy's time is 62), 74 for 1,280 of 50,257 where it took 347, 79 for 2,048 of 32,000
where it took 91. Of the 79, loads and stores with little arithmetic take 73, loads and all the arithmetic 63.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.cross_entropy import Objective, RowLosses
from ..device import HOPPER, device_at, device_of, multiprocessors_of
from ..tiling import ceil_div
from . import Attempts, Kernel, cubin, remembered

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


_attempt = Attempts("cross-entropy-cuda", "cross-entropies run in Triton instead, more slowly")


@remembered
def _kernel(device: int, blocks: Blocks, vocabulary: int, bf16: bool, smoothing: bool, entropy: bool) -> Kernel:
    constants = {"BF16": int(bf16), "SMOOTHING": int(smoothing), "ENTROPY": int(entropy)}
    constants |= {"THREADS": blocks.threads, "KEPT": blocks.kept, "AHEAD": blocks.ahead}
    image = cubin("cross_entropy", device_at(device).capability, constants, [Task])
    return Kernel(image, "cross_entropy", image.shared_for(blocks.chunks(vocabulary)))


def takes(logits: Tensor, stride: int, objective: Objective) -> bool:
    """True if the kernel can run: the device, the logits' dtype and alignment, and what is asked for."""
    return (
        device_of(logits).at_least(HOPPER)
        and logits.dtype is not torch.float32
        and objective.softcap is None
        and objective.slope > 0
        and stride % 8 == logits.data_ptr() % 16 == 0
    )


def try_gradient(logits: Tensor, labels: Tensor, objective: Objective, stride: int, losses: RowLosses) -> bool:
    """`cross_entropy_` with a gradient into `losses`, where this can; returns whether it could.

    Args:
        logits: [n, V], `stride` elements from row to row, n > 0.
        labels: [n], contiguous.
    """
    blocks = blocks_for(logits.shape[1], device_of(logits).shared_bytes)
    if blocks is None or not takes(logits, stride, objective):
        return False
    return _attempt(_gradient, logits, labels, objective, stride, losses, blocks) or False


def _gradient(
    logits: Tensor, labels: Tensor, objective: Objective, stride: int, losses: RowLosses, blocks: Blocks
) -> bool:
    """Run `cuda/cross_entropy.cu`; True.

    Raises:
        Unavailable: the kernel does not compile here.
    """
    (rows, vocabulary), device = logits.shape, logits.get_device()
    smoothing, entropy = objective.label_smoothing, losses.entropy
    tensors = (logits, labels, losses.loss, losses.logsumexp, entropy)
    task = Task(
        *[None if tensor is None else tensor.data_ptr() for tensor in tensors], stride, objective.ignore_index,
        rows, vocabulary, blocks.chunks(vocabulary),
        objective.slope, objective.slope * LOG2_E, smoothing, objective.z_loss,
    )  # fmt: skip
    with torch.cuda.device(device):
        bf16 = logits.dtype is torch.bfloat16
        kernel = _kernel(device, blocks, vocabulary, bf16, smoothing > 0, entropy is not None)
        kernel(min(rows, multiprocessors_of(device)), blocks.threads, [task])
    return True
