"""Losses of single documents before and after training: row_losses.jsonl.

Every held-out document and an evenly spaced sample of the training documents go through the model alone, so that a loss
belongs to one document. Documents are identified by a hash of their tokens, so that runs can be compared.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..data.answer_documents import documents_of
from ..data.images import IMAGES
from ..data.rows import Row
from ..mesh.mesh import DATA_AXES, TOKEN_AXES
from ..ops import IGNORE_INDEX
from ..reading import parse_json, read_text
from ..runs.layout import ROW_LOSSES
from ..utils.errors import CheckpointError, ConfigError
from ..utils.files import write_text
from ..utils.waiting import waiting
from .checkpoint import random_states, set_random_states
from .loop import TrainingLoop
from .run_folder import OpenRun

TRAINING_DOCUMENTS = 256  # documents of the training set
EXCERPT = 2000  # characters of a document's text
Moment = Literal["start", "end"]


@dataclass
class RowLosses:
    """The documents of a run's row_losses.jsonl, with their losses so far.

    Attributes:
        job: the run.
        rows: the documents, as rows of the run's collator.
        lines: a line of the file for each.
    """

    job: OpenRun
    rows: list[Row] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, job: OpenRun, train: Dataset, held_out: Dataset | None) -> RowLosses:
        """Choose the documents of a run, and read the losses that an interrupted run has measured.

        Args:
            train, held_out: rows with all columns of the method.

        Raises:
            ConfigError: packed rows have images.
        """
        packed = job.prepared.config.packing
        if packed and IMAGES in train.column_names:
            raise ConfigError("row_losses: true with packing: true and images in the data", "remove one of them")
        losses = cls(job)
        for split, rows, limit in (("train", train, TRAINING_DOCUMENTS), ("eval", held_out, None)):
            for number, document in _documents(rows, limit, packed) if rows is not None else ():
                line = {"split": split, "row": number, **_describe(document, job.prepared.tokenizer)}
                losses.rows.append(document)
                losses.lines.append(line)
        losses._read()
        return losses

    def _read(self) -> None:
        """Take losses from the file of the interrupted run; a damaged file is ignored, and measured again."""
        stored = {}
        mesh, file = self.job.prepared.mesh, self.job.output / ROW_LOSSES
        if mesh.is_main and file.exists():
            try:
                lines = read_text(file, CheckpointError).splitlines()
                parsed = [parse_json(line, ROW_LOSSES, CheckpointError) for line in lines]
                stored = {(line["split"], line["row"], line["hash"]): line.get("start") for line in parsed}
            except (CheckpointError, KeyError, TypeError):
                stored = {}
        stored = mesh.from_main(stored)
        if all(stored.get((line["split"], line["row"], line["hash"])) is not None for line in self.lines):
            for line in self.lines:
                line["start"] = stored[line["split"], line["row"], line["hash"]]

    @waiting("measuring the losses of single documents")
    def measure(self, loop: TrainingLoop, moment: Moment) -> None:
        """Measure the loss of each document and write the file; a collective. Losses that are known are not repeated.

        Args:
            loop: of the run; its weights and random states do not change.
        """
        if all(moment in line for line in self.lines):
            return
        random = random_states()
        loop.use_evaluation_weights()
        with loop.progress.during("evaluating"):
            for line, loss in zip(self.lines, losses_of(loop, self.rows), strict=True):
                line[moment] = loss
        set_random_states(random)
        if loop.mesh.is_main:
            write_text(self.job.output / ROW_LOSSES, "".join(json.dumps(line) + "\n" for line in self.lines))


def losses_of(loop: TrainingLoop, rows: Sequence[Row]) -> list[float | None]:
    """Return the loss of each row alone, as an evaluation computes it; None without a finite one. A collective."""
    rank, ranks = loop.mesh.coordinate(*DATA_AXES), loop.mesh.degree(*DATA_AXES)
    sums, counts = ({str(index): 0.0 for index in range(len(rows))} for _ in range(2))
    index = rank

    def add(batch_counts: dict[str, float], values: Mapping[str, Tensor]) -> None:
        nonlocal index
        if index < len(rows):  # else it is the blank batch of a rank that has one row less
            sums[str(index)], counts[str(index)] = float(values["loss"]), batch_counts[loop.loss_count]
        index += ranks

    loop.evaluate_batches(rows, 1, add)
    sums, counts = loop.mesh.sum(sums, TOKEN_AXES), loop.mesh.sum(counts)
    losses = (sums[name] / count if count else math.nan for name, count in counts.items())
    return [loss if math.isfinite(loss) else None for loss in losses]


def _documents(rows: Dataset, limit: int | None, packed: bool) -> Iterator[tuple[int, Row]]:
    """Yield documents with the number of their row: all of them, or the first ones of `limit` evenly spaced rows."""
    step = 1 if limit is None else max(1, -(-len(rows) // limit))
    for number in range(0, len(rows), step):
        row = rows[number]
        if not packed:
            yield number, row
            continue
        for document in documents_of(row)[: 1 if step > 1 else None]:
            yield number, {**document, "seq_lengths": [len(document["input_ids"])]}


def _describe(row: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return hash, number of tokens and text of a document; the text as [trained, part] pairs, cut to `EXCERPT`."""
    documents = documents_of(row) if row.get("seq_lengths") else [row]
    content: list[Any] = [[list(document["input_ids"]), list(document["labels"])] for document in documents]
    content += [image["sha256"] for image in row.get(IMAGES) or []]
    tokens = [
        (label != IGNORE_INDEX, token)
        for document in documents
        for token, label in zip(document["input_ids"], document["labels"], strict=True)
    ]
    text, left = [], EXCERPT
    for is_trained, part in groupby(tokens[:EXCERPT], key=lambda pair: pair[0]):
        words = str(tokenizer.decode([token for _, token in part]))[:left]
        left -= len(words)
        text.append([is_trained, words])
        if not left:
            break
    return {
        "hash": hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16],
        "tokens": len(tokens),
        "trained_tokens": sum(is_trained for is_trained, _ in tokens),
        "text": text,
    }
