"""Everything that can be known of a run before its first step, without a file written.

`halfbyte check` is `prepare_run` and nothing else. `halfbyte train` goes on from it, and writes its first file then. So
what `check` calls ready starts, and what it refuses is refused with the same words.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TrainingArguments

from halfbyte.config import Parallel, RunConfig
from halfbyte.config.policy import SAMPLING
from halfbyte.data.batches import batches_of, largest_id, longest_row, width_shares
from halfbyte.data.prepare import PreparedData
from halfbyte.data.tables import digest_of_rows
from halfbyte.loading.find import ModelFiles, find_model
from halfbyte.loading.load import check_attention, check_stored, load_tokenizer, resolve_dtype
from halfbyte.methods import Method, method_of
from halfbyte.methods.preference import reference_is_initial_model
from halfbyte.modeling.adapters import check_adapter_files, check_base_unchanged
from halfbyte.modeling.architectures import check_token_ids
from halfbyte.modeling.projections import check_recipe, configured_recipe
from halfbyte.modeling.routers import check_balancing
from halfbyte.modeling.tiny_model import check_positions
from halfbyte.optim import OPTIMIZERS
from halfbyte.parallel.context.model import check_context_parallel
from halfbyte.parallel.mesh import DATA_AXES, SINGLE_PROCESS, Mesh
from halfbyte.parallel.pipeline.model import PipelinePartition, check_trained, partition_model
from halfbyte.parallel.shard.optimizer import optimizer_shards
from halfbyte.plan.advice import check_fits
from halfbyte.plan.cards import Card, card_of
from halfbyte.plan.estimate import estimate
from halfbyte.plan.memory_plan import MemoryPlan
from halfbyte.plan.meshes import Device, Meshes, check_layout
from halfbyte.plan.policy import OFFLOADED
from halfbyte.plan.shapes import ModelShapes
from halfbyte.qat.model import qat_format
from halfbyte.utils.console import Console
from halfbyte.utils.environment import environment
from halfbyte.utils.errors import CheckpointError, DataError
from halfbyte.utils.files import check_space
from halfbyte.utils.hardware import chosen_device, free_bytes, free_cached_memory, limit_primitive_caches
from halfbyte.utils.notices import notice
from halfbyte.utils.terminal import print_data, print_header, print_memory, print_processes, size
from halfbyte.utils.text import one_line

from ..auxiliary.teacher import check_teacher
from ..parallel.launch.bandwidth import all_gather_bandwidth, host_copy_bandwidth
from ..rl.rollouts import answered_with, digest_of
from ..rl.served import look_over_server
from ..rl.setup import look_over_rewards
from . import checkpoint as checkpoints
from . import samples
from .callback_arguments import check_dtype, total_steps, training_arguments
from .dry_run import trackers, try_optimizer, try_schedule
from .preflight_paths import look_over_run

# Micro-batches of a length that repay cuDNN's plan for it. On an H200 one takes 0.15 s, and in a 0.6B model four rows
# of 2,048 to 4,096 tokens then take 7 to 30 ms less; short rows, whose repeatable backward takes 0.54 s to plan, 1 ms.
REPAID, SHORT, REPAID_SHORT = 50, 1024, 500


@dataclass(frozen=True)
class Machine:
    """Where a run computes, and in what.

    Attributes:
        compute_dtype: of matrix products.
        weights_dtype: of weights that are not quantized.
        facts: what environment.json begins with.
    """

    device: torch.device
    compute_dtype: torch.dtype
    weights_dtype: torch.dtype
    facts: dict[str, Any]


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to load its model; nothing of it was written.

    Attributes:
        checkpoint: where to continue from; None for step 0.
        files: the model, looked up once.
        prompts: answered before and after training.
        cut: where the model is cut into the stages of a pipeline, if it is.
    """

    config: RunConfig
    method: Method
    mesh: Mesh
    machine: Machine
    checkpoint: Path | None
    files: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    plan: MemoryPlan
    arguments: TrainingArguments
    prompts: list[samples.Prompt]
    cut: PipelinePartition | None = None

    @property
    def size(self) -> dict[str, Any]:
        """What `described` says of the training set."""
        return described(self.config, self.data)

    @property
    def computes_reference_once(self) -> bool:
        """Whether the reference is computed before training: always where it is asked for or cannot be had later, else
        where the run takes each row at least once."""
        asked, config = self.config.precompute_ref_log_probs, self.config
        if asked != "auto":
            return bool(asked)
        rows = config.per_device_train_batch_size * config.gradient_accumulation_steps * self.mesh.degree(*DATA_AXES)
        return reference_is_initial_model(config) or self.total_steps * rows >= len(self.data.train)

    @property
    def total_steps(self) -> int:
        return total_steps(self.config, len(self.data.train), self.mesh.degree(*DATA_AXES))


