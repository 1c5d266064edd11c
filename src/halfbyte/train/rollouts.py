"""Set up the rollouts of a run, with its reference, teacher and reward models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..auxiliary.model import additional_adapter
from ..auxiliary.teacher import loaded_teacher
from ..batch import REFERENCE
from ..config.policy import DISTILLING
from ..config.schema import RunKeys
from ..data.prepare import PreparedData
from ..generation.sampling import stop_tokens
from ..memory.allocators import GraphMemory
from ..methods.base import CountingCollator
from ..methods.grpo import PolicyOptimization
from ..modeling.compute_dtype import compute_autocast
from ..plan.memory_plan import RolloutPlan
from ..rewards.model_scores import loaded_reward_models
from ..rewards.score import Rewards
from ..rl.dataset import RolloutDataset, RolloutLog
from ..rl.distillation import DistillationRollouts
from ..rl.preflight import reference_adapter, rewards_of
from ..rl.rollouts import PolicyRollouts
from ..rl.sampler import AnswerSampler, TrainedPolicy
from ..rl.served import engine_of
from ..runs.checkpoints import step_of
from ..runs.layout import COMPLETIONS
from ..runs.metrics import MetricsFile
from .stepper import Stepper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .run_folder import OpenRun


def answer_stop_tokens(tokenizer: PreTrainedTokenizerBase, model: Any, data: PreparedData) -> list[int]:
    """Return the tokens that end an answer; the preflight checks ensure that there is at least one."""
    return stop_tokens(tokenizer, model, data.report.get("stop_tokens", []))


def make_rollouts(
    config: RunKeys,
    method: PolicyOptimization,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    rewards: Rewards,
    *,
    device: torch.device,
    compute_dtype: torch.dtype,
    graphs: GraphMemory | None = None,
    plan: RolloutPlan | None = None,
) -> PolicyRollouts | DistillationRollouts:
    """Return the rollouts of a run's method.

    Args:
        graphs: the stepper of the run; default: nothing is trained.
        plan: the planned memory of rollouts; default: the engine takes free memory.
    """
    collate = CountingCollator(method, method.collator(config, tokenizer, device))
    autocast = partial(compute_autocast, model, compute_dtype)
    policy = TrainedPolicy(config, method, model, tokenizer, device, autocast, collate, graphs or GraphMemory())
    engine = engine_of(config, model, config.answers_per_generation, plan)
    stops = answer_stop_tokens(tokenizer, model, data)
    sampler = AnswerSampler(policy, engine, stops, plan)
    if config.method in DISTILLING:
        return DistillationRollouts(sampler, data.train)
    return PolicyRollouts(sampler, data.train, rewards, data.shared)


@contextlib.contextmanager
def sampled_rollouts(job: OpenRun, model: Any, stepper: Stepper) -> Iterator[RolloutDataset | None]:
    """Yield the rollouts of a run whose rows are prompts, with its reference, teacher and reward models loaded.

    Yields None for other methods.
    """
    run, method = job.prepared, job.prepared.method
    if not isinstance(method, PolicyOptimization):
        yield None
        return
    file = MetricsFile(job.output / COMPLETIONS)
    file.keep_until(step_of(run.checkpoint) if run.checkpoint else -1)
    rewards = rewards_of(run.config, run.data)
    device = run.machine.device
    dtype = run.machine.compute_dtype
    rollouts = make_rollouts(
        run.config,
        method,
        model,
        run.tokenizer,
        run.data,
        rewards,
        device=device,
        compute_dtype=dtype,
        graphs=stepper,
        plan=run.plan.answering,
    )
    # The reference policy is a frozen copy of the adapter that training continues from, or the model without adapter.
    adapter = reference_adapter(run.config)
    no_copy: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        with (
            additional_adapter(run.config, model, adapter, REFERENCE) if adapter else no_copy,
            loaded_teacher(run.config, model, run.tokenizer, run.data.train, device, dtype),
            loaded_reward_models(run.config, rewards, model, run.tokenizer, device, dtype),
        ):
            yield RolloutDataset(rollouts, RolloutLog(file))
    finally:
        rollouts.close()
