"""Constructors and state bytes of the table's rows for torch's and halfbyte's own optimizers.

Each class has the methods `make` and `state_bytes` of a row (`table.Optimizer`). Nothing imports torch before a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..utils.notices import notice
from .groups import (
    Settings,
    embedding_weights,
    matched,
    matched_groups,
    parameter_groups,
    target_matrices,
    trained_parameters,
)
from .options import BADAM_OPTIONS, LOW_RANK_NAMES, SLICED, STORAGE_OF_BITS, Option, option_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .badam import Blocks
    from .low_rank import LowRank

WITHOUT_SCALES = ("weight", "fp32", "bf16")  # storages that small parameters and embeddings have too
FEWEST_IN_8_BITS = 4096  # elements; bitsandbytes stores the states of smaller parameters in 32 bits


def adam_keywords(settings: Settings) -> dict[str, Any]:
    """Return Adam's numbers as keywords of torch's optimizers."""
    return {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_epsilon}


@dataclass(frozen=True)
class TorchFamily:
    """An optimizer of torch.optim.

    Attributes:
        name: of the class.
        copies: state tensors per parameter, in the parameter's dtype; or options → their number.
        options: keys of `optim_args`.
        reads_adam: whether it takes betas and eps.
        fused: whether it is told to use torch's fused kernel.
    """

    name: str
    copies: int | Callable[[dict[str, Any]], int]
    options: Mapping[str, Option] = field(default_factory=dict)
    reads_adam: bool = False
    fused: bool = False

    def make(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        import torch

        keywords = option_values(self.options, settings.optim_args) | ({"fused": True} if self.fused else {})
        if self.reads_adam:
            keywords |= adam_keywords(settings)
        groups = parameter_groups(model, settings)
        return getattr(torch.optim, self.name)(groups, lr=settings.learning_rate, **keywords)

    def state_bytes(self, model: nn.Module, settings: Settings) -> int:
        copies = self.copies
        if not isinstance(copies, int):
            copies = copies(option_values(self.options, settings.optim_args))
        return copies * sum(p.nbytes for p in trained_parameters(model).values())


def make_adafactor(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return transformers' Adafactor with a fixed learning rate."""
    from transformers import Adafactor

    groups = parameter_groups(model, settings)
    return Adafactor(groups, lr=settings.learning_rate, scale_parameter=False, relative_step=False)


def adafactor_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of Adafactor's fp32 state: row and column sums of matrices, one number per element of vectors."""

    def elements(shape: torch.Size) -> int:
        return shape.numel() if len(shape) < 2 else shape[:-1].numel() + (shape[:-2] + shape[-1:]).numel()

    return sum(4 * elements(parameter.shape) for parameter in trained_parameters(model).values())


