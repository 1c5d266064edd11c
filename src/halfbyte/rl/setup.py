"""The reward functions of a run: looked over before it begins, and what the loop gets of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfbyte.config import RunConfig
from halfbyte.config.policy import DISTILLING, POLICY
from halfbyte.data.prepare import PreparedData
from halfbyte.generation.sampling import stop_tokens
from halfbyte.methods.answers import REFERENCE
from halfbyte.methods.grpo import PolicyOptimization
from halfbyte.modeling.adapters import compute_autocast, load_adapter
from halfbyte.rl.rewards.score import Rewards
from halfbyte.rl.rewards.specs import check_columns, read_specs
from halfbyte.utils.console import Console
from halfbyte.utils.notices import notice

from ..auxiliary.reward_model import check_judges, judge_files, judging
from ..auxiliary.teacher import teacher_files, teaching
from ..runs.layout import COMPLETIONS
from ..train.checkpoint import step_of
from ..train.metrics import MetricsFile
from ..utils.text import one_line
from .distillation import DistilledGenerations
from .rollouts import Generations, check_same_files, digest_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..train.run_folder import OpenRun
    from ..train.stepper import Stepper


def rewards_of(config: RunConfig, data: PreparedData) -> Rewards:
    """The functions that `reward_funcs` names, for the prompts of `data`.

    Raises:
        ConfigError: one of them cannot be taken.
    """
    columns = sorted(data.train[0]["columns"])
    specs = read_specs(config.reward_funcs or [], columns)
    return Rewards(specs, columns, config.reward_timeout_s, config.max_completion_length)


def look_over_rewards(
    config: RunConfig,
    data: PreparedData,
    model_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    console: Console,
) -> None:
    """Load every reward function once, look over every reward model, and say which files are run.

    Args:
        model_config: transformers', of the model that trains.

    Raises:
        HalfbyteError: one cannot be loaded or called, or the prompts' columns do not suit it.
    """
    if config.method in POLICY and (config.top_p < 1 or config.top_k or config.min_p):
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
        check_same_files(rewards.files | reference_files(config) | judge_files(config, rewards), checkpoint)
    try:
        rewards.check()
    finally:
        rewards.close()
    for path, digest in rewards.files.items():
        console.print(one_line(f"rewards: {path} (SHA-256 {digest})"), soft_wrap=True)
    check_judges(config, rewards, model_config, tokenizer, console)


def _reference_of(config: RunConfig) -> Path | None:
    """The adapter that a run continues from, where it is also what the run is compared with."""
    compared = config.beta and config.method in POLICY
    return Path(config.adapter_path) if config.adapter_path and compared else None


def reference_files(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the adapter that is the reference of a run which continues from it, by its path."""
    adapter = _reference_of(config)
    return {} if adapter is None else digest_of(adapter)


@contextlib.contextmanager
def _with_reference(config: RunConfig, model: Any) -> Iterator[None]:
    """Beside the adapter that trains a frozen copy of the one it began with, where that is the reference; else the
    reference is the model without adapter."""
    adapter = _reference_of(config)
    if adapter is None:
        yield
        return
    load_adapter(model, adapter, config.model_name_or_path, REFERENCE)
    try:
        yield
    finally:
        model.delete_adapter(REFERENCE)


def answer_ends(tokenizer: PreTrainedTokenizerBase, model: Any, data: PreparedData) -> list[int]:
    """The tokens that end an answer; `load_tokenizer` and `_check_data` know that there is one."""
    return stop_tokens(tokenizer, model, data.report.get("stop_tokens", []))


@contextlib.contextmanager
def sampled_rollouts(job: OpenRun, model: Any, stepper: Stepper) -> Iterator[Generations | None]:
    """Yield the rollouts of a run whose rows are prompts, with its reference, teacher and reward models loaded; None for
    other methods."""
    run, method = job.prepared, job.prepared.method
    if not isinstance(method, PolicyOptimization):
        yield None
        return
    file = MetricsFile(job.output / COMPLETIONS)
    file.keep_until(step_of(run.checkpoint) if run.checkpoint else -1)
    kind = DistilledGenerations if run.config.method in DISTILLING else Generations
    rewards, device, dtype = rewards_of(run.config, run.data), run.machine.device, run.machine.compute_dtype
    generations = kind(
        run.config,
        method,
        model,
        run.tokenizer,
        run.data.train,
        rewards,
        device=device,
        computing=partial(compute_autocast, model, dtype),
        stops=answer_ends(run.tokenizer, model, run.data),
        file=file,
        shared=run.data.shared,
        plan=run.plan.answering,
        files=reference_files(run.config) | teacher_files(run.config) | judge_files(run.config, rewards),
        stepper=stepper,
    )
    try:
        with (
            _with_reference(run.config, model),
            teaching(run, model),
            judging(run.config, rewards, model, run.tokenizer, device, dtype),
        ):
            yield generations
    finally:
        generations.close()
