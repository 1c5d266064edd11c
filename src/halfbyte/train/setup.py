"""The model of a run: load it, shard it, patch it, and verify its loss after each change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import set_seed

from ..adapters.lora import add_adapter, reads_base_weights
from ..batch import Batch, to_device
from ..data.answer_documents import first_prompt, with_own_prompts
from ..data.collate import make_collator
from ..data.collate_answers import answer_collator
from ..layers.plain import multiply_by_onednn
from ..loading.expert_offload import offload_experts
from ..loading.load import load_model
from ..memory.allocators import FIRST_KERNELS, HEAP_WASTE, memory_cap, return_free_memory, return_large_blocks
from ..mesh.mesh import SHARD_AXES
from ..methods.answers import turn_dropout_off
from ..modeling.attention import cudnn_lengths
from ..modeling.compute_dtype import compute_autocast
from ..modeling.head import causal_lm_loss
from ..modeling.layer import decoder_layers
from ..modeling.packing import isolate_for_run
from ..modeling.patch import PatchReport, patch, patch_attention
from ..modeling.projections import configured_recipe
from ..modeling.routers import track_routers
from ..modeling.transformers_versions import enable_checkpointing
from ..ops.fp8_scaling import DelayedScaling
from ..optim import trained_parameters
from ..parallel.context import context_parallel
from ..parallel.pipeline.model import LocalStages, PipelinePartition
from ..parallel.pipeline.runtime import Pipeline
from ..parallel.shard.model import shard_model
from ..parallel.tensor import apply_tensor_parallel
from ..plan.estimate import GIB
from ..report.terminal import expert_usage_line
from ..runs.layout import EXPERTS
from ..utils.console import Console, is_verbose
from ..utils.files import write_json
from ..utils.waiting import waiting
from . import checks
from .metrics_log import current_memory, reset_peak_memory
from .pipeline_stepper import PipelinedStepper
from .preflight import PreparedRun, planned_lengths
from .run_folder import OpenRun
from .stepper import GraphedStepper, Stepper


@contextlib.contextmanager
def process_settings(run: PreparedRun) -> Iterator[None]:
    """Apply the settings of the process while a run trains: memory cap, algorithms, and lengths with cuDNN plans."""
    with (
        memory_cap(run.machine.device, memory_limit(run)),
        checks.deterministic_algorithms(run.config, run.machine.device),
        cudnn_lengths(planned_lengths(run)),
    ):
        yield


def memory_limit(run: PreparedRun) -> int | None:
    """Cap for torch's CUDA allocator, bytes; None: no cap.

    Offloaded runs fill the device, so `FIRST_KERNELS` bytes stay free for kernels that are loaded later.
    """
    if run.plan.hosted or run.plan.offloaded:
        return run.plan.capacity_bytes - FIRST_KERNELS
    return None if run.config.memory_limit_gib is None else int(run.config.memory_limit_gib * GIB)


def load_trainable_model(run: PreparedRun, measured: dict[str, int]) -> Any:
    """Load the model, add the adapter and enable recomputation; adds memory before and after loading to `measured`."""
    device = run.machine.device
    if device.type == "cpu" and run.plan.total * HEAP_WASTE > run.plan.capacity_bytes:
        return_large_blocks()
    if device.type == "cpu":
        return_free_memory()  # the run would use free pages, and its memory would look smaller
    reset_peak_memory(device)
    measured["base_bytes"] = current_memory(device)
    how: dict[str, Any] = {"device": device, "attn_implementation": run.config.attn_implementation, "mesh": run.mesh}
    adapter, storage = run.config.adapter, run.config.storage
    # QAT, and adapters initialized from base weights, read all layers, so every rank loads them in full.
    if adapter and storage.qat_scheme is None and not reads_base_weights(adapter):
        slices = run.mesh.active(SHARD_AXES) if run.mesh.layout.slices > 1 else ()
        products = run.mesh.active(("tensor",))
        how["along"] = () if slices and products else slices or products  # 2D sharding loads full weights
        how["elsewhere"] = run.cut.remote_filter if run.cut else None
    model = load_model(run.files, storage, dtype=run.machine.weights_dtype, experts_on_host=run.plan.offloaded, **how)
    if run.plan.offloaded:
        offload_experts([*decoder_layers(model)[1]], run.plan.offloaded, device)
    measured["after_load_bytes"] = current_memory(device)
    if device.type == "cpu":
        reset_peak_memory(device)  # the peak so far counts pages of the checkpoint, which are not mapped any more
    set_seed(run.config.seed)
    if run.config.method != "sft" and run.config.disable_dropout:
        turn_dropout_off(model)
    if run.plan.activation_checkpointing and not run.plan.levels:
        enable_checkpointing(model)
    if adapter:
        model = add_adapter(model, adapter, scores=run.method.scores)
        if run.mesh.size == 1:
            multiply_by_onednn(model)
    return model


def shard_for_rank(run: PreparedRun, model: Any) -> LocalStages | None:
    """Reduce the model to this rank's part; returns its pipeline stages, or None without a pipeline."""
    stages = None if run.cut is None else run.cut.local_stages(model, run.mesh.coordinate("pipeline"))
    apply_tensor_parallel(model, run.mesh)
    shard_model(model, run.mesh, resident=run.plan.stays, on_host=run.plan.hosted)
    return stages


