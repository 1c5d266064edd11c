"""Optimizers of other packages, constructed as transformers' Trainer constructs them, and the bytes of their state.

No package is imported before an optimizer is made.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ..utils.errors import ConfigError
from ..utils.notices import notice
from .families import adam_keywords
from .groups import Settings, parameter_groups, trained_parameters
from .options import (
    ANY_PRECISION_OPTIONS,
    GROKADAMW_OPTIONS,
    SCHEDULE_FREE_OPTIONS,
    STABLE_ADAMW_OPTIONS,
    TORCHAO_OPTIONS,
    option_values,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SAME_FOR_ALL = ("weight_decay", "loraplus_lr_ratio", "embedding_learning_rate")  # LOMO has one value for all weights


def _make(cls: Any, model: nn.Module, settings: Settings, **keywords: Any) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = cls(parameter_groups(model, settings), lr=settings.learning_rate, **keywords)
    return optimizer


def make_schedule_free(name: str, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return schedulefree's `{name}ScheduleFree`: AdamW, RAdam or SGD (arXiv:2405.15682).

    Its warmup is `warmup_steps`; a share of all steps counts only with `max_steps`. RAdam needs none.
    """
    import schedulefree

    if settings.lr_scheduler_type != "constant":
        notice(
            "schedule-free",
            f"optim: {settings.optim} averages weights in place of a learning rate schedule, and"
            f" lr_scheduler_type: {settings.lr_scheduler_type} still multiplies its learning rate. Set"
            " lr_scheduler_type: constant, and warmup_steps to a number of steps",
        )
    keywords = option_values(SCHEDULE_FREE_OPTIONS, settings.optim_args) | {"weight_decay": settings.weight_decay}
    if name != "SGD":
        keywords |= adam_keywords(settings)
    if name != "RAdam":
        warmup = settings.warmup_steps
        keywords["warmup_steps"] = int(warmup) if warmup >= 1 else math.ceil(warmup * max(settings.max_steps, 0))
    return _make(getattr(schedulefree, f"{name}ScheduleFree"), model, settings, **keywords)


def make_torchao(bits: int, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return torchao's AdamW4bit or AdamW8bit."""
    import torchao.optim

    keywords = adam_keywords(settings) | option_values(TORCHAO_OPTIONS, settings.optim_args)
    return _make(getattr(torchao.optim, f"AdamW{bits}bit"), model, settings, **keywords)


def torchao_bytes(bits: int, model: nn.Module, settings: Settings) -> int:
    """Bytes of torchao's AdamW: codes, scales and a table for each quantized state.

    States of fewer than 4,096 elements, or whose elements are no multiple of the block, have the parameter's dtype.
    """
    block = option_values(TORCHAO_OPTIONS, settings.optim_args)["block_size"]

    def nbytes(parameter: Tensor) -> int:
        elements = parameter.numel()
        if elements < 4096 or elements % block:
            return 2 * parameter.nbytes
        return 2 * (elements * bits // 8 + 4 * (elements // block) + 4 * 2**bits)

    return sum(map(nbytes, trained_parameters(model).values()))


def make_grokadamw(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return grokadamw's GrokAdamW, which has its own betas, as in transformers."""
    from grokadamw import GrokAdamW

    return _make(GrokAdamW, model, settings, **option_values(GROKADAMW_OPTIONS, settings.optim_args))


def make_stable_adamw(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return optimi's StableAdamW (arXiv:2304.13013)."""
    from optimi import StableAdamW

    keywords = adam_keywords(settings) | option_values(STABLE_ADAMW_OPTIONS, settings.optim_args)
    return _make(StableAdamW, model, settings, weight_decay=settings.weight_decay, **keywords)


def stable_adamw_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of two moments, and of Kahan's compensation of 16-bit weights."""
    kahan = option_values(STABLE_ADAMW_OPTIONS, settings.optim_args)["kahan_sum"] is not False
    return sum((2 + (kahan and p.itemsize == 2)) * p.nbytes for p in trained_parameters(model).values())


def make_any_precision(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return torchdistx's AnyPrecisionAdamW."""
    import torch
    from torchdistx.optimizers import AnyPrecisionAdamW

    options = option_values(ANY_PRECISION_OPTIONS, settings.optim_args)
    dtypes = {key: getattr(torch, value) for key, value in options.items() if key.endswith("_dtype")}
    return _make(AnyPrecisionAdamW, model, settings, **adam_keywords(settings), **options | dtypes)


def any_precision_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of the moments and the compensation, whose dtypes are options."""
    options = option_values(ANY_PRECISION_OPTIONS, settings.optim_args)
    dtypes = [options["momentum_dtype"], options["variance_dtype"]]
    dtypes += [options["compensation_buffer_dtype"]] if options["use_kahan_summation"] else []
    nbytes = sum(4 if dtype == "float32" else 2 for dtype in dtypes)
    return nbytes * sum(parameter.numel() for parameter in trained_parameters(model).values())


def copies_bytes(copies: int, model: nn.Module, settings: Settings) -> int:
    """Bytes of an optimizer with this many state tensors of each parameter's size."""
    return copies * sum(parameter.nbytes for parameter in trained_parameters(model).values())


def make_lomo(name: str, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return lomo_optim's Lomo or AdaLomo behind a `Lomo` of `lomo`."""
    import lomo_optim

    from .lomo import Lomo

    for key in SAME_FOR_ALL:
        if getattr(settings, key):
            wrong = f"{key} with optim: {settings.optim}, which updates all weights alike"
            raise ConfigError(wrong, f"remove {key}")
    return Lomo(model, parameter_groups(model, settings), getattr(lomo_optim, name), settings.learning_rate)


def lomo_gradient_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of the two largest gradients: a weight is updated when the gradient after its own arrives."""
    sizes = sorted(parameter.nbytes for parameter in trained_parameters(model).values())
    return sum(sizes[-2:])


def adalomo_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of AdaLomo's fp32 second moments: rows and columns of every parameter, frozen ones included."""

    def elements(shape: torch.Size) -> int:
        return shape.numel() if len(shape) < 2 else shape[0] + shape[1]

    return sum(4 * elements(parameter.shape) for parameter in model.parameters())
