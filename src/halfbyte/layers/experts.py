"""A layer's experts by `autograd.experts`: `experts_implementation: halfbyte` in transformers' ExpertsInterface.

transformers' decorator says of a module how its stacks lie, whether they have biases and a gate, and what the gate is
(`_apply_gate`): the default one and those of `GATES` are formulas of ours, any other is the module's own function. So
whatever the decorator is on runs here, but for what `obstacle` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from ..autograd.experts import ExpertWeights, Gate, experts
from ..autograd.lora import LoRA, is_quantized
from ..modeling.families import ACTIVATIONS
from ..ops.experts import Unit
from ..ops.glu import Activation
from ..utils.errors import ModelError
from .plain import Adapter

NAME = "halfbyte"
HELD = "held_on_host"  # of a module: name → HostStack, where its stacks wait in the host's memory

_ACTIVATIONS: dict[type, Activation] = {type(ACT2FN[name]): each for name, each in ACTIVATIONS.items()}


def _clamped(interleaved: bool, limit: str, alpha: str) -> Callable[[Any], Unit]:
    return lambda module: Unit("silu", interleaved, getattr(module, limit), getattr(module, alpha), 1.0)


# Classes with a gate of their own that is a formula of ours.
GATES: dict[str, Callable[[Any], Unit]] = {
    "GptOssExperts": _clamped(True, "limit", "alpha"),
    "OpenAIPrivacyFilterExperts": _clamped(False, "limit", "alpha"),
    "MiniMaxM3VLExperts": _clamped(False, "swiglu_limit", "swiglu_alpha"),
}


class Window(Protocol):
    """What brings the stacks of a layer to the device: `memory.expert_offload`."""

    device: Any

    def arrive(self, at: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class HostStack:
    """A stack that waits in the host's memory, as `autograd.experts` takes it.

    Attributes:
        like: the stack, without data.
        name: of the parameter.
        at: the layer's number in the window.
    """

    like: Tensor
    name: str
    at: int
    window: Window

    requires_grad = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    def arrived(self) -> Any:
        """The stack on the device, to be read before another layer's is asked for."""
        return self.window.arrive(self.at)[self.name]


def unit_of(module: Any) -> Unit | Gate:
    """What a module of experts computes between its two products."""
    if not module.has_gate:
        return module.act_fn
    known = GATES.get(type(module).__name__)
    if known is not None:
        return known(module)
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)))
    if activation is not None and type(module)._apply_gate is _default_apply_gate:
        return Unit(activation)
    return module._apply_gate


def obstacle(module: Any) -> str | None:
    """Why this module of experts must compute itself; None if it need not."""
    if not hasattr(module, "has_gate"):  # what transformers' decorator sets
        return "transformers' ExpertsInterface does not know its experts"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm after them"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are divided among processes"
    return None


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
        top_k_index: integers [T, k].
        top_k_weights: [T, k].
        adapters: parameter → its LoRA: a [E, r, K], b [E, N, r].

    Returns:
        [T, H] in the dtype of `hidden_states`.

    Raises:
        ModelError: this module must compute itself, or a stack wants a gradient.
    """
    reason = obstacle(module)
    if reason is not None:
        fix = "set experts_implementation: grouped_mm, with experts in 16 bits"
        raise ModelError(f"experts_implementation: {NAME} does not run {type(module).__name__}: {reason}", fix)
    first, second = names_of(module)
    found = adapters or {}
    result = experts(
        hidden_states, top_k_index, top_k_weights, weights_of(module), _lora(found.get(first)),
        _lora(found.get(second)), max([0.0, *(each.dropout for each in found.values())]),
    )  # fmt: skip
    return result.to(hidden_states.dtype)


def names_of(module: Any) -> tuple[str, str]:
    """What transformers calls the two stacks of a module of experts."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def weights_of(module: Any) -> ExpertWeights:
    """What a module of experts has, where there is no `obstacle`."""
    first, second = names_of(module)
    held = module.__dict__.get(HELD, {})
    return ExpertWeights(
        held.get(first) or matrices_of(module, first),
        held.get(second) or matrices_of(module, second),
        unit_of(module),
        bias_of(module, first),
        bias_of(module, second),
    )


def matrices_of(module: Any, name: str) -> Tensor:
    """[E, N, K], whichever way a plain one lies; a quantized one always lies so."""
    stack = getattr(module, name)
    return stack.mT if module.is_transposed and not is_quantized(stack) else stack


def bias_of(module: Any, name: str) -> Tensor | None:
    """[E, N], of the products with a stack."""
    return getattr(module, f"{name}_bias") if module.has_bias else None


def _lora(adapter: Adapter | None) -> LoRA | None:
    return None if adapter is None else LoRA(adapter.a, adapter.b, adapter.scaling)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
