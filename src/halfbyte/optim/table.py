"""Optimizers by transformers' `optim` names, constructed and grouped as in transformers' Trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..utils.notices import notice

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BLOCK = 256  # elements of an 8-bit state with one float32 scale
FEWEST_IN_8_BITS = 4096  # elements; bitsandbytes stores the states of smaller parameters in 32 bits
BETA3 = 0.9999  # AdEMAMix's third beta, as in transformers
# Parameters without weight decay, matched against lower-case names, as in transformers' Trainer.
WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")

# Matrices that Muon leaves to AdamW besides nn.Embedding: heads, whose rows are tokens or labels, and adapters on them
OUTER = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_embeddings|score|classifier)\.|lora_embedding_")
FUSED = re.compile(r"(?:^|\.)(qkv_proj|gate_up_proj)(?:\.base_layer)?(?:\.lora_B\.\w+)?(?:\.weight)?$")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter that requires a gradient; tied parameters appear once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters in two groups: with `weight_decay`, and norms and biases without it."""
    from torch import nn

    norms = {id(p) for module in model.modules() if isinstance(module, nn.LayerNorm) for p in module.parameters()}
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in trained_parameters(model).items():
        groups[id(parameter) not in norms and WITHOUT_DECAY.search(name.lower()) is None].append(parameter)
    return [{"params": groups[True], "weight_decay": weight_decay}, {"params": groups[False], "weight_decay": 0.0}]


class Settings(Protocol):
    """The settings of a run that optimizers read."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def adam_beta1(self) -> float: ...
    @property
    def adam_beta2(self) -> float: ...
    @property
    def use_peft(self) -> bool: ...


@dataclass(frozen=True)
class Optimizer:
    """A row of the table.

    Attributes:
        make: (model, settings) → the optimizer of the model's trained parameters.
        state_bytes: model (also on the meta device) → bytes of the optimizer's state on the weights' device between
            steps, excluding step counts and tables shared by all parameters.
        guarded: whether the step reads `found_inf` on the device, as torch.amp.GradScaler expects, and changes nothing
            if it is 1.
        capturable: whether a CUDA graph can capture the step, given `capturable=True` in the groups.
        host_bytes: model → bytes of the state in pinned host memory, of which `state_bytes` is a window; None: 0.
        scratch: whether a step on an accelerator allocates temporary memory of the size of the trained parameters.
        block: elements that a step treats together, so that it can step slices of parameters that are cut at multiples
            of it; 0: whole parameters.
        package: required extra package, or None.
    """

    make: Callable[[nn.Module, Settings], torch.optim.Optimizer]
    state_bytes: Callable[[nn.Module], int]
    guarded: bool = False
    capturable: bool = False
    host_bytes: Callable[[nn.Module], int] | None = None
    scratch: bool = False
    block: int = 0
    package: str | None = None

    @property
    def elementwise(self) -> bool:
        """Whether a step treats each element separately."""
        return self.block == 1


def _torch(kind: str, copies: int, betas: bool = False, fused: bool = False, **row: Any) -> Optimizer:
    """A torch optimizer with `copies` state tensors per parameter, in the parameter's dtype."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        import torch

        options: dict[str, Any] = {"fused": True} if fused else {}
        if betas:
            options["betas"] = settings.adam_beta1, settings.adam_beta2
        groups = parameter_groups(model, settings.weight_decay)
        return getattr(torch.optim, kind)(groups, lr=settings.learning_rate, **options)

    def state_bytes(model: nn.Module) -> int:
        return copies * sum(p.nbytes for p in trained_parameters(model).values())

    return Optimizer(make, state_bytes, block=1, **row)


