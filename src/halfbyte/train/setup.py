"""The model of a run: load it, shard it, and make what steps it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from transformers import set_seed

from ..adapters.initial import AdapterInitialiser, InitialAdapter
from ..adapters.lora import add_adapter, reads_base_weights
from ..batch import Batch
from ..config.methods import CLASSIFYING
from ..config.schema import RunKeys
from ..layers.plain import multiply_by_onednn
from ..loading.expert_offload import offload_experts
from ..loading.load import load_model
from ..loading.tokenizers import start_new_tokens
from ..memory.allocators import FIRST_KERNELS, HEAP_WASTE, memory_cap, return_free_memory, return_large_blocks
from ..mesh.mesh import SHARD_AXES
from ..methods.answers import turn_dropout_off
from ..modeling.architectures import FREEZE_TOWER, train_vision, vision_parts
from ..modeling.attention import cudnn_lengths
from ..modeling.compute_dtype import compute_autocast
from ..modeling.layer import decoder_layers
from ..modeling.routers import track_routers
from ..modeling.shifted_attention import shifted_attention
from ..modeling.transformers_versions import enable_checkpointing
from ..optim import trained_parameters
from ..parallel.context import context_parallel
from ..parallel.pipeline.full_state import PipelineState
from ..parallel.pipeline.model import LocalStages
from ..parallel.pipeline.runtime import Pipeline
from ..parallel.shard.model import shard_model
from ..parallel.tensor import apply_tensor_parallel
from ..report.terminal import expert_usage_line
from ..runs.layout import EXPERTS
from ..utils.console import Console
from ..utils.files import write_json
from ..utils.hardware import free_cached_memory
from . import checks
from .initialise import initial_factors, keep_initial
from .inputs import digests_of_models
from .metrics_log import current_memory, reset_peak_memory, run_peaks
from .pipeline_stepper import PipelinedStepper
from .preflight import PreparedRun, planned_lengths
from .stepper import GraphedStepper, Stepper
from .verify import Verified


@contextlib.contextmanager
def process_settings(run: PreparedRun) -> Iterator[None]:
    """Apply the settings of the process while a run trains: memory cap, algorithms, and lengths with cuDNN plans.

    Afterwards the run's memory is free again; its driver must have returned, since it holds the last step.
    """
    device = run.machine.device
    with (
        memory_cap(device, memory_limit(run)),
        checks.deterministic_algorithms(run.config, device),
        cudnn_lengths(planned_lengths(run)),
    ):
        try:
            yield
        finally:
            gc.collect()  # loop and model reference each other
            free_cached_memory(device)


def memory_limit(run: PreparedRun) -> int | None:
    """Cap for torch's CUDA allocator, bytes; None: no cap.

    Offloaded runs fill the device, so `FIRST_KERNELS` bytes stay free for kernels that are loaded later.
    """
    if run.plan.hosted or run.plan.offloaded:
        return run.plan.capacity_bytes - FIRST_KERNELS
    return None if run.config.memory_limit_gib is None else int(run.config.memory_limit_gib * 2**30)


class ModelSource:
    """Gives a run its model: here, one that is loaded for this run alone."""

    def load(self, run: PreparedRun, measured: dict[str, int]) -> Any:
        """Return the model with its adapter and recomputation enabled; adds memory before and after loading (bytes) to
        `measured`."""
        initial = initial_factors(run)
        return with_adapter(run, load_base(run, measured, initial), initial)

    def stepper(self, run: PreparedRun, model: Any, verified: Verified) -> Stepper:
        """Return the stepper of the run, without pipeline."""
        return make_stepper(run, model, verified)

    def digests(self, run: PreparedRun) -> Future[dict[str, Any]]:
        """Return the digests of the run's models for its checkpoints, see `digests_of_models`."""
        return digests_of_models(run.config, run.files, run.checkpoint, run.mesh.is_main)


