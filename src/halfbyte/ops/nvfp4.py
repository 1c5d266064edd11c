"""NVFP4: E2M1 codes, an E4M3 scale per 16 values or per 16×16 tile, one fp32 factor per tensor. The specification.

With amax the largest magnitude of the tensor and of a block:

    factor = amax / (6 · 448)                         so that the largest block scale is E4M3's largest
    scale  = e4m3(block amax / (6 · factor))
    code   = e2m1(value / (scale · factor))

*Four over six* (arXiv:2512.02010): 6 has no neighbour but 4, so values near a block's amax have the largest errors.
Each block is also tried with its amax at 4, whose neighbours are 3 and 6, and the smaller error wins; ties choose 6.
The factor is then amax / (6 · 256), because a scale that maps to 4 is 1.5 times as large and must stay below 448.

*Random Hadamard transform*: 16 neighbours are multiplied by diag(±1)·H/4, orthonormal, which spreads an outlier over
its block. Applied to both operands of a GEMM along the reduced dimension it cancels.

*Stochastic rounding* is exactly unbiased while no value saturates. Block scales are therefore rounded up, and the
choice between 4 and 6 uses the errors of the nearest codes, a function of the values alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .codebooks import constant
from .e2m1 import codebook_e2m1, decode_scales, encode_e2m1, encode_e2m1_stochastic, encode_e4m3, pack_e2m1

BLOCK = 16
Metric = Literal["MSE", "L1", "AbsMax"]
ERRORS = {
    "MSE": lambda error: error.square().sum((1, 3)),
    "L1": lambda error: error.abs().sum((1, 3)),
    "AbsMax": lambda error: error.abs().amax((1, 3)),
}


class Nvfp4(NamedTuple):
    """A quantized matrix [rows, columns]; columns are padded with zeros to a multiple of 16.

    Attributes:
        codes: uint8 [rows, padded], one code each; `pack_e2m1` packs them.
        scales: uint8 [⌈rows/tile rows⌉, padded/16] E4M3 bytes.
        factor: fp32 [].
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor


def quantize_nvfp4(
    values: Tensor,
    tile_rows: int,
    metric: Metric | None = None,
    *,
    stochastic: bool = False,
    generator: torch.Generator | None = None,
) -> Nvfp4:
    """Codes and scales of a matrix.

    Args:
        values: [rows, columns], any float. NaN or Inf anywhere makes `factor` not finite.
        tile_rows: 1, a scale per 16 values of a row; or 16, a scale per 16×16 tile.
        metric: four over six with this error; None for plain NVFP4.
        stochastic: round codes stochastically, scales up.
        generator: of the random numbers; torch's own by default.
    """
    rows, columns = values.shape
    blocks = F.pad(values.float(), (0, -columns % BLOCK, 0, -rows % tile_rows)).contiguous()
    blocks = blocks.view(-(-rows // tile_rows), tile_rows, -(-columns // BLOCK), BLOCK)
    amax = blocks.abs().amax((1, 3))
    largest = amax.amax() if amax.numel() else amax.sum()
    factor = (largest / (6 * (448 if metric is None else 256))).clamp(min=torch.finfo(torch.float32).tiny)
    scales = encode_e4m3(amax / (6 * factor), up=stochastic)
    if metric is not None:
        at_four = encode_e4m3(amax / (4 * factor), up=stochastic)
        # Errors in units of the factor, whose squares neither underflow nor overflow.
        six, four = (ERRORS[metric]((blocks - _nearest(blocks, at, factor)) / factor) for at in (scales, at_four))
        scales = torch.where(four < six, at_four, scales)
    normal = _normalized(blocks, scales, factor)
    codes = encode_e2m1_stochastic(normal, generator) if stochastic else encode_e2m1(normal)
    return Nvfp4(codes.view(-1, blocks.shape[2] * BLOCK)[:rows], scales, factor)


def packed_nvfp4(values: Tensor, tile_rows: int, metric: Metric | None) -> tuple[Tensor, Tensor, Tensor]:
    """Packed codes uint8 [rows, padded/2], scales and factor of `quantize_nvfp4`."""
    codes, scales, factor = quantize_nvfp4(values, tile_rows, metric)
    return pack_e2m1(codes), scales, factor


def _normalized(blocks: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Divide blocks [R, rows, C, 16] by their scale; zero if the scale is 0, since such a block is below all codes."""
    step = decode_scales(scales, factor)[:, None, :, None]
    return torch.where(step > 0, blocks / step, 0.0)


def _nearest(blocks: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Round blocks to the nearest codes of these scales, and return their values."""
    codes = encode_e2m1(_normalized(blocks, scales, factor))
    return codebook_e2m1(blocks.device)[codes.int()] * decode_scales(scales, factor)[:, None, :, None]


@constant
def hadamard(seed: int, device: torch.device) -> Tensor:
    """Randomised Hadamard matrix, fp32 [16, 16]: diag(signs) · H / 4, with signs from the seed on every device."""
    ones = torch.ones(1, 1)
    for _ in range(4):
        ones = torch.cat([torch.cat([ones, ones], 1), torch.cat([ones, -ones], 1)])
    signs = torch.randint(0, 2, (BLOCK, 1), generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return (signs * ones / 4).to(device)


def rotate(values: Tensor, seed: int) -> Tensor:
    """Multiply every 16 neighbours of a row by `hadamard(seed)`: fp32 [rows, padded], columns padded with zeros."""
    values = F.pad(values.float(), (0, -values.shape[1] % BLOCK))
    return (values.reshape(-1, BLOCK) @ hadamard(seed, values.device)).view(values.shape)