def prepare_run(
    config: RunConfig,
    resume: str | bool | None = None,
    console: Console | None = None,
    mesh: Mesh = SINGLE_PROCESS,
    layout: Parallel | None = None,
) -> PreparedRun:
    """Look a run over, read and tokenize its data and plan its memory, saying what was found.

    Args:
        resume: True for the newest checkpoint in output_dir, or a checkpoint folder; default: `resume_from_checkpoint`.
        console: where that is said; default: nowhere.
        layout: of the processes that the run would have, where it is only looked over; default: those of `mesh`.

    Raises:
        HalfbyteError: whatever would keep the run from its first step: in the configuration, on this machine, in the
            output folder, the model's files, the adapter to continue from, the data, or for want of memory or space.
    """
    console = console or Console(quiet=True)
    resume = config.resume_from_checkpoint if resume is None else resume
    look_over_run(config, resume)
    limit_primitive_caches()
    method = method_of(config)
    layout = config.layout or layout or mesh.layout
    machine = _machine(config, method, mesh)
    trackers(config.report_to)
    optimizer = try_optimizer(config, machine.device)
    config, checkpoint = _continued(config, resume, layout, mesh)
    print_header(console, machine.facts, config)
    files = mesh.local_first(lambda: find_model(config.origin))  # a GGUF file is unpacked once
    check_stored(files, config.storage)
    check_attention(files.config, config.attn_implementation, machine.device, trains=True)
    if config.adapter_path:
        check_adapter_files(Path(config.adapter_path))
        check_base_unchanged(Path(config.adapter_path), quantized=config.storage.quantized)
    shapes = ModelShapes(config, files.config, machine.device)
    check_layout(layout, config, shapes)
    check_balancing(shapes.causal_lm, config.router_aux_loss_coef)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    data = _read_data(config, method, shapes, tokenizer, checkpoint, mesh, console)
    config, layout = _laid_out(config, files, machine, data, shapes, mesh, layout, console)
    mesh = mesh if mesh.size == 1 or mesh.layout == layout else mesh.with_layout(layout)
    _check_divided(shapes, mesh)
    ways = _dealt(layout)
    arguments = _arguments(config, machine, data, ways)
    try_schedule(config, arguments, optimizer, total_steps(config, len(data.train), ways))
    rows, templated = data.train if data.eval is None else data.eval, data.report["template"] is not None
    prompts = [] if method.scores else samples.pick_prompts(config, tokenizer, rows, templated=templated)
    _say_whole_states(config, machine, layout)
    if layout.size > 1:
        print_processes(console, layout, layout.size, config, ways)
    plan = _planned(config, files, machine, data, shapes, mesh, layout, console, checkpoint)
    mesh = mesh if mesh.size == 1 else replace(mesh, layout=plan.layout)  # which says whether frozen bytes are divided
    cut = _cut(config, layout, shapes, plan)
    run = PreparedRun(
        config, method, mesh, machine, checkpoint, files, tokenizer, data, plan, arguments, prompts, cut
    )
    if method.reference:
        console.print(f"reference {_reference_said(run)}")
    return run


def _reference_said(run: PreparedRun) -> str:
    if run.computes_reference_once:
        return "computed once, a forward of all rows before the first step, and kept"
    return "computed in each step: two forwards and a backward"


def _continued(
    config: RunConfig, resume: str | bool | None, layout: Parallel, mesh: Mesh
) -> tuple[RunConfig, Path | None]:
    """The checkpoint that the run goes on from, and its configuration, in which a step keeps its rows."""
    checkpoint = checkpoints.starting_point(config, resume)
    if not mesh.all_equal(checkpoint):
        raise CheckpointError(
            "the processes of this run see different checkpoints", "put output_dir on a disk they share"
        )
    return config if checkpoint is None else checkpoints.same_steps(config, checkpoint, _dealt(layout)), checkpoint


def _read_data(
    config: RunConfig,
    method: Method,
    shapes: ModelShapes,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    mesh: Mesh,
    console: Console,
) -> PreparedData:
    """The rows of the run, once for all processes of a host, looked over and said."""
    data = mesh.local_first(lambda: method.ready(config, tokenizer, shapes.causal_lm.config))
    print_data(console, data.report)
    _check_data(config, shapes, tokenizer, data)
    now = described(config, data)
    if not mesh.all_equal(now):
        raise DataError("the processes of this run read different data", "give each the same files")
    if checkpoint is not None:
        checkpoints.check_same_data(now, checkpoint)
    if method.rows == "prompts":
        model_config = shapes.causal_lm.config
        look_over_rewards(config, data, model_config, tokenizer, checkpoint, console)
        look_over_server(config, data, tokenizer, console)
        check_teacher(config, model_config, tokenizer, checkpoint, console, _longest(data))
    return data


