"""Text to measure a model on: packed rows with all their tokens, none of them chosen for training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from .collate import make_collator
from .prepare import prepare

ROW = 512  # tokens of a row


def calibration_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, tokens: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments of the model's forward for one row after another, until `tokens` are used up or the text ends.

    Args:
        config: its dataset is read as for training, with packing and a max_length of `ROW`.

    Raises:
        DataError: no text.
    """
    rows, collate = prepare(config, tokenizer).train, make_collator(config, tokenizer)
    for row in itertools.islice(rows, max(1, tokens // ROW)):
        batch = collate([row])
        yield {key: value.to(device) for key, value in batch.items() if key != "labels" and torch.is_tensor(value)}
