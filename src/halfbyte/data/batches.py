"""Sizes of a run's micro-batches, computed from row lengths before any row is collated."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from datasets import Dataset
from pyarrow import ChunkedArray, compute

from ..batch import IMAGES
from ..config.policy import SAMPLING
from ..config.schema import DataSection, RunKeys
from ..utils.notices import notice
from .batch_shapes import MAX_GRAPHS, Batches, Shape
from .collate import FINER, WIDTHS, rounds_widths, width_of
from .prepare import PreparedData
from .shared_prefix import ANSWERS

SAMPLES = 64  # random batches that the typical shape averages over


def batches_of(config: RunKeys, data: PreparedData, device: torch.device) -> Batches:
    """Return the shapes of a run's micro-batches on `device`.

    Args:
        config: may differ from the one that `data` was prepared with: a smaller max_length cuts rows, and packed rows
            count as full.
    """
    train, held_out = (_lengths_for(config, rows, data) for rows in (data.train, data.eval))
    prompts_per_step = config.answers_per_generation // config.group_size  # prompts; below, batch sizes count rows
    if data.counted > 1:
        rows = -(-config.per_device_train_batch_size // data.counted)
        config = config.model_copy(update={"per_device_train_batch_size": rows})
    if data.together > 1:  # rows hold several documents: wider rows, or more of them
        if config.packing or config.padding_free or data.shared:
            sizes = {"max_length": data.together * config.max_length}
        else:
            sizes = {"per_device_train_batch_size": data.together * config.per_device_train_batch_size}
            if config.per_device_eval_batch_size:
                sizes["per_device_eval_batch_size"] = data.together * config.per_device_eval_batch_size
        config = config.model_copy(update=sizes)
    widths = FINER if config.method in SAMPLING and data.shared else WIDTHS
    batches = batches_of_lengths(config, train, held_out, rounded=rounds_widths(device), widths=widths)
    batches = replace(
        batches,
        many=batches.many or data.shared,  # shapes also depend on the bounds of prompts and answers
        image_bytes=data.answers * _largest_images(data.train, config.per_device_train_batch_size),
    )
    if config.method not in SAMPLING:
        return batches
    return replace(
        batches,
        second=batches.largest,  # answers can have any length
        many=True,
        evaluation=Shape(0, 0),  # evaluation samples answers instead of reading rows
        prompts=_longest_prompts(data.train, prompts_per_step),
        held_out_prompts=() if data.eval is None else _longest_prompts(data.eval, len(data.eval)),
    )


def _largest_images(rows: Dataset, size: int) -> int:
    """Return the bytes of the tower's inputs for the `size` rows with the largest images."""
    if IMAGES not in rows.column_names:
        return 0
    sums = [sum(image["nbytes"] for image in images) for images in rows[IMAGES]]
    return sum(sorted(sums, reverse=True)[:size])


def _longest_prompts(rows: Dataset, count: int) -> tuple[int, ...]:
    """Return the token counts of the `count` longest prompts, in descending order."""
    return tuple(sorted(map(len, rows["prompt_ids"]), reverse=True)[:count])


def width_shares(config: RunKeys, data: PreparedData) -> dict[int, float]:
    """Return the widths of rounded micro-batches of unpacked training rows, and the share of batches with each width.

    Rows are drawn without replacement.
    """
    lengths = np.sort(row_lengths(data.train) if data.answers == 1 else document_lengths(data.train))
    widths = sorted({width_of(int(length), config.max_length) for length in np.unique(lengths)})
    drawn = min(config.per_device_train_batch_size * data.answers, len(lengths))
    within = [int(np.searchsorted(lengths, width, side="right")) for width in widths]  # rows that are no wider
    within[-1] = len(lengths)  # longer rows are cut
    draws = np.arange(drawn)
    no_wider = [float(np.prod(np.maximum(rows - draws, 0) / (len(lengths) - draws))) for rows in within]
    return {width: share - below for width, share, below in zip(widths, no_wider, [0.0, *no_wider], strict=False)}


def _lengths_for(config: DataSection, rows: Dataset | None, data: PreparedData) -> np.ndarray:
    """Return the tokens of each row under `config`.

    Rows with several documents count once per document if batches are padded or the answers go through separate
    forwards, unless answers share their prompt.
    """
    in_a_row = config.packing or config.padding_free or data.shared
    if data.answers > 1 and not (in_a_row and data.together > 1):
        return document_lengths(rows)
    lengths = row_lengths(rows)
    if not config.packing or rows is None or "seq_lengths" in rows.column_names:
        return lengths
    full_rows, last_tokens = divmod(int(np.minimum(lengths, config.max_length).sum()), config.max_length)
    return np.array([config.max_length] * full_rows + [last_tokens] * bool(last_tokens), dtype=np.int64)


