"""How large the micro-batches of a run are, known from the lengths of its rows before any is collated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from datasets import Dataset
from pyarrow import ChunkedArray, compute

from ..config import RunConfig
from ..config.policy import SAMPLING
from ..memory.activations import MAX_GRAPHS, Batches, Shape
from ..utils.notices import notice
from .branches import ANSWERS
from .collate import FINER, WIDTHS, rounds_widths, width_of
from .prepare import PreparedData

SAMPLES = 64  # batches that the usual one is the mean of


def batches_of(config: RunConfig, data: PreparedData, device: torch.device) -> Batches:
    """The micro-batches of a run on `device`; `config` may be another than `data` was prepared for, with shorter rows,
    or packed ones, which are taken to be full."""
    train, held_out = (_lengths_for(config, rows, data) for rows in (data.train, data.eval))
    asked = config.answers_per_generation // config.group_size  # prompts; the config below is of rows
    if data.counted > 1:
        rows = -(-config.per_device_train_batch_size // data.counted)
        config = config.model_copy(update={"per_device_train_batch_size": rows})
    if data.together > 1:
        config = _of_documents(config, data.together, data.shared)
    widths = FINER if config.method in SAMPLING and data.shared else WIDTHS
    found = batches_of_lengths(config, train, held_out, rounded=rounds_widths(device), widths=widths)
    found = replace(found, many=found.many or data.shared)  # which have bounds of prompts and answers, too
    if config.method not in SAMPLING:
        return found
    return replace(
        found,
        second=found.largest,  # answers have any lengths
        many=True,
        evaluation=Shape(0, 0),  # which answers, too
        prompts=_longest_prompts(data.train, asked),
        held_out_prompts=() if data.eval is None else _longest_prompts(data.eval, len(data.eval)),
    )


def _longest_prompts(rows: Dataset, count: int) -> tuple[int, ...]:
    """Tokens of so many of the longest prompts, the longest first."""
    return tuple(sorted(map(len, rows["prompt_ids"]), reverse=True)[:count])


def width_shares(config: RunConfig, data: PreparedData) -> dict[int, float]:
    """The widths that rounded micro-batches of unpacked training rows can have, and the share of them that has each,
    as drawing rows without putting them back makes them."""
    lengths = np.sort(row_lengths(data.train) if data.answers == 1 else document_lengths(data.train))
    widths = sorted({width_of(int(length), config.max_length) for length in np.unique(lengths)})
    drawn = min(config.per_device_train_batch_size * data.answers, len(lengths))
    within = [int(np.searchsorted(lengths, width, side="right")) for width in widths]  # rows that are no wider
    within[-1] = len(lengths)  # longer ones are cut
    places = np.arange(drawn)
    no_wider = [float(np.prod(np.maximum(rows - places, 0) / (len(lengths) - places))) for rows in within]
    return {width: share - below for width, share, below in zip(widths, no_wider, [0.0, *no_wider], strict=False)}


def _of_documents(config: RunConfig, answers: int, shared: bool) -> RunConfig:
    """`config` as batches of rows with several documents have it: wider rows, or more of them."""
    if config.packing or config.padding_free or shared:
        return config.model_copy(update={"max_length": answers * config.max_length})
    rows = {"per_device_train_batch_size": answers * config.per_device_train_batch_size}
    if config.per_device_eval_batch_size:
        rows["per_device_eval_batch_size"] = answers * config.per_device_eval_batch_size
    return config.model_copy(update=rows)


def _lengths_for(config: RunConfig, rows: Dataset | None, data: PreparedData) -> np.ndarray:
    """Tokens of each row under `config`; padded or apart, each of several documents is a row of its own, unless they
    share their prompt."""
    in_a_row = config.packing or config.padding_free or data.shared
    if data.answers > 1 and not (in_a_row and data.together > 1):
        return document_lengths(rows)
    lengths = row_lengths(rows)
    if not config.packing or rows is None or "seq_lengths" in rows.column_names:
        return lengths
    full, rest = divmod(int(np.minimum(lengths, config.max_length).sum()), config.max_length)
    return np.array([config.max_length] * full + [rest] * bool(rest), dtype=np.int64)


def row_lengths(rows: Dataset | None) -> np.ndarray:
    """Tokens of each row, from Arrow's offsets: no row is read."""
    if rows is None or not len(rows):
        return np.zeros(0, dtype=np.int64)
    return np.asarray(compute.list_value_length(_ids(rows)).to_numpy(), dtype=np.int64)


