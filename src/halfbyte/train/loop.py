"""The training loop: one optimizer step (`TrainingLoop.train_step`), and the run around it.

- A run is a generator that yields the forwards and backwards of each step (`Accumulation`) to its driver, which runs
  those of one run (`drive`), or of several runs together (`train.several`).
- The loss of a step is its sum over the whole accumulation window divided by the count over that window (for
  supervised fine-tuning: trained tokens). So gradient accumulation equals the large batch.
- NaN or Inf in loss or gradient, and a step with nothing to train on, stop the run before a weight changes (`guards`).
- The host does not block on the step it launches (`metrics_log`), except before a checkpoint, an evaluation and the
  end, and with optimizers that cannot skip a step on the device.
- Checkpoints hold adapters, optimizer, schedule and random states. They are written to a temporary folder and renamed.
- On SIGTERM, SIGHUP or Ctrl-C the run ends its step, saves a checkpoint and stops. Work that takes longer than
  `LEAVE_TIMEOUT` (a step of many micro-batches, an evaluation) is dropped: the checkpoint is of the state before it.
- Order of rows, schedule, parameter groups and checkpoints match transformers' Trainer (5.17 to 5.24).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainerCallback, TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import speed_metrics

from ..batch import Batch, take_counts, to_device
from ..config.schema import RunKeys
from ..data.rows import RowTable, TrainingRows
from ..memory.allocators import free_stream_caches
from ..mesh.mesh import AXES, DATA_AXES, SINGLE_PROCESS, TOKEN_AXES, Mesh
from ..mesh.sharded_linears import full_parameters
from ..methods.base import TOKENS, Collate, CountingCollator, Method, RowOutputs, Rows
from ..modeling.cast_cache import cast_replacements
from ..modeling.compute_dtype import compute_autocast
from ..modeling.embedding_noise import noisy_embeddings
from ..modeling.step_norms import DoraNorms
from ..ops.fp8_scaling import DelayedScaling
from ..optim import (
    FOLLOW_METRIC,
    continue_over,
    make_optimizer,
    make_schedule,
    next_rate,
    optimizer_row,
    trained_parameters,
)
from ..parallel.context import context_shard
from ..parallel.pipeline.full_state import PipelineState, scaling_state
from ..parallel.shard.model import has_static_gradients
from ..parallel.shard.optimizer import ReplicatedOptimizer, shard_optimizer
from ..rl.dataset import RolloutDataset
from ..runs import checkpoints
from ..runs.layout import TRAINER_STATE, checkpoint_folder
from ..runs.metrics import MetricsFile, Window
from ..runs.status import Progress
from ..utils.errors import TrainingError
from ..utils.notices import notice
from ..utils.processes import Stopped, StopRequest, request_on_signals
from ..utils.waiting import waiting
from .best_evaluation import BestEvaluation
from .callbacks import Callbacks, steps_per_epoch, total_steps
from .checkpoint import (
    load_optimizer,
    load_random,
    load_scaling,
    load_weights,
    new_checkpoint,
    random_states,
    save_optimizer,
    save_random,
    save_scaling,
    save_weights,
)
from .guards import LEAVE_TIMEOUT, StepGuards, announce_signal, skip_if_not_finite
from .metrics_log import MetricsLog
from .sampler import batches
from .samples import SampleLog
from .stepper import SharedNumbers, Stepper, with_numbers

Result = TypeVar("Result")


@dataclass(frozen=True)
class Accumulation:
    """The forwards and backwards of a step, which a loop yields to its driver: `drive`, or `train.several`.

    Attributes:
        loop: the loop of the step.
        batches: its micro-batches, on the device.
        loss_count: 0-d, on the device: the divisor of the step's summed loss.
    """

    loop: TrainingLoop
    batches: Iterator[dict[str, Any]]
    loss_count: Tensor

    def run(self) -> Tensor:
        """Add the gradients up in `.grad`; return the sums of the method's metrics, fp32 [n]."""
        loop = self.loop
        with loop.dora_norms.computed() if loop.dora_norms else nullcontext():
            if not loop.stepper.is_eager:  # CUDA graphs, or the stages of a pipeline
                return loop.stepper.forward_backward(loop.forward, self.batches, self.loss_count, loop.may_capture)
            sums = torch.zeros(loop.metric_count, device=loop.device)
            for batch in self.batches:
                loss, batch_sums = loop.forward(batch, self.loss_count)
                loss.backward()
                sums = sums + batch_sums
            return sums