def _make_adafactor(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    from transformers import Adafactor

    groups = parameter_groups(model, settings.weight_decay)
    return Adafactor(groups, lr=settings.learning_rate, scale_parameter=False, relative_step=False)


def _adafactor_bytes(model: nn.Module) -> int:
    """Bytes of Adafactor's fp32 state: row and column sums of matrices, one number per element of vectors."""

    def elements(shape: torch.Size) -> int:
        return shape.numel() if len(shape) < 2 else shape[:-1].numel() + (shape[:-2] + shape[-1:]).numel()

    return sum(4 * elements(parameter.shape) for parameter in trained_parameters(model).values())


def _fused(kind: str, storage: str, offload: bool = False) -> Optimizer:
    """An optimizer of `fused` with state in `storage` (embeddings: fp32), on the device or in host memory."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from . import fused

        embeddings = {id(parameter) for parameter in _embeddings(model)}
        groups = parameter_groups(model, settings.weight_decay)
        for group in groups:
            group["fp32_state"] = tuple(i for i, each in enumerate(group["params"]) if id(each) in embeddings)
        options: dict[str, Any] = {"lr": settings.learning_rate, "storage": storage, "offload": offload}
        if kind in {"AdamW", "Lion", "AdEMAMix"}:
            third = (BETA3,) if kind == "AdEMAMix" else ()
            options["betas"] = (settings.adam_beta1, settings.adam_beta2, *third)
        made: torch.optim.Optimizer = getattr(fused, kind)(groups, **options)
        return made

    def total(model: nn.Module) -> int:
        from ..ops.optimizer import RULES
        from ..ops.optimizer_state import STORAGES
        from . import fused

        embeddings = {id(parameter) for parameter in _embeddings(model)}
        states = len(RULES[getattr(fused, kind).rule].states)
        full = STORAGES["fp32"]

        def parameter_bytes(parameter: Tensor) -> int:
            wide = parameter.numel() < FEWEST_IN_8_BITS or id(parameter) in embeddings
            chosen = full if wide and STORAGES[storage].block else STORAGES[storage]
            return states * chosen.nbytes(parameter.numel())

        return sum(parameter_bytes(parameter) for parameter in trained_parameters(model).values())

    def window(model: nn.Module) -> int:
        from .offload import device_bytes

        return device_bytes(total(model))

    block = BLOCK if storage == "dynamic8" else 1
    if offload:
        return Optimizer(make, window, guarded=True, host_bytes=total, block=block)
    return Optimizer(make, total, guarded=True, capturable=True, block=block)


def _embeddings(model: nn.Module) -> list[Tensor]:
    from torch import nn

    return [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]


def _muon(bits: Literal[8, 32]) -> Optimizer:
    """Muon with its momentum in `bits` for matrices, and AdamW for vectors, embeddings and heads."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from functools import partial

        from .fused import AdamW
        from .muon import Muon

        if not settings.use_peft:
            notice(
                "muon-whole",
                "optim: muon trains all weights of the model. If the model was pretrained with AdamW, the change of"
                " optimizer costs quality (arXiv:2605.10468). Adapters do not suffer from it: set use_peft: true, or"
                " compare with optim: adamw",
            )
        rest = _not_for_muon(model)
        groups = [
            {
                **group,
                "params": [p for p in group["params"] if (id(p) not in rest) == use_muon],
                "use_muon": use_muon,
            }
            for use_muon in (True, False)
            for group in parameter_groups(model, settings.weight_decay)
        ]
        adamw = partial(AdamW, betas=(settings.adam_beta1, settings.adam_beta2))
        return Muon(groups, settings.learning_rate, momentum_bits=bits, splits=_fused_parts(model), rest=adamw)

    def state_bytes(model: nn.Module) -> int:
        from .muon import BLOCK as MOMENTUM_BLOCK

        rest = _not_for_muon(model)

        def parameter_bytes(parameter: Tensor) -> int:
            numel = parameter.numel()
            if id(parameter) in rest:
                return 8 * numel
            return 4 * numel if bits == 32 else numel + 4 * math.ceil(numel / MOMENTUM_BLOCK)

        return sum(parameter_bytes(parameter) for parameter in trained_parameters(model).values())

    return Optimizer(make, state_bytes, guarded=True, capturable=True, scratch=True)


def _not_for_muon(model: nn.Module) -> set[int]:
    """Ids of the trained parameters that are no matrices or stacks of these, or belong to embeddings or heads."""
    embeddings = {id(parameter) for parameter in _embeddings(model)}
    return {
        id(parameter)
        for name, parameter in trained_parameters(model).items()
        if parameter.dim() not in (2, 3) or id(parameter) in embeddings or OUTER.search(name)
    }


def _fused_parts(model: nn.Module) -> dict[Tensor, list[int]]:
    """Trained weight of a fused projection → the rows of each of its parts, for those of known layout.

    These are `qkv_proj`, whose parts follow from the config, and `gate_up_proj`; as weight of a linear, factor B of its
    adapter, or stack of experts [E, 2I, H].
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = getattr(config, "num_attention_heads", 0)
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (heads or 1)
    kv = (getattr(config, "num_key_value_heads", None) or heads) * width
    parts: dict[Tensor, list[int]] = {}
    for name, parameter in trained_parameters(model).items():
        found = FUSED.search(name)
        if found is None or parameter.dim() not in (2, 3):
            continue
        rows = parameter.shape[-2]
        if found[1] == "qkv_proj":
            sizes = [heads * width, kv, kv]
        else:
            sizes = [rows // 2] * 2
        stacked = parameter.dim() == 3 and parameter.shape[-1] != getattr(config, "hidden_size", None)
        if sum(sizes) == rows and not stacked:  # a stack [E, H, 2I] has its parts in columns
            parts[parameter] = sizes
    return parts


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": _fused("AdamW", "fp32"),
    "adamw_torch": _torch("AdamW", 2, betas=True, capturable=True, scratch=True),
    "adamw_torch_fused": _torch("AdamW", 2, betas=True, fused=True, guarded=True, capturable=True),
    "adafactor": Optimizer(_make_adafactor, _adafactor_bytes),
    "sgd": _torch("SGD", 0),
    "adagrad": _torch("Adagrad", 1, scratch=True),
    "rmsprop": _torch("RMSprop", 1, capturable=True, scratch=True),
    "adamw_8bit": _fused("AdamW", "dynamic8"),
    "adamw_bnb_8bit": _fused("AdamW", "dynamic8"),
    "paged_adamw_8bit": _fused("AdamW", "dynamic8", offload=True),
    "paged_adamw_32bit": _fused("AdamW", "fp32", offload=True),
    "ademamix": _fused("AdEMAMix", "fp32"),
    "ademamix_8bit": _fused("AdEMAMix", "dynamic8"),
    "paged_ademamix_8bit": _fused("AdEMAMix", "dynamic8", offload=True),
    "paged_ademamix_32bit": _fused("AdEMAMix", "fp32", offload=True),
    "lion_8bit": _fused("Lion", "dynamic8"),
    "lion_32bit": _fused("Lion", "fp32"),
    "paged_lion_8bit": _fused("Lion", "dynamic8", offload=True),
    "paged_lion_32bit": _fused("Lion", "fp32", offload=True),
    "rmsprop_bnb": _fused("RMSprop", "fp32"),
    "rmsprop_bnb_8bit": _fused("RMSprop", "dynamic8"),
    "rmsprop_bnb_32bit": _fused("RMSprop", "fp32"),
    "muon": _muon(32),
    "muon_8bit": _muon(8),
}
