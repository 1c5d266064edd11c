"""Prepare a run: every check that is possible before its first step, without writing a file.

`halfbyte check` only calls `prepare_run`; `halfbyte train` continues from its result. So both accept the same
configurations, and report the same errors. Functions named `check_<thing>` raise if the run could not start.
"""

from __future__ import annotations

import fnmatch
import math
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from ..adapters.lora import check_adapter_files, check_base_unchanged
from ..auxiliary.teacher import check_teacher
from ..config import Parallel, RunConfig
from ..config.policy import SAMPLING
from ..data.batches import batches_of, largest_id, longest_row, width_shares
from ..data.prepare import PreparedData
from ..loading.find import ModelFiles, find_model
from ..loading.load import check_attention, check_stored, load_tokenizer, resolve_dtype
from ..memory import allocators
from ..mesh.mesh import DATA_AXES, SINGLE_PROCESS, Mesh
from ..methods import Method, method_of
from ..methods.preference import reference_is_initial_model
from ..modeling.architectures import check_token_ids
from ..modeling.projections import check_recipe, configured_recipe
from ..modeling.routers import check_balancing
from ..modeling.tiny_model import check_positions
from ..optim import (
    FOLLOW_METRIC,
    OPTIMIZERS,
    make_optimizer,
    make_schedule,
    optimizer_row,
    state_key,
    target_matrices,
    trained_parameters,
)
from ..parallel.context import check_context_parallel
from ..parallel.launch.bandwidth import all_gather_bandwidth, host_copy_bandwidth
from ..parallel.pipeline.model import PipelinePartition, check_trained, partition_model
from ..parallel.shard.optimizer import optimizer_shards
from ..plan.advice import check_fits, check_host
from ..plan.cards import Card, card_of
from ..plan.estimate import estimate
from ..plan.memory_plan import MemoryPlan
from ..plan.meshes import Device, Meshes, check_layout
from ..plan.policy import OFFLOADED
from ..plan.shapes import ModelShapes
from ..qat.model import qat_format
from ..report.terminal import print_data, print_header, print_memory, print_processes
from ..rl.dataset import rollout_plan_of
from ..rl.preflight import check_rewards
from ..rl.served import check_server
from ..runs import checkpoints
from ..runs.inputs import check_output, check_paths
from ..utils.console import Console, is_verbose
from ..utils.environment import environment
from ..utils.errors import CheckpointError, ConfigError, DataError
from ..utils.files import check_space
from ..utils.hardware import chosen_device, free_bytes, free_cached_memory, limit_primitive_caches
from ..utils.notices import notice, silent
from ..utils.text import brief, one_line, size
from ..utils.waiting import waiting
from . import samples
from .best_evaluation import BestEvaluation
from .callbacks import check_dtype, total_steps, training_arguments
from .hub import check_hub_token
from .identity import data_identity, model_reader

# Number of micro-batches of one width that amortize cuDNN's plan for it. On an H200 a plan takes 0.15 s and saves 7 to
# 30 ms for four rows of 2,048 to 4,096 tokens in a 0.6B model. A plan for rows of at most `SHORT` tokens takes 0.54 s
# (deterministic backward) and saves 1 ms.
PLAN_BATCHES, SHORT, SHORT_PLAN_BATCHES = 50, 1024, 500
WIDTH = 64  # of the layer in `check_optimizer`: states of fewer than 4,096 numbers have 32 bits


@dataclass(frozen=True)
class Machine:
    """The device and dtypes of a run.

    Attributes:
        compute_dtype: dtype of matrix products.
        weights_dtype: dtype of weights that are not quantized.
        facts: the first entries of environment.json.
    """

    device: torch.device
    compute_dtype: torch.dtype
    weights_dtype: torch.dtype
    facts: dict[str, Any]


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
    def total_steps(self) -> int:
        return total_steps(self.config, len(self.data.train), self.mesh.degree(*DATA_AXES))


