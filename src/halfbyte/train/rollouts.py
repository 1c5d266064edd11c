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
from ..data.image_processor import ImageProcessor
from ..data.images import IMAGES
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
from ..rl.rollouts import ImageCollator, PolicyRollouts
from ..rl.sampler import AnswerSampler, TrainedPolicy
from ..rl.served import engine_of
from ..runs.checkpoints import step_of
from ..runs.layout import COMPLETIONS
from ..runs.metrics import MetricsFile
from .stepper import Stepper

if TYPE_CHECKING:
    from datasets import Dataset
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
    prompts: Dataset | None = None,
    device: torch.device,
    compute_dtype: torch.dtype,
    graphs: GraphMemory | None = None,
    plan: RolloutPlan | None = None,
) -> PolicyRollouts | DistillationRollouts:
    """Return the rollouts of a run's method.

    Args:
        prompts: the training rows, if their images name the files of their features; default: the data's.
        graphs: the stepper of the run; default: nothing is trained.
        plan: the planned memory of rollouts; default: the engine takes free memory.
    """
    prompts = data.train if prompts is None else prompts
    has_images = IMAGES in prompts.column_names
    collate = method.collator(config, tokenizer, device)
    counting = CountingCollator(method, ImageCollator(prompts, collate) if has_images else collate)
    autocast = partial(compute_autocast, model, compute_dtype)
    policy = TrainedPolicy(config, method, model, tokenizer, device, autocast, counting, graphs or GraphMemory())
    engine = engine_of(config, model, config.answers_per_generation, plan)
    stops = answer_stop_tokens(tokenizer, model, data)
    images = ImageProcessor(config, tokenizer) if has_images else None
    stops += [] if images is None else images.placeholder_ids  # answers that contain one could not be trained
    sampler = AnswerSampler(policy, engine, stops, plan, images)
    if config.method in DISTILLING:
        return DistillationRollouts(sampler, prompts)
    return PolicyRollouts(sampler, prompts, rewards, data.shared)


@contextlib.contextmanager
def sampled_rollouts(job: OpenRun, model: Any, stepper: Stepper, prompts: Dataset) -> Iterator[RolloutDataset | None]:
    """Yield the rollouts of a run whose rows are prompts, with its reference, teacher and reward models loaded.

    Yields None for other methods.

    Args:
        prompts: the training rows.
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
        prompts=prompts,
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
