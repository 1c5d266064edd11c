"""A micro-batch: the columns that it may have, and how they are padded, moved and handed to a model.

A batch is a dictionary from column to value. Every column that halfbyte reads is a row of `COLUMNS`. To add one (pixel
values, a score), add its `Column` there: a column with `in_data` is read from the rows of the data that have it, packed
with their tokens, collated (`data.columns`), padded to one shape on ranks that compute together (`parallel.padding`),
and passed to the model's forward by its name.

Shapes: B sequences, T tokens of each, D documents, M trained tokens of the whole batch, N answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .ops import IGNORE_INDEX

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Batch = Mapping[str, Any]

# Arguments of the forward of transformers' models.
INPUT_IDS, LABELS = "input_ids", "labels"  # [B, T]
ATTENTION_MASK, POSITION_IDS = "attention_mask", "position_ids"  # [B, T]
ROPE_POSITIONS = "rope_positions"  # [B, T, 3]: time, height and width of M-RoPE, in addition to position_ids
SHIFT_LABELS = "shift_labels"  # [B, T]: the label of the next token, in place of labels
HEAD_ROWS = "head_rows"  # int64 [M]: positions in the flattened batch that the head computes, see `with_head_rows`
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # int32 [documents + 1]: first tokens of documents, and the end
LONGEST = ("max_length_q", "max_length_k")  # a number that no document's length exceeds

# Stored images of a prepared row (`data.images`), in the order of its documents; collators make the model's inputs.
IMAGES = "images"

# Prefix of the arguments of the language model of a model that reads images, computed before (`language_columns`).
LANGUAGE_INPUTS = "language_model"

# How sequences of the batch relate to each other and to other processes.
REAL_TOKENS = "real_tokens"  # [B, T]: 1 for tokens that are not padding, for the routers of a mixture of experts
BRANCHES, KEY_POSITIONS = "branches", "key_places"  # answers that share a prompt, see `data.shared_prefix`
CONTEXT = "context"  # the `parallel.context` group among which the sequences are split
UNSPLIT = "whole_"  # prefix of columns that a split batch carries for full sequences

# Answers of preference, policy and distillation methods. The trained tokens of all answers are numbered 0 to M - 1.
AT, WANTED = "at", "wanted"  # int [M]: position of each trained token's logits in the flattened batch, and the token
ANSWER = "answer"  # int [M]: the answer that each trained token belongs to; -1: padding
ENDS = "ends"  # int [N]: position of each answer's last token
PLACE, REAL = "place", "real"  # int [M]: the token's number within its answer; bool [N]: the answer is not padding
MARGIN, LABEL = "margin", "label"  # [N]: required margin, desirable (KTO)
RIGHT = "right"  # [N]: correct step (PRM)
# Rows of several texts (`data.collate_tasks`): numbers to learn; each text's row; rows' first texts and whether they
# are real; and a hash of each text.
TARGET = "target"
ROW = "row"
BEGINS = "begins"
REAL_ROWS = "real_rows"
HASH = "hash"
REFERENCE = "reference"  # fp32 [M]: the reference's log-probabilities; also the name of PEFT's frozen adapter
OLD, SAMPLED = "old", "sampled"  # fp32 [M]: log-probabilities before the update, and those of the sampler
ADVANTAGES, ITEMS = "advantages", "items"  # fp32 [N]: advantage of each answer, and the divisor of its tokens' losses
BONUS, CORRECTS = "bonus_weight", "corrects"  # 0-d weight of the entropy bonus; whether importance weights apply

# Numbers of a step that each of its micro-batches carries.
ADAPTERS = "adapters"  # index of the adapter of each of equal ranges of rows
LOSS_COUNT = "loss_count"  # 0-d, on the device: the divisor of the step's summed loss
NLL_SCALE = "nll_scale"  # 0-d: pairs per likelihood token of the step
KTO_KL = "z"  # 0-d: mean log-ratio of mismatched prompts and answers, at least 0
LOOK_AHEAD = "ahead_"  # prefix of tensors that a step reads before its losses
COUNTS = "counts"  # name → number, on the host
SYNCED_SHAPE = "agreed"  # the shape that ranks agreed on (`parallel.padding.SyncedShape`)


@dataclass(frozen=True)
class Column:
    """The declaration of a column of a batch.

    Attributes:
        per: "token": [B, T, ...], padded with the sequences, and split along T by context parallelism. "document":
            [entries, *shape], the entries of all documents in the order of their tokens. None: passed on as it is.
        fill: value of padding.
        in_forward: whether the model's forward takes it.
        in_data: whether rows of the data may have it: a number or nested lists, for each document. Needs `per`
            "document".
        dtype, shape: of one entry of a column in the data.
        ragged: whether a document has any number of entries, [n, *shape], instead of one, [*shape].
    """

    name: str
    per: Literal["token", "document"] | None = None
    fill: float = 0
    in_forward: bool = True
    in_data: bool = False
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    ragged: bool = False


_TOKEN_COLUMNS = {
    INPUT_IDS: 0,
    LABELS: IGNORE_INDEX,
    POSITION_IDS: 0,
    ROPE_POSITIONS: 0,
    ATTENTION_MASK: 0,
    REAL_TOKENS: 0,
}
_LOSS_COLUMNS = (
    HEAD_ROWS,
    *(AT, WANTED, ANSWER, ENDS, PLACE, REAL, MARGIN, LABEL, RIGHT),
    *(TARGET, ROW, BEGINS, REAL_ROWS, HASH),
    *(REFERENCE, OLD, SAMPLED, ADVANTAGES, ITEMS, BONUS, CORRECTS),
)
COLUMNS: dict[str, Column] = {
    **{name: Column(name, "token", fill) for name, fill in _TOKEN_COLUMNS.items()},
    **{name: Column(name, in_forward=False) for name in _LOSS_COLUMNS},
}


def model_inputs(batch: Batch, *excluded: str) -> dict[str, Any]:
    """Return the columns that the model's forward takes, without `excluded`."""
    left_out = {*excluded, *(column.name for column in COLUMNS.values() if not column.in_forward)}
    return {name: value for name, value in batch.items() if name not in left_out}


