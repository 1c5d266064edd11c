"""Convert rows of preference training and of stepwise answers to documents, and documents back to answers.

A row holds one document per answer: the prompt and that answer, with the labels of supervised fine-tuning. So the
memory plan, the isolation check and samples read the usual columns `input_ids`, `labels` and `seq_lengths`. If answers
share their prompt, it is stored once before them (`shared_prefix`), else once per answer. Images of a prompt are
stored once, and belong to each of its documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, Value

from ..config.schema import DataSection
from ..ops import IGNORE_INDEX
from ..utils.notices import notice
from .batches import document_lengths, row_lengths
from .images import IMAGES, STORED
from .prepare import PreparedData, row_pixels
from .shared_prefix import ANSWERS, document_places, trees_of
from .tables import Table, packed, with_column

NUMBER_COLUMNS = ("margin", "label", "right")  # further columns that documents keep
IDS, NUMBERS = datasets.List(Value("int32")), datasets.List(Value("float64"))
MISMATCHED = ("other_ids", "other_mask")
IMAGE_COUNTS = "image_counts"  # column of rows with images: number of images of each prompt

Row = dict[str, Any]
Answer = tuple[str, str]  # names of its id and mask columns


def as_documents(
    rows: Dataset, answers: Sequence[Answer], numbers: Sequence[str] = (), *, shared: bool = False
) -> Dataset:
    """Return each prompt with its answers: columns input_ids, labels, seq_lengths, and `numbers` as lists.

    Args:
        rows: prompt_ids, and ids and mask (1 if trained) of each answer.
        answers: the columns of each answer, in the order of the documents.
        numbers: further columns, with a number or a list of numbers per row.
        shared: store the prompt once; seq_lengths are the tokens of the prompt, then of each answer, and the column
            `shared_prefix.ANSWERS` holds the number of answers. Otherwise seq_lengths are the tokens of the documents.
    """
    features = {"input_ids": IDS, "labels": IDS, "seq_lengths": IDS} | {name: NUMBERS for name in numbers}
    features |= {IMAGES: STORED, IMAGE_COUNTS: IDS} if IMAGES in rows.column_names else {}
    if shared:
        features[ANSWERS] = IDS
    columns: dict[str, list[list[Any]]] = {name: [] for name in features}
    for row in rows:
        prompt = list(row["prompt_ids"])
        untrained = [IGNORE_INDEX] * len(prompt)
        ids = [*prompt] if shared else []
        labels = [*untrained] if shared else []
        lengths = [len(prompt)] if shared else []
        for answer, mask in answers:
            trained = [token if flag else IGNORE_INDEX for token, flag in zip(row[answer], row[mask], strict=True)]
            ids += row[answer] if shared else [*prompt, *row[answer]]
            labels += trained if shared else [*untrained, *trained]
            lengths.append(len(trained) if shared else len(prompt) + len(trained))
        document = {"input_ids": ids, "labels": labels, "seq_lengths": lengths, ANSWERS: [len(answers)]}
        document |= {name: np.atleast_1d(row[name]).astype(float).tolist() for name in numbers}
        if IMAGES in features:
            document |= {IMAGES: row[IMAGES], IMAGE_COUNTS: [len(row[IMAGES])]}
        for name, values in columns.items():
            values.append(document[name])
    return Table.from_dict(columns, features=Features(features))


def documents_in(
    config: DataSection, data: PreparedData, answers: Sequence[Answer], *, together: bool = True, joined: bool = False
) -> PreparedData:
    """Return prepared rows with these answers as documents, several per row if `config` packs.

    A packed row holds at most max_length tokens per answer of a row, and image_max_pixels_per_row pixels in all.

    Args:
        data: its `shared` says whether the answers of a row share their prompt.
        together: the answers of a row go through the model in one forward.
        joined: the later answers go through the model in a second forward that reuses the first one's prompts (KTO).
    """
    shared = data.shared and len(answers) > 1
    report = dict(data.report)

    def convert(rows: Dataset | None, split: str) -> Any:
        if rows is None:
            return None
        numbers = [name for name in NUMBER_COLUMNS if name in rows.column_names]
        documents = as_documents(rows, answers, numbers, shared=shared)
        if config.packing:
            most_pixels = config.image_max_pixels_per_row
            pixels = row_pixels(documents, most_pixels, len(answers))
            documents = packed(documents, len(answers) * config.max_length, pixels, most_pixels or 0)
        if shared and (together or joined) and report.get(split):
            computed = int(row_lengths(documents).sum())
            apart = int(document_lengths(documents).sum())  # with one prompt per answer
            report[split] = {**report[split], "computed_tokens": computed, "tokens_apart": apart}
        return documents

    train = convert(data.train, "train")
    held_out = convert(data.eval, "eval")
    data = replace(data, train=train, eval=held_out, report=report, shared=shared)
    return replace(data, answers=len(answers), together=len(answers) if together else 1)


def mismatched(rows: Dataset, max_length: int) -> Dataset:
    """Add the columns `MISMATCHED`: an answer to the previous prompt, cut so that prompt and answer have at most
    `max_length` tokens.

    Adjacent rows with the same prompt take the previous prompt's answers in turn. For pairs that were split into rows,
    these are the combinations of TRL, where all chosen answers come before all rejected ones.
    """
    prompts = rows["prompt_ids"][:]
    answers = list(zip(rows["completion_ids"][:], rows["completion_mask"][:], strict=True))
    limits = [max(max_length - len(prompt), 1) for prompt in prompts]
    sources = _rows_of_other_prompts(prompts)
    for column, name in enumerate(MISMATCHED):
        cut = [answers[source][column][:limit] for source, limit in zip(sources, limits, strict=True)]
        rows = with_column(rows, name, cut)
    return rows


def _rows_of_other_prompts(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return for each row the index of the nearest earlier row with another prompt; the first rows wrap around to
    the last."""
    begins = [at for at, prompt in enumerate(prompts) if at == 0 or not _same_prompt(prompt, prompts[at - 1])]
    runs = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(prompts)], strict=True)]
    sources: list[int] = []
    for number, run in enumerate(runs):
        earlier = (runs[number - back] for back in range(1, len(runs)))
        source = next((r for r in earlier if not _same_prompt(prompts[r[0]], prompts[run[0]])), None)
        if source is None:
            notice(
                "one-prompt",
                "all answers have the same prompt, so KTO's z is the mean over other answers to it instead of over"
                " mismatched prompts",
            )
            return [(at - 1) % len(prompts) for at in range(len(prompts))]
        sources += [source[index % len(source)] for index in range(len(run))]
    return sources


