"""transformers' callbacks (`report_to` and added ones), and the configuration as their TrainingArguments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from ..config.schema import AdapterSection, RunKeys, TrainingSection
from ..methods import method_of
from ..utils.errors import ConfigError
from .trackers import Trackers


class Callbacks:
    """Calls every callback and tracker for an event, with the state of the run; `control` holds what callbacks request.

    transformers' DefaultFlowCallback is the first one: it requests logging, evaluation and saving.

    Args:
        reports: whether this rank reports to `report_to`.
        project: of the trackers.
    """

    def __init__(self, args: TrainingArguments, model: Any, reports: bool = True, project: str | None = None):
        self.args, self.control = args, TrainerControl()
        self.state = self._new_state()
        self.trackers = Trackers(args.report_to if reports else [], model, Path(args.output_dir), project)
        self.handler = CallbackHandler([DefaultFlowCallback], model, None, None, None)
        self("on_init_end")

    def __call__(self, event: str, **keys: Any) -> None:
        self.control = getattr(self.handler, event)(self.args, self.state, self.control, **keys)
        self.trackers.event(event, self.args, self.state, self.control, **keys)

    def _new_state(self) -> TrainerState:
        return TrainerState(stateful_callbacks=[self.control])

    def begin(self, saved: Path | None, *, steps: int, epochs: int, optimizer: Any, schedule: Any) -> None:
        """Start a training of `steps` steps in total, or continue from the state in the file `saved`.

        The intervals of logging, evaluation and saving come from the arguments, which may change in a resumed run.
        """
        state = self.state = self._new_state() if saved is None else TrainerState.load_from_json(str(saved))
        state.train_batch_size = self.args.per_device_train_batch_size
        state.compute_steps(self.args, steps)
        state.max_steps, state.num_train_epochs = steps, epochs
        self.handler.optimizer, self.handler.lr_scheduler = optimizer, schedule

    def log(self, numbers: dict[str, Any]) -> None:
        """Pass `numbers` of the current step to the callbacks, and add them to the state's history."""
        numbers = {**numbers, "epoch": self.state.epoch}
        self.state.log_history.append({**numbers, "step": self.state.global_step})
        self("on_log", logs=numbers)


def steps_per_epoch(config: RunKeys, rows: int, data_parallel_degree: int = 1) -> int:
    """Return the optimizer steps of one pass over `rows`; the last accumulation window may be incomplete. A stream is
    passed over once.

    Args:
        data_parallel_degree: number of ranks that rows are distributed to.
    """
    if config.streaming:
        return config.max_steps
    batches = method_of(config).micro_batches(config, rows)
    return math.ceil(batches / (config.gradient_accumulation_steps * data_parallel_degree))


def total_steps(config: RunKeys, rows: int, data_parallel_degree: int = 1) -> int:
    """Return the optimizer steps of the run."""
    if config.max_steps > 0:
        return config.max_steps
    return math.ceil(config.num_train_epochs * steps_per_epoch(config, rows, data_parallel_degree))


def check_dtype(config: AdapterSection, device: torch.device, dtype: torch.dtype) -> None:
    """Check that a run can train in `dtype` on `device`.

    Raises:
        ConfigError: it is float16, and the run cannot scale its loss.
    """
    if dtype == torch.float16 and (device.type == "cpu" or not config.use_peft or config.adapter_dtype != "float32"):
        raise ConfigError(
            "dtype: float16 needs loss scaling, which works for float32 adapters on an accelerator only",
            "use dtype: bfloat16 or float32",
        )


def training_arguments(
    config: RunKeys,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    evaluate: bool,
    data_parallel_degree: int = 1,
) -> TrainingArguments:
    """Translate `config` for a training set of `rows`, distributed to `data_parallel_degree` ranks.

    All intervals are counted in steps (an epoch too), so that the evaluation and the checkpoint of a step always come
    in the same order, also in a resumed run.

    Raises:
        ConfigError: a value that transformers does not know, or float16 without loss scaling.
    """
    check_dtype(config, device, dtype)
    epoch, shared = steps_per_epoch(config, rows, data_parallel_degree), _shared_keys(config)
    if config.is_default("warmup_steps") and total_steps(config, rows, data_parallel_degree) == 1:
        shared["warmup_steps"] = 0  # a share of one step would be that step, at a learning rate of 0
    try:
        arguments = TrainingArguments(
            **shared,
            use_cpu=device.type == "cpu",
            data_seed=config.seed,
            per_device_eval_batch_size=config.per_device_eval_batch_size or config.per_device_train_batch_size,
            logging_strategy="steps",
            save_strategy="steps",
            save_steps=_interval(config.save_steps) or epoch,
            eval_strategy="steps" if evaluate else "no",
            eval_steps=_interval(config.eval_steps) or epoch,
            report_to=config.report_to or "none",
            run_name=config.run_name,
            **({} if config.project is None else {"project": config.project}),
            disable_tqdm=True,
        )
    except ValueError as error:  # transformers names the value and the known ones
        raise ConfigError(f"training arguments: {error}", "correct the key of that name") from error
    if device.type == "cuda":
        torch.cuda.set_device(device)  # TrainingArguments has selected cuda:0
    return arguments


def _shared_keys(config: TrainingSection) -> dict[str, Any]:
    """Return the keys that have the same name and meaning in TrainingArguments."""
    names = (
        "output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate"
        " lr_scheduler_type warmup_steps weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon"
        " neftune_noise_alpha logging_steps save_total_limit seed"
    )
    return {name: getattr(config, name) for name in names.split()}


def _interval(steps: float | None) -> int | float | None:
    """Return a number of steps as an integer, a share of the run (below 1) as it is."""
    return steps if steps is None or steps < 1 else int(steps)
