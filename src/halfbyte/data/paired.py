"""Rows with several answers to a prompt as documents, and batches of them.

A row stands for as many documents as it has answers, each the prompt and one answer with the labels of supervised
fine-tuning. So whatever looks at rows (the plan, isolation, samples) sees what it knows: `input_ids`, `labels` and
`seq_lengths`. Where answers share their prompt it stands once before them (`branches`), else before each. What the
losses need of a batch beside the model's inputs is worked out on the host, from the labels, alike for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import datasets
import numpy as np
import torch
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..ops import IGNORE_INDEX
from ..utils.notices import notice
from . import branches
from .batches import document_lengths, row_lengths
from .branches import BranchCollator
from .collate import Batch, PackedCollator, PaddedCollator, make_collator, rounds_widths
from .pack import pack
from .prepare import PreparedData
from .tables import Table, new_name

PAIR = 2  # answers of a row: chosen and rejected, or for KTO the answer and another prompt's
PAIRS = 16  # pairs of a packed batch on a GPU are filled up to multiples of this
NUMBERS_OF_ROWS = ("margin", "label")  # columns that go with the documents
SHARES = 4  # trained tokens of a batch on a GPU are filled up to multiples of its tokens over this
IDS, NUMBERS = datasets.List(Value("int32")), datasets.List(Value("float64"))
COUNTS = datasets.List(Value("int32"))

MISMATCHED = ("other_ids", "other_mask")
AHEAD = "ahead_"  # before the names of tensors that a step needs before its losses

Row = dict[str, Any]
Answer = tuple[str, str]  # columns of its ids and of its mask


def as_documents(
    rows: Dataset, answers: Sequence[Answer], numbers: Sequence[str] = (), *, shared: bool = False
) -> Dataset:
    """Each prompt with its answers: columns input_ids, labels, seq_lengths, and `numbers` as lists of one.

    Args:
        rows: prompt_ids, and ids and mask (1 where trained) of each answer.
        answers: the columns of each answer, in the order in which the documents come.
        numbers: further columns with a number in each row.
        shared: the prompt stands once, and seq_lengths are its tokens, then those of its answers, of which the column
            `branches.ANSWERS` says how many they are; else it stands before each, and they are those of the documents.
    """
    features = {"input_ids": IDS, "labels": IDS, "seq_lengths": IDS} | {name: NUMBERS for name in numbers}
    if shared:
        features[branches.ANSWERS] = COUNTS

    def documents(row: Row) -> Row:
        prompt = list(row["prompt_ids"])
        parts: list[list[int]] = []
        labels: list[int] = []
        for answer, mask in answers:
            trained = [token if kept else IGNORE_INDEX for token, kept in zip(row[answer], row[mask], strict=True)]
            alone = shared and bool(parts)
            parts.append(([] if alone else prompt) + list(row[answer]))
            labels += [*([] if alone else [IGNORE_INDEX] * len(prompt)), *trained]
        lengths = list(map(len, parts))
        if shared:
            lengths = [len(prompt), lengths[0] - len(prompt), *lengths[1:]]
        made = {"input_ids": [token for part in parts for token in part], "labels": labels, "seq_lengths": lengths}
        made |= {branches.ANSWERS: [len(answers)]} if shared else {}
        return made | {name: [float(row[name])] for name in numbers}

    made = [documents(row) for row in rows]
    return Table.from_dict({name: [row[name] for row in made] for name in features}, features=Features(features))


def documents_in(
    config: RunConfig, data: PreparedData, answers: Sequence[Answer], *, together: bool = True, beside: bool = False
) -> PreparedData:
    """Prepared rows with these answers as documents, several rows in one where `config` packs.

    A row that packs holds as many tokens as a pair may have, `PAIR` times max_length.

    Args:
        data: its `shared` says whether the answers of a row, where it has several, share their prompt.
        together: the answers of a row go through the model in one forward.
        beside: those behind the first go through it behind the others.
    """

    data = replace(data, shared=data.shared and len(answers) > 1)

    def made(rows: Dataset) -> Dataset:
        numbers = [name for name in NUMBERS_OF_ROWS if name in rows.column_names]
        found = as_documents(rows, answers, numbers, shared=data.shared)
        return packed(found, PAIR * config.max_length) if config.packing else found

    train, held_out = made(data.train), None if data.eval is None else made(data.eval)
    found = replace(data, train=train, eval=held_out, answers=len(answers), together=len(answers) if together else 1)
    return _with_savings(found) if data.shared and (together or beside) else found


def _with_savings(data: PreparedData) -> PreparedData:
    """`data`, whose report says how many tokens of each split are computed, and would be with a prompt an answer."""
    report = dict(data.report)
    for name, rows in (("train", data.train), ("eval", data.eval)):
        if rows is not None and report.get(name):
            computed = int(row_lengths(rows).sum())
            report[name] = {
                **report[name],
                "computed_tokens": computed,
                "tokens_apart": int(document_lengths(rows).sum()),
            }
    return replace(data, report=report)


def mismatched(rows: Dataset, most: int) -> Dataset:
    """`rows` with `MISMATCHED`: an answer to the prompt before each, cut where both have over `most` tokens.

    Adjacent rows of one prompt take the answers to the prompt before them in turn. For pairs that are taken apart these
    are the prompts and answers that meet in TRL, where all chosen answers come before all rejected ones.
    """
    ids, masks, prompts = rows["completion_ids"][:], rows["completion_mask"][:], rows["prompt_ids"][:]
    sources = _of_other_prompts(prompts)
    room = [max(most - len(prompt), 1) for prompt in prompts]
    for name, values in zip(MISMATCHED, (ids, masks), strict=True):
        moved = [values[source][:limit] for source, limit in zip(sources, room, strict=True)]
        rows = rows.add_column(name, moved, new_fingerprint=new_name())
    return rows


def _of_other_prompts(prompts: Sequence[Sequence[int]]) -> list[int]:
    """For each row the index of an earlier one (the first rows: of the last ones) with another prompt."""
    begins = [at for at, prompt in enumerate(prompts) if at == 0 or not _same_prompt(prompt, prompts[at - 1])]
    runs = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(prompts)], strict=True)]
    found = []
    for number, run in enumerate(runs):
        earlier = (runs[number - back] for back in range(1, len(runs)))
        other = next((each for each in earlier if not _same_prompt(prompts[each[0]], prompts[run[0]])), None)
        if other is None:
            notice("one-prompt", "all answers are to one prompt, so z is taken over these, not over mismatched ones")
            return [(at - 1) % len(prompts) for at in range(len(prompts))]
        found += [other[place % len(other)] for place in range(len(run))]
    return found


def _same_prompt(ids: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two rows have one prompt; its last token may be the answer's in one of them, where both merge."""
    shared = min(len(ids), len(others))
    return abs(len(ids) - len(others)) <= 1 and list(ids[:shared]) == list(others[:shared])


