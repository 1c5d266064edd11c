"""Plain linears, x·Wᵀ + b with or without plain LoRA, as read from modules of torch and PEFT.

Fused training functions, generation and quantization-aware training compute a linear without calling its forward.
They read it here, at every call, since an adapter can change between calls (`set_adapter`, `disable_adapter`,
`merge_adapter`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..autograd.linear import frozen_linear
from ..autograd.lora import dropped
from ..utils.hardware import onednn_beats_mkl
from .bnb import is_bnb_linear, is_bnb_lora, weight_view


class FrozenLinear(nn.Linear):
    """`nn.Linear` in float32 whose weight is frozen; on CPUs oneDNN multiplies where torch would call MKL."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type) or self.weight.requires_grad:
            return F.linear(input, self.weight, self.bias)
        return frozen_linear(input, self.weight, self.bias)


Forward = TypeVar("Forward", bound=Callable[..., Any])

EQUAL_FORWARDS: set[Callable[..., Any]] = set()  # bound to instances; see `equals_its_class`
FORWARDS = (nn.Linear.forward, FrozenLinear.forward)  # forwards that compute x·Wᵀ + b


class ColumnDropout(nn.Dropout):
    """PEFT's dropout of an adapter whose input is divided among ranks: each drops its columns of one common mask.

    Args:
        first_column: index of this rank's first column in the full input.
    """

    def __init__(self, p: float, first_column: int):
        super().__init__(p)
        self.first_column = first_column

    def forward(self, input: Tensor) -> Tensor:
        return dropped(input, self.p, self.first_column) if self.training and self.p else input


class Adapter(NamedTuple):
    """Plain LoRA: scaling · (dropout(x) · Aᵀ) · Bᵀ.

    Attributes:
        a: [r, K].
        b: [N, r].
        dropout: probability of dropping an input; 0 in evaluation.
        dora: PEFT's layer with DoRA's magnitude, or None; always None unless it is asked for.
        bias: [N], added to u·Bᵀ before it is scaled, or None; always None unless it is asked for.
        first_column: index of the input's first column in the full input, of which a rank may have some columns.
    """

    name: str
    a: Tensor
    b: Tensor
    scaling: float
    dropout: float
    dora: DoraLinearLayer | None = None
    bias: Tensor | None = None
    first_column: int = 0


class PlainLinear(NamedTuple):
    """A linear x·Wᵀ + b and the adapters to add to it.

    Attributes:
        base: the module.
        weight: [N, K]; the module's, or a `QuantizedTensor` that shares the memory of a bitsandbytes weight.
    """

    base: nn.Linear
    weight: Tensor
    adapters: list[Adapter]

    @property
    def bias(self) -> Tensor | None:
        """[N] or None."""
        return self.base.bias

    @property
    def out_features(self) -> int:
        return self.base.out_features

    @property
    def in_features(self) -> int:
        return self.base.in_features


def read_linear(
    module: nn.Module, names: Iterable[str] | None = None, with_dora: bool = False, with_bias: bool = False
) -> PlainLinear | str:
    """The base linear and adapters of `module`, or the reason why only its own forward can compute it.

    Args:
        module: a linear of torch, halfbyte or bitsandbytes, or PEFT's LoRA around one. A subclass of PEFT's LoRA with
            another forward may give the reason in its attribute `own_forward`.
        names: names of the adapters to read; None: the active ones.
        with_dora: whether the caller computes DoRA; else it is a reason.
        with_bias: whether the caller adds the bias of an adapter (PEFT's `lora_bias`); else it is a reason.
    """
    base: Any = module
    adapters: list[Adapter] = []
    if isinstance(module, BaseTunerLayer):
        if not is_plain_lora(module):
            return getattr(type(module), "own_forward", _own_forward(module))
        read = read_adapters(module, names, with_dora, with_bias)
        if isinstance(read, str):
            return read
        a, b = factor_holders(module)
        if hooked(module) or any(hooked(a[adapter.name]) or hooked(b[adapter.name]) for adapter in read):
            return "it has hooks"
        base, adapters = module.base_layer, read
    stored = type(base).forward not in FORWARDS and is_bnb_linear(base)
    if not isinstance(base, nn.Linear) or not (stored or type(base).forward in FORWARDS):
        return _own_forward(base)
    if hooked(base):
        return "it has hooks"
    weight = weight_view(base) if stored else base.weight
    return weight if isinstance(weight, str) else PlainLinear(base, weight, adapters)


