"""Patch a run's model, and compare its loss after each change with the loss before; results go to checks.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..batch import LABELS, Batch, model_inputs, to_device
from ..data.answer_documents import first_prompt, with_own_prompts
from ..data.collate import make_collator
from ..data.collate_answers import answer_collator
from ..mesh.mesh import Mesh
from ..modeling.compute_dtype import compute_autocast
from ..modeling.head import backbone_inputs, causal_lm_loss, hidden_states_at, last_hidden_state
from ..modeling.language_inputs import IMAGES_EAGER, LanguageInputs
from ..modeling.layer import causal_lm_of
from ..modeling.packing import isolate_for_run, remove_isolation
from ..modeling.patch import PatchReport, patch, patch_attention, unpatch
from ..modeling.projections import configured_recipe
from ..modeling.vision import bind_vision
from ..ops import IGNORE_INDEX
from ..ops.fp8_scaling import DelayedScaling
from ..parallel.context import context_parallel, context_shard
from ..utils.console import Console, is_verbose
from ..utils.errors import TrainingError
from ..utils.hardware import is_out_of_memory
from ..utils.notices import notice
from ..utils.waiting import waiting
from .checks import ROUNDING, logits
from .inputs import has_image_rows, rows_with_most_images
from .pipeline_stepper import PipelinedStepper
from .preflight import PreparedRun

# Tolerance of a token's hidden states, relative; in 16 bits rounding errors grow through the layers.
HIDDEN_TOLERANCE = {torch.float32: 1e-4}
HIDDEN_TOLERANCE_16 = 0.1
SPLIT_ROWS = 2  # rows of `split_check`


@dataclass(frozen=True)
class Verified:
    """The results of patching and verifying a model.

    Attributes:
        results: for checks.json.
        report: report of `patch`; None if the model runs transformers' forwards.
        fp8_scales: delayed scales of the fp8 recipe.
        graphs: whether steps may be captured in CUDA graphs.
        language_inputs: replaces the images of a micro-batch before its graph; None: the rows have none.
    """

    results: dict[str, Any]
    report: PatchReport | None
    fp8_scales: DelayedScaling | None = None
    graphs: bool = False
    language_inputs: LanguageInputs | None = None


@waiting("checking the model's loss")
def patch_and_verify(run: PreparedRun, model: Any, ids: Tensor, console: Console) -> Verified:
    """Patch the model and isolate packed documents; compare the loss after each change with the loss before.

    Args:
        ids: token ids [1, T] of the loss.

    Raises:
        TrainingError: losses differ by more than rounding.
    """
    report = fp8_scales = None
    device = run.machine.device
    dtype = run.machine.compute_dtype
    results = {"first_step": loss_check(model, ids, dtype)}
    if run.config.use_kernels and device.type != "cpu":
        report = patch(model, run.plan.levels or None)
        if is_verbose(console):
            console.print(str(report))
        results["fused"] = fused_check(model, ids, dtype, results["first_step"]["loss"])
    elif run.config.use_kernels and run.config.precision.recipe == "bf16" and (name := patch_attention(model)):
        if is_verbose(console):
            console.print(f"attention: {name}")
        results["fused"] = fused_check(model, ids, dtype, results["first_step"]["loss"])
    if run.config.use_kernels and has_image_rows(run.data):
        bind_vision(model)  # also on CPUs
    plain = make_collator(run.config, run.tokenizer, device)
    isolation = isolate_for_run(model, run.config, plain, run.data.train, dtype, run.mesh)
    if isolation is not None:
        results["isolation"] = isolation.document()
    if run.data.shared:
        answers = answer_collator(run.config, run.tokenizer, device, answers=run.data.answers)
        row = first_prompt(run.data.train[0])
        shared = to_device(answers([row]), device)
        separate = to_device(answers([with_own_prompts(row)]), device)
        results["shared_prompts"] = shared_check(model, shared, separate, dtype)
    if run.mesh.degree("context") > 1:
        loss = results.get("fused", results["first_step"])["loss"]
        with context_parallel(model, run.mesh):
            results["divided"] = divided_check(model, ids, dtype, loss, run.mesh)
    by_positions = isolation is None or isolation.method == "positions"  # other methods read the batch's values
    captures = run.plan.use_graphs and by_positions
    language_inputs = None
    splits = [rows for rows in (run.data.train, run.data.eval) if rows is not None]
    if captures and (rows := rows_with_most_images(splits, SPLIT_ROWS)) is not None:
        is_text = run.method.rows in ("text", "prompts")  # prompts have room for an answer, as a document
        collate = plain if is_text else run.method.collator(run.config, run.tokenizer, device)
        batch = to_device(collate([*rows]), device)
        language_inputs, results["split_forward"] = split_check(model, batch, dtype)
        captures = language_inputs is not None
    if run.config.precision.recipe != "bf16":  # on a CPU too
        fp8_scales = patch(model, run.plan.levels or None, configured_recipe(run.config.precision)).scaling
    return Verified(results, report, fp8_scales, captures, language_inputs)


@waiting("checking the model's loss")
def patch_and_verify_stages(run: PreparedRun, model: Any, stepper: PipelinedStepper, ids: Tensor) -> Verified:
    """Patch this rank's stages; compare the loss through the pipeline before and after.

    Raises:
        TrainingError: losses differ by more than rounding.
    """
    loss, reference = _pipeline_losses(stepper, ids)
    results = {"first_step": compare_first_loss(loss, reference, ids.shape[1] - 1)}
    report = fp8_scales = None
    assert run.cut is not None
    rank = run.mesh.coordinate("pipeline")
    layers = sorted(layer for stage in run.cut.schedule.stages_of(rank) for layer in run.cut.stage_layers[stage])
    levels = [run.plan.levels[layer] for layer in layers] if run.plan.levels else None
    if run.config.use_kernels and run.machine.device.type != "cpu":
        report = patch(model, levels)
        results["fused"] = compare_fused_loss(_pipeline_losses(stepper, ids)[0], loss)
    if run.config.precision.recipe != "bf16":
        fp8_scales = patch(model, levels, configured_recipe(run.config.precision)).scaling
    return Verified(results, report, fp8_scales)


def _pipeline_losses(stepper: PipelinedStepper, ids: Tensor) -> tuple[float, float]:
    """Return the training loss, and cross-entropy on the model's own logits, of `ids` [1, T] without dropout."""
    model = stepper.stages.model

    def read(batch: Batch) -> Tensor:
        with stepper.autocast():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
            loss_sum, count = causal_lm_loss(model, batch)
        return torch.stack([loss_sum / count, F.cross_entropy(logits[0, :-1], ids[0, 1:])])

    model.eval()
    loss, reference = stepper.map_last_stage([{"input_ids": ids, "labels": ids}], read, 2)[0].tolist()
    return loss, reference


