"""Collators: batches padded with an attention mask, or flat with position_ids that restart at every document.

transformers isolates the documents of a row if it gets `position_ids` that restart, *no* attention mask and no
key-value cache (masking_utils, 5.23). With a mask of ones, or with the cache that a model creates by default outside of
Trainer, documents would attend to each other without an error. So a batch has a mask or positions, never both, and a
model needs `use_cache=False` for a flat batch.

On a GPU widths are rounded up (`rounded`) to four per octave above 512, since each width costs a CUDA graph, its
warm-up steps, and cached cuDNN plans. Batches of the fused step (`fused`, which also rounds) have no mask: rows are
padded on the right, where causal attention cannot look, and padding is not trained. They include the documents' bounds,
so that no layer has to synchronise with the device to compute them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase

from ..batch import HEAD_ROWS
from ..config.schema import RunKeys
from ..ops import IGNORE_INDEX
from .columns import collate_columns
from .image_processor import ImageProcessor
from .images import IMAGES

Batch = dict[str, Any]  # tensors, and two numbers of a fused flat batch

HEAD_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # shares of a batch that the head may compute
SAMPLED_ROWS = 512  # by which a run's share is chosen
LENGTHS, DOCUMENTS = 128, 32  # fused batches have a multiple of these tokens per row, and of these documents
WIDTHS, FINER = 4, 8  # widths per octave; finer for rows of several sampled answers, whose total lengths vary little


def make_collator(config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None) -> Collator:
    """Return the collator that `config` asks for: flat for packing or padding_free, else padded.

    Args:
        device: the training device; None: batches are neither fused nor rounded.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    rounded = device is not None and rounds_widths(device)
    fused = rounded and config.use_kernels
    images = ImageProcessor(config, tokenizer)
    if config.packing or config.padding_free:
        return PackedCollator(pad, config.padding_free, fused, config.max_length, rounded, images)
    fused = fused and config.neftune_noise_alpha is None  # NEFTune scales noise by a document's tokens, from the mask
    return PaddedCollator(pad, fused, config.max_length, rounded, images)


