"""Optimizers of other packages, constructed as transformers' Trainer constructs them.

Nothing is imported before an optimizer is made. Each `make_*` function returns `Optimizer.make` of a row of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..utils.errors import ConfigError
from ..utils.notices import notice
from .groups import Settings, parameter_groups, trained_parameters
from .options import Option, option_values

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Make = Callable[["nn.Module", Settings], "torch.optim.Optimizer"]
Bytes = Callable[["nn.Module", Settings], int]


def make_of_package(
    load: Callable[[], Any],
    options: Mapping[str, Option],
    keywords: Callable[[Settings, dict[str, Any]], dict[str, Any]],
) -> Make:
    """Return the constructor of an optimizer of parameter groups.

    Args:
        load: imports and returns the class.
        options: keys of `optim_args`.
        keywords: (settings, values of the options) → arguments of the class besides groups and learning rate.
    """

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        kind, given = load(), option_values(options, settings.optim_args)
        groups = parameter_groups(model, settings)
        made: torch.optim.Optimizer = kind(groups, lr=settings.learning_rate, **keywords(settings, given))
        return made

    return make


def _adam(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    return {"betas": (settings.adam_beta1, settings.adam_beta2), "eps": settings.adam_epsilon, **given}


def make_schedule_free(kind: str, options: Mapping[str, Option]) -> Make:
    """Return the constructor of schedulefree's `{kind}ScheduleFree`: AdamW, RAdam or SGD (arXiv:2405.15682).

    Its warmup is `warmup_steps`; a share of all steps counts only with `max_steps`. RAdam needs none.
    """

    def load() -> Any:
        import schedulefree

        return getattr(schedulefree, f"{kind}ScheduleFree")

    def keywords(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
        if settings.lr_scheduler_type != "constant":
            notice(
                "schedule-free",
                f"optim: {settings.optim} averages weights in place of a learning rate schedule, and"
                f" lr_scheduler_type: {settings.lr_scheduler_type} still multiplies its learning rate. Set"
                " lr_scheduler_type: constant, and warmup_steps to a number of steps",
            )
        own = given if kind == "SGD" else _adam(settings, given)
        own["weight_decay"] = settings.weight_decay
        if kind != "RAdam":
            own["warmup_steps"] = _warmup_steps(settings)
        return own

    return make_of_package(load, options, keywords)


def _warmup_steps(settings: Settings) -> int:
    given = settings.warmup_steps
    return int(given) if given >= 1 else math.ceil(given * max(settings.max_steps, 0))


def make_torchao(kind: str, options: Mapping[str, Option]) -> Make:
    """Return the constructor of torchao's AdamW4bit or AdamW8bit."""

    def load() -> Any:
        import torchao.optim

        return getattr(torchao.optim, kind)

    return make_of_package(load, options, _adam)


def torchao_bytes(bits: int, options: Mapping[str, Option]) -> Bytes:
    """Return `state_bytes` of torchao's AdamW: codes, scales and a table for each quantized state.

    States of fewer than 4,096 elements, or whose elements are no multiple of the block, have the parameter's dtype.
    """

    def state_bytes(model: nn.Module, settings: Settings) -> int:
        block = option_values(options, settings.optim_args)["block_size"]

        def nbytes(parameter: Tensor) -> int:
            elements = parameter.numel()
            if elements < 4096 or elements % block:
                return 2 * parameter.nbytes
            return 2 * (elements * bits // 8 + 4 * (elements // block) + 4 * 2**bits)

        return sum(map(nbytes, trained_parameters(model).values()))

    return state_bytes


def make_grokadamw(options: Mapping[str, Option]) -> Make:
    """Return the constructor of grokadamw's GrokAdamW, which has its own betas, as in transformers."""

    def load() -> Any:
        from grokadamw import GrokAdamW

        return GrokAdamW

    return make_of_package(load, options, lambda settings, given: given)


def make_stable_adamw(options: Mapping[str, Option]) -> Make:
    """Return the constructor of optimi's StableAdamW (arXiv:2304.13013)."""

    def load() -> Any:
        from optimi import StableAdamW

        return StableAdamW

    def keywords(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
        return _adam(settings, given) | {"weight_decay": settings.weight_decay}

    return make_of_package(load, options, keywords)


def stable_adamw_copies(options: Mapping[str, Option]) -> Callable[[Settings, Tensor], float]:
    """Return the number of state tensors of a parameter: two moments, and Kahan's compensation of 16-bit weights."""

    def copies(settings: Settings, parameter: Tensor) -> float:
        kahan = option_values(options, settings.optim_args)["kahan_sum"]
        return 2 + (kahan is not False and parameter.itemsize == 2)

    return copies


def make_any_precision(options: Mapping[str, Option]) -> Make:
    """Return the constructor of torchdistx's AnyPrecisionAdamW."""

    def load() -> Any:
        from torchdistx.optimizers import AnyPrecisionAdamW

        return AnyPrecisionAdamW

    def keywords(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
        import torch

        named = {key: getattr(torch, value) if key.endswith("_dtype") else value for key, value in given.items()}
        return _adam(settings, named)

    return make_of_package(load, options, keywords)


def any_precision_copies(options: Mapping[str, Option]) -> Callable[[Settings, Tensor], float]:
    """Return the bytes of a parameter's moments and compensation, in copies of the parameter."""

    def copies(settings: Settings, parameter: Tensor) -> float:
        given = option_values(options, settings.optim_args)
        dtypes = [given["momentum_dtype"], given["variance_dtype"]]
        dtypes += [given["compensation_buffer_dtype"]] if given["use_kahan_summation"] else []
        return sum(4 if dtype == "float32" else 2 for dtype in dtypes) / parameter.itemsize

    return copies


def copies_bytes(copies: float | Callable[[Settings, Tensor], float]) -> Bytes:
    """Return `state_bytes` of an optimizer with this many state tensors of each parameter's size."""

    def state_bytes(model: nn.Module, settings: Settings) -> int:
        def of(parameter: Tensor) -> float:
            return copies(settings, parameter) if callable(copies) else copies

        return sum(int(of(parameter) * parameter.nbytes) for parameter in trained_parameters(model).values())

    return state_bytes


# --- LOMO ------------------------------------------------------------------------------------------------------------

ALIKE = ("weight_decay", "loraplus_lr_ratio", "embedding_learning_rate")  # keys that divide parameters into groups


def make_lomo(kind: str) -> Make:
    """Return the constructor of lomo_optim's Lomo or AdaLomo behind a `Lomo` of `lomo`."""

    def make(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        import lomo_optim

        from .lomo import Lomo

        for key in ALIKE:
            if getattr(settings, key):
                wrong = f"{key} with optim: {settings.optim}, which updates all weights alike"
                raise ConfigError(wrong, f"remove {key}")
        inner = getattr(lomo_optim, kind)
        return Lomo(model, parameter_groups(model, settings), inner, settings.learning_rate)

    return make


def lomo_gradient_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of the two largest gradients: a weight is updated when the gradient after its own arrives."""
    sizes = sorted(parameter.nbytes for parameter in trained_parameters(model).values())
    return sum(sizes[-2:])


def adalomo_bytes(model: nn.Module, settings: Settings) -> int:
    """Bytes of AdaLomo's fp32 second moments: rows and columns of every parameter, frozen ones included."""

    def elements(shape: torch.Size) -> int:
        return shape.numel() if len(shape) < 2 else shape[0] + shape[1]

    return sum(4 * elements(parameter.shape) for parameter in model.parameters())
