"""How many steps a run has, and its configuration in the terms of transformers, whose callbacks read them."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainingArguments

from halfbyte.config import RunConfig
from halfbyte.methods import method_of
from halfbyte.utils.errors import ConfigError


def steps_per_epoch(config: RunConfig, rows: int, ways: int = 1) -> int:
    """Optimizer steps in one pass over `rows`; the last accumulation window of an epoch may be incomplete.

    Args:
        ways: processes that rows are dealt to.
    """
    batches = method_of(config).micro_batches(config, rows, ways)
    return math.ceil(batches / (config.gradient_accumulation_steps * ways))


def total_steps(config: RunConfig, rows: int, ways: int = 1) -> int:
    """Optimizer steps of the whole run."""
    if config.max_steps > 0:
        return config.max_steps
    return math.ceil(config.num_train_epochs * steps_per_epoch(config, rows, ways))


def check_dtype(config: RunConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Whether a run trains in `dtype` on `device`.

    Raises:
        ConfigError: it is float16, where that cannot train.
    """
    if dtype == torch.float16 and (device.type == "cpu" or not config.use_peft or config.adapter_dtype != "float32"):
        raise ConfigError(
            "dtype: float16 needs loss scaling, which works for float32 adapters on an accelerator only",
            "use dtype: bfloat16 or float32",
        )


def training_arguments(
    config: RunConfig, device: torch.device, dtype: torch.dtype, *, rows: int, evaluate: bool, ways: int = 1
) -> TrainingArguments:
    """Translate `config` for a training set of `rows`, dealt to `ways` processes.

    Everything periodic is counted in steps ("every epoch" too), so that evaluations and checkpoints of a step always
    come in the same order, also in a resumed run.

    Raises:
        ConfigError: a value that transformers does not know, or float16 where it cannot train.
    """
    check_dtype(config, device, dtype)
    epoch = steps_per_epoch(config, rows, ways)
    try:
        arguments = TrainingArguments(
            **_same_names(config),
            use_cpu=device.type == "cpu",
            data_seed=config.seed,
            per_device_eval_batch_size=config.per_device_eval_batch_size or config.per_device_train_batch_size,
            logging_strategy="steps",
            save_strategy="steps",
            save_steps=_whole(config.save_steps) or epoch,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=_whole(config.eval_steps) or epoch,
            report_to=config.report_to or "none",
            disable_tqdm=True,
        )
    except ValueError as error:  # transformers names the value and those it knows
        raise ConfigError(f"training arguments: {error}", "correct the key of that name") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)  # transformers has just chosen cuda:0
    return arguments


def _same_names(config: RunConfig) -> dict[str, Any]:
    """Keys that mean the same here and there."""
    names = (
        "output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate"
        " lr_scheduler_type warmup_steps weight_decay max_grad_norm adam_beta1 adam_beta2 neftune_noise_alpha"
        " logging_steps save_total_limit seed"
    )
    return {name: getattr(config, name) for name in names.split()}


def _whole(steps: float | None) -> int | float | None:
    """Counts as integers, shares below 1 as they are."""
    return steps if steps is None or steps < 1 else int(steps)
