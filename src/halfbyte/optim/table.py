"""Optimizers by transformers' `optim` names, constructed and grouped as in transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from .families import (
    FusedFamily,
    LowRankFamily,
    MuonFamily,
    TorchFamily,
    adafactor_bytes,
    badam_gradient_bytes,
    badam_state_bytes,
    largest_gradient,
    make_adafactor,
    make_badam,
)
from .groups import Settings, backward_gradient_bytes, backward_parts
from .options import (
    ADAGRAD_OPTIONS,
    ADEMAMIX_OPTIONS,
    ANY_PRECISION_OPTIONS,
    APOLLO_MINI_OPTIONS,
    APOLLO_OPTIONS,
    BADAM_OPTIONS,
    GROKADAMW_OPTIONS,
    LAMB_OPTIONS,
    LARS_OPTIONS,
    PROJECTION_OPTIONS,
    Q_GALORE_OPTIONS,
    RMSPROP_OPTIONS,
    SCHEDULE_FREE_OPTIONS,
    SGD_OPTIONS,
    SLICED,
    STABLE_ADAMW_OPTIONS,
    TORCHAO_OPTIONS,
    Option,
    fused_options,
)
from .packages import (
    adalomo_bytes,
    any_precision_bytes,
    copies_bytes,
    lomo_gradient_bytes,
    make_any_precision,
    make_grokadamw,
    make_lomo,
    make_schedule_free,
    make_stable_adamw,
    make_torchao,
    stable_adamw_bytes,
    torchao_bytes,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

BETAS = ("adam_beta1", "adam_beta2")
ADAM_KEYS = (*BETAS, "adam_epsilon")


@dataclass(frozen=True)
class Optimizer:
    """A row of the table.

    Attributes:
        make: (model, settings) → the optimizer of the model's trained parameters.
        state_bytes: (model, settings) → bytes of the optimizer's state on the weights' device between steps, excluding
            step counts and tables shared by all parameters; the model may be on the meta device.
        options: keys of `optim_args`.
        adam_keys: keys of `ADAM_KEYS` that it reads.
        updates: which parameters a step updates. all: all of them; backward: each one in the backward, when its
            gradient is complete, which is then freed; block: those of one block.
        gradient_bytes: (model, settings) → bytes of gradients between backward and step; None: those of all trained
            parameters.
        takes_targets: whether the row reads `optim_target_modules`.
        guarded: whether the step reads `found_inf` on the device, as torch.amp.GradScaler expects, and changes nothing
            if it is 1.
        capturable: whether a CUDA graph can capture the step, given `capturable=True` in the groups.
        host_bytes: (model, settings) → bytes of the state in pinned host memory, of which `state_bytes` is a window;
            None: 0.
        scratch: whether a step on an accelerator allocates temporary memory of the size of the trained parameters.
        block: elements that a step treats together, except for the norms of trust ratios, which are summed over ranks;
            it can step slices of parameters that are cut at multiples of it. 0: whole parameters.
        block_by: settings → `block`, if options change it.
        offloaded: the row with its state in host memory; None: it has none.
        in_backward: whether the optimizer has `update_in_backward`.
        has_modes: whether the optimizer trains other weights than those to evaluate and save, so that it has `train()`
            and `eval()`, which exchange them in place.
        package: module of a required extra package, or None.
        requirement: what `pip install` takes for it.
    """

    make: Callable[[nn.Module, Settings], torch.optim.Optimizer]
    state_bytes: Callable[[nn.Module, Settings], int]
    options: Mapping[str, Option] = field(default_factory=dict)
    adam_keys: tuple[str, ...] = ()
    updates: Literal["all", "backward", "block"] = "all"
    gradient_bytes: Callable[[nn.Module, Settings], int] | None = None
    takes_targets: bool = False
    guarded: bool = False
    capturable: bool = False
    host_bytes: Callable[[nn.Module, Settings], int] | None = None
    scratch: bool = False
    block: int = 0
    block_by: Callable[[Settings], int] | None = None
    offloaded: Optimizer | None = None
    in_backward: bool = False
    has_modes: bool = False
    package: str | None = None
    requirement: str | None = None

    @property
    def elementwise(self) -> bool:
        """Whether a step can be divided among ranks at any element, without options that change it."""
        return self.block == 1

    def block_of(self, settings: Settings) -> int:
        """Return `block` with the options of a run."""
        return self.block_by(settings) if self.block_by else self.block


def optimizer_row(settings: Settings) -> Optimizer:
    """Return the row of `settings.optim` with the run's `optim_offload` and `optim_in_backward`; "auto" is no."""
    row = OPTIMIZERS[settings.optim]
    if settings.optim_offload is True and row.offloaded is not None:
        row = row.offloaded
    if settings.optim_in_backward is not True or not row.in_backward:
        return row
    return replace(
        row,
        make=partial(_make_in_backward, row),
        updates="backward",
        gradient_bytes=lambda model, settings: backward_gradient_bytes(model),
        guarded=False,
        capturable=False,
    )