def language_columns(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a language model's arguments, with tensors at any depth, as columns of a batch, and their structure."""
    from torch.utils._pytree import keystr, tree_flatten_with_path

    leaves, structure = tree_flatten_with_path(dict(arguments))
    return {LANGUAGE_INPUTS: structure} | {f"{LANGUAGE_INPUTS}{keystr(path)}": value for path, value in leaves}


def language_arguments(batch: Batch) -> dict[str, Any]:
    """Return the arguments that `language_columns` has flattened."""
    from torch.utils._pytree import tree_unflatten

    structure = batch[LANGUAGE_INPUTS]
    leaves = [value for name, value in batch.items() if name.startswith(f"{LANGUAGE_INPUTS}[")]
    arguments: dict[str, Any] = tree_unflatten(leaves, structure)
    return arguments


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Return the batch on `device`, copied without a synchronization."""

    from torch import Tensor

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # a copy from pageable memory would block until the device has finished its queue
        pinned = value.pin_memory() if value.is_cpu and device.type == "cuda" else value
        return pinned.to(device, non_blocking=True)

    return {name: copied(value) for name, value in batch.items()}


def trains_anything(batch: Batch) -> Tensor | None:
    """Return whether a batch has something to train, bool 0-d on its device; None: no column says so.

    The result is False for a blank batch (`methods.base.Method.blank`), without a synchronization.
    """
    if LABELS in batch:
        return (batch[LABELS] != IGNORE_INDEX).any()
    return next((batch[name].any() for name in (REAL_ROWS, REAL) if name in batch), None)


def take_counts(batches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Remove `COUNTS` from every batch and return their sums."""
    counts = [batch.pop(COUNTS) for batch in batches]
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def is_per_token(name: str, value: Any, rows: int, length: int) -> bool:
    """Return whether a column has an entry per token of `rows` sequences of `length`, as declared, or by its shape."""
    from torch import Tensor

    if name in COLUMNS and COLUMNS[name].per == "document":
        return False
    return isinstance(value, Tensor) and value.shape[:2] == (rows, length)


def can_be_padded(batch: Batch) -> bool:
    """Return whether `padded`, `padded_bounds` and `padded_entries` extend all columns of a batch."""
    declared = {name for name, column in COLUMNS.items() if column.per is not None}
    return INPUT_IDS in batch and batch.keys() <= {*declared, *BOUNDS, *LONGEST}


def pad_tokens(value: Tensor, added: int, fill: float = 0) -> Tensor:
    """Return [B, T, ...] with `added` tokens of `fill` at the end of each sequence."""
    import torch.nn.functional as F

    return F.pad(value, (0, 0) * (value.dim() - 2) + (0, added), value=fill)


def padded(batch: Batch, added: int) -> dict[str, Any]:
    """Return the batch with `added` tokens at the end of each sequence: untrained, and a document of their own where
    the batch has `POSITION_IDS`. `BOUNDS` are left to `padded_bounds`."""
    import torch

    longer = dict(batch)
    if not added:
        return longer
    for name, column in COLUMNS.items():
        if name in batch and column.per == "token":
            longer[name] = pad_tokens(batch[name], added, column.fill)
    if POSITION_IDS in batch:
        positions = torch.arange(added, device=batch[POSITION_IDS].device).expand(len(batch[POSITION_IDS]), -1)
        longer[POSITION_IDS] = torch.cat([batch[POSITION_IDS], positions], 1)
    return longer


def joined(batches: Sequence[Batch]) -> dict[str, Any]:
    """Return one batch with the sequences of several batches, which `can_be_padded`.

    Each batch is first filled up to the number and length of sequences of the largest one.

    Added sequences are untrained, and a document each where the batch has `POSITION_IDS`. No synchronization.
    """
    import torch

    rows = max(len(batch[INPUT_IDS]) for batch in batches)
    width = max(batch[INPUT_IDS].shape[1] for batch in batches)
    resized = [_with_rows(_with_width(batch, width), rows) for batch in batches]
    names = [name for name in resized[0] if name not in (*BOUNDS, *LONGEST, HEAD_ROWS)]
    result = {name: torch.cat([batch[name] for batch in resized]) for name in names}
    if BOUNDS[0] in resized[0]:
        parts = [batch[BOUNDS[0]][number > 0 :] + number * rows * width for number, batch in enumerate(resized)]
        result |= dict.fromkeys(BOUNDS, torch.cat(parts))
        result |= dict.fromkeys(LONGEST, max(batch[LONGEST[0]] for batch in resized))
    return result


def _with_width(batch: Batch, width: int) -> dict[str, Any]:
    """Return a batch of sequences of `width` tokens."""
    length = batch[INPUT_IDS].shape[1]
    return padded(batch, width - length) | padded_bounds(batch, length, width - length)


def _with_rows(batch: dict[str, Any], rows: int) -> dict[str, Any]:
    """Return a batch with untrained sequences added, `rows` sequences in all."""
    import torch

    added, width = rows - len(batch[INPUT_IDS]), batch[INPUT_IDS].shape[1]
    if not added:
        return batch
    longer = dict(batch)
    for name, column in COLUMNS.items():
        if name in batch and column.per == "token":
            fill = 1 if name == ATTENTION_MASK else column.fill  # attention to nothing would be NaN
            longer[name] = pad_entries(batch[name], rows, fill)
    if POSITION_IDS in batch:
        longer[POSITION_IDS][-added:] = torch.arange(width, device=batch[POSITION_IDS].device)
    if BOUNDS[0] in batch:
        bounds = batch[BOUNDS[0]]
        ends = width * torch.arange(rows - added + 1, rows + 1, device=bounds.device, dtype=bounds.dtype)
        longer |= dict.fromkeys(BOUNDS, torch.cat([bounds, ends]))
        longer |= dict.fromkeys(LONGEST, max(batch[LONGEST[0]], 1 << (width - 1).bit_length()))
    return longer


def entry_counts(batch: Batch) -> list[int]:
    """Return the number of entries of each column per document, in the order of `COLUMNS`; 0 without the column."""
    names = (name for name, column in COLUMNS.items() if column.per == "document")
    return [len(batch[name]) if name in batch else 0 for name in names]


def padded_entries(batch: Batch, counts: Sequence[int]) -> dict[str, Any]:
    """Return the columns per document with `counts` entries, in the order of `entry_counts`."""
    columns = (column for column in COLUMNS.values() if column.per == "document")
    sizes = zip(columns, counts, strict=True)
    return {column.name: pad_entries(batch[column.name], n, column.fill) for column, n in sizes if column.name in batch}


def pad_entries(value: Tensor, count: int, fill: float) -> Tensor:
    """Return [count, ...]: the entries of `value`, then entries of `fill`."""
    import torch

    return torch.cat([value, value.new_full((count - len(value), *value.shape[1:]), fill)])


def padded_bounds(batch: Batch, length: int, added: int) -> dict[str, Any]:
    """Return `BOUNDS` and `LONGEST` of sequences of `length` tokens after `padded(batch, added)`; empty where the batch
    has none or does not grow. No synchronization."""
    import torch

    if not added or batch.get(BOUNDS[0]) is None:
        return {}
    bounds, rows = batch[BOUNDS[0]], len(batch[INPUT_IDS])
    begins = length + (length + added) * torch.arange(rows, device=bounds.device, dtype=bounds.dtype)
    bounds = torch.cat([bounds + added * (bounds // length), begins]).sort().values
    longest = max(batch[LONGEST[0]], added)
    return dict.fromkeys(BOUNDS, bounds) | dict.fromkeys(LONGEST, longest)
