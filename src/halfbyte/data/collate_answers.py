"""Collate rows of documents with answers (`answer_documents`): pairs, labelled answers and answers in steps.

The tensors that the losses need are computed on the host from the labels, in the same way whether answers share their
prompt or not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from ..batch import LOOK_AHEAD
from ..config.schema import RunKeys
from ..ops import IGNORE_INDEX
from .answer_documents import Row, documents_of, trained_tokens
from .collate import Batch, PackedCollator, PaddedCollator, make_collator, rounds_widths
from .images import IMAGES
from .shared_prefix import ANSWERS, BranchCollator, trees_of

PAIR = 2  # answers per row: chosen and rejected, or for KTO the answer and another prompt's answer
PAIR_MULTIPLE = 16  # the number of pairs of a packed batch on a GPU is padded to a multiple of this
STEP_MULTIPLE = 64  # the number of labelled positions on a GPU is padded to a multiple of this
TRAINED_SHARES = 4  # the number of trained tokens on a GPU is padded to a multiple of the batch's tokens / this


@dataclass(frozen=True)
class AnswerCollator:
    """Collate rows of documents: padded with one document per row, or flat with the rows as they are.

    Returns the document collator's tensors without labels, plus those that `methods.answers` describes; and, if the
    rows have them, `reference` [M] and further `numbers` [N/2], fp32.

    Args:
        collate: the document collator.
        rounded: pad to few shapes, since each shape costs a CUDA graph.
        prompts: also list the tokens of the chosen documents' prompts, with answer -1.
        numbers: columns with one number per pair; missing ones are skipped.
        answers: number of answers per pair; with 1, `real` and `numbers` are [N].
    """

    collate: PaddedCollator | PackedCollator
    rounded: bool = False
    prompts: bool = False
    numbers: tuple[str, ...] = ()
    answers: int = PAIR

    def __call__(self, rows: list[Row]) -> Batch:
        documents = [document for row in rows for document in documents_of(row)]
        batch, positions = self.lay_out(rows, documents)
        return self.add_loss_inputs(rows, documents, batch, positions, batch["input_ids"].numel())

    def add_loss_inputs(
        self, rows: list[Row], documents: list[Row], batch: Batch, positions: list[np.ndarray], tokens: int
    ) -> Batch:
        """Add the tensors that the losses need to `batch`.

        Args:
            documents: the documents of `rows`.
            positions: positions of each document's tokens in the forward's output.
            tokens: number of tokens of the batch.
        """
        batch |= self._trained(documents, positions, tokens)
        pairs = len(documents) // self.answers
        several = isinstance(self.collate, PackedCollator) and not self.collate.one_row
        padded_pairs = -(-pairs // PAIR_MULTIPLE) * PAIR_MULTIPLE if self.rounded and several else pairs
        batch["real"] = _pad([1.0] * pairs, padded_pairs)
        batch["ends"] = _concatenate([np.asarray([p[-1] for p in positions])], self.answers * padded_pairs, 0)
        if "reference" in rows[0]:
            batch["reference"] = _pad([number for row in rows for number in row["reference"]], len(batch["at"]))
        for name in (name for name in self.numbers if name in rows[0]):
            batch[name] = _pad([number for row in rows for number in row[name]], padded_pairs)
        return batch

    def lay_out(self, rows: list[Row], documents: list[Row]) -> tuple[Batch, list[np.ndarray]]:
        """Return the model's inputs, and the positions of each document's tokens in the flattened batch."""
        if ANSWERS in rows[0]:
            return BranchCollator.like(self.collate, self.answers)(rows)
        flat = isinstance(self.collate, PackedCollator)
        batch = self.collate(_with_images(rows, documents) if flat else documents)
        lines, width = batch.pop("labels").shape
        lengths = [len(document["input_ids"]) for document in documents]
        if not flat:
            begins = [width * number for number in range(len(documents))]
        elif lines == 1:
            begins = np.cumsum([0, *lengths[:-1]]).tolist()
        else:
            offsets = (np.cumsum([0, *row["seq_lengths"][:-1]]) for row in rows)
            begins = [width * number + int(offset) for number, line in enumerate(offsets) for offset in line]
        return batch, [np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]

    def _trained(self, documents: list[Row], positions: list[np.ndarray], tokens: int) -> Batch:
        """Return at, wanted, answer and place for documents in a flattened batch of `tokens` tokens."""
        listed: dict[str, list[np.ndarray]] = {"at": [], "wanted": [], "answer": [], "place": []}
        for number, (document, document_positions) in enumerate(zip(documents, positions, strict=True)):
            next_labels = np.asarray(document["labels"][1:], dtype=np.int64)
            trained = next_labels != IGNORE_INDEX
            with_prompt = self.prompts and number % self.answers == 0
            selected = np.arange(len(next_labels)) if with_prompt else np.flatnonzero(trained)
            listed["at"].append(document_positions[selected])
            listed["wanted"].append(np.asarray(document["input_ids"][1:], dtype=np.int64)[selected])
            listed["answer"].append(np.where(trained[selected], number, -1))
            listed["place"].append(np.cumsum(trained)[selected] - 1)
        size = sum(map(len, listed["at"]))
        size = filled_size(size, tokens) if self.rounded else size
        fills = {"at": 0, "wanted": IGNORE_INDEX, "answer": -1, "place": 0}
        return {name: _concatenate(pieces, size, fills[name]) for name, pieces in listed.items()}


def filled_size(trained: int, tokens: int) -> int:
    """Round the number of trained tokens up to one of few sizes, given the number of tokens of the batch."""
    step = max(tokens // TRAINED_SHARES, 1)
    return -(-trained // step) * step


@dataclass(frozen=True)
class UnpairedCollator:
    """Collate rows of one answer and, if present, a mismatched answer, whose tensors have the prefix `LOOK_AHEAD`.

    Args:
        joined: if answers share their prompt, lay out the mismatched answers after the batch of the rows' own answers
            (`shared_prefix.BranchCollator.further_answers`); otherwise they get their own prompts.
    """

    collate: AnswerCollator
    joined: bool = False

    def __call__(self, rows: list[Row]) -> Batch:
        joined = self.joined and ANSWERS in rows[0]
        split = [_split(row, joined) for row in rows]
        matched = [documents[0] for documents in split]
        mismatched = [documents[1] for documents in split if len(documents) > 1]
        if joined:
            return self._join(matched, mismatched)
        batch = self.collate(matched)
        if len(mismatched) == len(matched):
            batch |= {f"{LOOK_AHEAD}{name}": value for name, value in self.collate(mismatched).items()}
        return batch

    def _join(self, matched: list[Row], mismatched: list[Row]) -> Batch:
        documents = [document for row in matched for document in documents_of(row)]
        batch, positions = self.collate.lay_out(matched, documents)
        tokens = batch["input_ids"].numel()
        prompt_lengths = [trees_of(row)[0].prompt for row in matched]
        prompts = [p[:length] for p, length in zip(positions, prompt_lengths, strict=True)]
        answers = [row["input_ids"][length:] for row, length in zip(mismatched, prompt_lengths, strict=True)]
        layout = BranchCollator.like(self.collate.collate, 1)
        further, further_positions = layout.further_answers(answers, prompts, tokens)
        batch = self.collate.add_loss_inputs(matched, documents, batch, positions, tokens)
        tokens = further["input_ids"].numel()
        further = self.collate.add_loss_inputs(mismatched, mismatched, further, further_positions, tokens)
        return batch | {f"{LOOK_AHEAD}{name}": value for name, value in further.items()}


def _split(row: Row, as_trees: bool) -> list[Row]:
    """Split a row into one row per document; `as_trees`: as trees of a prompt and one answer."""
    split, begin = [], 0
    prompt = trees_of(row)[0].prompt if as_trees else 0
    for document in documents_of(row):
        tokens = len(document["input_ids"])
        piece = {name: value for name, value in row.items() if name != ANSWERS}
        piece |= {**document, "seq_lengths": [prompt, tokens - prompt] if as_trees else [tokens]}
        piece |= {ANSWERS: [1]} if as_trees else {}
        if "reference" in row:
            end = begin + trained_tokens(piece)
            piece["reference"], begin = row["reference"][begin:end], end
        split.append(piece)
    return split


@dataclass(frozen=True)
class StepCollator:
    """Collate documents in steps: the model's inputs, and for M labelled tokens `at` (int64 [M], positions in the
    flattened batch), `right` (fp32 [M]) and `real` (fp32 [M], 0 for padding).

    Args:
        collate: the document collator.
        rounded: pad to few shapes, since each shape costs a CUDA graph.
    """

    collate: PaddedCollator | PackedCollator
    rounded: bool = False

    def __call__(self, rows: list[Row]) -> Batch:
        batch = self.collate(rows)
        at = (batch.pop("labels").flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        right = torch.tensor([label for row in rows for label in row["right"]])
        size = -(-len(at) // STEP_MULTIPLE) * STEP_MULTIPLE if self.rounded else len(at)
        columns = {"at": at, "right": right, "real": torch.ones(len(at))}
        return batch | {name: F.pad(values, (0, size - len(values))) for name, values in columns.items()}


def answer_collator(
    config: RunKeys,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | None = None,
    *,
    prompts: bool = False,
    numbers: tuple[str, ...] = (),
    answers: int = PAIR,
) -> AnswerCollator:
    """Return the collator for `config`, for rows with `answers` answers; flat rows hold up to `answers` times
    max_length tokens."""
    if config.packing or config.padding_free:
        config = config.model_copy(update={"max_length": answers * config.max_length})
    rounded = device is not None and rounds_widths(device)
    return AnswerCollator(make_collator(config, tokenizer, device), rounded, prompts, numbers, answers)


def unpaired_collator(
    config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None, *, joined: bool = False
) -> UnpairedCollator:
    """Return the collator of labelled rows for `config`; `joined` as in `UnpairedCollator`."""
    return UnpairedCollator(answer_collator(config, tokenizer, device, numbers=("label",), answers=1), joined)


def step_collator(
    config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
) -> StepCollator:
    """Return the collator of stepwise rows for `config`."""
    rounded = device is not None and rounds_widths(device)
    return StepCollator(make_collator(config, tokenizer, device), rounded)


def _with_images(rows: list[Row], documents: list[Row]) -> list[Row]:
    """Return flat rows with the images of all of their documents, in order."""
    if IMAGES not in rows[0]:
        return rows
    remaining = iter(documents)
    images_of = ([image for _ in row["seq_lengths"] for image in next(remaining)[IMAGES]] for row in rows)
    return [{**row, IMAGES: images} for row, images in zip(rows, images_of, strict=True)]


def _pad(values: list[Any], size: int) -> torch.Tensor:
    """Return fp32 [size], padded with zeros."""
    return torch.tensor([*values, *[0.0] * (size - len(values))], dtype=torch.float32)


def _concatenate(pieces: list[np.ndarray], size: int, fill: int) -> torch.Tensor:
    """Return int64 [size], padded with `fill`."""
    joined = np.concatenate(pieces)
    return torch.from_numpy(np.pad(joined, (0, size - len(joined)), constant_values=fill).astype(np.int64))
