"""8-bit blockwise quantization with any sorted code of up to 256 values (Dettmers et al. 2021, arXiv:2110.02861).

A tensor is read flat, row-major, in blocks that may cross rows. Each block has one scale, its largest magnitude
(absmax). A value's code is the index of the nearest value of the code after division by the scale.

On a CPU bitsandbytes finds codes in a table of 65,536 points over [-1, 1]; the specification does the same there, so
that bytes are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_blockwise8(x: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """Quantize a tensor of n values.

    Args:
        x: any shape; fp32, fp16 or bf16.
        code: fp32 [≤ 256], sorted, on the device of `x`.
        blocksize: values per scale.

    Returns:
        uint8 codes of x's shape and absmax fp32 [⌈n/blocksize⌉].
    """
    flat = x.reshape(-1).float()
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % blocksize)).view(-1, blocksize)
    absmax = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
    normal = blocks * (1.0 / absmax).unsqueeze(1)  # NaN in a block of zeros, which encodes as 0 below
    if x.device.type == "cpu":
        normal = ((normal + 1) * 0.5 * 65535 + 0.5).int().float() / 65535 * 2 - 1
    index = torch.bucketize(normal, (code[:-1] + code[1:]) / 2).masked_fill_(absmax.unsqueeze(1) == 0, 0)
    return index.to(torch.uint8).view(-1)[: flat.numel()].view(x.shape), absmax


def dequantize_blockwise8(codes: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    """Dequantize codes to `dtype` of their shape, rounded once from fp32; see `quantize_blockwise8`."""
    values = code[codes.reshape(-1).int()].float()
    scales = absmax.float().repeat_interleave(blocksize)[: values.numel()]
    return (values * scales).to(dtype).view(codes.shape)
