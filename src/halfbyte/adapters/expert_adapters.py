"""PEFT's LoRA on stacked experts (`target_parameters`), computed as separate low-rank GEMMs.

PEFT's `ParamWrapper` owns A and B and writes the files. Its own forward adds the dense B·A of every expert to the
stack, which a quantized stack does not support. So each wrapper gets a forward that passes the factors to
`modeling.experts`. A layer has one wrapper per stack, nested in each other; the forward of the outermost one runs.

In PEFT's files A is [E·r, K] with an expert's rows contiguous, and B is [N, r·E] with an expert's columns at stride E.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from ..layers.plain import Adapter, factor_holders, read_adapters
from ..modeling.architectures import runs_experts
from ..modeling.experts import HOST_STACKS, NAME
from ..modeling.token_rows import attach_row_forwards
from ..utils.errors import ModelError
from .router_adapters import attach_router_forwards, router_wrappers


def expert_wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name of the stack's parameter and module, for each PEFT wrapper around a stack of experts."""
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and runs_experts(module.get_base_layer()):
            yield f"{name.replace('.base_layer', '')}.{module.parameter_name}", module


def parameter_wrappers(model: nn.Module) -> Iterator[Any]:
    """All parameter wrappers of PEFT, around experts and routers."""
    yield from (module for module in model.modules() if isinstance(module, ParamWrapper))


def attach_adapter_forwards(model: nn.Module) -> None:
    """Replace the forward of PEFT's wrappers: experts compute separate low-rank GEMMs, routers use a folded weight.

    Trained rows of embeddings are looked up without a copy of the embedding, and tied copies of a head get its sizes.

    The factors of offloaded stacks move to the computing device; PEFT creates them in host memory next to the stack.
    """
    attach_router_forwards(model)
    attach_row_forwards(model)
    for module in model.modules():  # PEFT gives the copy of a tied head the sizes of the embedding
        if isinstance(module, ModulesToSaveWrapper) and isinstance(module.original_module, nn.Linear):
            copies: Any = module.modules_to_save.values()
            for copy in copies:
                copy.out_features, copy.in_features = module.original_module.weight.shape
    for _, wrapper in expert_wrappers(model):
        wrapper.forward = MethodType(_forward, wrapper)
        experts = wrapper.get_base_layer()
        experts.config._experts_implementation = NAME
        for stack in experts.__dict__.get(HOST_STACKS, {}).values():
            for holder in factor_holders(wrapper):
                holder.to(stack.window.device)


def set_adapter_dropout(model: nn.Module, probability: float) -> None:
    """Set dropout on the inputs of every LoRA of `model` except routers; PEFT itself refuses dropout on parameters."""
    folding = {module for _, module in router_wrappers(model)}
    for module in model.modules():
        if isinstance(module, LoraLayer) and module not in folding:
            module.lora_dropout.update({name: nn.Dropout(probability) for name in factor_holders(module)[0]})


def _forward(wrapper: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    experts = wrapper.get_base_layer()  # called as a module, so that its hooks run; transformers forwards keywords
    return experts(hidden_states, top_k_index, top_k_weights, adapters=read_expert_adapters(wrapper))


def read_expert_adapters(wrapper: Any) -> dict[str, Adapter]:
    """Parameter name → its active adapter: a [E, r, K] and b [E, N, r], views of PEFT's factors.

    Args:
        wrapper: the outermost wrapper around a layer's experts.

    Raises:
        ModelError: several adapters are active on a stack, or one is not plain LoRA.
    """
    adapters = {}
    while isinstance(wrapper, ParamWrapper):
        active = [] if wrapper.merged else read_adapters(wrapper)
        if isinstance(active, str) or len(active) > 1:
            reason = active if isinstance(active, str) else "several of its adapters are active"
            raise ModelError(f"{wrapper.parameter_name} of the experts: {reason}", "activate one plain LoRA at a time")
        for adapter in active:
            a, b = by_expert(adapter.a, adapter.b, wrapper.num_experts)
            adapters[wrapper.parameter_name] = adapter._replace(a=a, b=b)
        wrapper = wrapper.base_layer
    return adapters


def by_expert(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """[E, r, K] and [E, N, r], views of PEFT's A [E·r, K] and B [N, r·E]."""
    return a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts).permute(2, 0, 1)


def expert_factors(wrapper: Any, name: str = "default") -> tuple[Tensor, Tensor]:
    """A [E, r, K] and B [E, N, r] of an adapter, views of the factors in PEFT's wrapper around a stack of experts."""
    a, b = factor_holders(wrapper)
    return by_expert(a[name].weight, b[name].weight, wrapper.num_experts)  # type: ignore[arg-type]


@torch.no_grad()
def changed_experts(model: nn.Module) -> tuple[int, int] | None:
    """Number of expert matrices with a nonzero B, and of all adapted ones; None if no experts are adapted."""
    changed, total = 0, 0
    for _, wrapper in expert_wrappers(model):
        for name in wrapper.active_adapters:
            if name in factor_holders(wrapper)[0]:
                _, b = expert_factors(wrapper, name)
                changed, total = changed + int(b.flatten(1).any(1).sum()), total + wrapper.num_experts
    return (changed, total) if total else None
