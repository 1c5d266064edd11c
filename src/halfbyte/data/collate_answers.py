"""Convert rows of preference training and of stepwise answers to documents, and collate them.

A row stands for one document per answer: the prompt and that answer, with the labels of supervised fine-tuning. So the
memory plan, the isolation check and samples read the usual columns `input_ids`, `labels` and `seq_lengths`. If answers
share their prompt, it is stored once before them (`shared_prefix`), else once per answer. The tensors that the losses
need are computed on the host from the labels, the same way in both cases.
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

from ..batch import LOOK_AHEAD
from ..config.schema import DataSection, RunKeys
from ..ops import IGNORE_INDEX
from ..utils.notices import notice
from .batches import document_lengths, row_lengths
from .collate import Batch, PackedCollator, PaddedCollator, make_collator, rounds_widths
from .prepare import PreparedData
from .shared_prefix import ANSWERS, BranchCollator, document_places, trees_of
from .tables import Table, new_fingerprint, packed

PAIR = 2  # answers per row: chosen and rejected, or for KTO the answer and another prompt's answer
PAIR_MULTIPLE = 16  # the number of pairs of a packed batch on a GPU is padded to a multiple of this
NUMBERS_OF_ROWS = ("margin", "label")  # number columns that documents keep
TRAINED_SHARES = 4  # the number of trained tokens on a GPU is padded to a multiple of the batch's tokens / this
IDS, NUMBERS = datasets.List(Value("int32")), datasets.List(Value("float64"))
COUNTS = datasets.List(Value("int32"))

MISMATCHED = ("other_ids", "other_mask")

Row = dict[str, Any]
Answer = tuple[str, str]  # names of its id and mask columns
STEP_MULTIPLE = 64  # the number of labelled positions on a GPU is padded to a multiple of this


def as_documents(
    rows: Dataset, answers: Sequence[Answer], numbers: Sequence[str] = (), *, shared: bool = False
) -> Dataset:
    """Return each prompt with its answers: columns input_ids, labels, seq_lengths, and `numbers` as lists of one.

    Args:
        rows: prompt_ids, and ids and mask (1 if trained) of each answer.
        answers: the columns of each answer, in the order of the documents.
        numbers: further columns with one number per row.
        shared: store the prompt once; seq_lengths are the tokens of the prompt, then of each answer, and the column
            `shared_prefix.ANSWERS` holds the number of answers. Otherwise seq_lengths are the tokens of the documents.
    """
    features = {"input_ids": IDS, "labels": IDS, "seq_lengths": IDS} | {name: NUMBERS for name in numbers}
    if shared:
        features[ANSWERS] = COUNTS

    def documents(row: Row) -> Row:
        prompt = list(row["prompt_ids"])
        parts: list[list[int]] = []
        labels: list[int] = []
        for answer, mask in answers:
            trained = [token if kept else IGNORE_INDEX for token, kept in zip(row[answer], row[mask], strict=True)]
            has_prompt = not (shared and parts)
            parts.append((prompt if has_prompt else []) + list(row[answer]))
            labels += [*([IGNORE_INDEX] * len(prompt) if has_prompt else []), *trained]
        lengths = list(map(len, parts))
        if shared:
            lengths = [len(prompt), lengths[0] - len(prompt), *lengths[1:]]
        made = {"input_ids": [token for part in parts for token in part], "labels": labels, "seq_lengths": lengths}
        made |= {ANSWERS: [len(answers)]} if shared else {}
        return made | {name: [float(row[name])] for name in numbers}

    made = [documents(row) for row in rows]
    return Table.from_dict({name: [row[name] for row in made] for name in features}, features=Features(features))


def documents_in(
    config: DataSection, data: PreparedData, answers: Sequence[Answer], *, together: bool = True, joined: bool = False
) -> PreparedData:
    """Return prepared rows with these answers as documents, several per row if `config` packs.

    A packed row holds as many tokens as a pair may have, `PAIR` times max_length.

    Args:
        data: its `shared` says whether the answers of a row share their prompt.
        together: the answers of a row go through the model in one forward.
        joined: the later answers go through the model in a second forward that reuses the first one's prompts (KTO).
    """

    data = replace(data, shared=data.shared and len(answers) > 1)

    def made(rows: Dataset) -> Dataset:
        numbers = [name for name in NUMBERS_OF_ROWS if name in rows.column_names]
        found = as_documents(rows, answers, numbers, shared=data.shared)
        return packed(found, PAIR * config.max_length) if config.packing else found

    train, held_out = made(data.train), None if data.eval is None else made(data.eval)
    found = replace(data, train=train, eval=held_out, answers=len(answers), together=len(answers) if together else 1)
    return _with_savings(found) if data.shared and (together or joined) else found


def _with_savings(data: PreparedData) -> PreparedData:
    """Add to the report the tokens that each split computes, and would compute with one prompt per answer."""
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
    """Add the columns `MISMATCHED`: an answer to the previous prompt, cut so that prompt and answer have at most `most`
    tokens.

    Adjacent rows with the same prompt take the previous prompt's answers in turn. For pairs that were split into rows,
    these are the combinations of TRL, where all chosen answers come before all rejected ones.
    """
    ids, masks, prompts = rows["completion_ids"][:], rows["completion_mask"][:], rows["prompt_ids"][:]
    sources = _rows_of_other_prompts(prompts)
    room = [max(most - len(prompt), 1) for prompt in prompts]
    for name, values in zip(MISMATCHED, (ids, masks), strict=True):
        moved = [values[source][:limit] for source, limit in zip(sources, room, strict=True)]
        rows = rows.add_column(name, moved, new_fingerprint=new_fingerprint())
    return rows


def _rows_of_other_prompts(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return for each row the index of the nearest earlier row with another prompt; the first rows wrap around to
    the last."""
    begins = [at for at, prompt in enumerate(prompts) if at == 0 or not _same_prompt(prompt, prompts[at - 1])]
    runs = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(prompts)], strict=True)]
    found = []
    for number, run in enumerate(runs):
        earlier = (runs[number - back] for back in range(1, len(runs)))
        other = next((each for each in earlier if not _same_prompt(prompts[each[0]], prompts[run[0]])), None)
        if other is None:
            notice(
                "one-prompt",
                "all answers have the same prompt, so KTO's z is the mean over other answers to it instead of over"
                " mismatched prompts",
            )
            return [(at - 1) % len(prompts) for at in range(len(prompts))]
        found += [other[place % len(other)] for place in range(len(run))]
    return found


