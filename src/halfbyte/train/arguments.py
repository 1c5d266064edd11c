"""One run's configuration in the terms of transformers' Trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainingArguments

from halfbyte.config import RunConfig
from halfbyte.errors import ConfigError


@dataclass
class RunArguments(TrainingArguments):
    """Arguments for one device, the model's: other visible GPUs are left alone (no DataParallel)."""

    model_device: str = "cpu"

    @property
    def device(self) -> torch.device:
        super().device  # noqa: B018 (sets up accelerate's state)
        return torch.device(self.model_device)

    @property
    def n_gpu(self) -> int:
        return 0 if self.model_device == "cpu" else 1

    @property
    def place_model_on_device(self) -> bool:
        return False


def steps_per_epoch(config: RunConfig, rows: int) -> int:
    """Optimizer steps in one pass over `rows`; the last accumulation window of an epoch may be incomplete."""
    batches = math.ceil(rows / config.per_device_train_batch_size)
    return math.ceil(batches / config.gradient_accumulation_steps)


def total_steps(config: RunConfig, rows: int) -> int:
    """Optimizer steps of the whole run."""
    if config.max_steps > 0:
        return config.max_steps
    return math.ceil(config.num_train_epochs * steps_per_epoch(config, rows))


def training_arguments(
    config: RunConfig, device: torch.device, dtype: torch.dtype, *, rows: int, evaluate: bool
) -> RunArguments:
    """Translate `config` for a training set of `rows`.

    Everything periodic is counted in steps ("every epoch" too), so that evaluations and checkpoints of a step always
    come in the same order, also in a resumed run.

    Raises:
        ConfigError: a value that transformers does not know (a schedule), or float16 where it cannot
            train.
    """
    needs_scaler = dtype == torch.float16
    if needs_scaler and (device.type == "cpu" or not config.use_peft or config.adapter_dtype != "float32"):
        raise ConfigError(
            "dtype: float16 needs loss scaling, which works for float32 adapters on an accelerator only",
            "use dtype: bfloat16 or float32",
        )
    epoch = steps_per_epoch(config, rows)
    try:
        arguments = RunArguments(
            **_same_names(config),
            model_device=str(device),
            use_cpu=device.type == "cpu",
            fp16=needs_scaler,
            data_seed=config.seed,
            per_device_eval_batch_size=config.per_device_eval_batch_size or config.per_device_train_batch_size,
            logging_strategy="steps",
            logging_nan_inf_filter=False,
            save_strategy="steps",
            save_steps=_whole(config.save_steps) or epoch,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=_whole(config.eval_steps) or epoch,
            report_to=config.report_to or "none",
            remove_unused_columns=False,
            label_names=["labels"],
            disable_tqdm=True,
            dataloader_pin_memory=device.type != "cpu",
            accelerator_config={"non_blocking": device.type != "cpu"},  # a batch's copy does not wait for the step
        )
    except ValueError as error:  # transformers names the value and those it knows
        raise ConfigError(f"training arguments: {error}") from error
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