def head_share(rows: Any) -> float | None:
    """Return the share of a batch that the head computes in a run on a GPU: one, since each costs CUDA graphs.

    It is the smallest of `HEAD_SHARES` that the trained tokens of nearly all of `rows` do not exceed, of which some are
    read; None: none of these shares.
    """
    sample = rows.select(range(0, len(rows), -(-len(rows) // SAMPLED_ROWS)))
    shares = sorted(sum(label != IGNORE_INDEX for label in labels) / len(labels) for labels in sample["labels"])
    usual = shares[int(0.95 * (len(shares) - 1))]
    return next((share for share in HEAD_SHARES if usual <= share), None)


def with_head_rows(collate: Callable[[Any], Batch], share: float | None) -> Callable[[Any], Batch]:
    """Return a collator whose batches name the positions that the head computes, `batch.HEAD_ROWS`.

    These are the tokens before trained ones, in their order. A batch of which the head would compute nearly all
    positions has no such column.

    Args:
        share: of the batch's positions that are named, by others in addition; None: those before trained tokens only.
    """

    def collated(rows: Any) -> Batch:
        batch = collate(rows)
        trained = F.pad(batch["labels"][:, 1:] != IGNORE_INDEX, (0, 1)).flatten()
        needed = max(int(trained.sum()), 1)  # a head of no rows is a special case for kernels
        count = needed if share is None else int(share * len(trained))
        if count < needed or count > HEAD_SHARES[-1] * len(trained):
            return batch
        positions = trained.nonzero().flatten()
        untrained = (~trained).nonzero().flatten()[: count - len(positions)]
        return batch | {HEAD_ROWS: torch.cat([positions, untrained]).sort().values}

    return collated


def rounds_widths(device: torch.device) -> bool:
    """Return whether a run on `device` rounds batch widths."""
    return device.type == "cuda"


def width_of(longest: int, max_tokens: int | None = None, widths: int = WIDTHS) -> int:
    """Return the rounded width of a batch whose longest row has `longest` tokens.

    Args:
        max_tokens: upper bound of a row's tokens, if known; the width does not exceed it (rounded up to `LENGTHS`).
        widths: number of widths per octave, a power of two.
    """
    octave = (longest - 1).bit_length()
    width = _up(longest, max(LENGTHS, 1 << max(octave - widths.bit_length(), 0)))
    return width if max_tokens is None else min(width, _up(max_tokens, LENGTHS))


@dataclass(frozen=True)
class PaddedCollator:
    """Collate one document per row, padded on the right to the longest.

    Returns input_ids, labels and attention_mask, int64 [rows, longest] (no mask if `fused`), and the rows' arrays
    (`columns.collate_columns`). Of rows with images, also the inputs that `images` makes of them.
    """

    pad_token_id: int
    fused: bool = False
    max_length: int | None = None
    rounded: bool = False
    images: ImageProcessor | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        longest = max(len(row["input_ids"]) for row in rows)
        width = width_of(longest, self.max_length) if self.fused or self.rounded else longest
        batch = {
            "input_ids": _stack([row["input_ids"] for row in rows], width, self.pad_token_id),
            "labels": _stack([_without_first(row["labels"], [0]) for row in rows], width, IGNORE_INDEX),
        }
        if not self.fused:
            batch["attention_mask"] = _stack([[1] * len(row["input_ids"]) for row in rows], width, 0)
        if self.images is not None and IMAGES in rows[0]:
            batch |= self.images.columns([row[IMAGES] for row in rows], batch["input_ids"])
        return batch | collate_columns(rows, self.rounded)


@dataclass(frozen=True)
class PackedCollator:
    """Collate concatenated documents, each with positions from 0 and no label on its first token.

    Returns input_ids, labels and position_ids, int64 [rows, longest], or [1, all tokens] if `one_row`, and the rows'
    arrays (`columns.collate_columns`). Shorter rows are padded with one more document, which is not trained. Use with
    `use_cache=False`, see the module docstring. Rows with images add the inputs that `images` makes of all documents'
    images, in order, and for M-RoPE `batch.ROPE_POSITIONS`.

    Rows may carry `seq_lengths` (the lengths of their documents); without it a row is one document.

    If `fused`, the batch also has the arguments of transformers' flash attention: cu_seq_lens_q and cu_seq_lens_k
    (int32, start of each document in the flattened batch; the last value repeats as padding, which means empty
    documents), and max_length_q and max_length_k (a power of two that no document exceeds). transformers would also
    pass them to a vision tower, which `modeling.vision.bind_vision` prevents.
    """

    pad_token_id: int
    one_row: bool = False
    fused: bool = False
    max_length: int | None = None
    rounded: bool = False
    images: ImageProcessor | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        ids = [list(row["input_ids"]) for row in rows]
        lengths = [list(row.get("seq_lengths") or [len(row["input_ids"])]) for row in rows]
        labels = [
            _without_first(row["labels"], _starts(document_lengths))
            for row, document_lengths in zip(rows, lengths, strict=True)
        ]
        if self.one_row:
            ids, labels, lengths = ([[item for row in rows for item in row]] for rows in (ids, labels, lengths))
        longest, max_length = max(map(len, ids)), self.max_length
        if self.one_row and max_length is not None:
            max_length *= len(rows)
        width = width_of(longest, max_length) if self.fused or self.rounded else longest
        documents = [(*document_lengths, width - sum(document_lengths)) for document_lengths in lengths]
        positions = [
            [position for length in document_lengths for position in range(length)] for document_lengths in documents
        ]
        batch: Batch = {
            "input_ids": _stack(ids, width, self.pad_token_id),
            "labels": _stack(labels, width, IGNORE_INDEX),
            "position_ids": _stack(positions, width, 0),
            **collate_columns(rows, self.rounded),
        }
        all_lengths = [length for document_lengths in documents for length in document_lengths]
        if self.fused:
            batch |= _bounds(all_lengths)
        if self.images is not None and IMAGES in rows[0]:
            images = [image for row in rows for image in row[IMAGES]]
            batch |= self.images.packed_columns(images, batch["input_ids"], all_lengths)
        return batch


Collator = PaddedCollator | PackedCollator


def _bounds(lengths: list[int]) -> Batch:
    """Return cu_seq_lens and max_length of documents of these lengths, padded to one of few shapes."""
    ends = torch.tensor(lengths).cumsum(0)
    bounds = F.pad(ends, (1, 0))
    bounds = F.pad(bounds, (0, _up(len(lengths), DOCUMENTS) - len(lengths)), value=int(ends[-1])).to(torch.int32)
    longest = 1 << (max(lengths) - 1).bit_length()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _up(size: int, step: int) -> int:
    """Round `size` up to a multiple of `step`."""
    return -(-size // step) * step


def _starts(lengths: list[int]) -> list[int]:
    return [sum(lengths[:index]) for index in range(len(lengths))]


def _without_first(labels: list[int], starts: list[int]) -> list[int]:
    labels = list(labels)
    for start in starts:
        labels[start] = IGNORE_INDEX
    return labels


def _stack(rows: list[list[int]], width: int, fill: int) -> torch.Tensor:
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=torch.int64)