def _make_in_backward(row: Optimizer, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    optimizer = row.make(model, settings)
    optimizer.update_in_backward(backward_parts(model))  # type: ignore[attr-defined]
    return optimizer


def state_key(settings: Settings) -> str:
    """Return the configuration key that puts the optimizer's state into host memory, if it is there."""
    return "optim" if OPTIMIZERS[settings.optim].host_bytes else "optim_offload"


def memory_choices(settings: Settings, alone: bool, has_host: bool) -> Iterator[dict[str, Any]]:
    """Yield the values of `optim_in_backward` and `optim_offload` that a run may have, the fastest first.

    Args:
        alone: whether the run has one process and no loss scale.
        has_host: whether host memory is not the device's.
    """
    row = OPTIMIZERS[settings.optim]
    may_update = alone and row.in_backward and settings.lora_preconditioner is None
    may_update = may_update and not settings.max_grad_norm and settings.gradient_accumulation_steps == 1
    in_backward_values = [settings.optim_in_backward]
    if in_backward_values == ["auto"] and may_update:
        in_backward_values.append(True)
    offload_values = [settings.optim_offload]
    if offload_values == ["auto"] and has_host and row.offloaded is not None:
        offload_values.append(True)
    for offload in offload_values:
        for in_backward in in_backward_values:
            yield {"optim_in_backward": in_backward, "optim_offload": offload}


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return the optimizer `settings.optim` of the model's trained parameters, with `lora_preconditioner` before it."""
    optimizer = optimizer_row(settings).make(model, settings)
    if settings.lora_preconditioner == "riemannian":
        from .riemannian import precondition_before

        precondition_before(optimizer, model)
    return optimizer


def _torch(family: TorchFamily, **row: Any) -> Optimizer:
    adam_keys = ADAM_KEYS if family.reads_adam else ()
    return Optimizer(family.make, family.state_bytes, family.options, adam_keys, block=1, **row)


def _fused(
    name: str, storage: str = "fp32", offload: bool = False, options: Mapping[str, Option] | None = None
) -> Optimizer:
    family = FusedFamily(name, storage, offload, fused_options(name, storage) | dict(options or {}))
    adam_keys = {"AdamW": ADAM_KEYS, "AdEMAMix": ADAM_KEYS, "Lion": BETAS, "LAMB": BETAS}.get(name, ())
    has_offload = not offload and name not in ("LAMB", "LARS")  # LAMB reads its state twice in a step
    return Optimizer(
        family.make,
        family.window_bytes if offload else family.total_bytes,
        family.options,
        adam_keys,
        guarded=True,
        capturable=not offload,
        host_bytes=family.total_bytes if offload else None,
        block=SLICED[storage],
        block_by=family.block,
        offloaded=_fused(name, storage, True, options) if has_offload else None,
        in_backward=True,
    )


def _low_rank(options: Mapping[str, Option], bits: int = 32, layerwise: bool = False) -> Optimizer:
    family = LowRankFamily(options, bits, layerwise)
    return Optimizer(
        family.make, family.state_bytes, options, ADAM_KEYS, takes_targets=True, guarded=not layerwise,
        scratch=not layerwise, updates="backward" if layerwise else "all",
        gradient_bytes=largest_gradient if layerwise else None,
    )  # fmt: skip


def _muon(bits: Literal[8, 32]) -> Optimizer:
    family = MuonFamily(bits)
    return Optimizer(
        family.make, family.state_bytes, adam_keys=ADAM_KEYS, guarded=True, capturable=True, scratch=True
    )  # fmt: skip


def _schedule_free(name: str, copies: int, version: str = "1.2.6") -> Optimizer:
    return Optimizer(
        partial(make_schedule_free, name), partial(copies_bytes, copies), SCHEDULE_FREE_OPTIONS,
        () if name == "SGD" else ADAM_KEYS, scratch=True, has_modes=True,
        package="schedulefree", requirement=f"schedulefree>={version}",
    )  # fmt: skip


def _torchao(bits: int) -> Optimizer:
    return Optimizer(
        partial(make_torchao, bits), partial(torchao_bytes, bits), TORCHAO_OPTIONS, ADAM_KEYS,
        package="torchao", requirement="torchao>=0.11",
    )  # fmt: skip


def _lomo(name: str, state_bytes: Callable[[nn.Module, Settings], int]) -> Optimizer:
    return Optimizer(
        partial(make_lomo, name), state_bytes, updates="backward", gradient_bytes=lomo_gradient_bytes,
        package="lomo_optim", requirement="lomo-optim",
    )  # fmt: skip


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": _fused("AdamW", "weight"),
    "adamw_torch": _torch(TorchFamily("AdamW", 2, reads_adam=True), capturable=True, scratch=True),
    "adamw_torch_fused": _torch(TorchFamily("AdamW", 2, reads_adam=True, fused=True), guarded=True, capturable=True),
    "adafactor": Optimizer(make_adafactor, adafactor_bytes),
    "sgd": _torch(TorchFamily("SGD", lambda options: bool(options["momentum"]), SGD_OPTIONS)),
    "adagrad": _torch(TorchFamily("Adagrad", 1, ADAGRAD_OPTIONS), scratch=True),
    "rmsprop": _torch(
        TorchFamily(
            "RMSprop", lambda options: 1 + bool(options["momentum"]) + options["centered"], RMSPROP_OPTIONS
        ),
        capturable=True, scratch=True,
    ),
    "adamw_8bit": _fused("AdamW", "dynamic8"),
    "adamw_bnb_8bit": _fused("AdamW", "dynamic8"),
    "paged_adamw_8bit": _fused("AdamW", "dynamic8", offload=True),
    "paged_adamw_32bit": _fused("AdamW", offload=True),
    "ademamix": _fused("AdEMAMix", options=ADEMAMIX_OPTIONS),
    "ademamix_8bit": _fused("AdEMAMix", "dynamic8", options=ADEMAMIX_OPTIONS),
    "paged_ademamix_8bit": _fused("AdEMAMix", "dynamic8", offload=True, options=ADEMAMIX_OPTIONS),
    "paged_ademamix_32bit": _fused("AdEMAMix", offload=True, options=ADEMAMIX_OPTIONS),
    "lion_8bit": _fused("Lion", "dynamic8"),
    "lion_32bit": _fused("Lion"),
    "paged_lion_8bit": _fused("Lion", "dynamic8", offload=True),
    "paged_lion_32bit": _fused("Lion", offload=True),
    "lamb": _fused("LAMB", options=LAMB_OPTIONS),
    "lars": _fused("LARS", options=LARS_OPTIONS),
    "rmsprop_bnb": _fused("RMSprop"),
    "rmsprop_bnb_8bit": _fused("RMSprop", "dynamic8"),
    "rmsprop_bnb_32bit": _fused("RMSprop"),
    "muon": _muon(32),
    "muon_8bit": _muon(8),
    "galore_adamw": _low_rank(PROJECTION_OPTIONS),
    "galore_adamw_layerwise": _low_rank(PROJECTION_OPTIONS, layerwise=True),
    "galore_adamw_8bit": _low_rank(PROJECTION_OPTIONS, bits=8),
    "galore_adamw_8bit_layerwise": _low_rank(PROJECTION_OPTIONS, bits=8, layerwise=True),
    "q_galore_adamw8bit": _low_rank(Q_GALORE_OPTIONS, bits=8),
    "apollo_adamw": _low_rank(APOLLO_OPTIONS),
    "apollo_adamw_layerwise": _low_rank(APOLLO_OPTIONS, layerwise=True),
    "apollo_mini": _low_rank(APOLLO_MINI_OPTIONS),
    "badam": Optimizer(
        make_badam, badam_state_bytes, BADAM_OPTIONS, ADAM_KEYS, updates="block", gradient_bytes=badam_gradient_bytes,
        guarded=True,
    ),
    "schedule_free_radam": _schedule_free("RAdam", 2, "1.4.0"),
    "schedule_free_adamw": _schedule_free("AdamW", 2),
    "schedule_free_sgd": _schedule_free("SGD", 1),
    "lomo": _lomo("Lomo", partial(copies_bytes, 0)),
    "adalomo": _lomo("AdaLomo", adalomo_bytes),
    "grokadamw": Optimizer(
        make_grokadamw, partial(copies_bytes, 3), GROKADAMW_OPTIONS, package="grokadamw",
        requirement="grokadamw==0.1.2",
    ),
    "stable_adamw": Optimizer(
        make_stable_adamw, stable_adamw_bytes, STABLE_ADAMW_OPTIONS, ADAM_KEYS, scratch=True, package="optimi",
        requirement="torch-optimi",
    ),
    "adamw_torch_8bit": _torchao(8),
    "adamw_torch_4bit": _torchao(4),
    "adamw_anyprecision": Optimizer(
        make_any_precision, any_precision_bytes, ANY_PRECISION_OPTIONS, ADAM_KEYS, scratch=True, package="torchdistx",
        requirement="git+https://github.com/pytorch/torchdistx",
    ),
}  # fmt: skip