def factor_holders(module: Any) -> tuple[nn.ModuleDict, nn.ModuleDict]:
    """Return PEFT's holders of the factors A and of the factors B of a module with LoRA, by the adapters' names."""
    return module.lora_A, module.lora_B


def is_plain_lora(module: nn.Module) -> bool:
    """Return whether a module runs the forward of PEFT's LoRA around a linear, of torch or of bitsandbytes."""
    if isinstance(module, LoraLinear):
        return type(module).forward is LoraLinear.forward
    return isinstance(module, BaseTunerLayer) and is_bnb_lora(module)


def is_dora(module: Any, name: str) -> bool:
    """Return whether an adapter of a module with LoRA is DoRA."""
    return isinstance(module.lora_variant.get(name), DoraLinearVariant)


def read_adapters(
    module: Any, names: Iterable[str] | None = None, with_dora: bool = False, with_bias: bool = False
) -> list[Adapter] | str:
    """The adapters of PEFT's LoRA around a linear, or the reason why one is not plain LoRA.

    Arguments as in `read_linear`. Hooks are not checked.
    """
    if module.merged:
        return "its adapter is merged"
    if names is None:
        names = () if module.disable_adapters else module.active_adapters
    adapters = []
    for name in names:
        if name not in module.lora_A:
            continue
        variant, dora = module.lora_variant.get(name), None
        if with_dora and is_dora(module, name):
            dora = module.lora_magnitude_vector[name]
        elif variant is not None:
            return f"its LoRA is a variant ({type(variant).__name__})"
        a, b = module.lora_A[name], module.lora_B[name]
        dropout = module.lora_dropout[name]
        if b.bias is not None and not with_bias:
            return "its lora_B has a bias"
        if not isinstance(dropout, (nn.Dropout, nn.Identity)):
            return "its adapter's dropout is not PEFT's own"
        probability = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        first_column = getattr(dropout, "first_column", 0)
        adapters.append(
            Adapter(name, a.weight, b.weight, module.scaling[name], probability, dora, b.bias, first_column)
        )
    return adapters


def equals_its_class(forward: Forward) -> Forward:
    """Mark a forward that is bound to instances and computes what their class does, so that `hooked` allows it."""
    EQUAL_FORWARDS.add(forward)
    return forward


def hooked(module: nn.Module) -> bool:
    """Whether the module has hooks or an instance forward, which a fused function would bypass."""
    forward = module.__dict__.get("forward")
    return has_hooks(module) or (forward is not None and getattr(forward, "__func__", None) not in EQUAL_FORWARDS)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(hooks)


def _own_forward(module: nn.Module) -> str:
    return f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__} has a forward of its own"


def multiply_by_onednn(model: nn.Module) -> int:
    """Turn the float32 linears under adapters into `FrozenLinear`s, in place, on a CPU where oneDNN is faster than MKL.

    Returns:
        The number of changed linears. Their names, weights and adapters do not change.
    """
    if not onednn_beats_mkl():
        return 0
    bases = [module.get_base_layer() for module in model.modules() if isinstance(module, BaseTunerLayer)]
    linears = [base for base in bases if type(base) is nn.Linear and "forward" not in vars(base)]
    frozen = [
        linear
        for linear in linears
        if all(p.is_cpu and p.dtype is torch.float32 and not p.requires_grad for p in linear.parameters())
    ]
    for linear in frozen:
        linear.__class__ = FrozenLinear
    return len(frozen)
