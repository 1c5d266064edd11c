"""Checks of a run's optimizer and learning rate schedule, before a weight is loaded.

Features of libraries are tried on a small scale, since an installed package need not work.
"""

from __future__ import annotations

import fnmatch
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from ..config import Parallel, RunConfig
from ..loading.load import resolve_dtype
from ..mesh.mesh import Mesh
from ..optim import (
    FOLLOW_METRIC,
    OPTIMIZERS,
    make_optimizer,
    make_schedule,
    optimizer_row,
    state_key,
    target_matrices,
    trained_parameters,
)
from ..parallel.shard.optimizer import optimizer_shards
from ..plan.advice import check_host
from ..utils.errors import ConfigError, first_line
from ..utils.notices import notice
from ..utils.text import brief
from .planning import Machine, free_host_bytes, ranks_on_host

WIDTH = 64  # of the layer in `check_optimizer`: states of fewer than 4,096 numbers have 32 bits


def check_optimizer(config: RunConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return the run's optimizer of one small layer on `device`, after a step.

    An installed package may not run here, so the step is run.

    Raises:
        ConfigError: it cannot be created, or does not run on `device`.
    """
    row = OPTIMIZERS[config.optim]
    if row.package is not None and find_spec(row.package) is None:
        wrong = f"optim: {config.optim} needs the package {row.package}, which is not installed"
        raise ConfigError(wrong, f"pip install '{row.requirement or row.package}', or set optim: adamw")
    dtype = getattr(torch, config.adapter_dtype) if config.use_peft else resolve_dtype(config.precision.weights, device)
    try:
        layer = torch.nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False, device=device, dtype=dtype)
        nn.init.ones_(layer.weight)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer: Any = make_optimizer(layer, config)
        if row.has_modes:
            optimizer.train()
        optimizer.step()
    except ConfigError:
        raise
    except Exception as error:  # any error of the optimizer's library
        install = f"pip install '{row.requirement}', or " if row.requirement else ""
        raise ConfigError(
            f"optim: {config.optim} does not run on {device}: {first_line(error)}", f"{install}set optim: adamw"
        ) from error
    return optimizer


def check_loss_scale(config: RunConfig, compute_dtype: torch.dtype) -> None:
    """Check that the optimizer sees an overflow of scaled gradients before it changes a weight.

    Raises:
        ConfigError: float16, which `dtype: auto` may have chosen, with an optimizer that steps in the backward.
    """
    if compute_dtype == torch.float16 and optimizer_row(config).updates == "backward":
        wrong = f"optim: {config.optim} updates weights in the backward, where float16's loss scale is not checked"
        raise ConfigError(wrong, "set dtype: bfloat16 or float32, or use an optimizer that is not layerwise")


def check_targets(config: RunConfig, model: nn.Module) -> None:
    """Check that a low-rank optimizer has matrices to project.

    Raises:
        ConfigError: optim_target_modules selects no linear layer that is trained.
    """
    targets = config.optim_target_modules
    if OPTIMIZERS[config.optim].takes_targets and not target_matrices(model, targets):
        wrong = f"optim_target_modules: {targets or 'all-linear'} selects no linear layer whose weight is trained"
        raise ConfigError(wrong, "name trained linear layers, or use another optim")


def check_bits(config: RunConfig, model: nn.Module) -> None:
    """Check that each pattern of `optim_bits` matches a parameter.

    Raises:
        ConfigError: it matches no trained parameter.
    """
    names = trained_parameters(model)
    for pattern in config.optim_bits if isinstance(config.optim_bits, dict) else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            wrong = f"optim_bits: {brief(pattern)} matches no trained parameter"
            raise ConfigError(wrong, f"match names such as {min(names)}, or remove it")


def check_host_state(config: RunConfig, model: nn.Module, machine: Machine, mesh: Mesh, layout: Parallel) -> None:
    """Check that each host holds the optimizer's state of its ranks, if it is there; the plan checks the rest.

    With `parallel: auto` the layout may still change, so the state is counted as if all ranks divided it.

    Args:
        model: all of it, whatever this rank will hold.

    Raises:
        ConfigError: it does not.
    """
    row = optimizer_row(config)
    if row.host_bytes is None or machine.device.type == "cpu":
        return
    block = 0 if machine.compute_dtype == torch.float16 else row.block_of(config)
    divided = optimizer_shards(layout, block) * layout.pipeline * layout.tensor
    state = row.host_bytes(model, config) // (layout.size if config.parallel == "auto" else divided)
    check_host({state_key(config): state}, ranks_on_host(mesh, layout), free_host_bytes(mesh))


def check_schedule(config: RunConfig, args: TrainingArguments, optimizer: Any, steps: int) -> None:
    """Check that the learning rate schedule can be created for `steps` steps.

    Raises:
        ConfigError: it cannot.
    """
    warmup, options = args.get_warmup_steps(steps), config.lr_scheduler_kwargs or {}
    stable = options.get("num_stable_steps", 0)
    if config.lr_scheduler_type == "warmup_stable_decay" and warmup + stable + options["num_decay_steps"] > steps:
        numbers = f"{warmup} steps of warmup, {stable} stable ones and {options['num_decay_steps']} of decay"
        fix = "lower num_decay_steps, or raise max_steps or num_train_epochs"
        raise ConfigError(f"lr_scheduler_kwargs: {numbers} are more than the {steps} of the run", fix)
    try:
        schedule = make_schedule(config, optimizer, warmup, steps)
        if config.lr_scheduler_type in FOLLOW_METRIC:
            return
        for step in (0, 1, warmup, steps):
            schedule.lr_lambdas[0](step)
        highest = max(map(schedule.lr_lambdas[0], range(steps))) if steps <= warmup else 1.0
    except (ValueError, TypeError, ArithmeticError) as error:
        message = f"lr_scheduler_type: {config.lr_scheduler_type} of {steps} steps, {warmup} of them warmup"
        fix = "set lr_scheduler_type: cosine, or change lr_scheduler_kwargs, learning_rate, max_steps or warmup_steps"
        raise ConfigError(f"{message}: {first_line(error)}", fix) from error
    if not any(map(schedule.lr_lambdas[0], range(steps))):
        steps_of_warmup = f", {warmup} of them warmup (warmup_steps: {config.warmup_steps:g})" if warmup else ""
        wrong = f"learning_rate is 0 in every step: {steps} step{'s' * (steps > 1)}{steps_of_warmup}"
        raise ConfigError(wrong, "set warmup_steps: 0" if warmup else "use another lr_scheduler_type, or more steps")
    if highest < 1.0:
        rates = f"at most {highest * config.learning_rate:.1e} of {config.learning_rate:.1e}"
        steps_of_warmup = f"{warmup} steps of warmup (warmup_steps) in {steps}"
        notice("warmup", f"learning_rate is never reached: {steps_of_warmup}, {rates}")


def notice_unsharded_states(config: RunConfig, machine: Machine, layout: Parallel) -> None:
    """Give a notice if the optimizer's state cannot be sharded although the frozen weights are."""
    scaled, row = machine.compute_dtype == torch.float16, OPTIMIZERS[config.optim]
    block = row.block_of(config)
    if optimizer_shards(layout, 1) == optimizer_shards(layout, 0 if scaled else block):
        return
    if block:
        why, instead = "dtype: float16 scales the loss", "dtype: bfloat16 shards it"
    else:
        shardable = ", ".join(name for name, optimizer in OPTIMIZERS.items() if optimizer.block)
        why, instead = f"optim: {config.optim} cannot step a shard of a parameter", f"these do: {shardable}"
    notice("whole-states", f"{why}, so each GPU holds the full optimizer state; {instead}")
