"""The training loop: the story of a step, and of the run around it.

A step takes its rows; a stepper gives gradients and sums; then gradients are clipped, a broken step is caught, the
optimizer moves, and the step's numbers are read and recorded when the next one is queued. What holds throughout:

- The loss of a step is its sum over the whole accumulation window divided by the count over that window (for
  supervised fine-tuning: of trained tokens), so accumulating equals the large batch.
- NaN or Inf in loss or gradient, and windows with nothing to train on, stop the run before a weight moves (`stops`).
- The host does not wait for the step it launches (`readback`, `records`) but where something depends on its numbers: a
  checkpoint, an evaluation, the end. An optimizer that cannot be told on the device to leave the weights alone waits
  for them, too.
- Checkpoints hold adapters, optimizer, schedule and random states, written aside and renamed.
- Asked to leave (SIGTERM, SIGHUP, Ctrl-C), the run ends its step, saves a checkpoint and goes. What takes longer (a
  step of many micro-batches, an evaluation) is given up: the checkpoint is of the moment before it.
- Order of rows, schedule, parameter groups and checkpoints are those of transformers' Trainer (5.17 to 5.23), with
  which runs of earlier versions were made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments, get_scheduler, set_seed
from transformers.trainer_utils import speed_metrics

from halfbyte.batch import take_counts, to_device
from halfbyte.config import RunConfig
from halfbyte.methods import method_of
from halfbyte.methods.base import Batch, Collate, Rows
from halfbyte.modeling.cast_cache import cast_replacements
from halfbyte.ops.fp8_scaling import DelayedScaling
from halfbyte.optim import OPTIMIZERS, trained_parameters
from halfbyte.parallel.context.model import context_shard
from halfbyte.parallel.mesh import AXES, DATA_AXES, SINGLE_PROCESS, TOKEN_AXES, Mesh
from halfbyte.parallel.shard.model import has_static_gradients
from halfbyte.parallel.shard.optimizer import shard_optimizer
from halfbyte.parallel.tensor.layers import full_parameters
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.files import new_directory
from halfbyte.utils.processes import Stopped, StopRequest, request_on_signals

from ..parallel.pipeline.full_state import PipelineState, scaling_state
from ..rl.rollouts import Generations
from ..runs.layout import checkpoint_folder
from ..runs.manifest import write_manifest
from . import checkpoint as checkpoints
from .callback_arguments import steps_per_epoch, total_steps
from .callbacks import Callbacks, noisy_embeddings
from .checkpoint_state import (
    load_optimizer,
    load_random,
    load_weights,
    random_states,
    save_optimizer,
    save_random,
    save_weights,
)
from .early_stop import PATIENCE, Stops, announce
from .look_ahead import Ahead, with_numbers
from .metrics import TOKENS, MetricsFile, Window
from .metrics_log import Records
from .readback import StepNumbers, guard
from .sampler import Counting, batches
from .stepper import Stepper, beside_graphs

Part = TypeVar("Part")


def seed_process(config: RunConfig, mesh: Mesh) -> None:
    """Seed the random numbers of this process: dropout differs between processes except along `tensor`, where all
    compute the same rows."""
    set_seed(config.seed + mesh.coordinate(*(axis for axis in AXES if axis != "tensor")))


class TrainingLoop:
    """Trains a causal LM on rows by the method of its configuration, and evaluates it on others.

    Args:
        config: the run's configuration; part of every checkpoint.
        data: rows, tokens and trained tokens of the training set; part of every checkpoint.
        metrics: where records go.
        compute_dtype: dtype of matrix products, whatever dtype the trained weights are kept in.
        model: a PeftModel, or a transformers model in full fine-tuning, on `device`.
        args: `config` for transformers' callbacks.
        rows: of the training set.
        held_out: rows to evaluate on.
        collate: rows → a batch, the method's own.
        stepper: runs the micro-batches of a step; it decides between eager steps, CUDA graphs and a pipeline.
        mesh: the processes that train.
        scaling: the recipe's delayed scales, if it has any.
        rollouts: samples the rows of each step; None: `rows` are trained on as they are.
        pipeline_state: gathers weights and optimizer state from the stages of a pipeline; None: one stage.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        data: dict[str, int],
        metrics: MetricsFile,
        compute_dtype: torch.dtype,
        model: Any,
        args: TrainingArguments,
        device: torch.device,
        rows: Rows,
        held_out: Rows | None = None,
        collate: Collate,
        stepper: Stepper,
        mesh: Mesh = SINGLE_PROCESS,
        scaling: DelayedScaling | None = None,
        rollouts: Generations | None = None,
        pipeline_state: PipelineState | None = None,
    ):
        self.config, self.data, self.metrics, self.compute_dtype = config, data, metrics, compute_dtype
        self.model, self.args, self.device, self.mesh = model, args, device, mesh
        self.rows, self.held_out, self.method = rows, held_out, method_of(config)
        self.collate = Counting(self.method, collate)
        self.ahead = Ahead(self.method, model, compute_dtype, mesh)
        self.loss_count = self.method.numbers.trained[0].over
        self.output, self.row = Path(config.output_dir), OPTIMIZERS[config.optim]
        self.trained = list(trained_parameters(model).values())
        self.stepper, self.scaler, self.scaling = stepper, stepper.scaler, scaling
        self.rollouts, self.pipeline_state = rollouts, pipeline_state
        self.callbacks, self.request = Callbacks(args, model, reports=mesh.is_main), StopRequest()
        self._owed = False  # an evaluation, by the checkpoint that the run continues from
        self.optimizer: Any = None
        self.units: Any = None
        self.schedule: Any = None
        self.stops = Stops(config, self.loss_count, sampled=rollouts is not None)
        scaled = self.scaler is not None
        self.records = Records(metrics, self.callbacks, self.method.numbers, self.stops, device, mesh, scaled, rollouts)
        self.ways = mesh.degree(*DATA_AXES)

    @property
    def state(self) -> TrainerState:
        return self.callbacks.state

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callbacks.handler.add_callback(callback)

    @property
    def _steady(self) -> bool:
        """Whether a step may be captured: after the first one, so that the optimizer's state is allocated before the
        graphs' memory, and with the recipe's scales set, because a graph replays the branch it was captured in."""
        return self.state.global_step > 0 and (self.scaling is None or any(self.scaling.settled))

    # --- a run -------------------------------------------------------------------------------------------------------

    def train(self, checkpoint: Path | None = None) -> None:
        """Train to the end from `checkpoint`, or from the start; a checkpoint of the end is only loaded.

        A run that raises has written the records of all steps before.

        Raises:
            TrainingError: a step is broken, or has nothing to train on; see `Stops`.
            CheckpointError: `checkpoint` cannot be read.
            Stopped: the process was asked to leave; a checkpoint of the last step is saved.
        """
        steps = total_steps(self.config, len(self.rows), self.ways)
        self._begin(checkpoint, steps)
        if self.state.global_step >= steps:
            if self.mesh.is_main:  # a run that was killed between the last save and this
                checkpoints.keep_newest(self.output, self.config.save_total_limit)
            return
        try:
            with (
                noisy_embeddings(self.model, self.config.neftune_noise_alpha, self.mesh),
                request_on_signals(announce) as self.request,
            ):
                self._run(checkpoint)
        except BaseException:
            self.records.read_all()
            raise
        finally:
            self.stepper.close()

    def _begin(self, checkpoint: Path | None, steps: int) -> None:
        """Weights, optimizer, schedule and state, new or as `checkpoint` has them."""
        split = self.pipeline_state
        if checkpoint is not None:
            with full_parameters(self.trained):
                load_weights(self.model, checkpoint, split.stages.is_remote if split else None)
            checkpoints.load_scaling(checkpoint, self.scaling, split.local_scaling if split else dict)
            state = checkpoints.read_state(checkpoint)
            if self.rollouts is not None:
                self.rollouts.load(checkpoint)
            self.records.window, self._owed = Window.of_dict(state["window"]), state.get("owes_evaluation", False)
        self.optimizer = self.row.make(self.model, self.config)
        elementwise = self.row.elementwise and self.scaler is None
        static_gradients = (
            self.mesh.degree("shard") > 1 and has_static_gradients(self.model) and not self.stepper.captures
        )
        narrow = partial(cast_replacements, self.model, self.compute_dtype)
        self.units = shard_optimizer(
            self.mesh, self.trained, elementwise=elementwise, static_gradients=static_gradients, narrow=narrow
        )
        self.units.adopt(self.optimizer)
        warmup = self.args.get_warmup_steps(steps)
        self.schedule = get_scheduler(self.config.lr_scheduler_type, self.optimizer, warmup, steps)
        if checkpoint is not None:
            own = partial(split.local_optimizer_state, self.optimizer) if split else self.units.local_state
            with full_parameters(self.trained, self.optimizer):
                load_optimizer(checkpoint, self.optimizer, self.schedule, self.scaler, own)
        by_steps = self.config.max_steps > 0
        epochs = math.ceil(steps / self._steps_per_epoch if by_steps else self.config.num_train_epochs)
        saved = None if checkpoint is None else checkpoint / checkpoints.TRAINER_STATE
        self.callbacks.begin(saved, steps=steps, epochs=epochs, optimizer=self.optimizer, schedule=self.schedule)

    @property
    def _micro_batches(self) -> int:
        """Of a whole step, in all processes."""
        return self.config.gradient_accumulation_steps * self.ways

    @property
    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self.config, len(self.rows), self.ways)

    def _run(self, checkpoint: Path | None) -> None:
        """Epoch after epoch until a callback says stop, as the first one does at the last step."""
        began, first = time.time(), self.state.global_step
        self.units.drop_gradients()
        self.records.watch(self.model, self.stepper)
        self.model.train()
        self.callbacks("on_train_begin")
        epoch, done = divmod(first, self._steps_per_epoch)
        while not self.callbacks.control.should_training_stop:
            self.callbacks("on_epoch_begin")
            self._epoch(epoch, done, checkpoint)
            self.callbacks("on_epoch_end")
            self._evaluate_and_save()
            self._leave_if_asked()
            epoch, done, checkpoint = epoch + 1, 0, None
        steps = self.state.global_step - first
        rows = steps * self._micro_batches * self.config.per_device_train_batch_size
        summary = {"total_flos": 0, "train_loss": self.records.mean_losses / max(steps, 1)}
        self.callbacks.log(speed_metrics("train", began, rows, steps) | summary)
        self.callbacks("on_train_end")

    def _epoch(self, epoch: int, done: int, checkpoint: Path | None) -> None:
        """The steps of an epoch after the first `done`.

        A loader draws a random number when it begins, so the checkpoint's numbers come back after that in the middle
        of an epoch, and before it where the checkpoint was at an epoch's end.
        """
        if checkpoint is not None and not done:
            self._continue(checkpoint)
        config = self.config
        size, skip = config.per_device_train_batch_size, done * self._micro_batches
        order, pinned = config.seed + epoch, self.device.type != "cpu"
        share: Any
        if self.rollouts is not None:
            share = self.rollouts.share(self.collate, epoch, skip, self.callbacks, settle=self.records.read)
        else:
            share = batches(self.rows, size, self.collate, self.mesh, shuffled=order, skip=skip, pinned=pinned)
        micro_batches, seen = skip + share.total, skip
        iterator = iter(share)
        while taken := self._take(iterator):
            if checkpoint is not None and done:
                self._continue(checkpoint)
                checkpoint = None
            seen = min(seen + len(taken) * self.ways, micro_batches)  # some may be blank
            self._step(taken, epoch + seen / micro_batches)
            control = self.callbacks.control
            if control.should_epoch_stop or control.should_training_stop:
                return
            if seen < micro_batches:  # the end of an epoch has things to do yet
                self._leave_if_asked()

    def _continue(self, checkpoint: Path) -> None:
        """Take the random numbers of `checkpoint`, and do what was left out after its step."""
        load_random(checkpoint, self.mesh.rank)
        if self._owed:
            self.evaluate()
            self._owed = False

    # --- a step ------------------------------------------------------------------------------------------------------

    def _take(self, loader: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of the next step, on their way to the device; none at the end of the epoch."""
        self.records.begin()
        taken = [to_device(batch, self.device) for batch in islice(loader, self.config.gradient_accumulation_steps)]
        return [context_shard(batch, self.mesh) for batch in self.stepper.synced(taken)]

    def _own(self, batch: dict[str, Any]) -> Batch:
        return context_shard(to_device(batch, self.device), self.mesh)

    def _step(self, taken: list[dict[str, Any]], epoch: float) -> None:
        """One optimizer step; `epoch` is how far the run is after it."""
        self.callbacks("on_step_begin")
        number, counts = self.state.global_step + 1, take_counts(taken)
        counts = self.mesh.sum(counts)
        divisor = self.stops.check_count(number, counts[self.loss_count], len(taken) * self.ways)
        if not self.model.training:  # after an evaluation; it walks all modules
            self.model.train()
        count = torch.full((), divisor, device=self.device)  # a launch; a copy could wait
        taken = self.ahead.shared(taken, counts)
        before = random_states() if len(taken) > 1 else None
        with self.records.shares.of(number):
            sums = self.stepper(self._unless_late(taken, before), count, steady=self._steady)
        sums = self.units.reduce(sums)
        norm = self._clip()
        numbers = torch.cat([sums, norm.to(sums).reshape(1)])
        if guarded := self.scaler is None and self.row.guarded:  # float16's scaler has a way of its own
            guard(self.optimizer, numbers)
        step = StepNumbers(number, counts, numbers, self.records.shares.step)
        self.records.launch(step)
        if not guarded or number == 1:
            self.records.check(step)
        if self.scaler is not None:
            self.stops.check_scale(number, self.records.norm, self.scaler.get_scale())
        self.callbacks("on_pre_optimizer_step")
        self._finish_step(self._move(), epoch)

    def _clip(self) -> torch.Tensor:
        """The norm of the gradients, before they are clipped to `max_grad_norm`."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        return self.units.clip(self.config.max_grad_norm or math.inf)

    def _move(self) -> float:
        """The optimizer's step, and the schedule's; the learning rate that it was made with."""
        rate = self.schedule.get_last_lr()[0]
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.callbacks("on_optimizer_step")
        # a step that the scaler leaves out is none of the schedule's; a fused optimizer leaves it out itself
        if self.scaler is None or math.isfinite(self.records.norm) or self.row.guarded:
            self.schedule.step()
        self.units.after_step()
        return rate

    def _finish_step(self, rate: float, epoch: float) -> None:
        """The end of a step: what it says is recorded once its numbers are there, then evaluate and save."""
        state = self.state
        state.global_step, state.epoch = state.global_step + 1, epoch
        self.callbacks("on_step_end")
        control = self.callbacks.control
        last = state.global_step >= state.max_steps  # whose record may span fewer than logging_steps
        self.records.finish(rate if control.should_log or last else None)
        if self.scaling is not None:
            self.scaling.roll(partial(self.mesh.max, axes=TOKEN_AXES))
        if last or control.should_training_stop or control.should_evaluate or control.should_save:
            self.records.read()
        self._evaluate_and_save()

    def _evaluate_and_save(self) -> None:
        """What the callbacks ask for."""
        if self.callbacks.control.should_evaluate:
            self.evaluate()
        if self.callbacks.control.should_save:
            self._save()
            self.callbacks("on_save")

    # --- evaluation and checkpoints ----------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """The method's numbers over the held-out rows, recorded.

        Raises:
            TrainingError: the loss is NaN or Inf, or there is nothing to take it over.
        """
        assert self.held_out is not None
        self.records.read()
        began, size = time.time(), self.args.per_device_eval_batch_size
        rows, answers = self.held_out, self.rollouts
        numbers = answers.evaluate(rows, self.callbacks) if answers else self._held_out_numbers(rows, size)
        numbers["seconds"] = time.time() - began
        self.records.write("eval", numbers)
        named = {f"eval_{name}": value for name, value in numbers.items()}
        named |= speed_metrics("eval", began, len(self.held_out), math.ceil(len(self.held_out) / size))
        self.callbacks.log(named)
        self.callbacks("on_evaluate", metrics=named)
        return numbers

    def _held_out_numbers(self, rows: Rows, size: int) -> dict[str, float]:
        """What the method makes of `rows`, `size` a batch."""
        found, random = Window.of(self.method.numbers.trained), random_states()
        self.model.eval()
        share = batches(rows, size, self.collate, self.mesh, pinned=self.device.type != "cpu")
        with beside_graphs(self.stepper, self.device), torch.no_grad():
            shared = self.ahead.of_all(map(self._own, share))
            late = iter(self._unless_late(share, random, evaluates=True))
            while together := list(islice(late, self.stepper.together)):
                counted = [take_counts([batch]) for batch in together]
                ready: list[Batch] = [with_numbers(self._own(batch), shared) for batch in together]
                for own, sums in zip(counted, self.stepper.evaluate(ready), strict=True):
                    found.add({name: float(value) for name, value in sums.items()}, own, 0.0)
        found = found.over(self.mesh)
        counts = {name: count for name, count in found.counts.items() if name != TOKENS}
        self.stops.check_held_out(self.state.global_step, found.sums["loss"], counts[self.loss_count])
        return self.method.evaluation(found.means(self.method.numbers.trained), counts)

    def _save(self, random: dict[str, Any] | None = None, owes_evaluation: bool = False) -> None:
        """Write checkpoint-N aside, rename it, and only then remove older ones.

        Args:
            random: states that the run is to continue with; default: those of now.
            owes_evaluation: whether it is to begin with an evaluation.

        Raises:
            TrainingError: it could not be written (a full disk); earlier checkpoints are untouched.
        """
        states = self.mesh.gather(random or random_states())
        with full_parameters(self.trained, self.optimizer):
            split = self.pipeline_state
            weights = split.weights() if split else None
            optimizer = (split.optimizer_state if split else self.units.full_state)(self.optimizer)
            scaling = scaling_state(self.scaling, split)
            with self.units.full():
                if self.mesh.is_main:
                    self._write(weights, optimizer, scaling, states, owes_evaluation)

    def _write(
        self,
        weights: dict[str, torch.Tensor] | None,
        optimizer: dict[str, Any],
        scaling: dict[str, torch.Tensor] | None,
        random: list[dict[str, Any]],
        owes_evaluation: bool,
    ) -> None:
        """The files of a checkpoint: `weights` of a model in stages, whole (None: as they are); all random states."""
        try:
            with new_directory(self._place()) as aside:
                save_weights(self.model, aside, weights)
                save_optimizer(aside, optimizer, self.schedule, self.scaler)
                save_random(aside, random)
                checkpoints.save_scaling(aside, scaling)
                if self.rollouts is not None:
                    self.rollouts.save(aside)
                self.state.save_to_json(str(aside / checkpoints.TRAINER_STATE))
                checkpoints.write_state(aside, self.config, self.data, self.records.window, owes_evaluation, self.ways)
                write_manifest(aside, self.state.global_step)
        except TrainingError as error:
            raise TrainingError(error.message, f"{error.fix}; {self.stops.last_checkpoint()}") from error
        checkpoints.keep_newest(self.output, self.config.save_total_limit)

    def _place(self) -> Path:
        """Where the checkpoint of the last step is, or would be."""
        return self.output / checkpoint_folder(self.state.global_step)

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _leave_if_asked(self) -> None:
        """After a step."""
        if number := self.mesh.max(self.request.number):
            self.request.number = number  # which may have reached another process alone
            self._leave()

    def _unless_late(
        self, parts: Iterable[Part], random: dict[str, Any] | None, evaluates: bool = False
    ) -> Iterator[Part]:
        """The `parts` of a step, or of an evaluation; once the process has been asked to leave for `PATIENCE`, it does.

        Args:
            random: states from before them.
        """
        for part in parts:
            # a recipe's scales have moved with the first part, and other processes wait for all of them
            if self.request.seconds > PATIENCE and self.scaling is None and self.mesh.size == 1:
                self._leave(random, evaluates)
            yield part

    def _leave(self, random: dict[str, Any] | None = None, owes_evaluation: bool = False) -> None:
        """Save what the last step came to, and go.

        Raises:
            Stopped: always.
        """
        self.records.read()
        if self.state.global_step and self.mesh.from_main(checkpoints.damage(self._place())) is not None:
            self._save(random, owes_evaluation)
        raise Stopped(self.request.number)