def _same_prompt(ids: Sequence[int], others: Sequence[int]) -> bool:
    """Return whether two rows have the same prompt; in one of them its last token may be merged into the answer."""
    shared = min(len(ids), len(others))
    return abs(len(ids) - len(others)) <= 1 and list(ids[:shared]) == list(others[:shared])


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
        split = [document for row in rows for document in documents_of(row)]
        batch, places = self.lay_out(rows, split)
        return self.add_loss_inputs(rows, split, batch, places, batch["input_ids"].numel())

    def add_loss_inputs(
        self, rows: list[Row], split: list[Row], batch: Batch, places: list[np.ndarray], tokens: int
    ) -> Batch:
        """Add the tensors that the losses need to `batch`.

        Args:
            split: the documents of `rows`.
            places: positions of each document's tokens in the forward's output.
            tokens: number of tokens of the batch.
        """
        pairs = len(split) // self.answers
        batch |= self._trained(split, places, tokens)
        batch["real"] = _pad([1.0] * pairs, self._padded_pairs(pairs))
        ends = np.asarray([place[-1] for place in places])
        batch["ends"] = _concatenate([ends], self.answers * len(batch["real"]), 0)
        if "reference" in rows[0]:
            found = [number for row in rows for number in row["reference"]]
            batch["reference"] = _pad(found, len(batch["at"]))
        for name in (name for name in self.numbers if name in rows[0]):
            batch[name] = _pad([number for row in rows for number in row[name]], len(batch["real"]))
        return batch

    def lay_out(self, rows: list[Row], documents: list[Row]) -> tuple[Batch, list[np.ndarray]]:
        """Return the model's inputs, and the positions of each document's tokens in the flattened batch."""
        if ANSWERS in rows[0]:
            return BranchCollator.like(self.collate, self.answers)(rows)
        flat = isinstance(self.collate, PackedCollator)
        batch = self.collate(rows if flat else documents)
        shape = batch.pop("labels").shape
        begins = _flat_begins(rows, shape) if flat else [shape[1] * number for number in range(len(documents))]
        lengths = (len(document["input_ids"]) for document in documents)
        return batch, [np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]

    def _trained(self, documents: list[Row], places: list[np.ndarray], tokens: int) -> Batch:
        """Return at, wanted, answer and place for documents at `places` in a flattened batch of `tokens` tokens."""
        at, wanted, answer, place = [], [], [], []
        for number, (document, where) in enumerate(zip(documents, places, strict=True)):
            next_labels = np.asarray(document["labels"][1:], dtype=np.int64)
            trained = next_labels != IGNORE_INDEX
            asked = (
                np.arange(len(next_labels)) if self.prompts and number % self.answers == 0 else np.flatnonzero(trained)
            )
            at.append(where[asked])
            wanted.append(np.asarray(document["input_ids"][1:], dtype=np.int64)[asked])
            answer.append(np.where(trained[asked], number, -1))
            place.append(np.cumsum(trained)[asked] - 1)
        size = sum(map(len, at))
        size = filled_size(size, tokens) if self.rounded else size
        fills = {"at": (at, 0), "wanted": (wanted, IGNORE_INDEX), "answer": (answer, -1), "place": (place, 0)}
        return {name: _concatenate(parts, size, fill) for name, (parts, fill) in fills.items()}

    def _padded_pairs(self, pairs: int) -> int:
        several = isinstance(self.collate, PackedCollator) and not self.collate.one_row
        return -(-pairs // PAIR_MULTIPLE) * PAIR_MULTIPLE if self.rounded and several else pairs


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
        own, others = (list(each) for each in zip(*(_split(row, joined) for row in rows), strict=True))
        if joined:
            return self._join(own, others)
        batch = self.collate(own)
        if all(others):
            batch |= {f"{LOOK_AHEAD}{name}": value for name, value in self.collate(others).items()}
        return batch

    def _join(self, own: list[Row], others: list[Row]) -> Batch:
        split = [document for row in own for document in documents_of(row)]
        batch, places = self.collate.lay_out(own, split)
        tokens, given = batch["input_ids"].numel(), [trees_of(row)[0].prompt for row in own]
        prompts = [where[:count] for where, count in zip(places, given, strict=True)]
        answers = [row["input_ids"][count:] for row, count in zip(others, given, strict=True)]
        layout = BranchCollator.like(self.collate.collate, 1)
        further, their_places = layout.further_answers(answers, prompts, tokens)
        batch = self.collate.add_loss_inputs(own, split, batch, places, tokens)
        found = self.collate.add_loss_inputs(others, others, further, their_places, further["input_ids"].numel())
        return batch | {f"{LOOK_AHEAD}{name}": value for name, value in found.items()}


def _split(row: Row, as_trees: bool = False) -> tuple[Row, Row | None]:
    """Split a row into one row per document; `as_trees`: as trees of a prompt and one answer."""
    found, begin = [], 0
    prompt = trees_of(row)[0].prompt if as_trees else 0
    for document in documents_of(row):
        tokens = len(document["input_ids"])
        part = {name: value for name, value in row.items() if name != ANSWERS}
        part |= {**document, "seq_lengths": [prompt, tokens - prompt] if as_trees else [tokens]}
        part |= {ANSWERS: [1]} if as_trees else {}
        if "reference" in row:
            end = begin + trained_tokens(part)
            part["reference"], begin = row["reference"][begin:end], end
        found.append(part)
    return found[0], found[1] if len(found) > 1 else None


def unpaired_collator(
    config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None, *, joined: bool = False
) -> UnpairedCollator:
    """Return the collator of labelled rows for `config`; `joined` as in `UnpairedCollator`."""
    rounded = device is not None and rounds_widths(device)
    collate = AnswerCollator(make_collator(config, tokenizer, device), rounded, numbers=("label",), answers=1)
    return UnpairedCollator(collate, joined)


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


def documents_of(row: Row) -> list[Row]:
    """Return the documents of a row, each with input_ids and labels, prompt included."""
    found, begin = [], 0
    if ANSWERS in row:
        ids, labels = (np.asarray(row[name], dtype=np.int64) for name in ("input_ids", "labels"))
        for tree in trees_of(row):
            places = document_places(tree, begin)
            found += [{"input_ids": ids[where].tolist(), "labels": labels[where].tolist()} for where in places]
            begin += tree.tokens
        return found
    for length in row["seq_lengths"]:
        part = slice(begin, begin + length)
        found.append({"input_ids": row["input_ids"][part], "labels": row["labels"][part]})
        begin += length
    return found


def first_prompt(row: Row) -> Row:
    """Return the first prompt of a row with its answers, which fit a row even with a prompt each; all of a packed
    row would not."""
    tree = trees_of(row)[0]
    tokens = {name: row[name][: tree.tokens] for name in ("input_ids", "labels")}
    return {**tokens, "seq_lengths": [tree.prompt, *tree.answers], ANSWERS: [len(tree.answers)]}


def with_own_prompts(row: Row) -> Row:
    """Return a row of trees as a row of documents that each contain their prompt."""
    documents = documents_of(row)
    joined = {name: [item for each in documents for item in each[name]] for name in ("input_ids", "labels")}
    return {**joined, "seq_lengths": [len(document["input_ids"]) for document in documents]}


def trained_tokens(row: Row) -> int:
    """Return the number of log-probabilities that `AnswerCollator` lists for a row: the trained tokens of its
    documents."""
    labels = (document["labels"][1:] for document in documents_of(row))
    return sum(int(np.count_nonzero(np.asarray(label) != IGNORE_INDEX)) for label in labels)


def _flat_begins(rows: list[Row], shape: torch.Size) -> list[int]:
    """Return where each document starts in a flattened batch."""
    begins, at = [], 0
    for number, row in enumerate(rows):
        at = number * shape[1] if shape[0] > 1 else at
        for length in row["seq_lengths"]:
            begins.append(at)
            at += length
    return begins


def _pad(values: list[float], size: int) -> torch.Tensor:
    """Return fp32 [size], padded with zeros."""
    return torch.tensor([*values, *[0.0] * (size - len(values))], dtype=torch.float32)


def _concatenate(parts: list[np.ndarray], size: int, fill: int) -> torch.Tensor:
    """Return int64 [size], padded with `fill`."""
    joined = np.concatenate(parts)
    return torch.from_numpy(np.pad(joined, (0, size - len(joined)), constant_values=fill).astype(np.int64))


# --- answers in steps -------------------------------------------------------------------------------------------------


def steps_in(config: DataSection, data: PreparedData) -> PreparedData:
    """Return prepared rows as documents, several per row if `config` packs.

    A document is the prompt with its steps: `input_ids`, `labels` (the token itself at each step's last token, -100
    elsewhere), `seq_lengths`, and `right`, 1 or 0 for each of those tokens.
    """

    def made(rows: Dataset) -> Dataset:
        found = _step_documents(rows)
        return packed(found, config.max_length) if config.packing else found

    return replace(data, train=made(data.train), eval=None if data.eval is None else made(data.eval))


def _step_documents(rows: Dataset) -> Dataset:
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
    """Collate documents in steps: the model's inputs, and for M labelled tokens `at` (int64 [M], positions in the
    flattened batch), `right` (fp32 [M]) and `real` (fp32 [M], 0 for padding).

    Args:
        collate: the document collator.
        rounded: pad to few shapes, since each shape costs a CUDA graph.
    """

    collate: PaddedCollator | PackedCollator
    rounded: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        batch = self.collate(rows)
        at = (batch.pop("labels").flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        right = torch.tensor([label for row in rows for label in row["right"]])
        size = -(-len(at) // STEP_MULTIPLE) * STEP_MULTIPLE if self.rounded else len(at)
        real = torch.ones(len(at))
        for name, values in (("at", at), ("right", right), ("real", real)):
            batch[name] = torch.nn.functional.pad(values, (0, size - len(values)))
        return batch


def step_collator(
    config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
) -> StepCollator:
    """Return the collator of stepwise rows for `config`."""
    rounded = device is not None and rounds_widths(device)
    return StepCollator(make_collator(config, tokenizer, device), rounded)
