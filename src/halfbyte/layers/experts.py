"""A layer's experts, which transformers' ExpertsInterface knows by "halfbyte": stacks [E, N, K], quantized or not, with
plain LoRA beside them. A loop over the experts that tokens chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from .plain import Adapter

NAME = "halfbyte"


def experts_forward(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: Mapping[str, Adapter] | None = None,
) -> Tensor:
    """The sum over each token's experts, weighted.

    Args:
        module: transformers' experts.
        hidden_states: [T, H].
        top_k_index: int64 [T, k]; an index of E is no expert.
        top_k_weights: [T, k].
        adapters: parameter → its LoRA: a [E, r, K], b [E, N, r].

    Returns:
        [T, H] in the dtype of `hidden_states`.
    """
    adapters = adapters or {}
    result = torch.zeros_like(hidden_states)
    for expert in top_k_index.unique().tolist():
        if expert == module.num_experts:
            continue
        token, place = torch.where(top_k_index == expert)
        up = _product(module, "gate_up_proj" if module.has_gate else "up_proj", hidden_states[token], expert, adapters)
        gated = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        down = _product(module, "down_proj", gated, expert, adapters) * top_k_weights[token, place, None]
        result = result.index_add(0, token, down.to(result.dtype))
    return result


def _product(module: Any, name: str, x: Tensor, expert: int, adapters: Mapping[str, Adapter]) -> Tensor:
    weight = getattr(module, name)[expert]
    y = F.linear(x, weight.T if module.is_transposed else weight)
    if lora := adapters.get(name):
        dropped = F.dropout(x, lora.dropout) if lora.dropout else x
        y = y + F.linear(F.linear(dropped, lora.a[expert].to(y.dtype)), lora.b[expert].to(y.dtype)) * lora.scaling
    return y + getattr(module, f"{name}_bias")[expert].to(y.dtype) if module.has_bias else y


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
