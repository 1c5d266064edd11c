"""Prepare a run: every check that is possible before its first step, without writing a file.

`halfbyte check` only calls `prepare_run`; `halfbyte train` continues from its result. So both accept the same
configurations, and report the same errors. Functions named `check_<thing>` raise if the run could not start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments

from ..adapters.initial import adapted_layers
from ..adapters.lora import check_adapter_files, check_base_unchanged
from ..config import Parallel, RunConfig
from ..config.initialisations import read_by
from ..config.policy import POLICY
from ..data.batches import width_shares
from ..data.prepare import PreparedData
from ..loading.find import ModelFiles, find_model, with_rope_factor
from ..loading.load import check_attention, check_not_quantized, check_stored
from ..loading.tokenizers import load_run_tokenizer, with_token_rows
from ..mesh.mesh import DATA_AXES, SINGLE_PROCESS, Mesh
from ..methods import Method, method_of
from ..methods.preference import reference_is_initial_model
from ..modeling.rope_scaling import check_adapter_rope
from ..modeling.routers import check_balancing
from ..modeling.shifted_attention import check_shifted_attention
from ..modeling.task_models import check_language_model
from ..parallel.context import check_context_parallel
from ..parallel.pipeline.model import PipelinePartition, check_trained, partition_model
from ..plan.memory_plan import MemoryPlan
from ..plan.meshes import check_layout
from ..plan.shapes import ModelShapes
from ..report.terminal import print_header, print_processes
from ..runs import checkpoints
from ..runs.inputs import check_paths
from ..utils.console import Console, is_verbose
from ..utils.errors import CheckpointError, ConfigError
from ..utils.files import check_space
from ..utils.hardware import limit_primitive_caches
from ..utils.text import one_line
from . import samples
from .best_evaluation import BestEvaluation
from .callbacks import total_steps, training_arguments
from .hub import check_hub_token
from .inputs import check_block, has_image_rows, most_images, notice_small_data, read_data
from .optimizer_checks import (
    check_bits,
    check_host_state,
    check_loss_scale,
    check_optimizer,
    check_schedule,
    check_targets,
    notice_unsharded_states,
)
from .planning import Machine, choose_layout, look_at_machine, plan_memory
from .storage_loss import StorageLoss, storage_loss
from .trackers import check_trackers

# Number of micro-batches of one width that amortize cuDNN's plan for it. On an H200 a plan takes 0.15 s and saves 7 to
# 30 ms for four rows of 2,048 to 4,096 tokens in a 0.6B model. A plan for rows of at most `SHORT` tokens takes 0.54 s
# (deterministic backward) and saves 1 ms.
PLAN_BATCHES = 50
SHORT = 1024
SHORT_PLAN_BATCHES = 500


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to load its model; no file is written.

    Attributes:
        config: the keys with everything that was chosen for them.
        written: the configuration as it was written, without what a checkpoint or the plan decides.
        checkpoint: checkpoint to continue from; None for step 0.
        files: the files of the model.
        identity: size of the training set, and digests of the data; see `data_identity`.
        prompts: prompts to answer before and after training.
        cut: the pipeline partition of the model, if it has stages.
        storage_loss: what formats under 4 bits cost; None if the main rank did not measure it.
    """

    config: RunConfig
    written: RunConfig
    method: Method
    mesh: Mesh
    machine: Machine
    checkpoint: Path | None
    files: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    identity: dict[str, Any]
    plan: MemoryPlan
    arguments: TrainingArguments
    prompts: list[samples.Prompt]
    cut: PipelinePartition | None = None
    storage_loss: StorageLoss | None = None

    @property
    def computes_reference_once(self) -> bool:
        """Whether the reference's log-probabilities are computed once, before training.

        With `auto`: if the reference does not exist later, or if the run uses each row at least once.
        """
        precompute, config = self.config.precompute_ref_log_probs, self.config
        if config.streaming:
            return False
        if precompute != "auto":
            return bool(precompute)
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.mesh.degree(*DATA_AXES)
        return reference_is_initial_model(config) or self.total_steps * rows >= len(self.data.train)

    @property
    def caches_features(self) -> bool:
        """Whether the features of images are computed once, before training."""
        return caches_features(self.config, self.data, self.total_steps)

    @property
    def total_steps(self) -> int:
        return total_steps(self.config, len(self.data.train), self.mesh.degree(*DATA_AXES))


