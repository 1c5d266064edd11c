"""transformers' Trainer with an exact loss, stops instead of broken runs, and checkpoints that are whole or absent.

What differs from the Trainer it derives from:

- The loss of a step is the sum over its trained tokens divided by their number, over the whole accumulation window, so
  accumulating equals the large batch. It never goes through full logits (`models.head.causal_lm_loss`).
- Evaluation weighs every token alike and keeps one number.
- On a CUDA device, micro-batches of a shape that comes again run as one CUDA graph (`graph`).
- NaN or Inf in loss or gradient, and windows with nothing to train on, stop the run before a weight moves.
- The host does not wait for the step it launches: a step's numbers are read and recorded when the next one is queued
  (`late`), or at once where something depends on them: a checkpoint, an evaluation, the end. An optimizer that cannot
  be told on the device to leave the weights alone waits for them, too.
- Checkpoints hold adapters, optimizer, schedule and random states, written aside and renamed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from halfbyte.adapters import compute, load_adapter_weights, save_adapter
from halfbyte.config import RunConfig
from halfbyte.errors import TrainingError
from halfbyte.files import new_directory
from halfbyte.hardware import is_out_of_memory
from halfbyte.models.head import causal_lm_loss
from halfbyte.ops import IGNORE_INDEX
from halfbyte.ops.fp8_scaling import DelayedScaling
from halfbyte.optim import OPTIMIZERS

from ..runs.manifest import write_manifest
from . import checkpoint as checkpoints
from .arguments import total_steps
from .graph import GraphedBackward
from .late import Mark, StepNumbers, guard
from .metrics import MetricsFile, Window, peak_memory

TOKENS = "tokens"
SKIPS = 20  # steps in a row that float16 may skip: the scale of 65536 that it begins with is below 1 after 17
TRAINED = "trained_tokens"  # of a micro-batch where it is collated, of the whole step where a graph reads it


class _Counting:
    """A collator that also counts, as plain numbers, which stay on the host.

    `tokens` are the rows', which padding hides. `trained_tokens` are those with a label; the first position predicts
    nothing, wherever its label points.
    """

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]):
        self.collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        trained = int((batch["labels"][..., 1:] != IGNORE_INDEX).sum())
        return {**batch, TOKENS: sum(len(row["input_ids"]) for row in rows), TRAINED: trained}


class HalfbyteTrainer(Trainer):
    """Trains a causal LM on rows of `input_ids` and `labels`.

    Args:
        config: the run's configuration; part of every checkpoint.
        data: rows, tokens and trained tokens of the training set; part of every checkpoint.
        metrics: where records go.
        compute_dtype: dtype of matrix products, whatever dtype the trained weights are kept in.
        **keys: as for transformers.Trainer.
    """

    model: Any  # a PeftModel, or a transformers model in full fine-tuning
    optimizer: Any  # accelerate's, around torch's
    loss_is_scaled_for_ga = True  # transformers 5.23: do not divide by the number of micro-batches

    def __init__(
        self, *, config: RunConfig, data: dict[str, int], metrics: MetricsFile, compute_dtype: torch.dtype, **keys: Any
    ):
        super().__init__(**keys | {"data_collator": _Counting(keys["data_collator"])})
        self.model_accepts_loss_kwargs = True  # the same for transformers 5.17
        self.remove_callback(PrinterCallback)
        self.config, self.data, self.metrics, self.compute_dtype = config, data, metrics, compute_dtype
        self.output = Path(config.output_dir)
        self.window = Window()
        self.scaling: DelayedScaling | None = None  # of the recipe, where it has a state
        self._loss_sum: torch.Tensor | float = 0.0
        self._graphs: GraphedBackward | None = None
        self.graph_pool_bytes = 0  # the most that graphs held
        self._counts = 0, 0  # tokens and trained tokens of the step being launched
        self._step: StepNumbers | None = None  # being launched, from its gradient norm on
        self._unread: StepNumbers | None = None  # launched
        self._since = Mark(self.args.device)  # until when the window counts the time
        self._norm = math.nan  # the last gradient norm that was read
        self._skipped = 0  # steps in a row, by fp16's scaler
        self._due: float | None = None  # learning rate of a record that waits for its step's numbers

    def train(self, *positional: Any, **keys: Any) -> Any:
        """As transformers' `train`; a run that raises has written the records of all steps before.

        Raises:
            TrainingError: see `get_batch_samples` and `_check`.
        """
        # nn.Module.zero_grad walks every frozen module: milliseconds a step
        self.model.zero_grad = self._drop_gradients
        try:
            return super().train(*positional, **keys)
        except BaseException:
            self._step = None  # was not finished
            self._settle()
            raise
        finally:
            del self.model.zero_grad
            if self._graphs is not None:
                self.graph_pool_bytes = self._graphs.most_pool_bytes
                self._graphs.close()

    def create_optimizer(self, model=None):
        """The row of the table, where the caller brought no optimizer."""
        if self.optimizer is None:
            self.optimizer = OPTIMIZERS[self.config.optim].make(self.model, self.config)
        return self.optimizer

    @cached_property
    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that get gradients."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _drop_gradients(self, set_to_none: bool = True) -> None:
        for parameter in self.trained:
            parameter.grad = None

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end from `checkpoint`, or from the start; a checkpoint of the end is only loaded."""
        total = total_steps(self.config, self.data["rows"])
        if checkpoint is None or checkpoints.step_of(checkpoint) < total:
            self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        else:  # transformers would train one step more
            self._load_from_checkpoint(str(checkpoint))
            self.state = TrainerState.load_from_json(str(checkpoint / checkpoints.TRAINER_STATE))

    def use_graphs(self) -> None:
        """From now on run micro-batches as CUDA graphs; for a fused model, on a CUDA device, without loss scaling."""
        self._graphs = GraphedBackward(self._forward_and_backward, self.trained)

    # --- one step ----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Collect the micro-batches of one step and count its tokens.

        Raises:
            TrainingError: nothing in this step is trained.
        """
        if self._unread is None:  # after a pause; else the step before ends where this one begins
            self._since = Mark(self.args.device)
        self._loss_sum = 0.0
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if not batches:
            return batches, None
        tokens = sum(batch.pop(TOKENS) for batch in batches)
        trained = sum(batch.pop(TRAINED) for batch in batches)
        self._counts = tokens, trained
        if not trained:
            raise TrainingError(
                f"step {self.state.global_step + 1} has no trained token in its {len(batches)} micro-batches",
                "look at the masks with `halfbyte preview`; rows cut by max_length may have lost their answers",
            )
        return batches, torch.full((), trained, device=device)  # a launch; a copy could wait

    def _get_num_items_in_batch(self, batch_samples, device):
        return None  # the collator counts

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Forward and backward of a micro-batch."""
        # A graph captured before the recipe's scales are there would look for them in every replay; before the first
        # step's end, the optimizer's state would have to find room beside the graphs.
        early = self.state.global_step == 0 or (self.scaling is not None and not any(self.scaling.settled))
        if self._graphs is None or early:
            return super().training_step(model, inputs, num_items_in_batch)
        if not model.training:  # after an evaluation; it walks all modules
            model.train()
        losses = self._graphs({**self._prepare_inputs(inputs), TRAINED: num_items_in_batch})
        self._loss_sum = self._loss_sum + losses[1]
        return losses[0]

    def _forward_and_backward(self, batch) -> torch.Tensor:
        """[the share of the step's mean loss, the loss's sum]; what a graph captures."""
        loss, loss_sum = self._losses(self.model, {k: v for k, v in batch.items() if k != TRAINED}, batch[TRAINED])
        loss.backward()
        return torch.stack([loss.detach(), loss_sum.detach()])

    def _losses(self, model, inputs, trained) -> tuple[torch.Tensor, torch.Tensor]:
        with compute(model, self.compute_dtype):
            loss_sum, own = causal_lm_loss(model, inputs)
        return loss_sum / (own if trained is None else trained), loss_sum

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The micro-batch's share of the step's mean loss per trained token."""
        loss, loss_sum = self._losses(model, inputs, num_items_in_batch)
        self._loss_sum = self._loss_sum + loss_sum.detach()
        return (loss, {}) if return_outputs else loss

    def _clip_grad_norm(self, model):
        return self.accelerator.clip_grad_norm_(self.trained, self.args.max_grad_norm or math.inf)

    def _get_grad_norm(self, model, grad_norm=None):
        """The last look at a step before the optimizer moves: by the host, or by the device itself.

        Raises:
            TrainingError: see `_check`; of this step, or of the step before. And `_check_scale`.
        """
        grad_norm = self._clip_grad_norm(model) if grad_norm is None else grad_norm
        loss_sum = torch.as_tensor(self._loss_sum, dtype=torch.float32)
        numbers = torch.stack([loss_sum, grad_norm.to(loss_sum)])
        if guarded := self._guarded:
            guard(self.optimizer.optimizer, numbers)
        step = self._step = StepNumbers(self.state.global_step + 1, *self._counts, numbers)
        self._settle()  # the step before, while the device is busy with this one
        if not guarded or step.number == 1:
            self._check(step)
        if self.accelerator.scaler is not None:
            self._check_scale(step)
        return grad_norm

    @property
    def _guarded(self) -> bool:
        """Whether the device alone keeps a broken step from moving weights; fp16's scaler does so in its own way."""
        return self.accelerator.scaler is None and OPTIMIZERS[self.config.optim].guarded

    def _check(self, step: StepNumbers) -> float:
        """The step's summed loss.

        Raises:
            TrainingError: its loss or gradient norm is NaN or Inf, or no gradient reaches the trained weights.
        """
        loss_sum, self._norm = step.read()
        scaled = self.accelerator.scaler is not None  # fp16: an overflow is skipped, and the scale lowered
        if not math.isfinite(loss_sum) or not (math.isfinite(self._norm) or scaled):
            numbers = f"loss {loss_sum:.4g} (sum), gradient norm {self._norm:.4g}"
            raise TrainingError(
                f"step {step.number}: {numbers}; stopped before updating any weight",
                f"lower learning_rate ({self.args.learning_rate:g}); {self._last_checkpoint()}",
            )
        if step.number == 1 and self._norm == 0:
            raise TrainingError("step 1: no gradient reaches the trained weights", "check target_modules")
        return loss_sum

    def _check_scale(self, step: StepNumbers) -> None:
        """fp16 skips a step whose gradients overflow and halves its scale, which ends overflows, but nothing else.

        Raises:
            TrainingError: it has skipped `SKIPS` steps in a row, or the scale is below 1.
        """
        self._skipped = 0 if math.isfinite(self._norm) else self._skipped + 1
        scale = self.accelerator.scaler.get_scale()
        if self._skipped >= SKIPS or (self._skipped and scale < 1):
            raise TrainingError(
                f"step {step.number}: the gradients of the last {self._skipped} steps were NaN or Inf in float16, at a"
                f" loss scale down to {scale:g}: no overflow that scaling ends, and no weight has moved since",
                f"set dtype: bfloat16 (float32 where the device lacks it); {self._last_checkpoint()}",
            )

    def _last_checkpoint(self) -> str:
        last = checkpoints.checkpoints(self.output)
        return f"the last checkpoint is {last[-1]}" if last else "there is no checkpoint yet"

    def floating_point_ops(self, inputs) -> int:
        return 0  # not reported; counting walks every parameter at every micro-batch

    def _maybe_log_save_evaluate(self, *positional: Any, **keys: Any) -> None:
        """The end of a step. transformers evaluates and saves; the record is written once the numbers are there."""
        if self._step is not None:
            self._step.finish()
            self._unread, self._step = self._step, None
            if self.scaling is not None:
                self.scaling.roll()
        step, control = self.state.global_step, self.control
        last = step >= self.state.max_steps  # whose record may span fewer than logging_steps
        if (control.should_log or last) and step > self._globalstep_last_logged:
            self._due, self._globalstep_last_logged = keys["learning_rate"], step
        control.should_log = False
        if last or control.should_training_stop or control.should_evaluate or control.should_save:
            self._settle()
        super()._maybe_log_save_evaluate(*positional, **keys)

    # --- records -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Take the unread step into the window, and write the record that is due.

        At that time transformers' state is still the step's own: the next one counts after its optimizer.

        A step's time is that from the end of the step before to its own end, on the device's clock; after anything
        else than a step, from where it began to collect its rows.
        """
        step, rate = self._unread, self._due
        self._unread = self._due = None
        if step is not None:
            self.window.loss_sum += self._check(step)
            self.window.tokens += step.tokens
            self.window.trained_tokens += step.trained_tokens
            self.window.seconds += step.end.seconds_since(self._since)
            self.window.steps += 1
            self._since = step.end
        if rate is not None:
            record, self.window = self.window.record(), Window()
            norm = self._norm if math.isfinite(self._norm) else None  # fp16's overflows: JSON has no Inf
            logs = {"loss": record["loss"], "grad_norm": norm, "learning_rate": rate}
            self.log(logs | record | {"memory_bytes": peak_memory(self.args.device)})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a record of metrics.jsonl, then hand the numbers to transformers' callbacks."""
        if "learning_rate" in logs:
            kind, fields = "train", logs
        elif "eval_loss" in logs:
            kind = "eval"
            fields = {name: logs[f"eval_{name}"] for name in ("loss", "perplexity", "tokens", "seconds")}
        else:
            return super().log(logs, start_time)
        position = {"step": self.state.global_step, "epoch": self.state.epoch or 0.0, "time": time.time()}
        self.metrics.append({"kind": kind, **position, **fields})
        return super().log(logs, start_time)

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix="eval"
    ) -> EvalLoopOutput:
        """Mean loss per trained token over `dataloader`, and its exponential.

        Raises:
            TrainingError: the loss is NaN or Inf, or no token has a label.
        """
        self._settle()
        began, loss_sum, tokens = time.perf_counter(), 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in dataloader:
                del batch[TOKENS], batch[TRAINED]
                batch_sum, batch_tokens = self._held_out_loss(self._prepare_inputs(batch))
                loss_sum, tokens = loss_sum + float(batch_sum), tokens + int(batch_tokens)
        if not tokens:
            raise TrainingError("the held-out rows have no trained token", "look at them with `halfbyte preview`")
        loss = loss_sum / tokens
        if not math.isfinite(loss):
            raise TrainingError(f"step {self.state.global_step}: the held-out loss is {loss}", self._last_checkpoint())
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700)), "tokens": tokens}
        metrics["seconds"] = time.perf_counter() - began
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, named, len(dataloader.dataset))  # type: ignore[arg-type]

    def _held_out_loss(self, inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss's sum and its tokens; where there is no room beside CUDA graphs, the graphs go."""
        graphs = self._graphs
        try:
            with compute(self.model, self.compute_dtype):
                return causal_lm_loss(self.model, inputs)
        except RuntimeError as error:
            if graphs is None or not graphs.holds_graphs or not is_out_of_memory(error):
                raise
        graphs.give_up()  # out of the handler, whose error keeps what the forward has made
        return self._held_out_loss(inputs)

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model, trial) -> None:
        """Write checkpoint-N aside, rename it, and only then remove older ones.

        Raises:
            TrainingError: it could not be written (a full disk); earlier checkpoints are untouched.
        """
        place = self.output / f"checkpoint-{self.state.global_step}"
        try:
            with new_directory(place) as aside:
                self.save_model(str(aside), _internal_call=True)
                self._save_optimizer_and_scheduler(str(aside))
                self._save_scaler(str(aside))
                self._save_rng_state(str(aside))
                if self.scaling is not None:
                    save_file(self.scaling.state_dict(), aside / checkpoints.SCALING)
                self.state.save_to_json(str(aside / checkpoints.TRAINER_STATE))
                checkpoints.write_state(aside, self.config, self.data, self.window)
                write_manifest(aside, self.state.global_step)
        # safetensors and torch.save have errors of their own for a disk that is full
        except (OSError, RuntimeError, SafetensorError, TrainingError) as error:
            reason = getattr(error, "message", str(error))
            raise TrainingError(
                f"{place} could not be saved: {reason}", f"free some space and resume; {self._last_checkpoint()}"
            ) from error
        checkpoints.keep_newest(self.output, self.args.save_total_limit)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Adapters only; all weights in full fine-tuning."""
        folder = Path(output_dir or self.output)
        if isinstance(self.model, PeftModel):
            save_adapter(self.model, folder)
        else:
            self.model.save_pretrained(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Weights in their own dtype (PEFT's loader would turn bfloat16 adapters into float32), and the open window."""
        folder = Path(resume_from_checkpoint)
        if isinstance(self.model, PeftModel):
            load_adapter_weights(self.model, folder)
        else:
            with checkpoints.reading(folder):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.scaling is not None:
            checkpoints.load_scaling(folder, self.scaling)
        self.window = Window(**checkpoints.read_state(folder)["window"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with checkpoints.reading(Path(checkpoint or "")):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        with checkpoints.reading(Path(checkpoint or "")):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with checkpoints.reading(Path(checkpoint or "")):
            super()._load_rng_state(checkpoint)