def pipelined_stepper(
    run: PreparedRun, model: Any, stages: LocalStages, grad_scaler: torch.amp.GradScaler
) -> PipelinedStepper:
    """Return the stepper that runs micro-batches through the stages of a run's model."""
    assert run.cut is not None
    device = run.machine.device
    pipeline = Pipeline(
        run.mesh,
        run.cut.schedule,
        run.cut.seconds,
        width=stages.causal_lm.config.get_text_config().hidden_size,
        dtype=stages.dtype,
        device=device,
        # sharded weights are gathered per backward
        ahead=0 if run.mesh.degree("shard") > 1 else len(stages.layers),
        spare=max(run.plan.capacity_bytes - run.plan.total, 0) if device.type == "cuda" else None,
    )
    names = [metric.name for metric in run.method.numbers.trained]
    return PipelinedStepper(names, run.method.blank, autocast_of(run, model), pipeline, stages, grad_scaler)


def autocast_of(run: PreparedRun, model: Any) -> Callable[[], Any]:
    """Return the context of a forward in the run's compute dtype."""
    return partial(compute_autocast, model, run.machine.compute_dtype)


def loss_scaler(run: PreparedRun) -> torch.amp.GradScaler:
    """Return the loss scaler of a run, which is disabled unless it computes in float16."""
    return torch.amp.GradScaler(run.machine.device.type, enabled=run.machine.compute_dtype == torch.float16)


def make_stepper(run: PreparedRun, model: Any, graphs: bool) -> Stepper:
    """Return the stepper of a run without pipeline; it captures CUDA graphs if `graphs`."""
    return GraphedStepper(list(trained_parameters(model).values()), run.mesh) if graphs else Stepper()


@contextlib.contextmanager
def counted_experts(
    job: OpenRun, model: Any, console: Console
) -> Iterator[Callable[[Batch], AbstractContextManager[Any]]]:
    """Yield the context of a forward that counts the experts of a mixture; write and print the counts afterwards.

    Ranks of a pipeline have different layers, so they count no experts.
    """
    run = job.prepared
    if run.cut is not None:
        yield contextlib.nullcontext
        return
    with track_routers(model, balanced=bool(run.config.router_aux_loss_coef)) as routers:
        yield contextlib.nullcontext if routers is None else routers.forward
        if routers is not None:
            usage = routers.usage(run.mesh)
            if run.mesh.is_main:
                write_json(job.output / EXPERTS, usage)
            console.print(expert_usage_line(usage))


