"""Learning rate schedules by transformers' names, and the options that `lr_scheduler_kwargs` gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .groups import Settings
from .options import Option

CYCLES = {"num_cycles": Option(0.5, above=0)}
MIN_LR = {"min_lr": Option(0.0, minimum=0), "min_lr_rate": Option(0.0, minimum=0, maximum=1)}
SHAPES = ("linear", "cosine", "1-sqrt")
FOLLOWING = {  # of schedules that follow the metric of the evaluations
    "mode": Option("min", ("min", "max")), "factor": Option(0.1, above=0, maximum=0.999999),
    "patience": Option(10, minimum=0), "threshold": Option(1e-4, minimum=0),
    "threshold_mode": Option("rel", ("rel", "abs")), "cooldown": Option(0, minimum=0),
    "min_lr": Option(0.0, minimum=0), "eps": Option(1e-8, minimum=0),
}  # fmt: skip
SCHEDULES: dict[str, Mapping[str, Option]] = {
    "linear": {},
    "cosine": CYCLES,
    "cosine_with_restarts": {"num_cycles": Option(1, minimum=1)},
    "cosine_with_min_lr": CYCLES | MIN_LR,
    "cosine_warmup_with_min_lr": CYCLES | MIN_LR | {"warmup_lr_rate": Option(0.0, minimum=0, maximum=1)},
    "polynomial": {"lr_end": Option(1e-7, minimum=0), "power": Option(1.0, above=0)},
    "constant": {},
    "constant_with_warmup": {},
    "inverse_sqrt": {"timescale": Option(None, minimum=1)},
    "warmup_stable_decay": CYCLES | {
        "num_decay_steps": Option(1, minimum=1), "num_stable_steps": Option(0, minimum=0),
        "warmup_type": Option("linear", SHAPES), "decay_type": Option("cosine", SHAPES),
        "min_lr_ratio": Option(0.0, minimum=0, maximum=1),
    },
    "reduce_lr_on_plateau": FOLLOWING,
    "greedy": FOLLOWING | {
        "factor": Option(0.95, above=0, maximum=0.999999), "threshold": Option(1e-6, minimum=0),
        "threshold_mode": Option("abs", ("rel", "abs")), "min_lr": Option(1e-3, minimum=0),
        "warmup": Option(0, minimum=0), "max_lr": Option(1.0, above=0), "smooth": Option(False),
        "window_size": Option(50, minimum=1), "reset_start": Option(500, minimum=0), "verbose": Option(False),
    },
}  # fmt: skip
FOLLOW_METRIC = ("reduce_lr_on_plateau", "greedy")  # they step with an evaluation, not with the optimizer


def make_schedule(settings: Settings, optimizer: Any, warmup: int, steps: int, greater_is_better: bool = False) -> Any:
    """Return transformers' schedule of a run.

    Args:
        greater_is_better: of the metric that the schedule follows, if it follows one.
    """
    from transformers import get_scheduler

    options = dict(settings.lr_scheduler_kwargs or {})
    if settings.lr_scheduler_type in FOLLOW_METRIC:
        options = {"mode": "max" if greater_is_better else "min"} | options
    return get_scheduler(settings.lr_scheduler_type, optimizer, warmup, steps, options)


def next_rate(schedule: Any) -> float:
    """Return the learning rate of the next step, in the first parameter group."""
    rates = schedule.get_last_lr() if hasattr(schedule, "get_last_lr") else schedule._last_lr
    return float(rates[0])  # torchao's is a tensor on the CPU


def continue_over(schedule: Any, optimizer: Any) -> None:
    """Set the learning rate of the next step, after a state of the schedule over fewer steps was loaded."""
    if not hasattr(schedule, "lr_lambdas"):  # it follows a metric, and has no number of steps
        return
    for group, rate, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        new = rate * factor(schedule.last_epoch)
        if hasattr(group["lr"], "fill_"):
            group["lr"].fill_(new)
        else:
            group["lr"] = new
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
