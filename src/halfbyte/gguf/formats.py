"""GGUF types whose values a halfbyte format stores exactly, and the conversion of their blocks.

    Q4_0   d · (code − 8), 32 weights a scale, fp16    gptq_v2 with groups of 32 and zeros of 8
    Q8_0   d · code, 32 weights a scale, fp16          hqq with 8 bits: codes + 128, zeros of 128, scales in fp16
    MXFP4  E2M1 and a power of two per 32 weights      mxfp4, the same codes in another order

No format stores the other types exactly. Q4_1 and Q5_1 add a minimum that is no multiple of the scale, so no 16-bit
zero point gives their values; a K-quant's scale is a product of two numbers, per 16 or 32 weights; Q5_0 has 5-bit
integers.
Blocks: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from ..formats import HQQ, Format, GptqV2, Mxfp4
from ..formats.bitplane import pack_planes
from ..formats.e2m1 import pack_e2m1
from ..formats.int4 import PACK
from ..utils.errors import CheckpointError

GROUP = 32
EIGHTS = -0x77777778  # int32 that packs eight zero points of 8
NAN = 0xFF  # an MXFP4 scale
CHUNK = 1 << 16  # blocks converted at once


def exact_format(type_: Type, shape: tuple[int, ...]) -> Format | None:
    """Return the format that stores a matrix of this type exactly, or None."""
    if type_ == Type.Q4_0 and shape[0] % PACK:  # gptq_v2 packs zeros of eight rows
        return None
    return EXACT[type_][0] if type_ in EXACT else None


def exact_parts(type_: Type, blocks: Tensor) -> dict[str, Tensor]:
    """Convert a matrix's blocks, uint8 [rows, blocks per row, bytes per block], to the parts of `exact_format`.

    Raises:
        CheckpointError: a scale is NaN, infinite or negative.
    """
    return EXACT[type_][1](blocks)


def _checked(scales: Tensor, wrong: Tensor) -> Tensor:
    if bool(wrong.any()):
        raise CheckpointError(f"{int(wrong.sum())} of its {scales.numel()} scales are NaN, infinite or negative")
    return scales


def _words(eights: Tensor) -> Tensor:
    """Pack the low nibbles of each int64's eight bytes into an int32, the first byte lowest."""
    for shift, mask in ((0, 0x0F0F0F0F0F0F0F0F), (4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        eights = (eights | eights >> shift) & mask
    return eights.view(torch.int32)[..., ::2]


def _gptq(blocks: Tensor) -> dict[str, Tensor]:
    rows = len(blocks)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
    eights = blocks[..., 2:].contiguous().view(torch.int64)  # bytes 0 to 7 and 8 to 15
    words = torch.cat([_words(eights), _words(eights >> 4)], dim=-1)
    return {
        "qweight": words.view(rows, -1).t().contiguous(),
        "qzeros": torch.full((scales.shape[1], rows // PACK), EIGHTS, dtype=torch.int32),
        "scales": _checked(scales, ~scales.isfinite()).t().contiguous(),
    }


def _hqq(blocks: Tensor) -> dict[str, Tensor]:
    scales = blocks[..., :2].contiguous().view(torch.float16).flatten()
    codes = (blocks[..., 2:] ^ 128).view(-1, GROUP)  # two's complement to offset binary
    return {
        "packed": torch.cat([pack_planes(chunk, 8) for chunk in codes.split(CHUNK)]),
        "scales": _checked(scales, ~(scales.isfinite() & (scales >= 0))),
        "zeros": torch.full_like(scales, 128),
    }


def _mxfp4(blocks: Tensor) -> dict[str, Tensor]:
    scales, packed = blocks[..., 0].contiguous(), blocks[..., 1:]
    codes = torch.cat([packed & 15, packed >> 4], dim=-1)  # a block's first half is in the low nibbles
    return {"packed": pack_e2m1(codes).view(len(blocks), -1), "scale": _checked(scales, scales == NAN)}


EXACT: dict[Type, tuple[Format, Callable[[Tensor], dict[str, Tensor]]]] = {
    Type.Q4_0: (GptqV2(GROUP), _gptq),
    Type.Q8_0: (HQQ(8, GROUP, fitted=False, scale_dtype="float16"), _hqq),
    Type.MXFP4: (Mxfp4(), _mxfp4),
}
