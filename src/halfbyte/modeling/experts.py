"""`experts_implementation: halfbyte` in transformers' ExpertsInterface, computed by `autograd.experts`.

transformers' decorator records on each experts module the orientation of its stacks, whether they have biases and a
gate, and the gate function (`_apply_gate`). The default gate and the gates in `GATES` map to formulas of
`ops.experts.Unit`; any other gate is called as the module's own function. Every decorated module runs here except for
the reasons in `obstacle`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from ..autograd.experts import ExpertWeights, Gate, experts
from ..autograd.lora import LoRA
from ..formats.base import is_quantized
from ..layers.plain import Adapter
from ..ops.experts import Unit
from ..ops.glu import Activation
from ..utils.errors import ModelError
from .families import ACTIVATIONS

NAME = "halfbyte"
HOST_STACKS = "held_on_host"  # attribute of a module whose stacks are offloaded: name → HostStack

_ACTIVATIONS: dict[type, Activation] = {type(ACT2FN[name]): activation for name, activation in ACTIVATIONS.items()}


def _clamped(interleaved: bool, limit: str, alpha: str) -> Callable[[Any], Unit]:
    return lambda module: Unit("silu", interleaved, getattr(module, limit), getattr(module, alpha), 1.0)


# Classes whose own gate equals a formula of `ops.experts.Unit`.
GATES: dict[str, Callable[[Any], Unit]] = {
    "GptOssExperts": _clamped(True, "limit", "alpha"),
    "OpenAIPrivacyFilterExperts": _clamped(False, "limit", "alpha"),
    "MiniMaxM3VLExperts": _clamped(False, "swiglu_limit", "swiglu_alpha"),
}


class Window(Protocol):
    """Interface of `loading.expert_offload.ExpertWindow`, which copies the stacks of a layer to the device."""

    device: Any

    def fetch(self, at: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class HostStack:
    """An offloaded stack in host memory, as `autograd.experts` takes it.

    Attributes:
        like: the stack on the meta device.
        name: name of the parameter.
        at: index of the layer in the window.
    """

    like: Tensor
    name: str
    at: int
    window: Window

    requires_grad = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.like.shape)

    def fetch(self) -> Any:
        """The stack on the device, valid until another layer is fetched."""
        return self.window.fetch(self.at)[self.name]


def unit_of(module: Any) -> Unit | Gate:
    """The activation that an experts module computes between its two GEMMs."""
    if not module.has_gate:
        return module.act_fn
    make_unit = GATES.get(type(module).__name__)
    if make_unit is not None:
        return make_unit(module)
    activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)))
    if activation is not None and type(module)._apply_gate is _default_apply_gate:
        return Unit(activation)
    return module._apply_gate


def obstacle(module: Any) -> str | None:
    """Return why `experts_forward` cannot compute this experts module, or None."""
    if not hasattr(module, "has_gate"):  # set by transformers' decorator
        return "its class does not use transformers' ExpertsInterface"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts have a norm after them"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are sharded across processes"
    return None


def experts_forward(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    adapters: Mapping[str, Adapter] | None = None,
) -> Tensor:
    """The weighted sum over each token's experts.

    Args:
        module: an experts module of transformers.
        hidden_states: [T, H].
        top_k_index: integers [T, k].
        top_k_weights: [T, k].
        adapters: parameter → its LoRA: a [E, r, K], b [E, N, r].

    Returns:
        [T, H] in the dtype of `hidden_states`.

    Raises:
        ModelError: the module is not supported (`obstacle`), or a stack requires a gradient.
    """
    reason = obstacle(module)
    if reason is not None:
        fix = "set experts_implementation: grouped_mm, with experts in 16 bits"
        raise ModelError(f"experts_implementation: {NAME} does not run {type(module).__name__}: {reason}", fix)
    first, second = names_of(module)
    loras = adapters or {}
    result = experts(
        hidden_states, top_k_index, top_k_weights, weights_of(module), _lora(loras.get(first)),
        _lora(loras.get(second)), max([0.0, *(lora.dropout for lora in loras.values())]),
    )  # fmt: skip
    return result.to(hidden_states.dtype)


def names_of(module: Any) -> tuple[str, str]:
    """Parameter names of the two stacks of an experts module in transformers."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def weights_of(module: Any) -> ExpertWeights:
    """The weights, biases and activation of a supported experts module."""
    first, second = names_of(module)
    host_stacks = module.__dict__.get(HOST_STACKS, {})
    return ExpertWeights(
        host_stacks.get(first) or matrices_of(module, first),
        host_stacks.get(second) or matrices_of(module, second),
        unit_of(module),
        bias_of(module, first),
        bias_of(module, second),
    )


def matrices_of(module: Any, name: str) -> Tensor:
    """[E, N, K]: a quantized stack as stored, a plain one transposed if the module stores [E, K, N]."""
    stack = getattr(module, name)
    return stack.mT if module.is_transposed and not is_quantized(stack) else stack


def bias_of(module: Any, name: str) -> Tensor | None:
    """[E, N]: the bias of a stack's outputs, or None."""
    return getattr(module, f"{name}_bias") if module.has_bias else None


def _lora(adapter: Adapter | None) -> LoRA | None:
    return None if adapter is None else LoRA(adapter.a, adapter.b, adapter.scaling)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