def prepare_run(
    config: RunConfig,
    resume: str | bool | None = None,
    console: Console | None = None,
    mesh: Mesh = SINGLE_PROCESS,
    layout: Parallel | None = None,
    writes: bool = True,
) -> PreparedRun:
    """Check a run, read and tokenize its data, and plan its memory.

    Args:
        resume: True for the newest checkpoint in output_dir, or a checkpoint folder; default: `resume_from_checkpoint`.
        console: prints the results; default: none.
        layout: layout that the run would have, if it is only checked; default: the layout of `mesh`.
        writes: whether the run will start. If not, it needs no output folder.

    Raises:
        HalfbyteError: the reason why the run cannot reach its first step: in the configuration, this machine, the
            output folder, the model's files, the adapter to continue from, the data, memory or disk space.
    """
    console = console or Console(quiet=True)
    resume = config.resume_from_checkpoint if resume is None else resume
    if writes:
        check_output(config, resume)
    check_paths(config)
    written = config
    limit_primitive_caches()
    method = method_of(config)
    BestEvaluation.of(config, method)
    if mesh.is_main:
        check_hub_token(config)
    layout = config.layout or layout or mesh.layout
    machine = _machine(config, method, mesh)
    check_trackers(config.report_to)
    check_loss_scale(config, machine.compute_dtype)
    optimizer = check_optimizer(config, machine.device)
    config, checkpoint = _resumed(config, resume, layout, mesh) if resume or writes else (config, None)
    print_header(console, machine.facts)
    files = mesh.local_first(lambda: find_model(config.origin))  # one rank unpacks a GGUF file
    check_stored(files, config.storage)
    check_attention(files.config, config.attn_implementation, machine.device, trains=True)
    if config.adapter_path:
        check_adapter_files(Path(config.adapter_path))
        check_base_unchanged(Path(config.adapter_path), quantized=config.storage.quantized)
    shapes = ModelShapes(config, files.config, machine.device)
    check_layout(layout, config, shapes)
    check_targets(config, shapes.model)
    check_bits(config, shapes.model)
    check_host_state(config, shapes.model, machine, mesh, layout)
    check_balancing(shapes.causal_lm, config.router_aux_loss_coef)
    tokenizer = load_tokenizer(files.place, chat_template_path=config.chat_template_path)
    data, identity = _read_data(config, method, files, shapes, tokenizer, checkpoint, mesh, console)
    config, layout = _with_layout(config, files, machine, data, shapes, mesh, layout, console)
    mesh = mesh if mesh.size == 1 or mesh.layout == layout else mesh.with_layout(layout)
    _check_context_parallel(shapes, mesh)
    ways = _row_ranks(layout)
    if data.stream is not None:
        rows_per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * ways
        data.stream.require(config.max_steps * rows_per_step)
        data.stream.check = partial(_check_block, shapes)
    arguments = _arguments(config, machine, data, ways)
    steps = total_steps(config, len(data.train), ways)
    if checkpoint is not None:
        checkpoints.check_length(config, checkpoint, steps)
    check_schedule(config, arguments, optimizer, steps)
    rows, templated = data.train if data.eval is None else data.eval, data.report["template"] is not None
    prompts = [] if method.scores else samples.pick_prompts(config, tokenizer, rows, templated=templated)
    _notice_unsharded_states(config, machine, layout)
    if layout.size > 1:
        print_processes(console, layout, layout.size, config, ways)
    plan = _memory_plan(config, files, machine, data, shapes, mesh, layout, console, checkpoint)
    config = config.model_copy(update=dict(plan.optimizer_choice))
    if mesh.size > 1:  # the plan decides whether frozen weights are sharded
        mesh = replace(mesh, layout=plan.layout)
    cut = _pipeline_partition(config, layout, shapes, plan)
    run = PreparedRun(
        config, written, method, mesh, machine, checkpoint, files, tokenizer, data, identity, plan, arguments, prompts,
        cut,
    )  # fmt: skip
    if writes:
        check_disk(run)
    if method.reference and is_verbose(console):
        console.print(f"reference {_describe_reference(run)}")
    return run


def check_disk(run: PreparedRun) -> None:
    """Check that the disk has space for all checkpoints that a run keeps at a time, and for its trained weights.

    A checkpoint is removed only after a newer one is written.

    Raises:
        TrainingError: it has not.
    """
    config, plan, steps = run.config, run.plan, run.total_steps
    interval = run.arguments.save_steps  # below 1: a share of the run
    saves = math.ceil(1 / interval) if interval < 1 else math.ceil(steps / interval)
    held = len(checkpoints.checkpoints(config.output_path))
    copies = max(min(saves, (config.save_total_limit or saves) + 1) - held, 1)
    needed = copies * (plan.adapters + plan.optimizer) + plan.adapters
    fix = "free some space, choose another output_dir, or set save_total_limit: 1"
    check_space(config.output_path / "checkpoint", needed, fix)