def document_lengths(rows: Dataset | None) -> np.ndarray:
    """Tokens of each document, a prompt that several share among each one's."""
    if rows is None or not len(rows):
        return np.zeros(0, dtype=np.int64)
    lengths = _numbers(rows, "seq_lengths")
    if ANSWERS not in rows.column_names:
        return lengths
    counts = _numbers(rows, ANSWERS)
    prompts = np.concatenate([[0], (counts + 1).cumsum()[:-1]])  # their numbers among the parts
    return np.delete(lengths, prompts) + lengths[prompts].repeat(counts)


def _numbers(rows: Dataset, column: str) -> np.ndarray:
    """All numbers of a column of lists, int64."""
    chunks = rows.with_format("arrow")[:][column].chunks
    return np.concatenate([chunk.flatten().to_numpy() for chunk in chunks]).astype(np.int64)


def _ids(rows: Dataset) -> ChunkedArray:
    """The token ids of the rows that there are; the table under them may have more."""
    return rows.with_format("arrow")[:]["input_ids"]


def longest_row(rows: Dataset, answers: int = 1) -> int:
    """Tokens of the longest of `rows`, or of their documents where they have several."""
    return int((row_lengths(rows) if answers == 1 else document_lengths(rows)).max(initial=0))


def largest_id(rows: Dataset) -> int:
    """The largest token id in `rows`."""
    return max((compute.max(chunk.flatten()).as_py() or 0 for chunk in _ids(rows).chunks), default=0)


def batches_of_lengths(
    config: RunConfig, train: np.ndarray, held_out: np.ndarray, *, rounded: bool, widths: int = WIDTHS
) -> Batches:
    """The largest micro-batch that shuffled rows can make, the usual one, and the largest of an evaluation.

    Args:
        train, held_out: tokens of each row; more than `max_length` are cut to it.
        rounded: whether the collator rounds widths up, see `data.collate`.
        widths: that an octave has then.
    """
    rows = config.per_device_train_batch_size
    if rows > len(train):
        notice(
            "batch-rows",
            f"per_device_train_batch_size: {rows} is more than the data's {len(train)} rows: a step takes them all",
        )
    evaluated = config.per_device_eval_batch_size or rows
    drawn = np.random.default_rng(0)
    lengths, octave = np.minimum(train, config.max_length), widths if rounded else 0
    picks = [drawn.choice(lengths, min(rows, len(lengths)), replace=False) for _ in range(SAMPLES)]
    usual = [_shape(config, pick, octave) for pick in picks]
    length = sum(shape.tokens for shape in usual) // sum(shape.rows for shape in usual)
    return Batches(
        largest=_largest(config, lengths, rows, octave),
        usual=Shape(usual[0].rows, max(length, 1)),
        second=_second(config, lengths, octave),
        evaluation=_largest(config, np.minimum(held_out, config.max_length), evaluated, octave),
        many=_shapes(config, lengths, octave) > MAX_GRAPHS,
    )


def _shapes(config: RunConfig, lengths: np.ndarray, octave: int) -> float:
    """How many shapes micro-batches can have, all of whose rows are packed or padded; without padding, any number."""
    different = np.unique(lengths)
    if config.padding_free:
        return math.inf if len(different) > 1 else 2
    last = bool(len(lengths) % min(config.per_device_train_batch_size, len(lengths)))  # of an epoch, of fewer rows
    return len({_shape(config, np.array([length]), octave).length for length in different}) * (1 + last)


def _largest(config: RunConfig, lengths: np.ndarray, rows: int, octave: int) -> Shape:
    longest = np.sort(lengths)[::-1][:rows]
    return _shape(config, longest, octave) if len(longest) else Shape(0, 0)


def _second(config: RunConfig, lengths: np.ndarray, octave: int) -> Shape:
    """The largest shape but one: of shorter rows, or of the rows that are left at the end of an epoch."""
    rows = min(config.per_device_train_batch_size, len(lengths))
    left = len(lengths) % rows
    largest = _largest(config, lengths, rows, octave)
    if config.padding_free:  # sums of lengths
        return largest if lengths.min() < lengths.max() else Shape(1, left * largest.length // rows)
    alone = (_shape(config, np.array([length]), octave) for length in np.unique(lengths))
    shorter = max((shape.length for shape in alone if shape.length < largest.length), default=0)
    return max(Shape(rows, shorter), Shape(left, largest.length), key=lambda shape: shape.tokens)


def _shape(config: RunConfig, lengths: np.ndarray, octave: int) -> Shape:
    """Of one micro-batch of rows of these lengths; `octave`: widths that one has, 0 where they are not rounded."""
    rows, longest, most = len(lengths), int(lengths.max()), config.max_length
    if config.padding_free:
        rows, longest, most = 1, int(lengths.sum()), most * len(lengths)
    return Shape(rows, width_of(longest, most, octave) if octave else longest)