def packed(rows: Dataset, most: int) -> Dataset:
    """Several rows of documents in one, of at most `most` tokens."""
    columns = {name: rows[name][:] for name in rows.column_names}
    together = pack([len(ids) for ids in columns["input_ids"]], most)
    joined = {
        name: [[item for index in indices for item in values[index]] for indices in together]
        for name, values in columns.items()
    }
    return Table.from_dict(joined, features=rows.features)


@dataclass(frozen=True)
class AnswerCollator:
    """Batches of rows with documents: padded with a document a row, or flat with the rows as they are.

    Gives what the collator of documents does but for labels, and what `methods.answers` says of them; where rows have
    them, `reference` [M] and further `numbers` [N/2], fp32.

    Args:
        collate: of documents.
        rounded: fill up to few shapes, since each costs a CUDA graph.
        prompts: list the tokens of the chosen documents' prompts, too, with an answer of -1.
        numbers: columns with a number a pair, those that rows have.
        answers: of which a pair is made; of 1, `real` and `numbers` are [N].
    """

    collate: PaddedCollator | PackedCollator
    rounded: bool = False
    prompts: bool = False
    numbers: tuple[str, ...] = ()
    answers: int = PAIR

    def __call__(self, rows: list[Row]) -> Batch:
        split = [document for row in rows for document in documents_of(row)]
        batch, places = self.laid_out(rows, split)
        return self.described(rows, split, batch, places, batch["input_ids"].numel())

    def described(
        self, rows: list[Row], split: list[Row], batch: Batch, places: list[np.ndarray], tokens: int
    ) -> Batch:
        """`batch` with what the losses need of it.

        Args:
            split: the documents of `rows`.
            places: where their tokens lie among the forward's.
            tokens: of the batch.
        """
        pairs = len(split) // self.answers
        batch |= self._trained(split, places, tokens)
        batch["real"] = _filled([1.0] * pairs, self._pairs(pairs))
        ends = np.asarray([place[-1] for place in places])
        batch["ends"] = _joined([ends], self.answers * len(batch["real"]), 0)
        if "reference" in rows[0]:
            found = [number for row in rows for number in row["reference"]]
            batch["reference"] = _filled(found, len(batch["at"]))
        for name in (name for name in self.numbers if name in rows[0]):
            batch[name] = _filled([number for row in rows for number in row[name]], len(batch["real"]))
        return batch

    def laid_out(self, rows: list[Row], documents: list[Row]) -> tuple[Batch, list[np.ndarray]]:
        """What the model's forward takes, and where the tokens of each document lie in the flattened batch."""
        if branches.ANSWERS in rows[0]:
            return BranchCollator.like(self.collate, self.answers)(rows)
        flat = isinstance(self.collate, PackedCollator)
        batch = self.collate(rows if flat else documents)
        shape = batch.pop("labels").shape
        begins = _flat_begins(rows, shape) if flat else [shape[1] * number for number in range(len(documents))]
        lengths = (len(document["input_ids"]) for document in documents)
        return batch, [np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]

    def _trained(self, documents: list[Row], places: list[np.ndarray], tokens: int) -> Batch:
        """at, wanted, answer and place of documents whose tokens lie there in the flat batch of so many tokens."""
        at, wanted, answer, place = [], [], [], []
        for number, (document, where) in enumerate(zip(documents, places, strict=True)):
            behind = np.asarray(document["labels"][1:], dtype=np.int64)
            trained = behind != IGNORE_INDEX
            asked = np.arange(len(behind)) if self.prompts and number % self.answers == 0 else np.flatnonzero(trained)
            at.append(where[asked])
            wanted.append(np.asarray(document["input_ids"][1:], dtype=np.int64)[asked])
            answer.append(np.where(trained[asked], number, -1))
            place.append(np.cumsum(trained)[asked] - 1)
        size = sum(map(len, at))
        size = filled_size(size, tokens) if self.rounded else size
        fills = {"at": (at, 0), "wanted": (wanted, IGNORE_INDEX), "answer": (answer, -1), "place": (place, 0)}
        return {name: _joined(parts, size, fill) for name, (parts, fill) in fills.items()}

    def _pairs(self, pairs: int) -> int:
        several = isinstance(self.collate, PackedCollator) and not self.collate.one_row
        return -(-pairs // PAIRS) * PAIRS if self.rounded and several else pairs


def filled_size(trained: int, tokens: int) -> int:
    """One of few sizes for so many trained tokens of a batch's `tokens`."""
    step = max(tokens // SHARES, 1)
    return -(-trained // step) * step


@dataclass(frozen=True)
class UnpairedCollator:
    """Batches of rows of an answer and, where there is one, another prompt's answer, whose tensors `AHEAD` precedes.

    Args:
        beside: where a row's answers share its prompt, the other answers are laid out behind the batch of the rows' own
            (`branches.BranchCollator.beside`); else with a prompt each.
    """

    collate: AnswerCollator
    beside: bool = False

    def __call__(self, rows: list[Row]) -> Batch:
        beside = self.beside and branches.ANSWERS in rows[0]
        own, others = (list(each) for each in zip(*(_apart(row, beside) for row in rows), strict=True))
        if beside:
            return self._beside(own, others)
        batch = self.collate(own)
        if all(others):
            batch |= {f"{AHEAD}{name}": value for name, value in self.collate(others).items()}
        return batch

    def _beside(self, own: list[Row], others: list[Row]) -> Batch:
        split = [document for row in own for document in documents_of(row)]
        batch, places = self.collate.laid_out(own, split)
        tokens, given = batch["input_ids"].numel(), [branches.trees_of(row)[0].prompt for row in own]
        prompts = [where[:count] for where, count in zip(places, given, strict=True)]
        answers = [row["input_ids"][count:] for row, count in zip(others, given, strict=True)]
        layout = branches.BranchCollator.like(self.collate.collate, 1)
        behind, their_places = layout.beside(answers, prompts, tokens)
        batch = self.collate.described(own, split, batch, places, tokens)
        found = self.collate.described(others, others, behind, their_places, behind["input_ids"].numel())
        return batch | {f"{AHEAD}{name}": value for name, value in found.items()}


def _apart(row: Row, as_trees: bool = False) -> tuple[Row, Row | None]:
    """The documents of a row as rows, each with what the row says of it; `as_trees`: with the prompt told apart."""
    found, begin = [], 0
    prompt = branches.trees_of(row)[0].prompt if as_trees else 0
    for document in documents_of(row):
        tokens = len(document["input_ids"])
        part = {name: value for name, value in row.items() if name != branches.ANSWERS}
        part |= {**document, "seq_lengths": [prompt, tokens - prompt] if as_trees else [tokens]}
        part |= {branches.ANSWERS: [1]} if as_trees else {}
        if "reference" in row:
            end = begin + trained_tokens(part)
            part["reference"], begin = row["reference"][begin:end], end
        found.append(part)
    return found[0], found[1] if len(found) > 1 else None


def unpaired_collator(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None, *, beside: bool = False
) -> UnpairedCollator:
    """The collator of rows with a label that `config` asks for; `beside` as of `UnpairedCollator`."""
    rounded = device is not None and rounds_widths(device)
    collate = AnswerCollator(make_collator(config, tokenizer, device), rounded, numbers=("label",), answers=1)
    return UnpairedCollator(collate, beside)


def answer_collator(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device | None = None,
    *,
    prompts: bool = False,
    numbers: tuple[str, ...] = (),
    answers: int = PAIR,
) -> AnswerCollator:
    """The collator that `config` asks for, of rows with so many answers; a flat row holds as many of up to max_length
    tokens."""
    if config.packing or config.padding_free:
        config = config.model_copy(update={"max_length": answers * config.max_length})
    rounded = device is not None and rounds_widths(device)
    return AnswerCollator(make_collator(config, tokenizer, device), rounded, prompts, numbers, answers)


def documents_of(row: Row) -> list[Row]:
    """The documents of a row, each with input_ids and labels, and its prompt."""
    found, begin = [], 0
    if branches.ANSWERS in row:
        ids, labels = (np.asarray(row[name], dtype=np.int64) for name in ("input_ids", "labels"))
        for tree in branches.trees_of(row):
            places = branches.document_places(tree, begin)
            found += [{"input_ids": ids[where].tolist(), "labels": labels[where].tolist()} for where in places]
            begin += tree.tokens
        return found
    for length in row["seq_lengths"]:
        part = slice(begin, begin + length)
        found.append({"input_ids": row["input_ids"][part], "labels": row["labels"][part]})
        begin += length
    return found


def first_prompt(row: Row) -> Row:
    """Of a row whose answers share prompts, the first prompt with its answers: apart, these take no more tokens than
    a row may have, and all of a packed row would."""
    tree = branches.trees_of(row)[0]
    tokens = {name: row[name][: tree.tokens] for name in ("input_ids", "labels")}
    return {**tokens, "seq_lengths": [tree.prompt, *tree.answers], branches.ANSWERS: [len(tree.answers)]}


def apart(row: Row) -> Row:
    """The documents of a row whose answers share their prompt, each with a prompt of its own."""
    documents = documents_of(row)
    joined = {name: [item for each in documents for item in each[name]] for name in ("input_ids", "labels")}
    return {**joined, "seq_lengths": [len(document["input_ids"]) for document in documents]}


def trained_tokens(row: Row) -> int:
    """Those of all documents of a row, for which `AnswerCollator` gives a log-probability."""
    labels = (document["labels"][1:] for document in documents_of(row))
    return sum(int(np.count_nonzero(np.asarray(label) != IGNORE_INDEX)) for label in labels)


def _flat_begins(rows: list[Row], shape: torch.Size) -> list[int]:
    """Where each document begins in a flat batch: one after the other in each row, or in the only one."""
    begins, at = [], 0
    for number, row in enumerate(rows):
        at = number * shape[1] if shape[0] > 1 else at
        for length in row["seq_lengths"]:
            begins.append(at)
            at += length
    return begins


def _filled(values: list[float], size: int) -> torch.Tensor:
    """fp32 [size], with zeros behind."""
    return torch.tensor([*values, *[0.0] * (size - len(values))], dtype=torch.float32)


def _joined(parts: list[np.ndarray], size: int, fill: int) -> torch.Tensor:
    """int64 [size], with `fill` behind."""
    joined = np.concatenate(parts)
    return torch.from_numpy(np.pad(joined, (0, size - len(joined)), constant_values=fill).astype(np.int64))