def caches_features(config: RunConfig, data: PreparedData, steps: int) -> bool:
    """Return whether a run of `steps` steps computes the features of images once, before training.

    With `auto`: if tower and projector are frozen, and the run uses each row at least twice, to train or to sample.
    """
    if not has_image_rows(data) or not config.vision_cache:
        return False
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    sampled = steps * rows // config.group_size if config.method in POLICY else 0
    uses = steps * rows + sampled
    return config.requires_vision_cache or (not config.trained_vision and uses >= 2 * len(data.train))


def prepare_run(
    config: RunConfig,
    resume: str | bool | None = None,
    console: Console | None = None,
    mesh: Mesh = SINGLE_PROCESS,
    layout: Parallel | None = None,
    writes: bool = True,
    together: Sequence[RunConfig] = (),
    capacity_bytes: int | None = None,
    plan: MemoryPlan | None = None,
) -> PreparedRun:
    """Check a run, read and tokenize its data, and plan its memory.

    Args:
        resume: True for the newest checkpoint in output_dir, or a checkpoint folder; default: `resume_from_checkpoint`.
        console: prints the results; default: none.
        layout: layout that the run would have, if it is only checked; default: the layout of `mesh`.
        writes: whether the run will start. If not, it needs no output folder.
        capacity_bytes: memory of the device to plan for; default: what is free now.
        together: the runs of adapters that train at once on one base, this one included; memory is planned for all.
        plan: the plan of an equally large run of `together`; default: memory is planned here.

    Raises:
        HalfbyteError: the reason why the run cannot reach its first step: in the configuration, this machine, the
            output folder, the model's files, the adapter to continue from, the data, memory or disk space.
    """
    console = console or Console(quiet=True)
    resume = config.resume_from_checkpoint if resume is None else resume
    check_paths(config)
    written, config = config, mesh.local_first(lambda: with_rope_factor(config))
    limit_primitive_caches()
    method = method_of(config)
    BestEvaluation.of(config, method)
    if mesh.is_main:
        check_hub_token(config)
    layout = config.layout or layout or mesh.layout
    machine = look_at_machine(config, method, mesh)
    check_trackers(config.report_to)
    check_loss_scale(config, machine.compute_dtype)
    optimizer = check_optimizer(config, machine.device)
    config, checkpoint = _resumed(config, resume, layout, mesh) if resume or writes else (config, None)
    print_header(console, machine.facts)
    files = mesh.local_first(lambda: find_model(config.origin))  # one rank unpacks a GGUF file
    check_stored(files, config.storage)
    check_attention(files.config, config.attn_implementation, machine.device, trains=True)
    _check_model(config, files)
    tokenizer = load_run_tokenizer(config, files.origin)
    config = with_token_rows(config, tokenizer, files.config)
    shapes = ModelShapes(config, files.config, machine.device)
    _check_shapes(config, shapes, machine, mesh, layout)
    ranks, adapters = layout.size, len(together)
    data, identity = read_data(config, method, files, shapes, tokenizer, checkpoint, mesh, console, ranks, adapters)
    config, layout = choose_layout(_with_labels(config, data), files, machine, data, shapes, mesh, layout, console)
    mesh = mesh if mesh.size == 1 or mesh.layout == layout else mesh.with_layout(layout)
    trust, attention = config.trust_remote_code, config.attn_implementation
    check_context_parallel(shapes.causal_lm.config, layout, attention=attention, trust_remote_code=trust)
    data_parallel_degree = _data_parallel_degree(layout)
    if data.stream is not None:
        rows_per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * data_parallel_degree
        data.stream.require(config.max_steps * rows_per_step)
        data.stream.check = partial(check_block, shapes)
    notice_small_data(config, len(data.train), data_parallel_degree)
    arguments = training_arguments(
        config, machine.device, machine.compute_dtype, len(data.train), data.eval is not None, data_parallel_degree
    )
    steps = total_steps(config, len(data.train), data_parallel_degree)
    if checkpoint is not None:
        checkpoints.check_length(config, checkpoint, steps)
    check_schedule(config, arguments, optimizer, steps)
    prompts = _pick_prompts(config, method, tokenizer, data)
    notice_unsharded_states(config, machine, layout)
    if layout.size > 1:
        print_processes(console, layout, layout.size, config, data_parallel_degree)
    if plan is None and has_image_rows(data):
        shapes.images = most_images(config, data, tokenizer, caches_features(config, data, steps))
    if plan is None:
        planned, shapes = _all_adapters(config, shapes, files, together) if together else (config, shapes)
        plan = plan_memory(planned, files, machine, data, shapes, mesh, layout, console, checkpoint, capacity_bytes)
    config = config.model_copy(update=dict(plan.optimizer_choice))
    if mesh.size > 1:  # the plan decides whether frozen weights are sharded
        mesh = replace(mesh, layout=plan.layout)
    cut = _pipeline_partition(config, layout, shapes, plan)
    measured = None
    if mesh.is_main and checkpoint is None:
        parameters = sum(parameter.numel() for parameter in shapes.model.parameters())
        measured = storage_loss(files, config.storage, machine, data.train, parameters)
    if measured is not None:
        console.print(one_line(str(measured)), soft_wrap=True)
    run = PreparedRun(
        config, written, method, mesh, machine, checkpoint, files, tokenizer, data, identity, plan, arguments, prompts,
        cut, measured,
    )  # fmt: skip
    if writes:
        check_disk(run)
    if method.reference and is_verbose(console):
        _print_reference(run, console)
    return run


