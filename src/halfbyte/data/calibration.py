"""Text to measure a model on: packed rows with all their tokens, none of them chosen for training."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from .collate import Collator, make_collator
from .prepare import prepare

ROW = 512  # tokens of a row


def calibration_rows(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, tokens: int, device: torch.device
) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments of the model's forward and `labels` for one row after another; see `packed_rows`."""
    return batched(packed_rows(config, tokenizer, tokens), make_collator(config, tokenizer), device)


def packed_rows(config: RunConfig, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[dict[str, Any]]:
    """Rows for a packing collator until `tokens` are used up or the text ends; all tokens are labels.

    Args:
        config: its dataset is read as for training, with packing and a max_length of `ROW`.

    Raises:
        DataError: no text.
    """
    rows = itertools.islice(prepare(config, tokenizer).train, max(1, tokens // ROW))
    return [{**row, "labels": row["input_ids"]} for row in rows]


def batched(
    rows: Iterable[dict[str, Any]], collate: Collator, device: torch.device, together: int = 1
) -> Iterator[dict[str, torch.Tensor]]:
    """Arguments of the model's forward and `labels` on `device`, for `together` rows of `packed_rows` at a time."""
    rest = iter(rows)
    while group := list(itertools.islice(rest, together)):
        yield {key: value.to(device) for key, value in collate(group).items() if torch.is_tensor(value)}