def remove_patches(model: Any) -> None:
    """Undo `patch_and_verify`: the model runs transformers' forwards again."""
    remove_isolation(model)
    unpatch(model)


# --- comparisons -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def loss_check(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Compare the training loss (no full logits) with cross-entropy on the model's own logits.

    Raises:
        TrainingError: they differ by more than rounding, or are NaN or Inf.
    """
    full = logits(model, ids, dtype)
    reference = float(F.cross_entropy(full[0, :-1], ids[0, 1:]))
    with compute_autocast(model, dtype):
        loss_sum, count = causal_lm_loss(model, {"input_ids": ids, "labels": ids})
    return compare_first_loss(float(loss_sum / count), reference, int(count))


def compare_first_loss(loss: float, reference: float, tokens: int) -> dict[str, Any]:
    """Return the result of `loss_check` for the two losses, or raise."""
    if not abs(loss - reference) <= ROUNDING * abs(reference):  # also when either is NaN
        raise TrainingError(
            f"before training, the loss is {loss:.6g} but the model's own logits give {reference:.6g}",
            "check the checkpoint for NaN; if it has none, this is a bug: please report the model",
        )
    return {"loss": loss, "reference_loss": reference, "difference": abs(loss - reference), "tokens": tokens}


@torch.no_grad()
def fused_check(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype, reference: float) -> dict[str, Any]:
    """Compare the loss through the fused kernels with `reference`, the loss of transformers' own forwards.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    with compute_autocast(model, dtype):
        loss_sum, count = causal_lm_loss(model, {"input_ids": ids, "labels": ids})
    return compare_fused_loss(float(loss_sum / count), reference)