def _check_shapes(config: RunConfig, shapes: ModelShapes, machine: Machine, mesh: Mesh, layout: Parallel) -> None:
    """Check that the model has the layers that adapter, optimizer and layout name."""
    if config.adapter is not None and _initialised(config):
        adapted_layers(shapes.model, config.adapter)
    check_layout(layout, config, shapes)
    check_targets(config, shapes.model)
    check_bits(config, shapes.model)
    check_host_state(config, shapes.model, machine, mesh, layout)
    check_balancing(shapes.causal_lm, config.router_aux_loss_coef)


def _pick_prompts(
    config: RunConfig, method: Method, tokenizer: PreTrainedTokenizerBase, data: PreparedData
) -> list[samples.Prompt]:
    """Return the prompts that a run answers as samples; check that there are some if it answers them in training."""
    rows = data.train if data.eval is None else data.eval
    templated = data.report["template"] is not None
    prompts = [] if method.scores else samples.pick_prompts(config, tokenizer, rows, templated=templated)
    if config.sample_steps and not prompts:
        fix = "give prompts as texts: sample_prompts: [...], or remove sample_steps"
        raise ConfigError(f"{config.written('sample_steps')}: the run has no prompts to answer", fix)
    return prompts


def _print_reference(run: PreparedRun, console: Console) -> None:
    """Print when the reference's log-probabilities are computed."""
    origin = "computed in each step: two forwards and a backward"
    if run.computes_reference_once:
        origin = "computed once, by a forward of all rows before the first step, and cached"
    console.print(f"reference {origin}")


def _all_adapters(
    config: RunConfig, shapes: ModelShapes, files: ModelFiles, together: Sequence[RunConfig]
) -> tuple[RunConfig, ModelShapes]:
    """Return a run as large as all adapters that train at once, and its model: their ranks add up on each linear."""
    ranks = [max([run.r, *run.rank_pattern.values()]) for run in together]
    # what only some runs of a base can change: where its experts are, and when gradients become updates
    shared: dict[str, Any] = {"expert_offload": False, "optim_in_backward": False}
    if config.use_kernels and shapes.device.type != "cpu":  # their micro-batches are one, see `joint_steps`
        shared["per_device_train_batch_size"] = len(together) * config.per_device_train_batch_size
    planned = config.model_copy(update={**shared, "r": sum(ranks), "rank_pattern": {}})
    return planned, ModelShapes(planned, files.config, shapes.device)