@dataclass(frozen=True)
class FusedFamily:
    """An optimizer of `fused` with state on the device or in host memory.

    Attributes:
        name: of the class.
        storage: of the state without the option `storage` or `optim_bits`; "weight": bf16 for bf16 weights as in torch,
            otherwise fp32.
        offload: whether the state is in host memory.
        options: keys of `optim_args`.
    """

    name: str
    storage: str
    offload: bool
    options: Mapping[str, Option]

    def storages(self, settings: Settings) -> tuple[str, dict[str, str]]:
        """Storage of the state, and of the state of parameters by pattern."""
        bits = settings.optim_bits
        if isinstance(bits, int):
            return STORAGE_OF_BITS[bits], {}
        storage: str = option_values(self.options, settings.optim_args)["storage"]
        return storage, {pattern: STORAGE_OF_BITS[number] for pattern, number in (bits or {}).items()}

    def make(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from . import fused

        options = option_values(self.options, settings.optim_args)
        options["storage"], patterns = self.storages(settings)
        if self.name not in ("RMSprop", "LARS"):
            betas = [settings.adam_beta1, settings.adam_beta2]
            betas += [options.pop("beta3")] if self.name == "AdEMAMix" else []
            options["betas"] = tuple(betas)
        if self.name in ("AdamW", "AdEMAMix"):
            options["eps"] = (settings.optim_args or {}).get("eps", settings.adam_epsilon)
        groups = matched_groups(model, parameter_groups(model, settings), patterns)
        if options["storage"] not in WITHOUT_SCALES:
            unmatched = [group for group in groups if "storage" not in group]
            with_storage = [group for group in groups if "storage" in group]
            groups = _with_fp32_state(unmatched, embedding_weights(model)) + with_storage
        optimizer: torch.optim.Optimizer = getattr(fused, self.name)(
            groups, lr=settings.learning_rate, offload=self.offload, min_quantized=FEWEST_IN_8_BITS, **options
        )
        return optimizer

    def total_bytes(self, model: nn.Module, settings: Settings) -> int:
        """Bytes of the state of all parameters, wherever it is."""
        from ..ops.optimizer import RULES
        from ..ops.optimizer_state import STORAGES
        from . import fused
        from .state_dicts import CORRECTIONS

        copies = len(RULES[getattr(fused, self.name).rule].states)
        base, patterns = self.storages(settings)
        correction = CORRECTIONS.get(option_values(self.options, settings.optim_args)["rounding"])
        embeddings = {id(weight) for weight in embedding_weights(model)}
        total = 0
        for name, parameter in trained_parameters(model).items():
            elements = parameter.numel()
            is_bf16 = str(parameter.dtype) == "torch.bfloat16"
            by_pattern = matched(name, patterns)
            storage = by_pattern or base
            if storage == "weight":
                storage = "bf16" if is_bf16 else "fp32"
            in_fp32 = elements < FEWEST_IN_8_BITS or (id(parameter) in embeddings and not by_pattern)
            if in_fp32 and storage not in WITHOUT_SCALES:
                storage = "fp32"
            total += copies * STORAGES[storage].nbytes(elements)
            total += correction.itemsize * elements if correction and is_bf16 else 0
        return total

    def window_bytes(self, model: nn.Module, settings: Settings) -> int:
        """Device bytes of the windows of offloaded state."""
        from .offload import device_bytes

        return device_bytes(self.total_bytes(model, settings))

    def block(self, settings: Settings) -> int:
        """Elements at whose multiples a parameter's state can be cut."""
        base, patterns = self.storages(settings)
        return max(SLICED[storage] for storage in (base, *patterns.values()))


def _with_fp32_state(groups: list[dict[str, Any]], parameters: list[Tensor]) -> list[dict[str, Any]]:
    """The groups with the option of `fused` optimizers that gives `parameters` fp32 state."""
    ids = {id(parameter) for parameter in parameters}
    return [
        group | {"fp32_state": tuple(index for index, p in enumerate(group["params"]) if id(p) in ids)}
        for group in groups
    ]


# --- low-rank and block-wise optimizers ------------------------------------------------------------------------------


def _inner_adamw(
    settings: Settings, bits: int, in_32_bits: list[Tensor], together: bool, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return the AdamW inside a low-rank or block-wise optimizer.

    Args:
        bits: 32 for state in bf16 for bf16 weights, otherwise fp32; 8 for 8-bit state.
        in_32_bits: parameters with fp32 state in place of 8 bits.
        together: whether the optimizer steps many parameters. If not, 32 bits are torch's fused AdamW, which does not
            hold gradients that are freed after a step.
    """
    import torch

    from .fused import AdamW

    keywords = adam_keywords(settings)
    if bits == 32 and not together:
        return torch.optim.AdamW(groups, settings.learning_rate, fused=True, **keywords)
    storage = {8: "dynamic8", 32: "weight"}[bits]
    return AdamW(_with_fp32_state(groups, in_32_bits), settings.learning_rate, storage=storage, **keywords)


@dataclass(frozen=True)
class LowRankFamily:
    """GaLore, Q-GaLore or APOLLO over AdamW.

    Attributes:
        options: keys of `optim_args`; their names in `LowRank` are in `LOW_RANK_NAMES` where they differ.
        bits: of the moments.
        layerwise: whether a parameter is stepped in the backward.
    """

    options: Mapping[str, Option]
    bits: int = 32
    layerwise: bool = False

    def low_rank(self, settings: Settings) -> LowRank:
        from .low_rank import LowRank

        options = option_values(self.options, settings.optim_args)
        if (proj := options.pop("proj", None)) is not None:
            options["random"] = proj == "random"
        return LowRank(**{LOW_RANK_NAMES.get(name, name): value for name, value in options.items()})

    def make(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from .low_rank import LowRankOptimizer, low_rank_groups

        chosen = target_matrices(model, settings.optim_target_modules)
        groups = low_rank_groups(parameter_groups(model, settings), chosen, self.low_rank(settings))
        inner = partial(_inner_adamw, settings, self.bits, embedding_weights(model), not self.layerwise)
        rate = settings.learning_rate
        return LowRankOptimizer(groups, inner, lr=rate, layerwise=self.layerwise, seed=settings.seed)

    def state_bytes(self, model: nn.Module, settings: Settings) -> int:
        from ..ops.optimizer_state import STORAGES
        from .low_rank import low_rank_bytes

        embeddings = {id(weight) for weight in embedding_weights(model)}

        def moment_bytes(elements: int, weight: Tensor, projected: bool) -> int:
            if self.bits == 32:
                storage = "bf16" if str(weight.dtype) == "torch.bfloat16" else "fp32"
            else:
                in_fp32 = elements < FEWEST_IN_8_BITS or (id(weight) in embeddings and not projected)
                storage = "fp32" if in_fp32 else "dynamic8"
            return 2 * STORAGES[storage].nbytes(elements)

        chosen = target_matrices(model, settings.optim_target_modules)
        return low_rank_bytes(trained_parameters(model), chosen, self.low_rank(settings), moment_bytes)


def largest_gradient(model: nn.Module, settings: Settings) -> int:
    """Bytes of the largest gradient."""
    return max((parameter.nbytes for parameter in trained_parameters(model).values()), default=0)


def _badam_blocks(settings: Settings) -> Blocks:
    from .badam import Blocks

    options = option_values(BADAM_OPTIONS, settings.optim_args)
    return Blocks(**{name.removeprefix("badam_"): value for name, value in options.items()})


def make_badam(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return BAdam over torch's AdamW; weights outside of decoder layers are logged, since they are not trained."""
    from .badam import BAdam

    trained = trained_parameters(model)
    blocks = _badam_blocks(settings)
    names = blocks.names(trained)
    if outside := trained.keys() - {name for block in names for name in block}:
        fewer = f"optim: badam trains {len(names)} blocks of decoder layers; {len(outside)} weights outside of them"
        notice("badam", f"{fewer}, such as {min(outside)}, stay as they are (badam_mode: ratio trains all)")
    inner = partial(_inner_adamw, settings, 32, [], False)
    groups = parameter_groups(model, settings)
    return BAdam(groups, trained, inner, lr=settings.learning_rate, blocks=blocks, seed=settings.seed)


def badam_state_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of state of BAdam's largest block."""
    from .badam import badam_bytes

    return badam_bytes(trained_parameters(model), _badam_blocks(settings))


def badam_gradient_bytes(model: nn.Module, settings: Settings) -> int:
    """Largest bytes of gradients: of one block, or in mode "ratio" of all parameters."""
    trained = trained_parameters(model)
    blocks = _badam_blocks(settings).names(trained)
    return max((sum(trained[name].nbytes for name in names) for names in blocks), default=0)


@dataclass(frozen=True)
class MuonFamily:
    """Muon with its momentum in `bits` for matrices, and AdamW for vectors, embeddings and heads."""

    bits: Literal[8, 32]

    def make(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        from .fused import AdamW
        from .muon import Muon, fused_projections, ids_outside_muon

        if not settings.use_peft:
            notice(
                "muon-whole",
                "optim: muon trains all weights of the model. If the model was pretrained with AdamW, the change of"
                " optimizer costs quality (arXiv:2605.10468). Adapters do not suffer from it: set use_peft: true, or"
                " compare with optim: adamw",
            )
        outside = ids_outside_muon(model)
        groups = [
            {
                **group,
                "params": [p for p in group["params"] if (id(p) not in outside) == use_muon],
                "use_muon": use_muon,
            }
            for use_muon in (True, False)
            for group in parameter_groups(model, settings)
        ]
        adamw = partial(AdamW, **adam_keywords(settings))
        splits = fused_projections(model)
        return Muon(groups, settings.learning_rate, momentum_bits=self.bits, splits=splits, auxiliary=adamw)

    def state_bytes(self, model: nn.Module, settings: Settings) -> int:
        from .muon import BLOCK, ids_outside_muon

        outside = ids_outside_muon(model)
        total = 0
        for parameter in trained_parameters(model).values():
            elements = parameter.numel()
            if id(parameter) in outside:
                total += 8 * elements
            else:
                total += 4 * elements if self.bits == 32 else elements + 4 * math.ceil(elements / BLOCK)
        return total