def _same_prompt(first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether two rows have the same prompt; in one of them its last token may be merged into the answer."""
    common = min(len(first), len(second))
    return abs(len(first) - len(second)) <= 1 and list(first[:common]) == list(second[:common])


def documents_of(row: Row) -> list[Row]:
    """Return the documents of a row, each with input_ids and labels, prompt included, and the prompt's images."""
    ids, labels = (np.asarray(row[name], dtype=np.int64) for name in ("input_ids", "labels"))
    if ANSWERS in row:
        trees = trees_of(row)
        begins = np.cumsum([0, *(tree.tokens for tree in trees)])
        positions = [
            index for tree, begin in zip(trees, begins, strict=False) for index in document_places(tree, begin)
        ]
    else:
        positions = np.split(np.arange(len(ids)), np.cumsum(row["seq_lengths"])[:-1])
    documents = [{"input_ids": ids[index].tolist(), "labels": labels[index].tolist()} for index in positions]
    if IMAGES not in row:
        return documents
    counts = row.get(IMAGE_COUNTS) or [len(row[IMAGES])]
    remaining = iter(row[IMAGES])
    images = [list(itertools.islice(remaining, count)) for count in counts]
    answers = len(documents) // len(counts)
    return [{**document, IMAGES: images[number // answers]} for number, document in enumerate(documents)]


def first_prompt(row: Row) -> Row:
    """Return the first prompt of a row with its answers, which fit a row even with a prompt each; all of a packed
    row would not."""
    tree = trees_of(row)[0]
    tokens = {name: row[name][: tree.tokens] for name in ("input_ids", "labels")}
    return {**tokens, "seq_lengths": [tree.prompt, *tree.answers], ANSWERS: [len(tree.answers)]}


def with_own_prompts(row: Row) -> Row:
    """Return a row of trees as a row of documents that each contain their prompt."""
    documents = documents_of(row)
    joined = {name: [token for document in documents for token in document[name]] for name in ("input_ids", "labels")}
    return {**joined, "seq_lengths": [len(document["input_ids"]) for document in documents]}


def trained_tokens(row: Row) -> int:
    """Return the number of log-probabilities that `AnswerCollator` lists for a row: the trained tokens of its
    documents."""
    labels = (np.asarray(document["labels"][1:]) for document in documents_of(row))
    return sum(int(np.count_nonzero(label != IGNORE_INDEX)) for label in labels)