def _with_labels(config: RunConfig, data: PreparedData) -> RunConfig:
    """Return the configuration with the names of the labels of its rows."""
    names = data.report["train"].get("label_names")
    return config if names is None else config.model_copy(update={"labels": names, "num_labels": len(names)})


def _initialised(config: RunConfig) -> bool:
    """Return whether `init_lora_weights` reads the base or the data."""
    return config.use_peft and not config.adapter_path and read_by(config) != "nothing"


def _check_model(config: RunConfig, files: ModelFiles) -> None:
    """Check that the base is a language model whose attention can be shifted, and that an adapter and its
    initialisation fit it."""
    check_language_model(files.config, files.name)
    check_shifted_attention(files.config, config.attention_group, trust_remote_code=config.trust_remote_code)
    if config.adapter_path:
        check_adapter_files(Path(config.adapter_path))
        check_base_unchanged(Path(config.adapter_path), quantized=config.storage.quantized)
        check_adapter_rope(Path(config.adapter_path), files.config)
    if _initialised(config):
        check_not_quantized(files)


def check_disk(run: PreparedRun) -> None:
    """Check that the disk has space for all checkpoints that a run keeps at a time, and for its trained weights.

    A checkpoint is removed only after a newer one is written.

    Raises:
        TrainingError: it has not.
    """
    config = run.config
    plan = run.plan
    steps = run.total_steps
    interval = run.arguments.save_steps  # below 1: a share of the run
    saves = math.ceil(1 / interval) if interval < 1 else math.ceil(steps / interval)
    held = len(checkpoints.checkpoints(config.output_path))
    copies = max(min(saves, (config.save_total_limit or saves) + 1) - held, 1)
    needed = copies * (plan.adapters + plan.optimizer) + plan.adapters
    fix = "free some space, choose another output_dir, or set save_total_limit: 1"
    check_space(config.output_path / "checkpoint", needed, fix)


def _resumed(
    config: RunConfig, resume: str | bool | None, layout: Parallel, mesh: Mesh
) -> tuple[RunConfig, Path | None]:
    """Return the checkpoint to continue from, and the configuration with its number of rows per step."""
    checkpoint = checkpoints.starting_point(config, resume)
    if not mesh.all_equal(checkpoint):
        raise CheckpointError(
            "the processes of this run see different checkpoints", "put output_dir on a disk that they share"
        )
    if checkpoint is not None:
        config = checkpoints.keep_step_size(config, checkpoint, _data_parallel_degree(layout))
    return config, checkpoint


def _data_parallel_degree(layout: Parallel) -> int:
    """Return the number of ranks that rows are distributed to."""
    return Mesh(layout=layout).degree(*DATA_AXES)


def _pipeline_partition(
    config: RunConfig, layout: Parallel, shapes: ModelShapes, plan: MemoryPlan
) -> PipelinePartition | None:
    """Return the pipeline partition of a run's model, or None without pipeline.

    Raises:
        ConfigError, ModelError: the model or its adapter cannot be computed in stages.
    """
    ranks = layout.pipeline
    if ranks == 1:
        return None
    cut = partition_model(
        shapes.causal_lm,
        config.pipeline_schedule,
        ranks,
        config.gradient_accumulation_steps,
        plan.activation_checkpointing,
        config.trust_remote_code,
    )
    check_trained(shapes.model, cut)
    return cut


def planned_lengths(run: PreparedRun) -> frozenset[int] | None:
    """Return the batch widths that occur often enough to amortize cuDNN's plan; None: all widths.

    They depend on data and configuration only, so a resumed run has the same.
    """
    if run.config.packing or run.config.padding_free:
        return None
    shares = width_shares(run.config, run.data)
    if len(shares) == 1:
        return None
    batches = run.total_steps * run.config.gradient_accumulation_steps
    needed = {width: SHORT_PLAN_BATCHES if width <= SHORT else PLAN_BATCHES for width in shares}
    return frozenset(width for width, share in shares.items() if share * batches >= needed[width])