# --- patch and verify ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verified:
    """The results of patching and verifying a model.

    Attributes:
        results: for checks.json.
        report: report of `patch`; None if the model runs transformers' forwards.
        fp8_scales: delayed scales of the fp8 recipe.
        graphs: whether steps may be captured in CUDA graphs.
    """

    results: dict[str, Any]
    report: PatchReport | None
    fp8_scales: DelayedScaling | None = None
    graphs: bool = False


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
    results = {"first_step": checks.loss_check(model, ids, dtype)}
    if run.config.use_kernels and device.type != "cpu":
        report = patch(model, run.plan.levels or None)
        if is_verbose(console):
            console.print(str(report))
        results["fused"] = checks.fused_check(model, ids, dtype, results["first_step"]["loss"])
    elif run.config.use_kernels and run.config.precision.recipe == "bf16" and (name := patch_attention(model)):
        if is_verbose(console):
            console.print(f"attention: {name}")
        results["fused"] = checks.fused_check(model, ids, dtype, results["first_step"]["loss"])
    plain = make_collator(run.config, run.tokenizer, device)
    isolation = isolate_for_run(model, run.config, plain, run.data.train, dtype, run.mesh)
    if isolation is not None:
        results["isolation"] = isolation.document()
    if run.data.shared:
        shared, separate = _first_prompt_batches(run, device)
        results["shared_prompts"] = checks.shared_check(model, shared, separate, dtype)
    if run.mesh.degree("context") > 1:
        loss = results.get("fused", results["first_step"])["loss"]
        with context_parallel(model, run.mesh):
            results["divided"] = checks.divided_check(model, ids, dtype, loss, run.mesh)
    by_positions = isolation is None or isolation.method == "positions"  # other methods read the batch's values
    if run.config.precision.recipe != "bf16":  # on a CPU too
        fp8_scales = patch(model, run.plan.levels or None, configured_recipe(run.config.precision)).scaling
    return Verified(results, report, fp8_scales, run.plan.use_graphs and by_positions)


def _first_prompt_batches(run: PreparedRun, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two batches of the answers to the first prompt: sharing the prompt, and each with its own copy."""
    collate = answer_collator(run.config, run.tokenizer, device, answers=run.data.answers)
    row = first_prompt(run.data.train[0])
    return to_device(collate([row]), device), to_device(collate([with_own_prompts(row)]), device)


@waiting("checking the model's loss")
def patch_and_verify_stages(run: PreparedRun, model: Any, stepper: PipelinedStepper, ids: Tensor) -> Verified:
    """Patch this rank's stages; compare the loss through the pipeline before and after.

    Raises:
        TrainingError: losses differ by more than rounding.
    """
    device, around = run.machine.device, autocast_of(run, model)
    loss, reference = _pipeline_losses(stepper, ids, around)
    results = {"first_step": checks.compare_first_loss(loss, reference, ids.shape[1] - 1)}
    report = fp8_scales = None
    assert run.cut is not None
    levels = _stage_levels(run.plan.levels, run.cut, run.mesh.coordinate("pipeline")) or None
    if run.config.use_kernels and device.type != "cpu":
        report = patch(model, levels)
        results["fused"] = checks.compare_fused_loss(_pipeline_losses(stepper, ids, around)[0], loss)
    if run.config.precision.recipe != "bf16":
        fp8_scales = patch(model, levels, configured_recipe(run.config.precision)).scaling
    return Verified(results, report, fp8_scales)


def _pipeline_losses(stepper: PipelinedStepper, ids: Tensor, around: Callable[[], Any]) -> tuple[float, float]:
    """Return the training loss, and cross-entropy on the model's own logits, of `ids` [1, T] without dropout."""
    model = stepper.stages.model

    def read(batch: Batch) -> Tensor:
        with around():
            logits = model(input_ids=batch["input_ids"], use_cache=False).logits.float()
            loss_sum, count = causal_lm_loss(model, batch)
        return torch.stack([loss_sum / count, F.cross_entropy(logits[0, :-1], ids[0, 1:])])

    model.eval()
    loss, reference = stepper.map_last_stage([{"input_ids": ids, "labels": ids}], read, 2)[0].tolist()
    return loss, reference


def _stage_levels(levels: Sequence[str], cut: PipelinePartition, rank: int) -> list[str]:
    """Return the recomputation levels of a rank's layers."""
    here = sorted(index for stage in cut.schedule.stages_of(rank) for index in cut.stage_layers[stage])
    return [levels[index] for index in here] if levels else []