def _say_whole_states(config: RunConfig, machine: Machine, layout: Parallel) -> None:
    """Say what keeps the optimizer's state from being divided where the frozen weights are."""
    scaled, row = machine.compute_dtype == torch.float16, OPTIMIZERS[config.optim]
    if optimizer_shards(layout, True) == optimizer_shards(layout, row.elementwise and not scaled):
        return
    if row.elementwise:
        why, instead = "dtype: float16 scales the loss", "dtype: bfloat16 divides it"
    else:
        known = ", ".join(name for name, other in OPTIMIZERS.items() if other.elementwise)
        why, instead = f"optim: {config.optim} steps no slices of a parameter", f"these do: {known}"
    notice("whole-states", f"{why}, so the optimizer's state is whole on each GPU; {instead}")


def _dealt(layout: Parallel) -> int:
    """Processes that rows are dealt to."""
    return Mesh(layout=layout).degree(*DATA_AXES)


def _cut(config: RunConfig, layout: Parallel, shapes: ModelShapes, plan: MemoryPlan) -> PipelinePartition | None:
    """Where the model of a run is cut; None where it is not.

    Raises:
        ConfigError, ModelError: what is asked for cannot be computed in stages.
    """
    ranks = layout.pipeline
    if ranks == 1:
        return None
    how = config.gradient_accumulation_steps, plan.activation_checkpointing, config.trust_remote_code
    cut = partition_model(shapes.causal_lm, config.pipeline_schedule, ranks, *how)
    check_trained(shapes.model, cut)
    return cut


def described(config: RunConfig, data: PreparedData) -> dict[str, Any]:
    """Return what decides the steps of a run beside its configuration, for its checkpoints.

    Returns:
        Rows, tokens and trained tokens of the training set, the SHA-256 of all its prepared columns (those that reward
        functions get, too), and that of the adapter which the run continues from.
    """
    size = {name: data.report["train"][name] for name in ("rows", "tokens", "trained_tokens")}
    adapter = "".join(digest_of(Path(config.adapter_path)).values()) if config.adapter_path else None
    return {**size, "digest": digest_of_rows(data.train), "adapter_path": adapter}


def lengths_worth_plans(run: PreparedRun) -> frozenset[int] | None:
    """Of rows that are one document each the widths that come so often that planning for them pays; None: all.

    Data and configuration decide, so a resumed run has the same.
    """
    if run.config.packing or run.config.padding_free:
        return None
    shares = width_shares(run.config, run.data)
    if len(shares) == 1:
        return None
    batches = run.total_steps * run.config.gradient_accumulation_steps
    least = {width: REPAID_SHORT if width <= SHORT else REPAID for width in shares}
    return frozenset(width for width, share in shares.items() if share * batches >= least[width])


def _machine(config: RunConfig, method: Method, mesh: Mesh) -> Machine:
    device = mesh.device(chosen_device(config.device))
    check_recipe(configured_recipe(config.precision), device)
    if config.storage.qat_scheme is not None:
        qat_format(config.storage.qat_scheme)
    compute, weights = (
        resolve_dtype(name, device) for name in (config.precision.compute, config.precision.weights)
    )
    check_dtype(config, device, compute)
    described = environment(str(device), compute, config.precision.compute)
    facts = {**described, "numbers": method.numbers.document(), "started": time.time()}
    return Machine(device, compute, weights, facts)


def _check_divided(shapes: ModelShapes, mesh: Mesh) -> None:
    """Whether the rows of the model can be cut along their tokens, where they are to be."""
    if mesh.degree("context") == 1:
        return
    attention, trust = shapes.config.attn_implementation, shapes.config.trust_remote_code
    check_context_parallel(shapes.causal_lm.config, mesh, attention=attention, trust_remote_code=trust)


