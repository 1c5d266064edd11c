"""Rows of answers in steps as documents, and batches of them: what a process reward model learns from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset, Features
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..ops import IGNORE_INDEX
from .collate import Batch, PackedCollator, PaddedCollator, make_collator, rounds_widths
from .paired import IDS, NUMBERS, packed
from .prepare import PreparedData
from .tables import Table

STEPS = 64  # labelled positions of a batch on a GPU are filled up to multiples of this


def steps_in(config: RunConfig, data: PreparedData) -> PreparedData:
    """Prepared rows as documents, several in a row where `config` packs.

    A document is the prompt with its steps: `input_ids`, `labels` (the token itself at each step's last token, -100
    elsewhere), `seq_lengths`, and `right`, 1 or 0 for each of those tokens.
    """

    def made(rows: Dataset) -> Dataset:
        found = _documents(rows)
        return packed(found, config.max_length) if config.packing else found

    return replace(data, train=made(data.train), eval=None if data.eval is None else made(data.eval))


def _documents(rows: Dataset) -> Dataset:
    made = []
    for row in rows:
        prompt, steps = row["prompt_ids"], row["steps_ids"]
        ends = [token if end else IGNORE_INDEX for token, end in zip(steps, row["steps_mask"], strict=True)]
        made.append(
            {
                "input_ids": [*prompt, *steps],
                "labels": [*[IGNORE_INDEX] * len(prompt), *ends],
                "seq_lengths": [len(prompt) + len(steps)],
                "right": [float(label) for label in row["right"]],
            }
        )
    features = Features({"input_ids": IDS, "labels": IDS, "seq_lengths": IDS, "right": NUMBERS})
    return Table.from_dict({name: [row[name] for row in made] for name in features}, features=features)


@dataclass(frozen=True)
class StepCollator:
    """Batches of documents in steps: the model's inputs, and of M labelled tokens `at` (int64 [M], their places in the
    flattened batch), `right` (fp32 [M]) and `real` (fp32 [M], 0 of what fills up).

    Args:
        collate: of documents.
        rounded: fill up to few shapes, since each costs a CUDA graph.
    """

    collate: PaddedCollator | PackedCollator
    rounded: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        batch = self.collate(rows)
        at = (batch.pop("labels").flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        right = torch.tensor([label for row in rows for label in row["right"]])
        size = -(-len(at) // STEPS) * STEPS if self.rounded else len(at)
        real = torch.ones(len(at))
        for name, values in (("at", at), ("right", right), ("real", real)):
            batch[name] = torch.nn.functional.pad(values, (0, size - len(values)))
        return batch


def step_collator(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
) -> StepCollator:
    """The collator of rows in steps that `config` asks for."""
    rounded = device is not None and rounds_widths(device)
    return StepCollator(make_collator(config, tokenizer, device), rounded)