def load_base(
    run: PreparedRun, measured: dict[str, int], initial: AdapterInitialiser | InitialAdapter | None = None
) -> Any:
    """Load the model without its adapter; adds memory before and after loading to `measured`.

    Args:
        initial: takes the weights that `init_lora_weights` reads, before they are quantized.
    """
    device = run.machine.device
    if device.type == "cpu" and run.plan.total * HEAP_WASTE > run.plan.capacity_bytes:
        return_large_blocks()
    if device.type == "cpu":
        return_free_memory()  # the run would use free pages, and its memory would look smaller
    reset_peak_memory(device)
    measured["base_bytes"] = current_memory(device)
    adapter = run.config.adapter
    storage = run.config.storage
    sharded_axes: tuple[str, ...] = ()
    is_remote = None
    # QAT, and adapters initialized from base weights, read all layers, so every rank loads them in full.
    if adapter and not storage.rounds and not reads_base_weights(adapter):
        slices = run.mesh.active(SHARD_AXES) if run.mesh.layout.slices > 1 else ()
        products = run.mesh.active(("tensor",))
        sharded_axes = () if slices and products else slices or products  # 2D sharding loads full weights
        is_remote = run.cut.remote_filter if run.cut else None
    model = load_model(
        run.files,
        storage,
        dtype=run.machine.weights_dtype,
        experts_on_host=run.plan.offloaded,
        device=device,
        attn_implementation=run.config.attn_implementation,
        mesh=run.mesh,
        along=sharded_axes,
        elsewhere=is_remote,
        initial=initial,
    )
    if run.plan.offloaded:
        offload_experts([*decoder_layers(model)[1]], run.plan.offloaded, device)
    measured["after_load_bytes"] = current_memory(device)
    if device.type == "cpu":
        reset_peak_memory(device)  # the peak so far counts pages of the checkpoint, which are not mapped any more
    return model


def with_adapter(run: PreparedRun, model: Any, initial: AdapterInitialiser | InitialAdapter | None = None) -> Any:
    """Return a loaded model with the adapter of a run, and with recomputation enabled as planned.

    Args:
        initial: the argument of `load_base`.
    """
    adapter = run.config.adapter
    set_seed(run.config.seed)
    if run.config.method != "sft" and run.config.disable_dropout:
        turn_dropout_off(model)
    if run.plan.activation_checkpointing and not run.plan.levels:
        enable_checkpointing(model)
    elif run.plan.activation_checkpointing and not run.config.freeze_vision_tower:
        for name in vision_parts(model)[FREEZE_TOWER]:
            enable_checkpointing(model.get_submodule(name))
    if adapter:
        start_new_tokens(model, run.config, run.tokenizer)
        labels = head_size(run.config)
        model = add_adapter(model, adapter, scores=run.method.scores, labels=labels, initial=initial)
        if initial is not None and run.mesh.is_main:
            keep_initial(run, initial, model)
        if run.mesh.size == 1:
            multiply_by_onednn(model)
    else:
        train_vision(model, run.config.trained_vision)
    return model


def head_size(config: RunKeys) -> int | None:
    """Return the number of outputs of a run's head `score`; None: as in its task type."""
    if config.method not in CLASSIFYING:
        return None
    return 1 if config.labels is None else len(config.labels)


def shard_for_rank(run: PreparedRun, model: Any) -> PipelineState | None:
    """Reduce the model to this rank's part; returns the state of its pipeline stages, or None without a pipeline."""
    stages = None if run.cut is None else run.cut.local_stages(model, run.mesh.coordinate("pipeline"))
    apply_tensor_parallel(model, run.mesh)
    shard_model(model, run.mesh, resident=run.plan.stays, on_host=run.plan.hosted)
    return None if stages is None else PipelineState(run.mesh, stages)


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


def make_stepper(run: PreparedRun, model: Any, verified: Verified) -> Stepper:
    """Return the stepper of a run without pipeline; it captures CUDA graphs if `verified` allows it."""
    if not verified.graphs:
        return Stepper()
    return GraphedStepper(list(trained_parameters(model).values()), run.mesh, verified.language_inputs)


@contextlib.contextmanager
def training_context(
    run: PreparedRun, model: Any, console: Console
) -> Iterator[Callable[[Batch], AbstractContextManager[Any]]]:
    """Make forwards accept context-parallel shards, and shift attention; yield the context of a forward that counts a
    mixture's experts.

    The counts are written and printed afterwards. Ranks of a pipeline have different layers, so they count no experts.
    """
    with context_parallel(model, run.mesh), shifted_attention(model, run.config.attention_group):
        if run.cut is not None:
            yield contextlib.nullcontext
            return
        with track_routers(model, balanced=bool(run.config.router_aux_loss_coef)) as routers:
            yield contextlib.nullcontext if routers is None else routers.forward
            if routers is not None:
                usage = routers.usage(run.mesh)
                if run.mesh.is_main:
                    write_json(run.config.output_path / EXPERTS, usage)
                console.print(expert_usage_line(usage))


def measure_peaks(run: PreparedRun, stepper: Stepper, measured: dict[str, int]) -> None:
    """Add the peak memory of a run to `measured`, which holds the memory before loading."""
    measured |= run_peaks(run.machine.device, measured["base_bytes"], stepper.peak_graph_bytes)
