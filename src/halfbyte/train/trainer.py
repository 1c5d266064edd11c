"""transformers' Trainer with an exact loss, stops instead of broken runs, and checkpoints that are whole or absent.

What differs from the Trainer it derives from:

- The loss of a step is the sum over its trained tokens divided by their number, over the whole accumulation window, so
  accumulating equals the large batch. It never goes through full logits (`models.head.causal_lm_loss`).
- Evaluation weighs every token alike and keeps one number.
- On a CUDA device, micro-batches of a shape that comes again run as one CUDA graph (`graph`).
- NaN or Inf in loss or gradient, and windows with nothing to train on, stop the run before the optimizer moves.
- Checkpoints hold adapters, optimizer, schedule and random states, written aside and renamed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
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
from halfbyte.models.head import IGNORE_INDEX, causal_lm_loss
from halfbyte.ops.fp8_scaling import DelayedScaling

from . import checkpoint as checkpoints
from .arguments import total_steps
from .graph import GraphedBackward
from .metrics import MetricsFile, Window, peak_memory

TOKENS = "tokens"
TRAINED = "trained_tokens"  # of the whole step, in a micro-batch that a graph reads


class _Counting:
    """A collator that also counts its rows' tokens, which padding hides: `tokens`, 0-d int64."""

    def __init__(self, collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]):
        self.collate = collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**self.collate(rows), TOKENS: torch.tensor(sum(len(row["input_ids"]) for row in rows))}


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
        self._step_began: float | None = None

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
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        accumulates = self.args.gradient_accumulation_steps > 1
        self._graphs = GraphedBackward(self._forward_and_backward, trained, accumulates)

    # --- one step ----------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """Collect the micro-batches of one step and count its tokens.

        Raises:
            TrainingError: nothing in this step is trained.
        """
        self._step_began, self._loss_sum = time.perf_counter(), 0.0
        batches, trained = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches:
            if not trained:
                raise TrainingError(
                    f"step {self.state.global_step + 1} has no trained token in its {len(batches)} micro-batches",
                    "look at the masks with `halfbyte preview`; rows cut by max_length may have lost their answers",
                )
            self.window.tokens += sum(int(batch.pop(TOKENS)) for batch in batches)
            self.window.trained_tokens += int(trained)
        return batches, trained

    def _get_num_items_in_batch(self, batch_samples, device):
        """Trained tokens of the window; the first position predicts nothing, wherever its label points."""
        if not batch_samples:
            return None
        counts = [(batch["labels"][..., 1:] != IGNORE_INDEX).sum() for batch in batch_samples]
        return torch.stack(counts).sum().to(device)

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Forward and backward of a micro-batch."""
        # A graph captured before the recipe's scales are there would look for them in every replay.
        unscaled = self.scaling is not None and not any(self.scaling.settled)
        if self._graphs is None or unscaled:
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

    def _get_grad_norm(self, model, grad_norm=None):
        """Also the last look at a step before the optimizer moves.

        Raises:
            TrainingError: its loss or gradient norm is NaN or Inf, or no gradient reaches the trained weights.
        """
        grad_norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        loss_sum, norm = float(self._loss_sum), float(grad_norm)
        step = self.state.global_step + 1
        scaled = self.accelerator.scaler is not None  # fp16: an overflow is skipped, and the scale lowered
        if not math.isfinite(loss_sum) or not (math.isfinite(norm) or scaled):
            raise TrainingError(
                f"step {step}: loss {loss_sum:.4g} (sum), gradient norm {norm:.4g}; stopped before updating any weight",
                f"lower learning_rate ({self.args.learning_rate:g}); {self._last_checkpoint()}",
            )
        if step == 1 and norm == 0:
            raise TrainingError("step 1: no gradient reaches the trained weights", "check target_modules")
        self.window.loss_sum += loss_sum
        return grad_norm

    def _last_checkpoint(self) -> str:
        last = checkpoints.checkpoints(self.output)
        return f"the last checkpoint is {last[-1]}" if last else "there is no checkpoint yet"

    def floating_point_ops(self, inputs) -> int:
        return 0  # not reported; counting walks every parameter at every micro-batch

    def _maybe_log_save_evaluate(self, *positional: Any, **keys: Any) -> None:
        if self._step_began is not None:
            self.window.seconds += time.perf_counter() - self._step_began
            self.window.steps += 1
            self._step_began = None
            if self.scaling is not None:
                self.scaling.roll()
        if self.state.global_step >= self.state.max_steps:
            self.control.should_log = True  # the last record may span fewer than logging_steps
        super()._maybe_log_save_evaluate(*positional, **keys)

    # --- records -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write a record of metrics.jsonl, then hand the numbers to transformers' callbacks."""
        if "learning_rate" in logs:
            logs |= self.window.record() | {"memory_bytes": peak_memory(self.args.device)}
            self.window = Window()
            kind, fields = "train", logs
            fields["grad_norm"] = float(fields["grad_norm"])
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
        began, loss_sum, tokens = time.perf_counter(), 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in dataloader:
                batch.pop(TOKENS)
                with compute(self.model, self.compute_dtype):
                    batch_sum, batch_tokens = causal_lm_loss(self.model, self._prepare_inputs(batch))
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
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.scaling is not None:
            checkpoints.load_scaling(folder, self.scaling)
        self.window = Window(**checkpoints.read_state(folder)["window"])
