"""The training loop: the story of a step, and of the run around it.

A step takes its micro-batches (`_next_micro_batches`); the stepper runs their forwards and backwards and returns the
sums of the method's metrics; gradients are reduced and clipped; guards stop a broken step; the optimizer and the
schedule step; the step's numbers are read and recorded while the next step is launched.

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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments, set_seed
from transformers.trainer_utils import speed_metrics

from ..batch import take_counts, to_device
from ..config import RunConfig
from ..data.rows import RowTable, TrainingRows
from ..mesh.mesh import AXES, DATA_AXES, SINGLE_PROCESS, TOKEN_AXES, Mesh
from ..mesh.sharded_linears import full_parameters
from ..methods import method_of
from ..methods.base import Batch, Collate, Rows
from ..modeling.cast_cache import cast_replacements
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
from ..parallel.shard.optimizer import shard_optimizer
from ..runs import checkpoints
from ..runs.layout import TRAINER_STATE, checkpoint_folder
from ..runs.manifest import write_manifest
from ..runs.metrics import TOKENS, MetricsFile, Window
from ..utils.errors import TrainingError
from ..utils.files import new_directory
from ..utils.notices import notice
from ..utils.processes import Stopped, StopRequest, request_on_signals
from ..utils.waiting import waiting
from .best_evaluation import BestEvaluation
from .callbacks import Callbacks, noisy_embeddings, steps_per_epoch, total_steps
from .checkpoint import (
    load_optimizer,
    load_random,
    load_scaling,
    load_weights,
    random_states,
    save_optimizer,
    save_random,
    save_scaling,
    save_weights,
)
from .guards import LEAVE_TIMEOUT, StepGuards, announce_signal, skip_if_not_finite
from .metrics_log import MetricsLog, SampledRows, StepNumbers
from .sampler import CountingCollator, batches
from .stepper import LookAhead, Stepper, free_stream_caches, with_numbers
from .update import make_update

Part = TypeVar("Part")


def seed_process(config: RunConfig, mesh: Mesh) -> None:
    """Seed the random numbers of this rank. Dropout differs between ranks except along `tensor`, whose ranks compute
    the same rows."""
    set_seed(config.seed + mesh.coordinate(*(axis for axis in AXES if axis != "tensor")))


class TrainingLoop:
    """Trains a causal LM on rows by the method of its configuration, and evaluates it on held-out rows.

    Args:
        config: the run's configuration; part of every checkpoint.
        identity: returns sizes and digests of the run's inputs, see `train.identity`; part of every checkpoint.
        metrics: file of the records.
        compute_dtype: dtype of matrix products, independent of the dtype of the trained weights.
        model: a PeftModel, or a transformers model in full fine-tuning, on `device`.
        args: `config` for transformers' callbacks.
        rows: the training rows.
        held_out: rows to evaluate on.
        collate: the method's collator, rows → a batch.
        stepper: runs the micro-batches of a step: eager, as CUDA graphs or through a pipeline.
        mesh: the ranks that train.
        scaling: delayed scales of the fp8 recipe.
        rollouts: samples the rows of each step; None: `rows` are trained on as they are.
        pipeline_state: gathers weights and optimizer state from the stages of a pipeline; None: one stage.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
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
        mesh: Mesh = SINGLE_PROCESS,
        scaling: DelayedScaling | None = None,
        rollouts: SampledRows | None = None,
        pipeline_state: PipelineState | None = None,
    ):
        self.config, self.identity, self.metrics, self.compute_dtype = config, identity, metrics, compute_dtype
        self.model, self.args, self.device, self.mesh = model, args, device, mesh
        self.rows, self.held_out, self.method = rows, held_out, method_of(config)
        self.collate = CountingCollator(self.method, collate)
        self.look_ahead = LookAhead(self.method, model, compute_dtype, mesh)
        self.loss_count = self.method.numbers.trained[0].over
        self.output, self.optimizer_row = Path(config.output_dir), optimizer_row(config)
        self.trained = list(trained_parameters(model).values())
        self.stepper, self.scaler, self.scaling = stepper, stepper.scaler, scaling
        self.rollouts, self.pipeline_state = rollouts, pipeline_state
        self.callbacks, self.request = Callbacks(args, model, reports=mesh.is_main), StopRequest()
        self.best = BestEvaluation.of(config, self.method)
        self._evaluation_pending = False  # whether the checkpoint was saved before its step's evaluation
        self.optimizer: Any = None
        self.units: Any = None
        self.update: Any = None
        self.schedule: Any = None
        self.guards = StepGuards(config, self.loss_count, sampled=rollouts is not None)
        numbers, scaled = self.method.numbers, self.scaler is not None
        self.log = MetricsLog(metrics, self.callbacks, numbers, self.guards, device, mesh, scaled, rollouts)
        self.ways = mesh.degree(*DATA_AXES)  # ranks that rows are distributed to

    @property
    def state(self) -> TrainerState:
        return self.callbacks.state

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callbacks.handler.add_callback(callback)

    @property
    def _may_capture(self) -> bool:
        """Whether a step may be captured.

        The optimizer's state is allocated in the first step, before the graphs' memory. A graph replays the branch that
        it was captured in, so the recipe's scales must be set.
        """
        return self.state.global_step > 0 and (self.scaling is None or any(self.scaling.settled))

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, checkpoint: Path | None = None) -> None:
        """Train to the last step from `checkpoint`, or from the start; a checkpoint of the last step is only loaded.

        Before it raises, the records of all finished steps are written.

        Raises:
            TrainingError: a step is broken, or has nothing to train on; see `StepGuards`.
            CheckpointError: `checkpoint` cannot be read.
            Stopped: the process received a signal; a checkpoint of the last step is saved.
        """
        steps = total_steps(self.config, self.rows.row_count, self.ways)
        self._set_up(checkpoint, steps)
        if self.state.global_step >= steps or (self.best and self.best.is_exhausted):
            if self.mesh.is_main:  # the run may have been killed between its last save and the removal of older ones
                checkpoints.keep_newest(self.output, self.config.save_total_limit)
            return
        try:
            with (
                noisy_embeddings(self.model, self.config.neftune_noise_alpha, self.mesh),
                request_on_signals(announce_signal) as self.request,
            ):
                self._run(checkpoint)
        except BaseException:
            self.log.flush()
            raise
        finally:
            self.update.close()
            self.stepper.close()

    def _set_up(self, checkpoint: Path | None, steps: int) -> None:
        """Create weights, optimizer, schedule and state, or load them from `checkpoint`."""
        split = self.pipeline_state
        if checkpoint is not None:
            with full_parameters(self.trained):
                load_weights(self.model, checkpoint, split.stages.is_remote if split else None)
            load_scaling(checkpoint, self.scaling, split.local_scaling if split else dict)
            state = checkpoints.read_state(checkpoint)
            if self.rollouts is not None:
                self.rollouts.load(checkpoint)
            self.log.window = Window.of_dict(state["window"])
            self._evaluation_pending = state.get("owes_evaluation", False)
            if self.best is not None:
                self.best.load(state.get("best"))
                self._forget_missing(self.best)
            self.rows.resume(state.get("stream"))
        self.optimizer = make_optimizer(self.model, self.config)
        block = self.optimizer_row.block_of(self.config) if self.scaler is None else 0
        static_gradients = (
            self.mesh.degree("shard") > 1 and has_static_gradients(self.model) and not self.stepper.captures
        )
        narrow = partial(cast_replacements, self.model, self.compute_dtype)
        self.units = shard_optimizer(
            self.mesh, self.trained, block=block, static_gradients=static_gradients, narrow=narrow
        )
        self.units.adopt(self.optimizer)
        most, before = self.config.max_grad_norm or math.inf, partial(self.callbacks, "on_pre_optimizer_step")
        self.update = make_update(self.optimizer, self.optimizer_row, self.units, most, self.stepper, before)
        if self.optimizer_row.updates == "backward" and hasattr(self.optimizer, "first_broken"):
            self.stepper.before_backward = partial(skip_if_not_finite, self.optimizer)
            self.guards.first_broken = self._first_broken
        warmup = self.args.get_warmup_steps(steps)
        greater = self.best is not None and self.best.greater
        self.schedule = make_schedule(self.config, self.optimizer, warmup, steps, greater)
        if checkpoint is not None:
            local_part = partial(split.local_optimizer_state, self.optimizer) if split else self.units.local_state
            with full_parameters(self.trained, self.optimizer):
                load_optimizer(checkpoint, self.optimizer, self.schedule, self.scaler, local_part)
            if (planned := checkpoints.planned_steps(checkpoint)) < steps:
                continue_over(self.schedule, self.optimizer)
                rate = f"{self.config.written('lr_scheduler_type')} continues over {steps}"
                next_step = f"the next step has a learning rate of {next_rate(self.schedule):.2e}"
                notice("longer-run", f"the run has {steps} steps instead of {planned}; {rate}, and {next_step}")
        by_steps = self.config.max_steps > 0
        epochs = math.ceil(steps / self._steps_per_epoch if by_steps else self.config.num_train_epochs)
        saved = None if checkpoint is None else checkpoint / TRAINER_STATE
        self.callbacks.begin(saved, steps=steps, epochs=epochs, optimizer=self.optimizer, schedule=self.schedule)

    def _forget_missing(self, best: BestEvaluation) -> None:
        """Forget the best evaluation so far if its checkpoint is needed and does not exist any more."""
        if not self.config.load_best_model_at_end or best.step is None:
            return
        folder = self.output / checkpoint_folder(best.step)
        if (wrong := self.mesh.from_main(checkpoints.damage(folder))) is not None:
            notice(
                "best-checkpoint", f"{folder}, the best checkpoint so far, cannot be used: {wrong}. Later ones compete"
            )
            best.value = best.step = None

    @property
    def _micro_batches_per_step(self) -> int:
        """Micro-batches of a step on all ranks."""
        return self.config.gradient_accumulation_steps * self.ways

    @property
    def _rows_per_step(self) -> int:
        """Rows of a step on all ranks."""
        return self._micro_batches_per_step * self.config.per_device_train_batch_size

    @property
    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self.config, self.rows.row_count, self.ways)

    def _run(self, checkpoint: Path | None) -> None:
        """Train epochs until a callback requests a stop; DefaultFlowCallback does so at the last step."""
        began, first = time.time(), self.state.global_step
        self.units.drop_gradients()
        self.log.start(self.model, self.stepper)
        self.model.train()
        self.callbacks("on_train_begin")
        epoch, done = divmod(first, self._steps_per_epoch)
        while not self.callbacks.control.should_training_stop:
            self.callbacks("on_epoch_begin")
            self._epoch(epoch, done, checkpoint)
            self.callbacks("on_epoch_end")
            self._evaluate_and_save()
            self._stop_if_requested()
            epoch, done, checkpoint = epoch + 1, 0, None
        self._set_optimizer_mode(training=False)
        steps = self.state.global_step - first
        rows = steps * self._rows_per_step
        summary = {"total_flos": 0, "train_loss": self.log.mean_losses / max(steps, 1)}
        self.callbacks.log(speed_metrics("train", began, rows, steps) | summary)
        self.callbacks("on_train_end")

    def _epoch(self, epoch: int, done: int, checkpoint: Path | None) -> None:
        """Run the steps of an epoch after the first `done`.

        A DataLoader draws a random number when its iteration starts. In the middle of an epoch the checkpoint's random
        states are restored after that; a checkpoint of an epoch's end was saved before it, so they are restored before.
        """
        if checkpoint is not None and not done:
            self._restore_random_states(checkpoint)
            if self.callbacks.control.should_training_stop:
                return
        config = self.config
        size, skip = config.per_device_train_batch_size, done * self._micro_batches_per_step
        order, pinned = config.seed + epoch, self.device.type != "cpu"
        source: Any
        if self.rollouts is not None:
            source = self.rollouts.micro_batches(epoch, skip, self.state, settle=self.log.read)
            micro_batches = self.method.micro_batches(config, self.rows.row_count)
        else:
            source = batches(self.rows, size, self.collate, self.mesh, shuffled=order, skip=skip, pinned=pinned)
            micro_batches = skip + source.total
        seen = skip
        iterator = iter(source)
        while taken := self._next_micro_batches(iterator):
            if checkpoint is not None and done:
                self._restore_random_states(checkpoint)
                checkpoint = None
                if self.callbacks.control.should_training_stop:
                    return
            seen = min(seen + len(taken) * self.ways, micro_batches)  # the last ones of some ranks may be blank
            self._step(taken, epoch + seen / micro_batches)
            control = self.callbacks.control
            if control.should_epoch_stop or control.should_training_stop:
                return
            if seen < micro_batches:  # after an epoch's last step `_run` evaluates and saves first
                self._stop_if_requested()

    def _restore_random_states(self, checkpoint: Path) -> None:
        """Load the random states of `checkpoint`, and run the evaluation that it was saved before."""
        load_random(checkpoint, self.mesh.rank)
        if self._evaluation_pending:
            self.evaluate()
            self._evaluation_pending = False

    # --- a step ------------------------------------------------------------------------------------------------------

    def _next_micro_batches(self, loader: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the micro-batches of the next step, being copied to the device; empty at the end of the epoch."""
        self.log.begin_step()
        taken = [to_device(batch, self.device) for batch in islice(loader, self.config.gradient_accumulation_steps)]
        return [context_shard(batch, self.mesh) for batch in self.stepper.pad_across_ranks(taken)]

    def _to_device(self, batch: dict[str, Any]) -> Batch:
        """Return this rank's context-parallel shard of a batch, on the device."""
        return context_shard(to_device(batch, self.device), self.mesh)

    def _step(self, taken: list[dict[str, Any]], epoch: float) -> None:
        """Run one optimizer step on these micro-batches.

        Args:
            epoch: position of the run after the step, in epochs.
        """
        self.callbacks("on_step_begin")
        number, counts = self.state.global_step + 1, self.mesh.sum(take_counts(taken))
        divisor = self.guards.check_count(number, counts[self.loss_count], len(taken) * self.ways)
        if not self.model.training:  # after an evaluation; `train()` walks all modules
            self.model.train()
        self._set_optimizer_mode(training=True)
        count = torch.full((), divisor, device=self.device)  # a kernel launch; a copy from the host could block
        taken = self.look_ahead.add_numbers(taken, counts)
        before = random_states() if len(taken) > 1 else None
        with self.log.breakdown.step(number):
            sums = self.stepper(self._stop_when_late(taken, before), count, may_capture=self._may_capture)
        sums = self.units.reduce(sums)
        self.log.read()  # raises for a broken step before a later one changes a weight
        numbers = self.update.numbers(sums, self._may_capture)
        step = StepNumbers(number, counts, numbers, self.log.breakdown.last_step)
        self.log.launch(step)
        if not self.update.skips_on_device or number == 1:
            self.log.check(step)
        if self.scaler is not None:
            self.guards.check_scale(number, self.log.norm, self.scaler.get_scale())
        self._finish_step(self._update_weights(), epoch)

    def _first_broken(self) -> str | None:
        """Return the name of the first parameter whose gradient in this step's backward has NaN or Inf, or None."""
        broken = self.optimizer.first_broken()
        return next((name for name, each in self.model.named_parameters() if each is broken), None)

    def _update_weights(self) -> float:
        """Step the optimizer and the schedule; return the learning rate of this step."""
        rate = next_rate(self.schedule)
        self.update.step()
        self.callbacks("on_optimizer_step")
        # If the scaler skips a step, the schedule does not count it. A fused optimizer skips it on the device, where
        # the host does not see it, so the schedule counts it.
        counts = self.scaler is None or math.isfinite(self.log.norm) or self.optimizer_row.guarded
        if counts and self.config.lr_scheduler_type not in FOLLOW_METRIC:
            self.schedule.step()
        self.units.after_step()
        return rate

    def _finish_step(self, rate: float, epoch: float) -> None:
        """Count the step, schedule its record, then evaluate and save if requested."""
        state = self.state
        state.global_step, state.epoch = state.global_step + 1, epoch
        self.callbacks("on_step_end")
        control = self.callbacks.control
        last = state.global_step >= state.max_steps  # its record may span fewer than logging_steps
        if self.best is not None and (last or control.should_training_stop):
            control.should_evaluate = True
        self.log.finish(rate if control.should_log or last else None)
        if self.scaling is not None:
            self.scaling.roll(partial(self.mesh.max, axes=TOKEN_AXES))
        if last or control.should_training_stop or control.should_evaluate or control.should_save:
            self.log.read()
        self._evaluate_and_save()

    def _evaluate_and_save(self) -> None:
        """Evaluate and save a checkpoint, if the callbacks request it."""
        if self.callbacks.control.should_evaluate:
            self.evaluate()
        if self.callbacks.control.should_save:
            self._save()
            self.callbacks("on_save")

    def _set_optimizer_mode(self, training: bool) -> None:
        """Exchange the weights that a schedule-free optimizer trains with those that it evaluates and saves, in place.

        Steps need the former. After an evaluation or a checkpoint the latter stay until the next step, so that a run
        resumed from the checkpoint computes the same.
        """
        if self.optimizer_row.has_modes and self.optimizer is not None:
            (self.optimizer.train if training else self.optimizer.eval)()

    # --- evaluation and checkpoints ----------------------------------------------------------------------------------

    @waiting("evaluating")
    def evaluate(self) -> dict[str, float]:
        """Compute the method's numbers over the held-out rows, record and return them.

        Raises:
            TrainingError: the loss is NaN or Inf, or there is nothing to evaluate.
        """
        assert self.held_out is not None
        self.log.read()
        self._set_optimizer_mode(training=False)
        began, size = time.time(), self.args.per_device_eval_batch_size
        rows, answers = self.held_out, self.rollouts
        numbers = answers.evaluate(rows, self.state) if answers else self._held_out_numbers(rows, size)
        numbers["seconds"] = time.time() - began
        self.log.write("eval", numbers)
        named = {f"eval_{name}": value for name, value in numbers.items()}
        named |= speed_metrics("eval", began, len(self.held_out), math.ceil(len(self.held_out) / size))
        self.callbacks.log(named)
        self.callbacks("on_evaluate", metrics=named)
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
            self.schedule.step(value)
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
        self.units = self.units.replicated()
        with full_parameters(self.trained):
            load_weights(self.model, folder, split.stages.is_remote if split else None)

    def _held_out_numbers(self, rows: Rows, size: int) -> dict[str, float]:
        """Return the method's numbers over `rows`, `size` per batch."""
        found, random = Window.of(self.method.numbers.trained), random_states()
        self.model.eval()
        source = batches(RowTable(rows), size, self.collate, self.mesh, pinned=self.device.type != "cpu")
        with free_stream_caches(self.stepper, self.device), torch.no_grad():
            shared = self.look_ahead.numbers(map(self._to_device, source))
            remaining = iter(self._stop_when_late(source, random, evaluates=True))
            while some := list(islice(remaining, self.stepper.evaluation_batches)):
                counted = [take_counts([batch]) for batch in some]
                ready: list[Batch] = [with_numbers(self._to_device(batch), shared) for batch in some]
                for counts, sums in zip(counted, self.stepper.evaluate(ready), strict=True):
                    found.add({name: float(value) for name, value in sums.items()}, counts, 0.0)
        found = found.over(self.mesh)
        totals = {name: count for name, count in found.counts.items() if name != TOKENS}
        self.guards.check_held_out(self.state.global_step, found.sums["loss"], totals[self.loss_count])
        return self.method.evaluation(found.means(self.method.numbers.trained), totals)

    @waiting("saving a checkpoint")
    def _save(self, random: dict[str, Any] | None = None, evaluation_pending: bool = False) -> None:
        """Write checkpoint-N to a temporary folder, rename it, and only then remove older checkpoints.

        Args:
            random: random states that the resumed run continues with; default: the current ones.
            evaluation_pending: whether the resumed run evaluates first.

        Raises:
            TrainingError: it could not be written (a full disk); earlier checkpoints are untouched.
        """
        self._set_optimizer_mode(training=False)
        states = self.mesh.gather(random or random_states())
        with full_parameters(self.trained, self.optimizer):
            split = self.pipeline_state
            weights = split.weights() if split else None
            optimizer = (split.optimizer_state if split else self.units.full_state)(self.optimizer)
            scaling = scaling_state(self.scaling, split)
            with self.units.full():
                if self.mesh.is_main:
                    self._write_checkpoint(weights, optimizer, scaling, states, evaluation_pending)

    def _write_checkpoint(
        self,
        weights: dict[str, torch.Tensor] | None,
        optimizer: dict[str, Any],
        scaling: dict[str, torch.Tensor] | None,
        random: list[dict[str, Any]],
        evaluation_pending: bool,
    ) -> None:
        """Write the files of a checkpoint.

        Args:
            weights: full weights of a model in stages; None: the model's own.
            random: random states by rank.
        """
        try:
            with new_directory(self._checkpoint_folder()) as folder:
                save_weights(self.model, folder, weights)
                save_optimizer(folder, optimizer, self.schedule, self.scaler)
                save_random(folder, random)
                save_scaling(folder, scaling)
                if self.rollouts is not None:
                    self.rollouts.save(folder)
                self.state.save_to_json(str(folder / TRAINER_STATE))
                checkpoints.write_state(
                    folder,
                    self.config,
                    self.identity(),
                    self.log.window,
                    evaluation_pending,
                    self.ways,
                    best=self.best.document() if self.best else None,
                    stream=self.rows.position(self.state.global_step * self._rows_per_step),
                )
                write_manifest(folder, self.state.global_step)
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
        self, parts: Iterable[Part], random: dict[str, Any] | None, evaluates: bool = False
    ) -> Iterator[Part]:
        """Yield the `parts` of a step or an evaluation; stop between them `LEAVE_TIMEOUT` seconds after a signal.

        Args:
            random: random states from before the first part.
        """
        for part in parts:
            # The first part changes a recipe's scales, and with several ranks the others would block in a collective.
            if self.request.seconds > LEAVE_TIMEOUT and self.scaling is None and self.mesh.size == 1:
                self._save_and_stop(random, evaluates)
            yield part

    def _save_and_stop(self, random: dict[str, Any] | None = None, evaluation_pending: bool = False) -> None:
        """Save a checkpoint of the last step, if there is none, and end the run.

        Raises:
            Stopped: always.
        """
        self.log.read()
        if self.state.global_step and self.mesh.from_main(checkpoints.damage(self._checkpoint_folder())) is not None:
            self._save(random, evaluation_pending)
        raise Stopped(self.request.number)
