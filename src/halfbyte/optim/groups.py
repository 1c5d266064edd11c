"""The parameters that an optimizer moves, and which of them decay, as transformers' Trainer groups them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")  # in lower-case names


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter that requires a gradient; tied ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as two groups: with `weight_decay`, and without it, which are norms and biases."""
    from torch import nn

    norms = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in trained_parameters(model).items():
        groups[id(parameter) not in norms and WITHOUT_DECAY.search(name.lower()) is None].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]
