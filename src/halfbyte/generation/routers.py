"""Routers as generation runs them: those whose forward is known are one op (`ops.router`), any other runs its own."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ..ops.experts import top_experts

Route = Callable[
    [Tensor], tuple[Tensor, Tensor, Tensor]
]  # [T, K] → logits, weights and experts, as routers return them


class _Kind(NamedTuple):
    """What a router's forward does beyond softmax and top k.

    Args:
        normalized: whether weights are divided by their sum; None: as its `norm_topk_prob` says.
        wide: weights stay in fp32; else they have the logits' dtype.
    """

    normalized: bool | None
    wide: bool


def _key(code: CodeType) -> tuple:
    return code.co_code, code.co_names, code.co_consts[1:]  # the first is the docstring's place


# transformers writes the same forward into many models: what a forward does is told by its code, not by its name.
_KINDS = {
    _key(Qwen3MoeTopKRouter.forward.__code__): _Kind(None, False),
    _key(Qwen3_5MoeTopKRouter.forward.__code__): _Kind(True, False),
    _key(MixtralTopKRouter.forward.__code__): _Kind(True, True),
}


def known(router: nn.Module, dtype: torch.dtype) -> Route | None:
    """What a router without hooks computes from x of `dtype`, as one op; None if it must run its own forward."""
    code = getattr(type(router).forward, "__code__", None)
    kind = None if code is None else _KINDS.get(_key(code))
    own: Any = router
    if kind is None or "forward" in vars(own) or own.weight.dtype is not dtype:
        return None
    normalized = own.norm_topk_prob if kind.normalized is None else kind.normalized
    of_weights = torch.float32 if kind.wide else dtype

    def route(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return top_experts(x.reshape(-1, own.hidden_dim), own.weight, own.top_k, normalized, of_weights)

    return route
