"""The types a GGUF tensor can have, and one entry to quantize into any of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ..utils.errors import CheckpointError
from . import block_quants as blocks
from . import kquants

Type = GGMLQuantizationType
FLOATS = {Type.F32: torch.float32, Type.F16: torch.float16, Type.BF16: torch.bfloat16}
ENCODERS: dict[GGMLQuantizationType, Callable[[Tensor, Tensor | None], Tensor]] = {
    Type.Q8_0: blocks.q8_0,
    Type.Q4_0: blocks.q4_0,
    Type.Q4_1: blocks.q4_1,
    Type.Q5_0: blocks.q5_0,
    Type.Q5_1: blocks.q5_1,
    Type.Q2_K: kquants.q2_k,
    Type.Q3_K: kquants.q3_k,
    Type.Q4_K: kquants.q4_k,
    Type.Q5_K: kquants.q5_k,
    Type.Q6_K: kquants.q6_k,
}
# Values worked on at once: the temporaries of a search stay in the caches of a CPU, or fill a GPU.
CHUNK = {"cpu": 1 << 18}
CHUNK_ELSEWHERE = 1 << 26


def row_bytes(columns: int, type_: GGMLQuantizationType) -> int:
    """Bytes of one row of `columns` weights."""
    block, size = GGML_QUANT_SIZES[type_]
    return columns // block * size


@torch.no_grad()
def quantize(weight: Tensor, type_: GGMLQuantizationType, importance: Tensor | None = None) -> Tensor:
    """A weight as ggml stores it.

    Args:
        weight: any float dtype, [..., columns]; columns a multiple of the type's block.
        importance: [columns], > 0: mean square of the activation that meets each column (an importance matrix). The
            squared error is weighted by it: what is minimised is the expected error of the product.

    Returns:
        uint8 [..., bytes of a row], on the weight's device.

    Raises:
        CheckpointError: the weight has NaN or Inf, or does not fit fp16.
    """
    if type_ in FLOATS:
        stored = weight.to(FLOATS[type_])
        _check_finite(weight)
        if not bool(stored.isfinite().all()):
            raise CheckpointError("a weight does not fit float16", "export to bf16 or f32")
        return stored.contiguous().view(torch.uint8)
    block, size = GGML_QUANT_SIZES[type_]
    rows = weight.reshape(-1, weight.shape[-1])
    out = torch.empty(rows.shape[0], rows.shape[1] // block * size, dtype=torch.uint8, device=weight.device)
    step = max(1, CHUNK.get(weight.device.type, CHUNK_ELSEWHERE) // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        x = rows[start : start + step].float()
        _check_finite(x)
        weighed = None if importance is None else importance.to(x).expand_as(x).reshape(-1, block)
        out[start : start + step] = ENCODERS[type_](x.reshape(-1, block), weighed).view(x.shape[0], -1)
    return out.view(*weight.shape[:-1], -1)


def _check_finite(weight: Tensor) -> None:
    if not bool(weight.isfinite().all()):
        raise CheckpointError("a weight has NaN or Inf", "re-download the model, or train with a lower learning rate")
