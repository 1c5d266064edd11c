"""Which experts a token goes to, and how they are weighed, by a softmax over all of them, as most routers do it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..dispatch import op


@op("triton.router")
def top_experts(
    x: Tensor, weight: Tensor, top_k: int, normalized: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The k experts of the largest p = softmax(x·Wᵀ), computed in fp32, largest first.

    Args:
        x: [T, K] float.
        weight: [E, K] in its dtype.
        normalized: divide a token's weights by their sum.
        dtype: of the weights.

    Returns:
        Logits [T, E] in x's dtype, weights `dtype` [T, k], and int64 [T, k]. Of equal experts any may be chosen.
    """
    logits = F.linear(x, weight)
    scores, index = torch.topk(logits.float().softmax(-1), top_k)
    if normalized:
        scores /= scores.sum(-1, keepdim=True)
    return logits, scores.to(dtype), index