def _describe_reference(run: PreparedRun) -> str:
    if run.computes_reference_once:
        return "computed once, by a forward of all rows before the first step, and cached"
    return "computed in each step: two forwards and a backward"


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
        config = checkpoints.keep_step_size(config, checkpoint, _row_ranks(layout))
    return config, checkpoint


@waiting("reading and tokenizing the data")
def _read_data(
    config: RunConfig,
    method: Method,
    files: ModelFiles,
    shapes: ModelShapes,
    tokenizer: PreTrainedTokenizerBase,
    checkpoint: Path | None,
    mesh: Mesh,
    console: Console,
) -> tuple[PreparedData, dict[str, Any]]:
    """Read, check and print the run's data; one rank of each host prepares it, the others read its cache.

    Returns:
        The data, and `data_identity`.
    """
    data = mesh.local_first(lambda: method.ready(config, tokenizer, shapes.causal_lm.config))
    print_data(console, data.report)
    _check_data(config, shapes, tokenizer, data)
    identity = data_identity(config, data, files)
    if not mesh.all_equal(identity):
        raise DataError("the processes of this run read different data", "give all of them the same files")
    if checkpoint is not None:
        checkpoints.check_same_inputs(identity, checkpoint)
        models = mesh.from_main(model_reader(config, files)() if mesh.is_main else {})
        checkpoints.check_same_inputs(models, checkpoint)
    if method.rows == "prompts":
        model_config = shapes.causal_lm.config
        check_rewards(config, data, model_config, tokenizer, console)
        check_server(config, data, tokenizer, console)
        check_teacher(config, model_config, tokenizer, console, _longest(data))
    return data, identity


def _notice_unsharded_states(config: RunConfig, machine: Machine, layout: Parallel) -> None:
    """Give a notice if the optimizer's state cannot be sharded although the frozen weights are."""
    scaled, row = machine.compute_dtype == torch.float16, OPTIMIZERS[config.optim]
    block = row.block_of(config)
    if optimizer_shards(layout, 1) == optimizer_shards(layout, 0 if scaled else block):
        return
    if block:
        why, instead = "dtype: float16 scales the loss", "dtype: bfloat16 shards it"
    else:
        known = ", ".join(name for name, other in OPTIMIZERS.items() if other.block)
        why, instead = f"optim: {config.optim} cannot step a shard of a parameter", f"these do: {known}"
    notice("whole-states", f"{why}, so each GPU holds the full optimizer state; {instead}")


def _row_ranks(layout: Parallel) -> int:
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
    how = config.gradient_accumulation_steps, plan.activation_checkpointing, config.trust_remote_code
    cut = partition_model(shapes.causal_lm, config.pipeline_schedule, ranks, *how)
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
    least = {width: SHORT_PLAN_BATCHES if width <= SHORT else PLAN_BATCHES for width in shares}
    return frozenset(width for width, share in shares.items() if share * batches >= least[width])


@waiting("looking at the device")
def _machine(config: RunConfig, method: Method, mesh: Mesh) -> Machine:
    device = mesh.device(chosen_device(config.device))
    check_recipe(configured_recipe(config.precision), device)
    if config.storage.qat_scheme is not None:
        qat_format(config.storage.qat_scheme)
    with silent():  # the header has the dtype
        compute = resolve_dtype(config.precision.compute, device)
        weights = resolve_dtype(config.precision.weights, device)
    check_dtype(config, device, compute)
    found = environment(str(device), compute, config.precision.compute)
    facts = {**found, "numbers": method.numbers.document(), "started": time.time()}
    return Machine(device, compute, weights, facts)


def _check_context_parallel(shapes: ModelShapes, mesh: Mesh) -> None:
    """Check that the model supports context parallelism, if the layout uses it."""
    if mesh.degree("context") == 1:
        return
    attention, trust = shapes.config.attn_implementation, shapes.config.trust_remote_code
    check_context_parallel(shapes.causal_lm.config, mesh, attention=attention, trust_remote_code=trust)


