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
    """Token-weighted loss of `model` over `rows`, `size` rows per forward; as in training, without full logits.

    Raises:
        DataError: no row has a token that counts.
    """
    import torch

    from .adapters import compute, no_input_casts
    from .models.head import causal_lm_loss

    device = next(model.parameters()).device
    total, tokens, started = 0.0, 0, time.perf_counter()
    with torch.no_grad(), no_input_casts(model):
        for first in range(0, len(rows), size):
            batch = collate([rows[index] for index in range(first, min(first + size, len(rows)))])
            batch = {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}
            with compute(model):
                loss_sum, trained_tokens = causal_lm_loss(model, batch)
            total, tokens = total + float(loss_sum), tokens + int(trained_tokens)
    if not tokens:
        raise DataError("no token of this data is trained on, so there is no loss", "see `halfbyte preview`")
    loss = total / tokens
    return Evaluation(loss, math.exp(min(loss, 700.0)), tokens, len(rows), time.perf_counter() - started)
