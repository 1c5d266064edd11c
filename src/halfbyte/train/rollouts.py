"""Set up the rollouts of a run, with its reference, teacher and reward models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..adapters.lora import compute_autocast
from ..auxiliary.model import additional_adapter
from ..auxiliary.teacher import loaded_teacher
from ..batch import REFERENCE
from ..config import RunConfig
from ..config.policy import DISTILLING
from ..data.prepare import PreparedData
from ..generation.sampling import stop_tokens
from ..methods.grpo import PolicyOptimization
from ..rewards.model_scores import loaded_reward_models
from ..rl.distillation import DistilledGenerations
from ..rl.preflight import reference_adapter, rewards_of
from ..rl.rollouts import Generations
from ..runs.checkpoints import step_of
from ..runs.layout import COMPLETIONS
from ..runs.metrics import MetricsFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .run_folder import OpenRun
    from .stepper import Stepper


@contextlib.contextmanager
def _reference_loaded(config: RunConfig, model: Any) -> Iterator[None]:
    """Load a frozen copy of the adapter that training starts from, if it is the reference policy.

    Otherwise the reference policy is the model without adapter.
    """
    adapter = reference_adapter(config)
    if adapter is None:
        yield
        return
    with additional_adapter(config, model, adapter, REFERENCE):
        yield


def answer_stop_tokens(tokenizer: PreTrainedTokenizerBase, model: Any, data: PreparedData) -> list[int]:
    """Return the tokens that end an answer; the preflight checks ensure that there is at least one."""
    return stop_tokens(tokenizer, model, data.report.get("stop_tokens", []))


@contextlib.contextmanager
def sampled_rollouts(job: OpenRun, model: Any, stepper: Stepper) -> Iterator[Generations | None]:
    """Yield the rollouts of a run whose rows are prompts, with its reference, teacher and reward models loaded.

    Yields None for other methods.
    """
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
        stops=answer_stop_tokens(run.tokenizer, model, run.data),
        file=file,
        shared=run.data.shared,
        plan=run.plan.answering,
        stepper=stepper,
    )
    try:
        with (
            _reference_loaded(run.config, model),
            loaded_teacher(run.config, model, run.tokenizer, run.data.train, device, dtype),
            loaded_reward_models(run.config, rewards, model, run.tokenizer, device, dtype),
        ):
            yield generations
    finally:
        generations.close()
