"""What a run takes from libraries besides its model, tried out: whether a package is installed does not say whether it
runs here."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments, get_scheduler
from transformers.integrations import get_reporting_integration_callbacks

from halfbyte.config import RunConfig
from halfbyte.optim import OPTIMIZERS
from halfbyte.utils.errors import ConfigError
from halfbyte.utils.notices import notice

WIDTH = 64  # of the one layer that is trained: bitsandbytes keeps states of fewer than 4,096 numbers in 32 bits


def first_line(error: BaseException) -> str:
    """The first line of what a library says, or the error's name where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def trackers(names: list[str]) -> list[TrainerCallback]:
    """The callbacks of `report_to`.

    Raises:
        ConfigError: there is no such tracker, or it is not installed.
    """
    made = []
    for name in names:
        asked = name if len(names) == 1 else [name]  # alone it may be "all" or "none"
        try:
            made += [callback() for callback in get_reporting_integration_callbacks(asked)]
        except Exception as error:  # whatever a tracker's own library raises
            raise ConfigError(
                f"report_to: {name}: {first_line(error)}", f"install what it needs, or leave {name} out of report_to"
            ) from error
    return made


def try_optimizer(config: RunConfig, device: torch.device) -> torch.optim.Optimizer:
    """An optimizer as the run's, of one small layer on `device`, after a step.

    Raises:
        ConfigError: it cannot be made, or does not run on `device`.
    """
    package = OPTIMIZERS[config.optim].package
    if package is not None and find_spec(package) is None:
        wrong = f"optim: {config.optim} needs the package {package}, which is not installed"
        raise ConfigError(wrong, f"pip install {package}, or set optim: adamw_torch_fused")
    dtype = getattr(torch, config.adapter_dtype) if config.use_peft else torch.float32
    try:
        layer = torch.nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False, device=device, dtype=dtype)
        nn.init.ones_(layer.weight)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer = OPTIMIZERS[config.optim].make(layer, config)
        optimizer.step()
    except Exception as error:  # whatever the optimizer's library raises
        raise ConfigError(
            f"optim: {config.optim} does not run on {device}: {first_line(error)}", "set optim: adamw_torch_fused"
        ) from error
    return optimizer


def try_schedule(config: RunConfig, args: TrainingArguments, optimizer: Any, steps: int) -> None:
    """Whether a schedule of so many steps can be made.

    Raises:
        ConfigError: it cannot.
    """
    warmup = args.get_warmup_steps(steps)
    try:
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, warmup, steps)
        for step in (0, 1, warmup, steps):
            schedule.lr_lambdas[0](step)
        highest = max(map(schedule.lr_lambdas[0], range(steps))) if steps <= warmup else 1.0
    except (ValueError, ArithmeticError) as error:
        message = f"lr_scheduler_type: {config.lr_scheduler_type} of {steps} steps, {warmup} of them warmup"
        fix = "set lr_scheduler_type: cosine, or change learning_rate, max_steps or warmup_steps"
        raise ConfigError(f"{message}: {first_line(error)}", fix) from error
    if highest < 1.0:
        most = f"at most {highest * config.learning_rate:.1e} of {config.learning_rate:.1e}"
        said = f"learning_rate is never reached: {warmup} steps of warmup (warmup_steps) in {steps}"
        notice("warmup", f"{said}, {most}" if highest else f"{said}: nothing is learned")
