"""Batches: padded with an attention mask, or flat with positions that restart at every document.

transformers keeps the documents of a row apart when it is given `position_ids` that restart, *no* attention mask and no
key-value cache (masking_utils, 5.23). With a mask of ones beside them, or with the cache that a model makes by default
outside of Trainer, documents would see each other, silently. So a batch has a mask or positions, never both, and a
model must be given a flat batch with `use_cache=False`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from .encode import IGNORED

Batch = dict[str, torch.Tensor]


def make_collator(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PaddedCollator | PackedCollator:
    """The collator that `config` asks for: flat for packing or padding_free, else padded."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if config.packing or config.padding_free:
        return PackedCollator(pad, one_row=config.padding_free)
    return PaddedCollator(pad)


@dataclass(frozen=True)
class PaddedCollator:
    """One document a row, padded on the right to the longest.

    Gives input_ids, labels and attention_mask, int64 of shape [rows, longest].
    """

    pad_token_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            "input_ids": _stack([row["input_ids"] for row in rows], longest, self.pad_token_id),
            "labels": _stack([_without_first(row["labels"], [0]) for row in rows], longest, IGNORED),
            "attention_mask": _stack([[1] * len(row["input_ids"]) for row in rows], longest, 0),
        }


@dataclass(frozen=True)
class PackedCollator:
    """Documents one after the other, each with positions from 0 and no label on its first token.

    Gives input_ids, labels and position_ids, int64 of shape [rows, longest], or [1, all tokens] when `one_row`. What a
    shorter row lacks is padded with a document of its own, which is not trained. Use with `use_cache=False`, see above.

    Rows may carry `seq_lengths` (the lengths of their documents); without it a row is one document.
    """

    pad_token_id: int
    one_row: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        ids = [list(row["input_ids"]) for row in rows]
        lengths = [list(row.get("seq_lengths") or [len(row["input_ids"])]) for row in rows]
        labels = [_without_first(row["labels"], _starts(parts)) for row, parts in zip(rows, lengths, strict=True)]
        if self.one_row:
            ids, labels, lengths = ([[item for row in rows for item in row]] for rows in (ids, labels, lengths))
        longest = max(map(len, ids))
        positions = [
            [position for length in (*parts, longest - sum(parts)) for position in range(length)] for parts in lengths
        ]
        return {
            "input_ids": _stack(ids, longest, self.pad_token_id),
            "labels": _stack(labels, longest, IGNORED),
            "position_ids": _stack(positions, longest, 0),
        }


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]


def _without_first(labels: list[int], starts: list[int]) -> list[int]:
    labels = list(labels)
    for start in starts:
        labels[start] = IGNORED
    return labels


def _stack(rows: list[list[int]], width: int, fill: int) -> torch.Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)