def _check_data(config: RunConfig, shapes: ModelShapes, tokenizer: PreTrainedTokenizerBase, data: PreparedData) -> None:
    """Check that the model has embeddings for all token ids of the data, padding and ends of answers, and positions for
    the longest row."""
    splits = [rows for rows in (data.train, data.eval) if rows is not None]
    ends: Any = tokenizer.convert_tokens_to_ids(data.report.get("stop_tokens", []))
    named = {"padding": tokenizer.pad_token_id, "the end of an answer": max(filter(None, ends), default=None)}
    check_token_ids(shapes.causal_lm, {"tokens of the data": max(map(largest_id, splits)), **named})
    longest = _longest(data) if data.stream is None else config.max_length
    check_positions(shapes.causal_lm.config, longest, trust_remote_code=config.trust_remote_code)


def _check_block(shapes: ModelShapes, rows: Any) -> None:
    """Check that the model has embeddings for the tokens of a later block of a stream."""
    if len(rows):
        check_token_ids(shapes.causal_lm, {"tokens of the data": largest_id(rows)})


def _longest(data: PreparedData) -> int:
    """Return the number of tokens in the longest row."""
    return max(longest_row(rows, data.answers) for rows in (data.train, data.eval) if rows is not None)


def _arguments(config: RunConfig, machine: Machine, data: PreparedData, ways: int) -> TrainingArguments:
    rows, evaluate = len(data.train), data.eval is not None
    wanted = config.per_device_train_batch_size * config.gradient_accumulation_steps * ways
    if wanted > rows and config.method not in SAMPLING and not config.streaming:
        keys = "per_device_train_batch_size and gradient_accumulation_steps"
        notice("step-rows", f"{keys} ask for {wanted:,} rows a step, and the data has {rows:,}: a step uses them all")
    return training_arguments(config, machine.device, machine.compute_dtype, rows=rows, evaluate=evaluate, ways=ways)


@waiting("choosing a layout")
def _with_layout(
    config: RunConfig, files: ModelFiles, machine: Machine, data: PreparedData, shapes: ModelShapes, mesh: Mesh,
    layout: Parallel, console: Console,
) -> tuple[RunConfig, Parallel]:  # fmt: skip
    """Choose a layout for `parallel: auto` at this world size and print the reason; the global batch stays."""
    if config.parallel != "auto" or layout.size == 1:
        return config, layout
    card = _card(machine, mesh)
    ranks_per_host = _ranks_per_host(mesh, layout)
    device = Device(machine.device, _free_bytes(machine, mesh, ranks_per_host), card, ranks_per_host)
    meshes = Meshes(config, files.config, device, lambda changed: batches_of(changed, data, machine.device), shapes)
    option, reason = meshes.choose(layout.size)
    chosen, said = mesh.from_main((option, reason))  # ranks may measure different free host memory
    console.print(one_line(f"parallel: {chosen.layout}: {said}"), soft_wrap=True)
    return chosen.config.model_copy(update={"parallel": "auto"}), chosen.layout


def _card(machine: Machine, mesh: Mesh) -> Card:
    """Return this rank's card with the measured bandwidth to other ranks. Measuring also allocates NCCL's buffers, so
    free memory excludes them."""
    card = card_of(machine.device).measured(link=all_gather_bandwidth(mesh, machine.device))
    free_cached_memory(machine.device)
    return card


def _free_bytes(machine: Machine, mesh: Mesh, ranks_per_host: int) -> int:
    """Return the free bytes on the rank with the least free memory."""
    return -mesh.max(-free_bytes(machine.device, ranks_per_host))


def _free_host_bytes(mesh: Mesh) -> int:
    """Return the free host memory on the host with the least, bytes."""
    return -mesh.max(-allocators.available_bytes())


def _ranks_per_host(mesh: Mesh, layout: Parallel) -> int:
    """Return the number of ranks on the host with the most ranks; all, if they are not started yet."""
    if mesh.size == 1:
        return layout.size
    return mesh.most_on_a_host()


