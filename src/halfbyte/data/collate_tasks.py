"""Collate rows of texts with targets (`prepare_tasks`) for classification, embeddings and reranking.

Shapes: N texts of R rows, and M tokens whose hidden states are read. Everything is padded to few shapes on a GPU.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from ..config.schema import RunKeys
from ..ops import IGNORE_INDEX
from .answer_documents import Row, documents_of
from .collate import Batch, make_collator, rounds_widths
from .collate_answers import AnswerCollator

TEXTS_MULTIPLE = 16  # the number of texts of a batch on a GPU is padded to a multiple of this
READ_MULTIPLE = 64  # the number of tokens that are read is padded to a multiple of this


@dataclass(frozen=True)
class TaskCollator:
    """Collate rows of texts.

    Returns the model's inputs, and
    - `at`, `answer`: int64 [M], position in the flattened batch and text of each token that is read (-1: padding);
    - `target`: fp32 [N], [M] or [N, labels], or [R] for scores of pairs;
    - `real`: fp32 [N], 0 for padding;
    - with `grouped` rows: `row` int64 [N], the row of each text (-1: padding); `begins` int64 [R], each row's first
      text; `real_rows` fp32 [R]; and `hash` int64 [N], equal for equal texts.

    Args:
        layout: lays documents out in the batch.
        per_text: numbers of `target` for each text; 0: one per token that is read; None: one per row.
        grouped: whether rows have several texts.
        rounded: pad to few shapes, since each shape costs a CUDA graph.
    """

    layout: AnswerCollator
    per_text: int | None
    grouped: bool
    rounded: bool

    def __call__(self, rows: list[Row]) -> Batch:
        documents = [document for row in rows for document in documents_of(row)]
        batch, positions = self.layout.lay_out(rows, documents)
        read = [np.flatnonzero(np.asarray(document["labels"]) != IGNORE_INDEX) for document in documents]
        at = np.concatenate([position[tokens] for position, tokens in zip(positions, read, strict=True)])
        answer = np.repeat(np.arange(len(documents)), [len(tokens) for tokens in read])
        texts = self._rounded(len(documents), TEXTS_MULTIPLE)
        one_each = len(at) == len(documents)
        # `pooled` reads as many positions as texts as one position per text
        tokens = texts if one_each else self._rounded(max(len(at), texts + 1), READ_MULTIPLE)
        sizes = [int(size) for row in rows for size in row["texts"]]
        padded_rows = self._rounded(len(sizes), TEXTS_MULTIPLE)
        target = torch.tensor([number for row in rows for number in row["target"]], dtype=torch.float32)
        if self.per_text is not None and self.per_text > 1:
            target = target.view(-1, self.per_text)
        padded_size = padded_rows if self.per_text is None else texts if self.per_text else tokens
        batch |= {
            "at": _padded(torch.from_numpy(at), tokens),
            "answer": _padded(torch.from_numpy(answer), tokens, -1),
            "target": _padded(target, padded_size),
            "real": _padded(torch.ones(len(documents)), texts),
        }
        return batch | (self._groups(documents, sizes, texts, padded_rows) if self.grouped else {})

    def _groups(self, documents: list[Row], sizes: list[int], texts: int, rows: int) -> Batch:
        counts = torch.tensor(sizes)
        digests = [
            hashlib.blake2b(str(document["input_ids"]).encode(), digest_size=8).digest() for document in documents
        ]
        return {
            "row": _padded(torch.arange(len(sizes)).repeat_interleave(counts), texts, -1),
            "begins": _padded(counts.cumsum(0) - counts, rows),
            "real_rows": _padded(torch.ones(len(sizes)), rows),
            "hash": _padded(torch.tensor([int.from_bytes(digest, signed=True) for digest in digests]), texts),
        }

    def _rounded(self, size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple if self.rounded else size


def _padded(values: torch.Tensor, size: int, fill: float = 0) -> torch.Tensor:
    """Return values with rows of `fill` up to `size` rows."""
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, size - len(values)), value=fill)


def task_collator(
    config: RunKeys,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | None = None,
    *,
    per_text: int | None = 1,
    grouped: bool = False,
) -> TaskCollator:
    """Return the collator for `config`."""
    rounded = device is not None and rounds_widths(device)
    collate: Any = make_collator(config, tokenizer, device)
    if grouped:
        collate = replace(collate, max_length=None)  # rows have any number of texts of max_length tokens
    return TaskCollator(AnswerCollator(collate, rounded, answers=1), per_text, grouped, rounded)
