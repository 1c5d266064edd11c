"""The stacked experts of a 16-bit model, matrix by matrix: what `mixed` measures and stores them by."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.experts import bias_of, matrices_of, names_of
from ..modeling.architectures import expert_stacks


class Stacks(NamedTuple):
    """Stacks of a module that share a format: each alone, or both of one whose stacks lie transposed, since it has one
    orientation.

    Attributes:
        module: transformers' experts.
        leaves: names of the stacks in it.
    """

    module: Any
    leaves: tuple[str, ...]

    def matrices(self) -> dict[str, Tensor]:
        """Each stack as [E, N, K], whichever way it lies."""
        return {leaf: matrices_of(self.module, leaf).detach() for leaf in self.leaves}


def measurable_stacks(model: Any) -> dict[str, Stacks]:
    """Pattern that names them in `quantization:` → the stacks of `model` that may be quantized."""
    found: dict[str, Stacks] = {}
    for name, module in expert_stacks(model).items():
        place, _, leaf = name.rpartition(".")
        key = f"{place}.*" if module.is_transposed else name
        found[key] = Stacks(module, (*(found[key].leaves if key in found else ()), leaf))
    return found


Meet = Callable[[str, int, Tensor, Tensor, Tensor], None]


@contextlib.contextmanager
def watch_experts(stacks: Mapping[str, Stacks], meet: Meet) -> Iterator[None]:
    """Within it, a backward calls `meet` for each product of an expert: name of the stacks, the expert, its matrix
    [N, K], the rows x [S, K] and the gradient of the product [S, N]."""
    modules = {id(each.module): each.module for each in stacks.values()}
    names = {(id(each.module), leaf): name for name, each in stacks.items() for leaf in each.leaves}
    try:
        for module in modules.values():
            module.forward = partial(_forward, module, names, meet)
        yield
    finally:
        for module in modules.values():
            del module.forward


def _forward(
    module: Any,
    names: Mapping[tuple[int, str], str],
    meet: Meet,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """transformers' sum over each token's experts, an expert after the other."""
    total = torch.zeros_like(hidden_states)
    first, second = names_of(module)
    unit = module._apply_gate if module.has_gate else module.act_fn

    def product(leaf: str, expert: int, x: Tensor) -> Tensor:
        weight, biases = matrices_of(module, leaf).detach()[expert], bias_of(module, leaf)
        result = nn.functional.linear(x, weight, None if biases is None else biases[expert])
        name = names.get((id(module), leaf))
        if result.requires_grad and name is not None:
            result.register_hook(partial(meet, name, expert, weight, x.detach()))
        return result

    for expert in top_k_index.unique().tolist():
        tokens, places = torch.where(top_k_index == expert)
        hidden = product(second, expert, unit(product(first, expert, hidden_states[tokens])))
        weighted = hidden * top_k_weights[tokens, places, None].to(hidden.dtype)
        total = total.index_add(0, tokens, weighted.to(total.dtype))
    return total