@waiting("planning memory")
def _memory_plan(
    config: RunConfig, files: ModelFiles, machine: Machine, data: PreparedData, shapes: ModelShapes, mesh: Mesh,
    layout: Parallel, console: Console, checkpoint: Path | None,
) -> MemoryPlan:  # fmt: skip
    """Plan the memory of a run on the main rank; check that it fits.

    Args:
        checkpoint: checkpoint to continue from; the plan of its rollouts is kept.
    """

    def batches(changed: RunConfig) -> Any:
        return batches_of(changed, data, machine.device)

    card = _card(machine, mesh)
    ranks_per_host = _ranks_per_host(mesh, layout)
    capacity = _free_bytes(machine, mesh, ranks_per_host) if layout.size > 1 else None
    answered = rollout_plan_of(checkpoint) if checkpoint is not None and config.method in SAMPLING else None

    def plan_on(card: Card) -> MemoryPlan:
        plan = estimate(
            config, files.config, device=machine.device, capacity_bytes=capacity, batches=batches(config),
            shapes=shapes if layout.tensor == 1 else None, layout=layout, card=card, ranks_per_host=ranks_per_host,
            answered=answered,
        )  # fmt: skip
        return mesh.from_main(plan)

    plan = plan_on(card)
    if mesh.size > 1 and not OFFLOADED.keys().isdisjoint(plan.levels):  # all ranks copy at once
        plan = plan_on(card.measured(host=host_copy_bandwidth(mesh, machine.device)))
    print_memory(console, plan)
    check_host(plan.host, ranks_per_host, _free_host_bytes(mesh))
    if plan.answering is not None and is_verbose(console):
        step = size(plan.activations + plan.logits)
        how = "in addition to" if plan.answering.stays else "in turn with"
        console.print(one_line(f"rollouts {plan.answering}, {how} a step's {step}"), soft_wrap=True)
    check_fits(plan, config, files.config, rows=len(data.train), batches=batches)
    return plan


# --- dry runs of libraries -------------------------------------------------------------------------------------------