def row_lengths(rows: Dataset | None) -> np.ndarray:
    """Return the tokens of each row from Arrow's offsets, without reading any row."""
    if rows is None or not len(rows):
        return np.zeros(0, dtype=np.int64)
    return np.asarray(compute.list_value_length(_ids(rows)).to_numpy(), dtype=np.int64)


def document_lengths(rows: Dataset | None) -> np.ndarray:
    """Return the tokens of each document; a shared prompt counts for each of its answers."""
    if rows is None or not len(rows):
        return np.zeros(0, dtype=np.int64)
    lengths = _numbers(rows, "seq_lengths")
    if ANSWERS not in rows.column_names:
        return lengths
    counts = _numbers(rows, ANSWERS)
    prompts = np.concatenate([[0], (counts + 1).cumsum()[:-1]])  # indices of prompts in seq_lengths
    return np.delete(lengths, prompts) + lengths[prompts].repeat(counts)


def _numbers(rows: Dataset, column: str) -> np.ndarray:
    """Return all numbers of a column of lists, int64."""
    chunks = rows.with_format("arrow")[:][column].chunks
    return np.concatenate([chunk.flatten().to_numpy() for chunk in chunks]).astype(np.int64)


def _ids(rows: Dataset) -> ChunkedArray:
    """Return the token ids of the selected rows; the table below them may have more."""
    return rows.with_format("arrow")[:]["input_ids"]


def longest_row(rows: Dataset, answers: int = 1) -> int:
    """Return the tokens of the longest row, or of the longest document if rows have several."""
    return int((row_lengths(rows) if answers == 1 else document_lengths(rows)).max(initial=0))


def largest_id(rows: Dataset) -> int:
    """Return the largest token id in `rows`."""
    return max((compute.max(chunk.flatten()).as_py() or 0 for chunk in _ids(rows).chunks), default=0)


def batches_of_lengths(
    config: RunKeys, train: np.ndarray, held_out: np.ndarray, *, rounded: bool, widths: int = WIDTHS
) -> Batches:
    """Return the largest and the typical micro-batch of shuffled rows, and the largest one of an evaluation.

    Args:
        train, held_out: tokens of each row; rows over `max_length` are cut to it.
        rounded: whether the collator rounds widths up, see `data.collate`.
        widths: number of widths per octave if `rounded`.
    """
    rows = config.per_device_train_batch_size
    if rows > len(train):
        notice(
            "batch-rows",
            f"per_device_train_batch_size: {rows} exceeds the {len(train)} rows of the data; each step takes all rows",
        )
    evaluated = config.per_device_eval_batch_size or rows
    if config.streaming:  # later rows may be as long as any
        train = np.append(train, np.full(rows, config.max_length))
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


def _shapes(config: RunKeys, lengths: np.ndarray, octave: int) -> float:
    """Return the number of shapes that micro-batches can have; unbounded for padding-free rows of different lengths."""
    different = np.unique(lengths)
    if config.padding_free:
        return math.inf if len(different) > 1 else 2
    last = bool(len(lengths) % min(config.per_device_train_batch_size, len(lengths)))  # an epoch's last, smaller batch
    return len({_shape(config, np.array([length]), octave).length for length in different}) * (1 + last)


def _largest(config: DataSection, lengths: np.ndarray, rows: int, octave: int) -> Shape:
    longest = np.sort(lengths)[::-1][:rows]
    return _shape(config, longest, octave) if len(longest) else Shape(0, 0)


def _second(config: RunKeys, lengths: np.ndarray, octave: int) -> Shape:
    """Return the second largest shape: shorter rows, or the last, smaller batch of an epoch."""
    rows = min(config.per_device_train_batch_size, len(lengths))
    left = len(lengths) % rows
    largest = _largest(config, lengths, rows, octave)
    if config.padding_free:  # widths are sums of lengths
        return largest if lengths.min() < lengths.max() else Shape(1, left * largest.length // rows)
    alone = (_shape(config, np.array([length]), octave) for length in np.unique(lengths))
    shorter = max((shape.length for shape in alone if shape.length < largest.length), default=0)
    return max(Shape(rows, shorter), Shape(left, largest.length), key=lambda shape: shape.tokens)


def _shape(config: DataSection, lengths: np.ndarray, octave: int) -> Shape:
    """Return the shape of a micro-batch with rows of these lengths; `octave` is the number of widths per octave, 0
    if unrounded."""
    rows, longest = len(lengths), int(lengths.max())
    max_length = config.max_length
    if config.padding_free:
        max_length *= rows
        rows, longest = 1, int(lengths.sum())
    return Shape(rows, width_of(longest, max_length, octave) if octave else longest)
