"""Held-out loss and perplexity of a run or a model: the mean over trained tokens, whatever the batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import DataError

if TYPE_CHECKING:
    import torch

IGNORED = -100
LOGIT_ROWS = 1024  # positions whose logits are taken to float32 at a time


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measures.

    Attributes:
        loss: mean cross-entropy per trained token, in nats.
        perplexity: exp(loss).
        tokens: trained tokens counted.
        rows: rows of the prepared dataset (packed rows hold several documents).
        seconds: time of the forward passes.
    """

    loss: float
    perplexity: float
    tokens: int
    rows: int
    seconds: float


def evaluate(name: str, dataset: str, overrides: Iterable[str] = ()) -> Evaluation:
    """Loss of a saved run, adapter or model on every row of `dataset`.

    The rows are prepared as in training (template, masks, max_length), so the number compares with the eval lines of
    metrics.jsonl.

    Raises:
        HalfbyteError: the model or the data cannot be read, no token is left to predict, or packed documents see each
            other in this model.
    """
    from .data import prepare
    from .data.collate import make_collator
    from .models.isolation import isolate_run
    from .runs.saved import load_saved

    saved = load_saved(name, overrides, dataset)
    config = saved.config.model_copy(update={"dataset": dataset, "eval_dataset": None, "eval_split_size": 0.0})
    rows = prepare(config, saved.tokenizer).train
    size = config.per_device_eval_batch_size or config.per_device_train_batch_size
    collate = make_collator(config, saved.tokenizer)
    isolate_run(saved.model, config, collate, rows)
    return measure(saved.model, rows, collate, size)


def measure(
    model: torch.nn.Module, rows: Sequence[dict[str, Any]], collate: Callable[[list[Any]], dict[str, Any]], size: int
) -> Evaluation:
    """Token-weighted loss of `model` over `rows`, `size` rows per forward.

    Raises:
        DataError: no row has a token that counts.
    """
    import torch

    from .adapters import compute, no_input_casts
    from .models.head import backbone_inputs

    device = next(model.parameters()).device
    total, tokens, started = 0.0, 0, time.perf_counter()
    with torch.inference_mode(), no_input_casts(model):
        for first in range(0, len(rows), size):
            batch = collate([rows[index] for index in range(first, min(first + size, len(rows)))])
            batch = {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}
            labels = batch["labels"]
            with compute(model):
                logits = model(**backbone_inputs(model, batch), use_cache=False).logits
            loss, count = summed_loss(logits, labels)
            total, tokens = total + loss, tokens + count
    if not tokens:
        raise DataError("no token of this data is trained on, so there is no loss", "see `halfbyte preview`")
    loss = total / tokens
    return Evaluation(loss, math.exp(min(loss, 700.0)), tokens, len(rows), time.perf_counter() - started)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> tuple[float, int]:
    """Sum of the cross-entropies, in float32, and how many tokens it is over.

    Args:
        logits: (batch, length, vocabulary), position t predicting token t+1.
        labels: (batch, length), unshifted, -100 where a token does not count.
    """
    from torch.nn.functional import cross_entropy

    predicted, target = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = sum(
        float(cross_entropy(part.float(), wanted, ignore_index=IGNORED, reduction="sum"))
        for part, wanted in zip(predicted.split(LOGIT_ROWS), target.split(LOGIT_ROWS), strict=True)
    )
    return total, int((target != IGNORED).sum())
