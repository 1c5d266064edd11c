"""Types of GGUF that a format of halfbyte holds value for value, and their blocks as that format's parts.

    Q4_0   d · (code − 8), 32 weights a scale, fp16    gptq_v2 with groups of 32 and zeros of 8
    Q8_0   d · code, 32 weights a scale, fp16          hqq with 8 bits: codes + 128, zeros of 128, scales in fp16
    MXFP4  E2M1 and a power of two per 32 weights      mxfp4, the same codes in another order

No format holds the others. Q4_1 and Q5_1 add a minimum, which is no multiple of the scale, so that no zero point in 16
bits gives their values; a K-quant's scale is a product of two numbers, per 16 or 32 weights; Q5_0 has 5-bit integers.
Blocks: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from ..formats import HQQ, Format, GptqV2, Mxfp4
from ..ops.bitplane import pack_planes
from ..ops.e2m1 import pack_e2m1
from ..ops.int4 import PACK
from ..utils.errors import CheckpointError

GROUP = 32
EIGHTS = -0x77777778  # int32 of eight zeros of 8
NAN = 0xFF  # of MXFP4's scales
AT_ONCE = 1 << 16  # blocks whose planes are made together


def kept_format(type_: Type, shape: tuple[int, ...]) -> Format | None:
    """The format that holds a matrix of this type without a change of value; None: there is none."""
    if type_ == Type.Q4_0 and shape[0] % PACK:  # gptq_v2 packs zeros of eight rows
        return None
    return KEPT[type_][0] if type_ in KEPT else None


def kept_parts(type_: Type, blocks: Tensor) -> dict[str, Tensor]:
    """The parts of `kept_format` from a matrix's blocks, uint8 [rows, blocks of a row, bytes of a block].

    Raises:
        CheckpointError: a scale that no quantizer writes.
    """
    return KEPT[type_][1](blocks)


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., 32] codes: ggml has the first half of a block in the low nibbles, the second in the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _checked(scales: Tensor, wrong: Tensor) -> Tensor:
    if bool(wrong.any()):
        raise CheckpointError(f"{int(wrong.sum())} of its {scales.numel()} scales are NaN, infinite or negative")
    return scales


def _words(eights: Tensor) -> Tensor:
    """int32: the low nibbles of the eight bytes of each int64, the first byte's lowest."""
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
    codes = (blocks[..., 2:] ^ 128).view(-1, GROUP)  # two's complement to what is 128 more
    return {
        "packed": torch.cat([pack_planes(part, 8) for part in codes.split(AT_ONCE)]),
        "scales": _checked(scales, ~(scales.isfinite() & (scales >= 0))),
        "zeros": torch.full_like(scales, 128),
    }


def _mxfp4(blocks: Tensor) -> dict[str, Tensor]:
    scales = blocks[..., 0].contiguous()
    return {
        "packed": pack_e2m1(_nibbles(blocks[..., 1:])).view(len(blocks), -1),
        "scale": _checked(scales, scales == NAN),
    }


KEPT: dict[Type, tuple[Format, Callable[[Tensor], dict[str, Tensor]]]] = {
    Type.Q4_0: (GptqV2(GROUP), _gptq),
    Type.Q8_0: (HQQ(8, GROUP, fitted=False, scale_dtype="float16"), _hqq),
    Type.MXFP4: (Mxfp4(), _mxfp4),
}