def _first_line(error: BaseException) -> str:
    """Return the first line of a library's error message, or the error's class name if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def check_trackers(names: list[str]) -> list[TrainerCallback]:
    """Create the callbacks of `report_to`.

    Raises:
        ConfigError: a tracker does not exist, or is not installed.
    """
    made = []
    for name in names:
        given = name if len(names) == 1 else [name]  # a single name may be "all" or "none"
        try:
            made += [callback() for callback in get_reporting_integration_callbacks(given)]
        except Exception as error:  # any error of a tracker's library
            raise ConfigError(
                f"report_to: {name}: {_first_line(error)}", f"install what it needs, or leave {name} out of report_to"
            ) from error
    return made


def check_optimizer(config: RunConfig, device: torch.device) -> torch.optim.Optimizer:
    """Return the run's optimizer of one small layer on `device`, after a step.

    An installed package may not run here, so the step is run.

    Raises:
        ConfigError: it cannot be created, or does not run on `device`.
    """
    row = OPTIMIZERS[config.optim]
    if row.package is not None and find_spec(row.package) is None:
        wrong = f"optim: {config.optim} needs the package {row.package}, which is not installed"
        raise ConfigError(wrong, f"pip install '{row.requirement or row.package}', or set optim: adamw")
    dtype = getattr(torch, config.adapter_dtype) if config.use_peft else resolve_dtype(config.precision.weights, device)
    try:
        layer = torch.nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False, device=device, dtype=dtype)
        nn.init.ones_(layer.weight)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer: Any = make_optimizer(layer, config)
        if row.has_modes:
            optimizer.train()
        optimizer.step()
    except ConfigError:
        raise
    except Exception as error:  # any error of the optimizer's library
        install = f"pip install '{row.requirement}', or " if row.requirement else ""
        raise ConfigError(
            f"optim: {config.optim} does not run on {device}: {_first_line(error)}", f"{install}set optim: adamw"
        ) from error
    return optimizer


def check_loss_scale(config: RunConfig, compute_dtype: torch.dtype) -> None:
    """Check that the optimizer sees an overflow of scaled gradients before it changes a weight.

    Raises:
        ConfigError: float16, which `dtype: auto` may have chosen, with an optimizer that steps in the backward.
    """
    if compute_dtype == torch.float16 and optimizer_row(config).updates == "backward":
        wrong = f"optim: {config.optim} updates weights in the backward, where float16's loss scale is not checked"
        raise ConfigError(wrong, "set dtype: bfloat16 or float32, or use an optimizer that is not layerwise")


def check_targets(config: RunConfig, model: nn.Module) -> None:
    """Check that a low-rank optimizer has matrices to project.

    Raises:
        ConfigError: optim_target_modules selects no linear layer that is trained.
    """
    targets = config.optim_target_modules
    if OPTIMIZERS[config.optim].takes_targets and not target_matrices(model, targets):
        wrong = f"optim_target_modules: {targets or 'all-linear'} selects no linear layer whose weight is trained"
        raise ConfigError(wrong, "name trained linear layers, or use another optim")


def check_bits(config: RunConfig, model: nn.Module) -> None:
    """Check that each pattern of `optim_bits` matches a parameter.

    Raises:
        ConfigError: it matches no trained parameter.
    """
    names = trained_parameters(model)
    for pattern in config.optim_bits if isinstance(config.optim_bits, dict) else ():
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            wrong = f"optim_bits: {brief(pattern)} matches no trained parameter"
            raise ConfigError(wrong, f"match names such as {min(names)}, or remove it")


def check_host_state(config: RunConfig, model: nn.Module, machine: Machine, mesh: Mesh, layout: Parallel) -> None:
    """Check that each host holds the optimizer's state of its ranks, if it is there; the plan checks the rest.

    With `parallel: auto` the layout may still change, so the state is counted as if all ranks divided it.

    Args:
        model: all of it, whatever this rank will hold.

    Raises:
        ConfigError: it does not.
    """
    row = optimizer_row(config)
    if row.host_bytes is None or machine.device.type == "cpu":
        return
    block = 0 if machine.compute_dtype == torch.float16 else row.block_of(config)
    divided = optimizer_shards(layout, block) * layout.pipeline * layout.tensor
    state = row.host_bytes(model, config) // (layout.size if config.parallel == "auto" else divided)
    check_host({state_key(config): state}, _ranks_per_host(mesh, layout), _free_host_bytes(mesh))


def check_schedule(config: RunConfig, args: TrainingArguments, optimizer: Any, steps: int) -> None:
    """Check that the learning rate schedule can be created for `steps` steps.

    Raises:
        ConfigError: it cannot.
    """
    warmup, options = args.get_warmup_steps(steps), config.lr_scheduler_kwargs or {}
    stable = options.get("num_stable_steps", 0)
    if config.lr_scheduler_type == "warmup_stable_decay" and warmup + stable + options["num_decay_steps"] > steps:
        numbers = f"{warmup} steps of warmup, {stable} stable ones and {options['num_decay_steps']} of decay"
        fix = "lower num_decay_steps, or raise max_steps or num_train_epochs"
        raise ConfigError(f"lr_scheduler_kwargs: {numbers} are more than the {steps} of the run", fix)
    try:
        schedule = make_schedule(config, optimizer, warmup, steps)
        if config.lr_scheduler_type in FOLLOW_METRIC:
            return
        for step in (0, 1, warmup, steps):
            schedule.lr_lambdas[0](step)
        highest = max(map(schedule.lr_lambdas[0], range(steps))) if steps <= warmup else 1.0
    except (ValueError, TypeError, ArithmeticError) as error:
        message = f"lr_scheduler_type: {config.lr_scheduler_type} of {steps} steps, {warmup} of them warmup"
        fix = "set lr_scheduler_type: cosine, or change lr_scheduler_kwargs, learning_rate, max_steps or warmup_steps"
        raise ConfigError(f"{message}: {_first_line(error)}", fix) from error
    if not any(map(schedule.lr_lambdas[0], range(steps))):
        steps_of_warmup = f", {warmup} of them warmup (warmup_steps: {config.warmup_steps:g})" if warmup else ""
        wrong = f"learning_rate is 0 in every step: {steps} step{'s' * (steps > 1)}{steps_of_warmup}"
        raise ConfigError(wrong, "set warmup_steps: 0" if warmup else "use another lr_scheduler_type, or more steps")
    if highest < 1.0:
        most = f"at most {highest * config.learning_rate:.1e} of {config.learning_rate:.1e}"
        said = f"learning_rate is never reached: {warmup} steps of warmup (warmup_steps) in {steps}"
        notice("warmup", f"{said}, {most}")
