"""The table of optimizers, by transformers' `optim` names, made with the arguments that its Trainer gives them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .groups import parameter_groups, trained_parameters

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BLOCK = 256  # elements of an 8-bit state with one float32 scale
FEWEST_IN_8_BITS = 4096  # elements; bitsandbytes keeps the states of smaller parameters in 32 bits
BETA3 = 0.9999  # of AdEMAMix, as in transformers


class Settings(Protocol):
    """What of a run's configuration an optimizer takes."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...


@dataclass(frozen=True)
class Optimizer:
    """A row of the table.

    Attributes:
        make: (model, settings) → the optimizer of the model's trained parameters.
        state_bytes: model, on the meta device too → bytes that the optimizer keeps between steps; step counts and
            tables that all parameters share are left out.
        guarded: reads `found_inf` on the device, as torch.amp.GradScaler asks, and leaves weights and state alone
            where it is 1.
        capturable: its step may be part of a CUDA graph, if its groups have `capturable=True`.
        paged: CUDA moves its state to the host where the device is full.
        scratch: a step on an accelerator needs as many bytes as the trained parameters have.
        elementwise: it steps a slice of a parameter as it would in the whole.
        package: to be installed for it.
    """

    make: Callable[[nn.Module, Settings], torch.optim.Optimizer]
    state_bytes: Callable[[nn.Module], int]
    guarded: bool = False
    capturable: bool = False
    paged: bool = False
    scratch: bool = False
    elementwise: bool = False
    package: str | None = None


def _torch(kind: str, copies: int, betas: bool = False, fused: bool = False, **row: Any) -> Optimizer:
    """An optimizer of torch that keeps `copies` of each parameter in its own dtype."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        import torch

        options: dict[str, Any] = {"fused": True} if fused else {}
        if betas:
            options["betas"] = settings.adam_beta1, settings.adam_beta2
        groups = parameter_groups(model, settings.weight_decay)
        return getattr(torch.optim, kind)(groups, lr=settings.learning_rate, **options)

    def state_bytes(model: nn.Module) -> int:
        return copies * sum(p.nbytes for p in trained_parameters(model).values())

    return Optimizer(make, state_bytes, elementwise=True, **row)


def _make_adafactor(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    from transformers import Adafactor

    groups = parameter_groups(model, settings.weight_decay)
    return Adafactor(groups, lr=settings.learning_rate, scale_parameter=False, relative_step=False)


def _adafactor_bytes(model: nn.Module) -> int:
    """float32 sums of rows and of columns of the last two dimensions; one number an element below two."""

    def elements(shape: torch.Size) -> int:
        return shape.numel() if len(shape) < 2 else shape[:-1].numel() + (shape[:-2] + shape[-1:]).numel()

    return sum(4 * elements(parameter.shape) for parameter in trained_parameters(model).values())


def _bitsandbytes(kind: str, copies: int, bits: int, paged: bool = False) -> Optimizer:
    """An optimizer of bitsandbytes that keeps `copies` of each parameter in 8 or 32 bits; embeddings' in 32."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        import bitsandbytes

        options: dict[str, Any] = {"lr": settings.learning_rate, "optim_bits": bits}
        if kind != "RMSprop":
            third = (BETA3,) if kind == "AdEMAMix" else ()
            options |= {"betas": (settings.adam_beta1, settings.adam_beta2, *third), "is_paged": paged}
        groups = parameter_groups(model, settings.weight_decay)
        made = getattr(bitsandbytes.optim, kind)(groups, **options)
        # Its own manager: the global one would keep embeddings alive, and take another model's parameters for them.
        made.mng = object.__new__(bitsandbytes.optim.GlobalOptimManager)
        made.mng.initialize()
        made.mng.override_config(_embeddings(model), "optim_bits", 32)
        made.mng.register_parameters(made.param_groups)
        return made

    def state_bytes(model: nn.Module) -> int:
        in_32_bits = {id(parameter) for parameter in _embeddings(model)}

        def parameter_bytes(parameter: Tensor) -> int:
            numel = parameter.numel()
            if bits == 32 or numel < FEWEST_IN_8_BITS or id(parameter) in in_32_bits:
                return 4 * copies * numel
            return copies * (numel + 4 * math.ceil(numel / BLOCK))

        return sum(parameter_bytes(parameter) for parameter in trained_parameters(model).values())

    return Optimizer(make, state_bytes, paged=paged, package="bitsandbytes")


def _embeddings(model: nn.Module) -> list[Tensor]:
    from torch import nn

    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw_torch": _torch("AdamW", 2, betas=True, capturable=True, scratch=True),
    "adamw_torch_fused": _torch("AdamW", 2, betas=True, fused=True, guarded=True, capturable=True),
    "adafactor": Optimizer(_make_adafactor, _adafactor_bytes),
    "sgd": _torch("SGD", 0),
    "adagrad": _torch("Adagrad", 1, scratch=True),
    "rmsprop": _torch("RMSprop", 1, capturable=True, scratch=True),
    "adamw_8bit": _bitsandbytes("AdamW", 2, 8),
    "adamw_bnb_8bit": _bitsandbytes("AdamW", 2, 8),
    "paged_adamw_8bit": _bitsandbytes("AdamW", 2, 8, paged=True),
    "paged_adamw_32bit": _bitsandbytes("AdamW", 2, 32, paged=True),
    "ademamix": _bitsandbytes("AdEMAMix", 3, 32),
    "ademamix_8bit": _bitsandbytes("AdEMAMix", 3, 8),
    "paged_ademamix_8bit": _bitsandbytes("AdEMAMix", 3, 8, paged=True),
    "paged_ademamix_32bit": _bitsandbytes("AdEMAMix", 3, 32, paged=True),
    "lion_8bit": _bitsandbytes("Lion", 1, 8),
    "lion_32bit": _bitsandbytes("Lion", 1, 32),
    "paged_lion_8bit": _bitsandbytes("Lion", 1, 8, paged=True),
    "paged_lion_32bit": _bitsandbytes("Lion", 1, 32, paged=True),
    "rmsprop_bnb": _bitsandbytes("RMSprop", 1, 32),
    "rmsprop_bnb_8bit": _bitsandbytes("RMSprop", 1, 8),
    "rmsprop_bnb_32bit": _bitsandbytes("RMSprop", 1, 32),
}
