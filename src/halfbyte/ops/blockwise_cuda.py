"""Blockwise quantization with the bytes of bitsandbytes' CUDA kernels, which differ from those of its CPU library.

Its kernels are compiled with fast math (read from the machine code of 0.50.2 for compute capability 9.0):

- A block is multiplied by the approximate reciprocal of its largest magnitude (`rcp.approx.ftz.f32`), also a partial
  last block. A block of zeros has NaN ratios, which no comparison exceeds: all of its codes are 0.
- 4-bit codes come from comparisons with constants, which are not all the fp32 midpoints of neighbouring values. FP4
  compares magnitudes and keeps the sign of what rounds to zero.
- 8-bit codes come from a binary search that ends at an even code. A ratio in the middle between two codes gets the even
  one of them.
- Numbers below the smallest normal fp32 are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..dispatch import op
from ..formats.codebooks import constant

SMALLEST = torch.finfo(torch.float32).smallest_normal
NF4_THRESHOLDS = (
    -0.848096430, -0.610632896, -0.459995270, -0.339679420, -0.234607399, -0.137911737, -0.0455250181, 0.0397901498,
    0.120255254, 0.203521252, 0.292013764, 0.389312536, 0.501663387, 0.642786920, 0.861478388,
)  # fmt: skip
FP4_THRESHOLDS = (0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333)  # of magnitudes
FP4_CODES = (0, 1, 6, 7, 4, 5, 2, 3)  # by magnitude


@constant
def thresholds(quant_type: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """fp32 thresholds of ratios (FP4: of magnitudes), and uint8: the code by the number of thresholds exceeded."""
    numbers, codes = (NF4_THRESHOLDS, range(16)) if quant_type == "nf4" else (FP4_THRESHOLDS, FP4_CODES)
    return (
        torch.tensor(numbers, dtype=torch.float32, device=device),
        torch.tensor([*codes], dtype=torch.uint8, device=device),
    )


@op("triton.blockwise4")
def approximate_reciprocal(x: Tensor) -> Tensor:
    """Return fp32 1/x of x [n], on NVIDIA GPUs as their approximate instruction gives it."""
    return 1.0 / x


@op("triton.blockwise4")
def quantize_blockwise4_cuda(weight: Tensor, blocksize: int, quant_type: str) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to packed codes and scales; arguments and results as in `blockwise4.quantize_blockwise4`."""
    flat = weight.reshape(-1).float()
    ratios, absmax = _ratios(flat, blocksize)
    limits, code_of_rank = thresholds(quant_type, weight.device)
    compared = ratios if quant_type == "nf4" else ratios.abs()
    codes = code_of_rank[torch.bucketize(compared, limits).masked_fill_(ratios.isnan(), 0)]
    if quant_type == "fp4":
        codes = codes + 8 * (ratios <= -SMALLEST).to(torch.uint8)
    codes = codes.view(-1)[: flat.numel() + flat.numel() % 2]
    return ((codes[::2] << 4) | codes[1::2]).unsqueeze(1), absmax


def quantize_blockwise8_cuda(x: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor to codes and scales; arguments and results as in `blockwise8.quantize_blockwise8`."""
    ratios, absmax = _ratios(x.reshape(-1).float(), blocksize)
    middles = (code[:-1] + code[1:]) * 0.5
    above = torch.arange(len(middles), device=x.device) % 2 == 1  # the even code is the upper one
    lowered = torch.nextafter(middles, torch.full_like(middles, -torch.inf))
    limits = torch.where(above & (code[:-1] < code[1:]), lowered, middles)
    index = torch.bucketize(ratios, limits).masked_fill_(ratios.isnan(), 0)
    return index.to(torch.uint8).view(-1)[: x.numel()].view(x.shape), absmax


def _ratios(flat: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """fp32 [blocks, blocksize], padded with zeros: values times the reciprocal of their scale; and the scales."""
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % blocksize)).view(-1, blocksize)
    blocks = blocks.masked_fill(blocks.abs() < SMALLEST, 0)
    absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
    return blocks * approximate_reciprocal(absmax).unsqueeze(1), absmax
