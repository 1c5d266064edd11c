"""A run whose model is cut into the stages of a pipeline: what it does otherwise than a run with a whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from halfbyte.generation.decoder import context_length
from halfbyte.modeling.adapters import adapter_weights, compute_autocast
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.patch import PatchReport, patch
from halfbyte.modeling.projections import configured_recipe
from halfbyte.ops.fp8_scaling import DelayedScaling
from halfbyte.parallel.pipeline.model import LocalStages, PipelinePartition
from halfbyte.parallel.pipeline.runtime import Pipeline
from halfbyte.reading.tensors import ADAPTER, read_tensors
from halfbyte.utils.errors import TrainingError

from ..parallel.pipeline.stepper import PipelinedStepper
from . import checks, samples
from .preflight import PreparedRun
from .stepper import Batch, Sums

WIDTH = 64  # answers are computed in widths that are multiples of this


@dataclass(frozen=True)
class Ready:
    """A patched and checked model.

    Attributes:
        results: for checks.json.
        report: what was patched; None: nothing.
        scaling: the recipe's delayed scales, if it has any.
        graphs: whether steps may be captured in CUDA graphs.
    """

    results: dict[str, Any]
    report: PatchReport | None
    scaling: DelayedScaling | None = None
    graphs: bool = False


def pipelined_stepper(
    run: PreparedRun, model: Any, stages: LocalStages, sums: Sums, scaler: torch.amp.GradScaler | None
) -> PipelinedStepper:
    """Return the stepper that runs the micro-batches of a run through the stages of its model."""
    assert run.cut is not None
    device = run.machine.device
    width = stages.causal_lm.config.get_text_config().hidden_size
    how: dict[str, Any] = {"width": width, "dtype": stages.dtype, "device": device}
    how["ahead"] = 0 if run.mesh.degree("shard") > 1 else len(stages.layers)  # slices are gathered for a gradient alone
    if device.type == "cuda":
        how["spare"] = max(run.plan.capacity_bytes - run.plan.total, 0)
    pipeline = Pipeline(run.mesh, run.cut.schedule, run.cut.seconds, **how)
    names = [metric.name for metric in run.method.numbers.trained]
    around = partial(compute_autocast, model, run.machine.compute_dtype)
    return PipelinedStepper(sums, names, run.method.blank, around, pipeline, stages, scaler)


def first_losses(stepper: PipelinedStepper, ids: Tensor, around: Callable[[], Any]) -> tuple[float, float]:
    """The loss that is trained, and cross-entropy on the model's own logits, of `ids` [1, T] without dropout."""
    model = stepper.stages.model

    def read(batch: Batch) -> Tensor:
        with around():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
            loss_sum, count = causal_lm_loss(model, batch)
        return torch.stack([loss_sum / count, F.cross_entropy(logits[0, :-1], ids[0, 1:])])

    model.eval()
    loss, reference = stepper.map_last_stage([{"input_ids": ids, "labels": ids}], read, 2)[0].tolist()
    return loss, reference


def make_ready(run: PreparedRun, model: Any, stepper: PipelinedStepper, ids: Tensor) -> Ready:
    """Patch the stages of this process, and check the loss before and after."""
    device, around = run.machine.device, partial(compute_autocast, model, run.machine.compute_dtype)
    loss, reference = first_losses(stepper, ids, around)
    results, report, scaling = {"first_step": checks.first_step(loss, reference, ids.shape[1] - 1)}, None, None
    assert run.cut is not None
    levels = stage_levels(run.plan.levels, run.cut, run.mesh.coordinate("pipeline")) or None
    if run.config.use_kernels and device.type != "cpu":
        report = patch(model, levels)
        results["fused"] = checks.fused(first_losses(stepper, ids, around)[0], loss)
    if run.config.precision.recipe != "bf16":
        scaling = patch(model, levels, configured_recipe(run.config.precision)).scaling
    return Ready(results, report, scaling)


def answer(
    stepper: PipelinedStepper,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[samples.Prompt],
    around: Callable[[], Any],
    *,
    max_new_tokens: int,
    stops: Sequence[int],
) -> list[str]:
    """As `samples.answer`, without a cache: each token is one forward of the prompt and what follows it so far."""
    model, device = stepper.stages.model, stepper.pipeline.device
    limit = context_length(model) or math.inf
    texts, open_ = [list(prompt.ids) for prompt in prompts], list(range(len(prompts)))
    model.eval()

    def read(batch: Batch) -> Tensor:
        with around():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        return logits[0, batch["last"]].argmax(-1, keepdim=True).float()

    for _ in range(max_new_tokens):
        open_ = [index for index in open_ if len(texts[index]) < limit]
        if not open_:
            break
        found = stepper.map_last_stage([_padded(texts[index], device) for index in open_], read, 1)
        for index, token in zip(open_, found[:, 0].long().tolist(), strict=True):
            texts[index].append(token)
        open_ = [index for index in open_ if texts[index][-1] not in stops]
    answers = (text[len(prompt.ids) :] for text, prompt in zip(texts, prompts, strict=True))
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]


def _padded(ids: list[int], device: torch.device) -> dict[str, Any]:
    """A row padded on its right, where causal attention does not look."""
    row = F.pad(torch.tensor([ids], device=device), (0, -len(ids) % WIDTH))
    return {"input_ids": row, "last": len(ids) - 1}


def adapter_file(stages: LocalStages, folder: Path) -> dict[str, Any]:
    """Compare the saved tensors of this process's adapters with those in memory, bit by bit.

    Raises:
        TrainingError: one differs or is not there.
    """
    saved, own = read_tensors(folder / ADAPTER), adapter_weights(stages.model)
    for name, tensor in own.items():
        if name not in saved or not torch.equal(saved[name], tensor):
            raise TrainingError(f"{folder}: {name} differs from the trained weight", "please report this")
    return {"tensors": len(own), "equal": True}


def stage_levels(levels: Sequence[str], cut: PipelinePartition, rank: int) -> list[str]:
    """Of the levels of all layers, those of the layers that a process has."""
    here = sorted(index for stage in cut.schedule.stages_of(rank) for index in cut.parts[stage])
    return [levels[index] for index in here] if levels else []
