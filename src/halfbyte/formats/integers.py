"""Affine integers of other tools' checkpoints in HQQ's bit planes: codes, scales and zeros as the file stores them.

    value[n, k] = (code[n, k] − zero[n, group(k)]) · scale[n, group(k)]

The product is computed in fp32 and rounded once, as in `formats.hqq`. A code minus an integer zero and its product with
a 16-bit scale are exact in fp32, so GPTQ's and compressed-tensors' values are bit-equal in every dtype.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..utils.errors import CheckpointError
from .bitplane import BLOCK, pack_planes
from .hqq import CHUNK, GROUPS, HQQ

WORD = 32
USE_GROUPS = f"use a checkpoint with groups that are multiples of {BLOCK}, one scale per row, or the 16-bit model"


def codes_per_period(bits: int) -> tuple[int, int]:
    """Words and codes after which `bits`-bit codes begin at a word again: (3, 32) for 3 bits, (1, 4) for 8."""
    words = bits // math.gcd(bits, WORD)
    return words, words * WORD // bits


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words, whose codes are one stream of bits along `dim`, lowest bits first.

    GPTQ's files, and compressed-tensors' "pack-quantized", use this order; 3-bit codes cross words.

    Returns:
        uint8, with `dim` · 32 / bits codes.
    """
    period, count = codes_per_period(bits)
    stream = words.movedim(dim, -1).unflatten(-1, (-1, period)).long() & 0xFFFFFFFF
    codes = []
    for i in range(count):
        word, shift = divmod(i * bits, WORD)
        code = stream[..., word] >> shift
        if shift + bits > WORD:
            code = code | (stream[..., word + 1] << (WORD - shift))
        codes.append((code & (2**bits - 1)).to(torch.uint8))
    return torch.stack(codes, -1).flatten(-2).movedim(-1, dim)


def order_of_groups(group_index: Tensor, groups: int, label: str) -> Tensor | None:
    """Order that sorts the inputs by group, int32 [2, K] as in `HQQ`; None if they are sorted.

    Args:
        group_index: [K], the group of each input, below `groups`; on the meta device, the order is one, too.
        label: entry of the checkpoint, for the error.

    Raises:
        CheckpointError: groups have different sizes.
    """
    if not group_index.is_meta:
        sizes = torch.bincount(group_index, minlength=groups)
        if bool((sizes != group_index.numel() // groups).any()):
            raise CheckpointError(
                f"{label} has groups of {int(sizes.min())} to {int(sizes.max())} inputs", "use groups of equal sizes"
            )
        if bool((group_index.diff() >= 0).all()):
            return None
    order = group_index.argsort(stable=True)
    return torch.stack([order, order.argsort()]).int()


def planes_group(run: int) -> int:
    """Weights per scale in planes, for `run` of them in a file: the largest divisor that kernels have, or 0."""
    return max((size for size in GROUPS if run % size == 0), default=0)


def to_planes(
    codes: Tensor, scales: Tensor, zeros: Tensor, bits: int, name: str, order: Tensor | None = None
) -> tuple[HQQ, dict[str, Tensor]]:
    """Format and parts of a matrix from its codes.

    Groups that no kernel has are divided: their scales and zeros are repeated, which changes no value. So a scale per
    row becomes one per 256, 128, 64 or 32 weights; such a row is padded to whole groups.

    Args:
        codes: uint8 [N, K].
        scales: fp16, bf16 or fp32 [N, G].
        zeros: [N, G]; integers below 2^11, or floats.
        name: the weight, for the error.
        order: as in `HQQ`: codes are given in the order of inputs, and stored sorted by group.

    Raises:
        CheckpointError: groups are not multiples of 32.
    """
    inputs, groups = codes.shape[1], scales.shape[1]
    run = inputs // groups
    size = planes_group(run)
    if not size and groups > 1:
        raise CheckpointError(f"{name} has groups of {run} inputs in {bits} bits", USE_GROUPS)
    size = size or BLOCK
    repeats = -(-inputs // size) // groups
    integers = not zeros.is_floating_point()
    zero_dtype = torch.float16 if integers or zeros.dtype is torch.float16 else torch.float32
    if order is not None:
        codes = codes[:, order[0]]
    codes = F.pad(codes, (0, -inputs % size))
    scale_dtype = str(scales.dtype).removeprefix("torch.")
    format_ = HQQ(bits, size, False, scale_dtype, str(zero_dtype).removeprefix("torch."), order is not None)
    chunk = max(CHUNK // max(codes.shape[1], 1), 1)
    parts = {
        "packed": torch.cat([pack_planes(rows.reshape(-1, BLOCK), bits) for rows in codes.split(chunk)]),
        "scales": scales.repeat_interleave(repeats, 1).reshape(-1),
        "zeros": zeros.to(zero_dtype).repeat_interleave(repeats, 1).reshape(-1),
    }
    return format_, parts if order is None else parts | {"order": order}