def _check_data(config: RunConfig, shapes: ModelShapes, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> None:
    """Whether the model has embeddings for all tokens of the data, of padding and of the ends of answers, which prompts
    do not have, and positions for its longest row."""
    splits = [rows for rows in (data.train, data.eval) if rows is not None]
    ends: Any = tokenizer.convert_tokens_to_ids(data.report.get("stop_tokens", []))
    named = {"padding": tokenizer.pad_token_id, "the end of an answer": max(filter(None, ends), default=None)}
    check_token_ids(shapes.causal_lm, {"tokens of the data": max(map(largest_id, splits)), **named})
    check_positions(shapes.causal_lm.config, _longest(data), trust_remote_code=config.trust_remote_code)


def _longest(data: PreparedData) -> int:
    """Tokens of the longest row."""
    return max(longest_row(rows, data.answers) for rows in (data.train, data.eval) if rows is not None)


def _arguments(config: RunConfig, machine: Machine, data: PreparedData, ways: int) -> TrainingArguments:
    rows, evaluate = len(data.train), data.eval is not None
    asked = config.per_device_train_batch_size * config.gradient_accumulation_steps * ways
    if asked > rows and config.method not in SAMPLING:
        keys = "per_device_train_batch_size and gradient_accumulation_steps"
        notice("step-rows", f"{keys} ask for {asked:,} rows a step, and there are {rows:,}: a step takes them all")
    return training_arguments(config, machine.device, machine.compute_dtype, rows=rows, evaluate=evaluate, ways=ways)


def _laid_out(
    config: RunConfig, files: ModelFiles, machine: Machine, data: PreparedData, shapes: ModelShapes, mesh: Mesh,
    layout: Parallel, console: Console,
) -> tuple[RunConfig, Parallel]:  # fmt: skip
    """The run as `parallel: auto` divides it among as many processes, said with the reason; steps keep their rows."""
    if config.parallel != "auto" or layout.size == 1:
        return config, layout
    card, on_host = _card(machine, mesh), _on_host(mesh, layout)
    device = Device(machine.device, _free_bytes(machine, mesh, on_host), card, on_host)
    meshes = Meshes(config, files.config, device, lambda changed: batches_of(changed, data, machine.device), shapes)
    option, reason = meshes.choose(layout.size)
    chosen, said = mesh.from_main((option, reason))  # what is free in the host's memory differs from moment to moment
    console.print(one_line(f"parallel: {chosen.layout}: {said}"), soft_wrap=True)
    return chosen.config.model_copy(update={"parallel": "auto"}), chosen.layout


def _card(machine: Machine, mesh: Mesh) -> Card:
    """What this process computes on, with the link to the others as it was measured, by which what NCCL needs beside
    torch is taken."""
    card = card_of(machine.device).measured(link=all_gather_bandwidth(mesh, machine.device))
    free_cached_memory(machine.device)
    return card


def _free_bytes(machine: Machine, mesh: Mesh, on_host: int) -> int:
    """Of the device that has least."""
    return -mesh.max(-free_bytes(machine.device, on_host))


def _on_host(mesh: Mesh, layout: Parallel) -> int:
    """Processes on the host that has most; of those that are not here, all."""
    return layout.size if mesh.size == 1 else mesh.max(mesh.local) + 1


def _planned(
    config: RunConfig, files: ModelFiles, machine: Machine, data: PreparedData, shapes: ModelShapes, mesh: Mesh,
    layout: Parallel, console: Console, checkpoint: Path | None,
) -> MemoryPlan:  # fmt: skip
    """The plan of a run that fits, with room on the disk for a checkpoint: every process's, the main one's.

    Args:
        checkpoint: that the run goes on from, whose rollouts it plans for.
    """

    def batches(changed: RunConfig) -> Any:
        return batches_of(changed, data, machine.device)

    options: dict[str, Any] = {"device": machine.device, "batches": batches(config), "layout": layout}
    if checkpoint is not None and config.method in SAMPLING:
        options["answered"] = answered_with(checkpoint)
    card = _card(machine, mesh)
    if layout.size > 1:
        options["on_host"] = _on_host(mesh, layout)
        options["capacity_bytes"] = _free_bytes(machine, mesh, options["on_host"])
    if layout.tensor == 1:
        options["shapes"] = shapes
    plan = mesh.from_main(estimate(config, files.config, card=card, **options))
    if mesh.size > 1 and not OFFLOADED.keys().isdisjoint(plan.levels):  # all copy at once
        card = card.measured(host=host_copy_bandwidth(mesh, machine.device))
        plan = mesh.from_main(estimate(config, files.config, card=card, **options))
    print_memory(console, plan)
    if plan.answering is not None:
        step = size(plan.activations + plan.logits)
        how = "beside" if plan.answering.stays else "in turn with"
        console.print(one_line(f"rollouts {plan.answering}, {how} a step's {step}"), soft_wrap=True)
    check_fits(plan, config, files.config, rows=len(data.train), batches=batches)
    needed = plan.adapters + plan.optimizer
    check_space(config.output_path / "checkpoint", needed, "free some space, or choose another output_dir")
    return plan
