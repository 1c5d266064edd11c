"""The reward functions of a run: looked over before it begins, and what the loop gets of them."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.adapters import compute, load_adapter
from halfbyte.config import RunConfig
from halfbyte.console import Console
from halfbyte.data.prepare import PreparedData
from halfbyte.generation.stops import stop_tokens
from halfbyte.methods.answers import REFERENCE
from halfbyte.methods.grpo import PolicyOptimization
from halfbyte.notices import notice
from halfbyte.rewards import Rewards, check_columns, read_specs

from ..reading.tensors import ADAPTER
from ..words import one_line
from .checkpoint import step_of
from .generations import COMPLETIONS, Generations, check_same_files
from .metrics import MetricsFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .loop import TrainingLoop
    from .setup import OpenRun


def rewards_of(config: RunConfig, data: PreparedData) -> Rewards:
    """The functions that `reward_funcs` names, for the prompts of `data`.

    Raises:
        ConfigError: one of them cannot be taken.
    """
    columns = sorted(data.train[0]["columns"])
    specs = read_specs(config.reward_funcs or [], columns)
    return Rewards(specs, columns, config.reward_timeout_s, config.max_completion_length)


def look_over_rewards(config: RunConfig, data: PreparedData, checkpoint: Path | None, console: Console) -> None:
    """Load every reward function once, and say which files are run.

    Raises:
        ConfigError: one cannot be loaded or called, or the prompts' columns do not suit it.
    """
    if config.top_p < 1 or config.top_k or config.min_p:
        notice(
            "narrowed-sampling",
            "top_p, top_k and min_p narrow what answers are drawn from, and training's log-probabilities are over all"
            " tokens: their ratios are biased (trl#6789)",
        )
    rewards = rewards_of(config, data)
    for rows in (data.train, data.eval):
        if rows is not None:
            check_columns(rewards.specs, rows)
    if checkpoint is not None:
        check_same_files(rewards.files | reference_files(config), checkpoint)
    try:
        rewards.check()
    finally:
        rewards.close()
    for path, digest in rewards.files.items():
        console.print(one_line(f"rewards: {path} (SHA-256 {digest})"), soft_wrap=True)


def reference_files(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the adapter that is the reference of a run which continues from it, by its path."""
    if not (config.adapter_path and config.beta):
        return {}
    file = (Path(config.adapter_path) / ADAPTER).resolve()
    with file.open("rb") as opened:
        return {str(file): hashlib.file_digest(opened, "sha256").hexdigest()}


@contextlib.contextmanager
def _with_reference(config: RunConfig, model: Any) -> Iterator[None]:
    """Beside the adapter that trains a frozen copy of the one it began with, where that is the reference; else the
    reference is the model without adapter."""
    if not (config.adapter_path and config.beta):
        yield
        return
    load_adapter(model, Path(config.adapter_path), config.model_name_or_path, REFERENCE)
    try:
        yield
    finally:
        model.delete_adapter(REFERENCE)


def answer_ends(tokenizer: PreTrainedTokenizerBase, model: Any, data: PreparedData) -> list[int]:
    """The tokens that end an answer; `load_tokenizer` and `_check_data` know that there is one."""
    return stop_tokens(tokenizer, model, data.report.get("stop_tokens", []))


@contextlib.contextmanager
def answering(job: OpenRun, loop: TrainingLoop) -> Iterator[None]:
    """Around the training of a run: if its rows are prompts, `loop` gets answers to them."""
    run, method = job.prepared, job.prepared.method
    if not isinstance(method, PolicyOptimization):
        yield
        return
    file = MetricsFile(job.output / COMPLETIONS)
    file.keep_until(step_of(run.checkpoint) if run.checkpoint else -1)
    generations = Generations(
        run.config,
        method,
        loop.model,
        run.tokenizer,
        run.data.train,
        rewards_of(run.config, run.data),
        device=run.machine.device,
        computing=partial(compute, loop.model, run.machine.compute_dtype),
        stops=answer_ends(run.tokenizer, loop.model, run.data),
        file=file,
        shared=run.data.shared,
        plan=run.plan.answering,
        files=reference_files(run.config),
    )
    loop.use_generations(generations)
    try:
        with _with_reference(run.config, loop.model):
            yield
    finally:
        generations.close()