def compare_fused_loss(loss: float, reference: float) -> dict[str, Any]:
    """Return the result of `fused_check` for the two losses, or raise."""
    if not abs(loss - reference) <= ROUNDING * abs(reference):
        raise TrainingError(
            f"with fused kernels the loss is {loss:.6g}, with transformers' forwards {reference:.6g}",
            "set use_kernels: false, and please report the model",
        )
    return {"loss": loss, "reference_loss": reference, "difference": abs(loss - reference)}


@torch.no_grad()
def shared_check(model: nn.Module, shared: Batch, separate: Batch, dtype: torch.dtype) -> dict[str, Any]:
    """Compare hidden states of answers that share a prompt with those of each answer after its own copy of the prompt.

    Args:
        shared, separate: batches of the same answers, of `data.collate_answers`.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    with compute_autocast(model, dtype):
        hidden, expected = (
            hidden_states_at(model, model_inputs(batch), batch["at"]).float()[batch["wanted"] != IGNORE_INDEX]
            for batch in (shared, separate)
        )
    off = (hidden - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    difference = float(off.median())
    if not difference <= HIDDEN_TOLERANCE.get(dtype, HIDDEN_TOLERANCE_16):
        raise TrainingError(
            f"with shared prompts, hidden states differ by {difference:.3g} from those with a prompt per answer",
            "set use_kernels: false, and please report the model",
        )
    return {"median_difference": difference, "largest_difference": float(off.max()), "tokens": len(off)}


@torch.no_grad()
def split_check(model: nn.Module, batch: Batch, dtype: torch.dtype) -> tuple[LanguageInputs | None, dict[str, Any]]:
    """Compare hidden states of a model that reads images with those of its forward in two parts.

    Returns:
        The first part, and numbers for checks.json. None if hidden states differ by more than rounding, or the model
        cannot be split; a notice gives the reason.
    """
    model.eval()
    language_inputs = LanguageInputs(model)

    def hidden(columns: Batch) -> Tensor:
        with compute_autocast(model, dtype):
            inputs = backbone_inputs(model, model_inputs(columns, LABELS))
            return last_hidden_state(causal_lm_of(model), inputs).float()

    try:
        expected = hidden(batch)
        difference = float((hidden(language_inputs(batch, hidden)) - expected).abs().mean() / expected.abs().mean())
    except Exception as error:  # of the model's own code
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}"
        notice("image-graphs", f"{IMAGES_EAGER}: {reason}")
        return None, {"error": reason}
    if not difference <= HIDDEN_TOLERANCE.get(dtype, HIDDEN_TOLERANCE_16):
        notice("image-graphs", f"{IMAGES_EAGER}: in two parts, hidden states differ by {difference:.3g}")
        return None, {"difference": difference}
    return language_inputs, {"difference": difference, "tokens": expected.shape[0] * expected.shape[1]}


@torch.no_grad()
def divided_check(
    model: nn.Module, ids: torch.Tensor, dtype: torch.dtype, reference: float, mesh: Mesh
) -> dict[str, Any]:
    """Compare the loss of a context-parallel row, inside `divided`, with `reference`, the loss of the full row.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    with compute_autocast(model, dtype):
        loss_sum, _ = causal_lm_loss(model, context_shard({"input_ids": ids, "labels": ids}, mesh))
    loss = mesh.sum(float(loss_sum), ("context",)) / (ids.shape[1] - 1)
    if not abs(loss - reference) <= ROUNDING * abs(reference):
        raise TrainingError(
            f"with context: {mesh.degree('context')} the loss is {loss:.6g}, without {reference:.6g}",
            "leave context out of `parallel`, and please report the model",
        )
    return {"loss": loss, "reference_loss": reference, "difference": abs(loss - reference)}