Steps = Generator[Accumulation, Tensor, Result]  # a run that yields its steps, and takes the sums of each


def run_step(steps: Steps[Any], accumulation: Accumulation) -> Accumulation:
    """Run the step that a run has yielded, and continue the run; returns its next step.

    Raises:
        StopIteration: the run has ended; with its result.
    """
    try:
        sums = accumulation.run()
    except BaseException as error:
        return steps.throw(error)
    return steps.send(sums)


def drive(steps: Steps[Result]) -> Result:
    """Run the steps of one run to its end, and return its result."""
    try:
        accumulation = next(steps)
        while True:
            accumulation = run_step(steps, accumulation)
    except StopIteration as end:
        result: Result = end.value
        return result


def seed_process(config: RunKeys, mesh: Mesh) -> None:
    """Seed the random numbers of this rank. Dropout differs between ranks except along `tensor`, whose ranks compute
    the same rows."""
    set_seed(config.seed + mesh.coordinate(*(axis for axis in AXES if axis != "tensor")))


class TrainingLoop:
    """Trains a causal LM on rows by the method of its configuration, and evaluates it on held-out rows.

    Args:
        config: the run's configuration; part of every checkpoint.
        method: of the configuration.
        identity: returns sizes and digests of the run's inputs, see `train.inputs`; part of every checkpoint.
        metrics: file of the records.
        compute_dtype: dtype of matrix products, independent of the dtype of the trained weights.
        model: a PeftModel, or a transformers model in full fine-tuning, on `device`.
        args: `config` for transformers' callbacks.
        rows: the training rows.
        held_out: rows to evaluate on.
        collate: the method's collator, rows → a batch.
        stepper: what CUDA graphs or a pipeline replace in a step.
        grad_scaler: the loss scaler of float16; default: disabled.
        count_experts: returns the context of a forward that counts the experts of a mixture; default: counts nothing.
        mesh: the ranks that train.
        fp8_scales: delayed scales of the fp8 recipe.
        rollouts: samples the rows of each step; None: `rows` are trained on as they are.
        pipeline_state: gathers weights and optimizer state from the stages of a pipeline; None: one stage.
        progress: state of the run for its status.json; default: a new one that is not written.
        samples: answers prompts every few steps; None: the run answers none while it trains.
    """

    # Set by `train`, after the weights of a checkpoint are loaded.
    optimizer: torch.optim.Optimizer
    optimizer_shards: ReplicatedOptimizer
    schedule: LRScheduler
    clip_gradients: Callable[[], Tensor]  # returns the norm before clipping, 0-d
    skips_on_device: bool  # whether the optimizer skips a step with NaN or Inf itself, so that the host need not wait

    def __init__(
        self,
        *,
        config: RunKeys,
        method: Method,
        identity: Callable[[], dict[str, Any]],
        metrics: MetricsFile,
        compute_dtype: torch.dtype,
        model: Any,
        args: TrainingArguments,
        device: torch.device,
        rows: TrainingRows,
        held_out: Rows | None = None,
        collate: Collate,
        stepper: Stepper,
        grad_scaler: torch.amp.GradScaler | None = None,
        count_experts: Callable[[Batch], AbstractContextManager[Any]] = nullcontext,
        mesh: Mesh = SINGLE_PROCESS,
        fp8_scales: DelayedScaling | None = None,
        rollouts: RolloutDataset | None = None,
        pipeline_state: PipelineState | None = None,
        progress: Progress | None = None,
        samples: SampleLog | None = None,
    ):
        self.config = config
        self.identity = identity
        self.metrics = metrics
        self.compute_dtype = compute_dtype
        self.model = model
        self.args = args
        self.device = device
        self.mesh = mesh
        self.rows = rows
        self.held_out = held_out
        self.method = method
        self.collate = CountingCollator(self.method, collate)
        self.shared_numbers = SharedNumbers(self.method, model, compute_dtype, mesh)
        self.metric_count = len(method.numbers.trained)
        self.loss_count = method.numbers.trained[0].over
        self.output = Path(config.output_dir)
        self.optimizer_row = optimizer_row(config)
        self.trained = list(trained_parameters(model).values())
        self.stepper = stepper
        has_all_weights = stepper.has_all_layers and mesh.layout.slices == 1
        self.dora_norms = DoraNorms(model, compute_dtype) if has_all_weights else None
        self.grad_scaler = grad_scaler or torch.amp.GradScaler(device.type, enabled=False)
        self.count_experts = count_experts
        self.fp8_scales = fp8_scales
        self.rollouts = rollouts
        self.pipeline_state = pipeline_state
        self.progress = progress or Progress()
        self.samples = samples
        self.callbacks = Callbacks(args, model, reports=mesh.is_main, project=config.project)
        self.request = StopRequest()
        self.best = BestEvaluation.of(config, self.method)
        self.guards = StepGuards(config, self.loss_count, sampled=rollouts is not None)
        self.metrics_log = MetricsLog(
            metrics, self.callbacks, self.method.numbers, self.guards, device, mesh, self.grad_scaler, rollouts
        )  # fmt: skip
        self.data_parallel_degree = mesh.degree(*DATA_AXES)
        self.context_degree = mesh.degree("context")
        self._evaluation_pending = False  # whether the checkpoint was saved before its step's evaluation
        # Hooks that `train` replaces for optimizers that update in the backward, and for schedule-free ones, whose
        # training weights differ from the weights to evaluate and save and are exchanged in place.
        self.loss_hooks: list[Callable[[Tensor], object]] = []  # called with a micro-batch's loss before its backward
        self.use_training_weights: Callable[[], object] = _keep_weights
        self.use_evaluation_weights: Callable[[], object] = _keep_weights

    @property
    def state(self) -> TrainerState:
        return self.callbacks.state

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callbacks.handler.add_callback(callback)

    # --- a step ------------------------------------------------------------------------------------------------------

    def train_step(self, micro_batches: Sequence[dict[str, Any]], epoch: float) -> Steps[None]:
        """Run one optimizer step; `epoch` is the position of the run after it, in epochs."""
        state = self.callbacks.state
        number = state.global_step + 1
        self.callbacks("on_step_begin")
        self._use_training_mode()

        # Micro-batches. The step's loss is divided by its count over all of them, on all ranks.
        batches = self._to_device(micro_batches)
        counts = take_counts(batches)
        if self.data_parallel_degree > 1:
            counts = self.mesh.sum(counts)
        divisor = counts[self.loss_count] or self.guards.check_empty(number, len(batches) * self.data_parallel_degree)
        loss_count = torch.full((), divisor, device=self.device)  # a kernel launch; a copy from the host could block
        if self.method.shares_numbers:
            batches = self.shared_numbers.add(batches, counts)

        # Forward and backward: gradients add up in `.grad`, the method's metrics in `sums`, fp32 [n].
        remaining = self._stop_when_late(batches, random_states() if len(batches) > 1 else None)
        with self.metrics_log.breakdown.step(number):
            sums = yield Accumulation(self, remaining, loss_count)

        # Reduction over ranks: gradients and sums are added, or gradients reduce-scattered to the optimizer's shards.
        sums = self.optimizer_shards.reduce(sums)
        self.metrics_log.read()  # the numbers of the step before: raises if it was broken

        # Clipping, and the guard: with a NaN or Inf the optimizer skips the step, or `launch` raises before it. A
        # captured optimizer clips and steps in one graph.
        if self.stepper.captures_optimizer:
            numbers = self.stepper.clip_and_step(sums, self.may_capture)
        else:
            self.grad_scaler.unscale_(self.optimizer)
            numbers = torch.cat([sums, self.clip_gradients().to(sums).reshape(1)])
            if self.skips_on_device:
                skip_if_not_finite(self.optimizer, numbers)
        self.metrics_log.launch(number, counts, numbers, check=number == 1 or not self.skips_on_device)

        # Optimizer and schedule
        rate = next_rate(self.schedule)
        if not self.stepper.captures_optimizer:
            self.callbacks("on_pre_optimizer_step")
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        self.callbacks("on_optimizer_step")
        if self._schedule_counts_step:
            self.schedule.step()
        self.optimizer_shards.after_step()

        # Record. Unless `launch` has checked its numbers, they are read while the next step is launched.
        state.global_step = self.progress.step = number
        state.epoch = epoch
        self.callbacks("on_step_end")
        self.metrics_log.finish(rate)

    def forward(self, batch: Batch, loss_count: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of a micro-batch to differentiate, 0-d, and the sums of the method's metrics, fp32 [n].

        CUDA graphs capture it with its backward.

        Args:
            loss_count: 0-d, on the device: the divisor of the step's summed loss.
        """
        sums = self.sums(batch)
        loss = sums["loss"] / loss_count
        for hook in self.loss_hooks:
            hook(loss.detach())
        return self.grad_scaler.scale(loss), torch.stack([value.detach() for value in sums.values()])

    def sums(self, batch: Batch) -> Mapping[str, Tensor]:
        """Run the model; return the method's named sums of a batch, 0-d, of which "loss" is differentiable."""
        with self.count_experts(batch), compute_autocast(self.model, self.compute_dtype):
            return self.method.sums(self.model, batch)

    def held_out_values(self, batch: Batch) -> Mapping[str, Tensor]:
        """Return the result of the method's `evaluate` for a batch."""
        with self.count_experts(batch), compute_autocast(self.model, self.compute_dtype):
            return self.method.evaluate(self.model, batch)

    def _to_device(self, micro_batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Copy a step's micro-batches to the device, with the shapes that all ranks compute."""
        batches = [to_device(batch, self.device) for batch in micro_batches]
        if self.stepper.captures:
            batches = self.stepper.pad_across_ranks(batches)
        if self.context_degree > 1:
            batches = [context_shard(batch, self.mesh) for batch in batches]
        return batches

    def _use_training_mode(self) -> None:
        if not self.model.training:  # after an evaluation; `train()` walks all modules
            self.model.train()
        if self.optimizer_row.has_modes:
            self.use_training_weights()

    @property
    def may_capture(self) -> bool:
        """Whether CUDA graphs may capture a step.

        The optimizer's state is allocated in the first step, before the graphs' memory. A graph replays the branch that
        it was captured in, so the recipe's scales must be set.
        """
        return self.state.global_step > 0 and (self.fp8_scales is None or any(self.fp8_scales.settled))

    @property
    def _schedule_counts_step(self) -> bool:
        """Whether the schedule counts the step.

        It does not count a step that float16's scaler skips. A fused optimizer skips it on the device, where the host
        does not see it, so the schedule counts it.
        """
        if self.config.lr_scheduler_type in FOLLOW_METRIC:
            return False
        is_seen = self.grad_scaler.is_enabled() and not self.optimizer_row.guarded
        return not is_seen or math.isfinite(self.metrics_log.norm)

    def _after_step(self) -> None:
        """Advance the fp8 scales; evaluate and save if a callback or the end of training requests it."""
        if self.fp8_scales is not None:
            self.fp8_scales.roll(partial(self.mesh.max, axes=TOKEN_AXES))
        control = self.callbacks.control
        ends = self.state.global_step >= self.state.max_steps or control.should_training_stop
        if self.best is not None and ends:
            control.should_evaluate = True
        samples = self.samples if self.samples is not None and self.samples.is_due(self.state.global_step) else None
        if ends or samples or control.should_evaluate or control.should_save:
            self.metrics_log.read()
        if samples is not None:  # before the evaluation, which a signal may interrupt, and a resumed run then repeats
            self.use_evaluation_weights()
            with self.progress.during("evaluating"):
                samples.sample(self.state.global_step, self.stepper, self.device)
        self._evaluate_and_save()

    def _evaluate_and_save(self) -> None:
        """Evaluate and save a checkpoint, if the callbacks request it."""
        if self.callbacks.control.should_evaluate:
            self.evaluate()
        if self.callbacks.control.should_save:
            self._save()
            self.callbacks("on_save")

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, checkpoint: Path | None = None) -> None:
        """Train to the last step, see `steps`."""
        drive(self.steps(checkpoint))

    def steps(self, checkpoint: Path | None = None) -> Steps[None]:
        """Train to the last step from `checkpoint`, or from the start; a checkpoint of the last step is only loaded.

        Before it raises, the records of all finished steps are written.

        Raises:
            TrainingError: a step is broken, or has nothing to train on; see `StepGuards`.
            CheckpointError: `checkpoint` cannot be read.
            Stopped: the process received a signal; a checkpoint of the last step is saved.
        """
        steps = total_steps(self.config, self.rows.row_count, self.data_parallel_degree)
        if checkpoint is not None:
            self._load_weights(checkpoint)
        self._make_optimizer(steps)
        if checkpoint is not None:
            self._load_optimizer(checkpoint, steps)
        by_steps = self.config.max_steps > 0
        epochs = math.ceil(steps / self._steps_per_epoch if by_steps else self.config.num_train_epochs)
        saved = None if checkpoint is None else checkpoint / TRAINER_STATE
        self.callbacks.begin(saved, steps=steps, epochs=epochs, optimizer=self.optimizer, schedule=self.schedule)
        self.progress.step = self.state.global_step
        if self.state.global_step >= steps or (self.best and self.best.is_exhausted):
            if self.mesh.is_main:  # the run may have been killed between its last save and the removal of older ones
                checkpoints.keep_newest(self.output, self.config.save_total_limit)
            return
        try:
            with (
                noisy_embeddings(self.model, self.config.neftune_noise_alpha, self.mesh),
                request_on_signals(announce_signal) as self.request,
            ):
                yield from self._run(checkpoint)
        except BaseException:
            self.metrics_log.flush()
            self.callbacks.trackers.close(failed=True)
            raise
        finally:
            self.stepper.close()

    def _load_weights(self, checkpoint: Path) -> None:
        """Load weights, fp8 scales, rollouts, and the positions in metrics, evaluations and rows."""
        split = self.pipeline_state
        with full_parameters(self.trained):
            load_weights(self.model, checkpoint, split.stages.is_remote if split else None)
        load_scaling(checkpoint, self.fp8_scales, split.local_scaling if split else dict)
        state = checkpoints.read_state(checkpoint)
        if self.rollouts is not None:
            self.rollouts.load(checkpoint)
        self.metrics_log.window = Window.of_dict(state["window"])
        self._evaluation_pending = state.get("owes_evaluation", False)
        if self.best is not None:
            self.best.load(state.get("best"))
            self._forget_missing(self.best)
        self.rows.resume(state.get("stream"))

    def _make_optimizer(self, steps: int) -> None:
        """Create the optimizer, its shards and the schedule; set the hooks of a step that the optimizer needs."""
        optimizer: Any = make_optimizer(self.model, self.config)
        self.optimizer = optimizer
        scales_loss = self.grad_scaler.is_enabled()
        static_gradients = (
            self.mesh.degree("shard") > 1 and has_static_gradients(self.model) and not self.stepper.captures
        )
        self.optimizer_shards = shard_optimizer(
            self.mesh,
            self.trained,
            block=0 if scales_loss else self.optimizer_row.block_of(self.config),
            static_gradients=static_gradients,
            narrow=partial(cast_replacements, self.model, self.compute_dtype),
        )
        self.optimizer_shards.adopt(optimizer)
        max_norm = self.config.max_grad_norm or math.inf
        self.clip_gradients = partial(self.optimizer_shards.clip, max_norm)
        self.skips_on_device = self.optimizer_row.guarded and not scales_loss
        if self.optimizer_row.has_modes:
            self.use_training_weights = optimizer.train
            self.use_evaluation_weights = optimizer.eval
        if self.optimizer_row.updates == "backward":
            self.clip_gradients = optimizer.gradient_norm
            if hasattr(optimizer, "first_broken"):
                names = {id(parameter): name for name, parameter in self.model.named_parameters()}
                self.loss_hooks.append(partial(skip_if_not_finite, optimizer))
                self.guards.first_broken = lambda: names.get(id(optimizer.first_broken()))
        before_step = partial(self.callbacks, "on_pre_optimizer_step")
        self.stepper.capture_optimizer(optimizer, self.optimizer_shards, max_norm, before_step)
        warmup = self.args.get_warmup_steps(steps)
        self.schedule = make_schedule(
            self.config, optimizer, warmup, steps, greater_is_better=self.best is not None and self.best.greater
        )

    def _load_optimizer(self, checkpoint: Path, steps: int) -> None:
        """Load the states of optimizer, schedule and loss scale; a run may have become longer."""
        split = self.pipeline_state
        local_part = self.optimizer_shards.local_state
        if split is not None:
            local_part = partial(split.local_optimizer_state, self.optimizer)
        with full_parameters(self.trained, self.optimizer):
            load_optimizer(checkpoint, self.optimizer, self.schedule, self.grad_scaler, local_part)
        if (planned := checkpoints.planned_steps(checkpoint)) < steps:
            continue_over(self.schedule, self.optimizer)
            rate = f"{self.config.written('lr_scheduler_type')} continues over {steps}"
            next_step = f"the next step has a learning rate of {next_rate(self.schedule):.2e}"
            notice("longer-run", f"the run has {steps} steps instead of {planned}; {rate}, and {next_step}")

    def _forget_missing(self, best: BestEvaluation) -> None:
        """Forget the best evaluation so far if its checkpoint is needed and does not exist any more."""
        if not self.config.load_best_model_at_end or best.step is None:
            return
        folder = self.output / checkpoint_folder(best.step)
        if (damage := self.mesh.from_main(checkpoints.damage(folder))) is not None:
            notice(
                "best-checkpoint", f"{folder}, the best checkpoint so far, cannot be used: {damage}. Later ones compete"
            )
            best.value = best.step = None

    @property
    def _micro_batches_per_step(self) -> int:
        """Micro-batches of a step on all ranks."""
        return self.config.gradient_accumulation_steps * self.data_parallel_degree

    @property
    def _rows_per_step(self) -> int:
        """Rows of a step on all ranks."""
        return self._micro_batches_per_step * self.config.per_device_train_batch_size

    @property
    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self.config, self.rows.row_count, self.data_parallel_degree)

    def _run(self, checkpoint: Path | None) -> Steps[None]:
        """Train epochs until a callback requests a stop; DefaultFlowCallback does so at the last step."""
        start = time.time()
        first_step = self.state.global_step
        self.optimizer_shards.drop_gradients()
        self.metrics_log.start(self.model, self.stepper)
        self.model.train()
        self.callbacks("on_train_begin")
        epoch, finished_steps = divmod(first_step, self._steps_per_epoch)
        while not self.callbacks.control.should_training_stop:
            self.callbacks("on_epoch_begin")
            yield from self._epoch(epoch, finished_steps, checkpoint)
            self.callbacks("on_epoch_end")
            self._evaluate_and_save()
            self._stop_if_requested()
            epoch += 1
            finished_steps = 0
            checkpoint = None
        self.use_evaluation_weights()
        steps = self.state.global_step - first_step
        summary = {"total_flos": 0, "train_loss": self.metrics_log.mean_losses / max(steps, 1)}
        self.callbacks.log(speed_metrics("train", start, steps * self._rows_per_step, steps) | summary)
        self.callbacks("on_train_end")

    def _epoch(self, epoch: int, finished_steps: int, checkpoint: Path | None) -> Steps[None]:
        """Run the remaining steps of an epoch.

        A DataLoader draws a random number when its iteration starts. In the middle of an epoch the checkpoint's random
        states are restored after that; a checkpoint of an epoch's end was saved before it, so they are restored before.
        """
        if checkpoint is not None and not finished_steps:
            self._restore_random_states(checkpoint)
            if self.callbacks.control.should_training_stop:
                return
        skip = finished_steps * self._micro_batches_per_step
        source: Any
        if self.rollouts is not None:
            source = self.rollouts.micro_batches(epoch, skip, self.state, settle=self.metrics_log.read)
            total = self.method.micro_batches(self.config, self.rows.row_count)
        else:
            source = batches(
                self.rows, self.config.per_device_train_batch_size, self.collate, self.mesh,
                shuffled=self.config.seed + epoch, skip=skip, pinned=self.device.type != "cpu",
            )  # fmt: skip
            total = skip + source.total
        position = skip  # in micro-batches of all ranks
        loader = iter(source)
        self.metrics_log.begin_step()
        while micro_batches := list(islice(loader, self.config.gradient_accumulation_steps)):
            if checkpoint is not None and finished_steps:
                self._restore_random_states(checkpoint)
                checkpoint = None
                if self.callbacks.control.should_training_stop:
                    return
            # the last micro-batches of some ranks may be blank
            position = min(position + len(micro_batches) * self.data_parallel_degree, total)
            yield from self.train_step(micro_batches, epoch + position / total)
            self._after_step()
            control = self.callbacks.control
            if control.should_epoch_stop or control.should_training_stop:
                return
            if position < total:  # after an epoch's last step `_run` evaluates and saves first
                self._stop_if_requested()
            self.metrics_log.begin_step()

    def _restore_random_states(self, checkpoint: Path) -> None:
        """Load the random states of `checkpoint`, and run the evaluation that it was saved before."""
        load_random(checkpoint, self.mesh.rank)
        if self._evaluation_pending:
            self.evaluate()
            self._evaluation_pending = False

    # --- evaluation and checkpoints ----------------------------------------------------------------------------------

    @waiting("evaluating")
    def evaluate(self) -> dict[str, float]:
        """Compute the method's numbers over the held-out rows, record and return them.

        Raises:
            TrainingError: the loss is NaN or Inf, or there is nothing to evaluate.
        """
        assert self.held_out is not None
        self.metrics_log.read()
        self.use_evaluation_weights()
        start = time.time()
        size = self.args.per_device_eval_batch_size
        with self.progress.during("evaluating"):
            if self.rollouts is not None:
                numbers = self.rollouts.evaluate(self.held_out, self.state)
            else:
                numbers = self._held_out_numbers(self.held_out, size)
        numbers["seconds"] = time.time() - start
        self.metrics_log.write("eval", numbers)
        metrics = {f"eval_{name}": value for name, value in numbers.items()}
        metrics |= speed_metrics("eval", start, len(self.held_out), math.ceil(len(self.held_out) / size))
        self.callbacks.log(metrics)
        self.callbacks("on_evaluate", metrics=metrics)
        if self.best is not None and self.state.global_step:
            self._compare(self.best, numbers)
        return numbers

    def _compare(self, best: BestEvaluation, numbers: dict[str, float]) -> None:
        """Compare an evaluation with the best one; the schedule may follow it, and training may stop.

        An evaluation that is the best so far saves a checkpoint if the run ends with the best weights; the last one of
        a run that stops early does in any case.
        """
        value, control = self.mesh.from_main(numbers.get(best.metric)), self.callbacks.control
        if value is None:
            notice(f"no {best.metric}", f"the evaluation after step {self.state.global_step} has no {best.metric}")
            return
        is_best = best.add(self.state.global_step, value)
        if self.config.lr_scheduler_type in FOLLOW_METRIC:
            self.schedule.step(value)  # type: ignore[arg-type]  # it takes the metric
        if best.is_exhausted:
            control.should_training_stop = True
        if best.is_exhausted or (is_best and self.config.load_best_model_at_end):
            control.should_save = True

    def best_result(self) -> dict[str, Any] | None:
        """Return the facts of the best evaluation for environment.json; None if nothing was compared."""
        if self.best is None or self.best.step is None:
            return None
        return self.best.result(self.state.global_step, self.config.load_best_model_at_end)

    def load_best(self) -> None:
        """Load the weights of the best evaluation, unless training ended with them; the optimizer is not loaded."""
        best = self.best
        if not (self.config.load_best_model_at_end and best and best.step not in (None, self.state.global_step)):
            return
        split, folder = self.pipeline_state, self.output / checkpoint_folder(best.step)
        self.optimizer_shards = self.optimizer_shards.replicated()
        with full_parameters(self.trained):
            load_weights(self.model, folder, split.stages.is_remote if split else None)

    def _held_out_numbers(self, rows: Rows, size: int) -> dict[str, float]:
        """Return the method's numbers over `rows`, `size` per batch."""
        metrics = self.method.numbers.trained
        window, outputs = Window.of(metrics), RowOutputs(metrics)

        def add(counts: dict[str, float], values: Mapping[str, Tensor]) -> None:
            window.add({metric.name: float(values[metric.name]) for metric in metrics}, counts, 0.0)
            outputs.add(values)

        self.evaluate_batches(rows, size, add)
        window = window.over(self.mesh)
        totals = {name: count for name, count in window.counts.items() if name != TOKENS}
        self.guards.check_held_out(self.state.global_step, window.sums["loss"], totals[self.loss_count])
        numbers = self.method.evaluation(window.means(metrics), totals)
        return numbers | self.method.over_all_rows(outputs.all(self.mesh))

    def evaluate_batches(
        self, rows: Rows, size: int, add: Callable[[dict[str, float], Mapping[str, Tensor]], None]
    ) -> None:
        """Run the model on this rank's batches of `rows`, without gradients.

        Args:
            size: rows per batch.
            add: called with the counts of each batch and the result of the method's `evaluate`.
        """
        random = random_states()
        self.model.eval()
        source = batches(RowTable(rows), size, self.collate, self.mesh, pinned=self.device.type != "cpu")

        def on_device(batch: dict[str, Any]) -> dict[str, Any]:
            return context_shard(to_device(batch, self.device), self.mesh)

        with free_stream_caches(self.stepper, self.device), torch.no_grad():
            shared = self.shared_numbers.of_evaluation(map(on_device, source))
            remaining = iter(self._stop_when_late(source, random, evaluates=True))
            while evaluated := list(islice(remaining, self.stepper.evaluation_batches)):
                counts = [take_counts([batch]) for batch in evaluated]
                ready: list[Batch] = [with_numbers(on_device(batch), shared) for batch in evaluated]
                for batch_counts, values in zip(
                    counts, self.stepper.evaluate(self.held_out_values, ready), strict=True
                ):
                    add(batch_counts, values)

    @waiting("saving a checkpoint")
    def _save(self, random: dict[str, Any] | None = None, evaluation_pending: bool = False) -> None:
        """Write checkpoint-N to a temporary folder, rename it, and only then remove older checkpoints.

        Args:
            random: random states that the resumed run continues with; default: the current ones.
            evaluation_pending: whether the resumed run evaluates first.

        Raises:
            TrainingError: it could not be written (a full disk); earlier checkpoints are untouched.
        """
        self.use_evaluation_weights()
        split = self.pipeline_state
        random_of_ranks = self.mesh.gather(random or random_states())
        with self.progress.during("saving"), full_parameters(self.trained, self.optimizer):
            weights = split.weights() if split else None
            optimizer = (split.optimizer_state if split else self.optimizer_shards.full_state)(self.optimizer)
            fp8_scales = scaling_state(self.fp8_scales, split)
            with self.optimizer_shards.full():
                if not self.mesh.is_main:
                    return
                try:
                    with new_checkpoint(self._checkpoint_folder(), self.state.global_step) as folder:
                        save_weights(self.model, folder, weights, scaled=bool(self.config.rope_scaling))
                        save_optimizer(folder, optimizer, self.schedule, self.grad_scaler)
                        save_random(folder, random_of_ranks)
                        save_scaling(folder, fp8_scales)
                        if self.rollouts is not None:
                            self.rollouts.save(folder)
                        self.state.save_to_json(str(folder / TRAINER_STATE))
                        checkpoints.write_state(
                            folder,
                            self.config,
                            self.identity(),
                            self.metrics_log.window,
                            evaluation_pending,
                            self.data_parallel_degree,
                            best=self.best.document() if self.best else None,
                            stream=self.rows.position(self.state.global_step * self._rows_per_step),
                        )
                except TrainingError as error:
                    raise TrainingError(error.message, f"{error.fix}; {self.guards.last_checkpoint()}") from error
                checkpoints.keep_newest(self.output, self.config.save_total_limit)

    def _checkpoint_folder(self) -> Path:
        """Folder of the last step's checkpoint, which need not exist."""
        return self.output / checkpoint_folder(self.state.global_step)

    # --- signals -----------------------------------------------------------------------------------------------------

    def _stop_if_requested(self) -> None:
        """After a step, save and stop if any rank received a signal."""
        if number := self.mesh.max(self.request.number):
            self.request.number = number  # the signal may have reached another rank only
            self._save_and_stop()

    def _stop_when_late(
        self, batches: Iterable[dict[str, Any]], random: dict[str, Any] | None, evaluates: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the batches of a step or an evaluation; stop between them `LEAVE_TIMEOUT` seconds after a signal.

        Args:
            random: random states from before the first batch.
        """
        for batch in batches:
            is_late = self.request.number and self.request.seconds > LEAVE_TIMEOUT
            # The first batch changes a recipe's scales, and with several ranks the others would block in a collective.
            if is_late and self.fp8_scales is None and self.mesh.size == 1:
                self._save_and_stop(random, evaluates)
            yield batch

    def _save_and_stop(self, random: dict[str, Any] | None = None, evaluation_pending: bool = False) -> None:
        """Save a checkpoint of the last step, if there is none, and end the run.

        Raises:
            Stopped: always.
        """
        self.metrics_log.read()
        if self.state.global_step and self.mesh.from_main(checkpoints.damage(self._checkpoint_folder())) is not None:
            self._save(random, evaluation_pending)
        raise Stopped(self.request.number)


def _keep_weights() -> None:
    """Do nothing: an optimizer without modes trains the weights that are evaluated and saved."""
