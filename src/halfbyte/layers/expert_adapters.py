"""PEFT's LoRA on stacked experts (`target_parameters`), computed beside the stacks.

PEFT's `ParamWrapper` holds A and B and writes the files. Its forward adds the dense B·A of every expert to the whole
stack, which a quantized stack has no place for; so each wrapper gets a forward that hands the factors to
`layers.experts`. A layer's stacks have a wrapper each, one around the other, and that of the outermost runs.

In PEFT's files A is [E·r, K], an expert's rows together, and B is [N, r·E], an expert's columns E apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import Tensor, nn

from ..modeling.architectures import runs_experts
from ..utils.errors import ModelError
from .experts import HELD, NAME
from .plain import Adapter, read_adapters
from .router_adapters import fold_routers, router_wrappers


def expert_wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of each of PEFT's wrappers around a stack of experts; a stack's is named by its parameter."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and runs_experts(module.get_base_layer()):
            yield f"{name.replace('.base_layer', '')}.{module.parameter_name}", module


def parameter_wrappers(model: nn.Module) -> Iterator[Any]:
    """PEFT's wrappers of parameters: of experts and routers."""
    yield from (module for module in model.modules() if isinstance(module, ParamWrapper))


def run_beside(model: nn.Module) -> None:
    """Have PEFT's wrappers around experts compute their low-rank products beside the stacks, and where those are
    multiplied: PEFT makes factors where a stack is, which may wait in the host's memory. Those around routers fold."""
    fold_routers(model)
    for _, wrapper in expert_wrappers(model):
        wrapper.forward = MethodType(_forward, wrapper)
        experts = wrapper.get_base_layer()
        experts.config._experts_implementation = NAME
        for stack in experts.__dict__.get(HELD, {}).values():
            wrapper.lora_A.to(stack.window.device)
            wrapper.lora_B.to(stack.window.device)


def drop_inputs(model: nn.Module, probability: float) -> None:
    """Dropout on the inputs of all LoRA of `model` but routers', where PEFT, whose forward has no input of an expert,
    refuses it."""
    folding = {module for _, module in router_wrappers(model)}
    for module in model.modules():
        if isinstance(module, LoraLayer) and module not in folding:
            module.lora_dropout.update({name: nn.Dropout(probability) for name in module.lora_A})


def _forward(wrapper: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    experts = wrapper.get_base_layer()  # called, so that hooks on it run; transformers hands keywords on to ours
    return experts(hidden_states, top_k_index, top_k_weights, adapters=read_expert_adapters(wrapper))


def read_expert_adapters(wrapper: Any) -> dict[str, Adapter]:
    """Parameter → the adapter that is active on it: a [E, r, K] and b [E, N, r], views of PEFT's factors.

    Args:
        wrapper: the outermost around a layer's experts.

    Raises:
        ModelError: several adapters are active on a stack, or one is no plain LoRA.
    """
    found = {}
    while isinstance(wrapper, ParamWrapper):
        active = [] if wrapper.merged else read_adapters(wrapper)  # what is merged is in the stack
        if isinstance(active, str) or len(active) > 1:
            what = active if isinstance(active, str) else "several of its adapters are active"
            raise ModelError(f"{wrapper.parameter_name} of the experts: {what}", "activate one plain LoRA at a time")
        for each in active:
            a, b = by_expert(each.a, each.b, wrapper.num_experts)
            found[wrapper.parameter_name] = each._replace(a=a, b=b)
        wrapper = wrapper.base_layer
    return found


def by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """[E, r, K] and [E, N, r], views of PEFT's A [E·r, K] and B [N, r·E]."""
    return a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)


@torch.no_grad()
def changed_experts(model: nn.Module) -> tuple[int, int] | None:
    """How many experts' matrices the active adapters change, and how many they are on; None: they are on no experts."""
    changed, total = 0, 0
    for _, wrapper in expert_wrappers(model):
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                _, b = by_expert(wrapper.lora_A[name].weight, wrapper.lora_B[name].weight, wrapper.num_experts)
                changed, total = changed + int(b.flatten(1).any(1).sum()), total + wrapper.num_experts
    return (changed, total) if total else None
