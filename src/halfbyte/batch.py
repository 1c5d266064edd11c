"""A micro-batch: the columns that it may have, and how they are padded, moved and handed to a model.

A batch is a dictionary from column to value. Every column that halfbyte reads is declared here, once. To add one (an
image, say): declare its name, list it in `TOKEN_COLUMNS` if it has a value per token, and in `OWN_COLUMNS` if the
model's forward does not take it. Context parallelism splits the token columns (`parallel.context.context_shard`),
and ranks that compute together pad them to one shape (`parallel.rank_sync`).

Shapes: B sequences, T tokens of each, M trained tokens of the whole batch, N answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .ops import IGNORE_INDEX

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Batch = Mapping[str, Any]

# What transformers' models take.
INPUT_IDS, LABELS, ATTENTION_MASK, POSITION_IDS = "input_ids", "labels", "attention_mask", "position_ids"  # [B, T]
SHIFT_LABELS = "shift_labels"  # [B, T]: the label of the next token, in place of labels
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # int32 [documents + 1]: where documents begin in the flattened batch
LONGEST = ("max_length_q", "max_length_k")  # a number that no document's length exceeds

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
MARGIN, LABEL, RIGHT = "margin", "label", "right"  # [N]: required margin, desirable (KTO), correct step (PRM)
REFERENCE = "reference"  # fp32 [M]: the reference's log-probabilities; also the name of PEFT's frozen adapter
OLD, SAMPLED = "old", "sampled"  # fp32 [M]: log-probabilities before the update, and those of the sampler
ADVANTAGES, ITEMS = "advantages", "items"  # fp32 [N]: advantage of each answer, and the divisor of its tokens' losses
BONUS, CORRECTS = "bonus_weight", "corrects"  # 0-d weight of the entropy bonus; whether importance weights apply

# Numbers of a step that each of its micro-batches carries.
LOSS_COUNT = "loss_count"  # 0-d, on the device: the divisor of the step's summed loss
NLL_SCALE = "nll_scale"  # 0-d: pairs per likelihood token of the step
KTO_KL = "z"  # 0-d: mean log-ratio of mismatched prompts and answers, at least 0
LOOK_AHEAD = "ahead_"  # prefix of tensors that a step reads before its losses
COUNTS = "counts"  # name → number, on the host
SYNCED_SHAPE = "agreed"  # the shape that ranks agreed on (`parallel.rank_sync.SyncedShape`)

# Columns with a value per token, [B, T], and the value that padding has.
TOKEN_COLUMNS = {INPUT_IDS: 0, LABELS: IGNORE_INDEX, POSITION_IDS: 0, ATTENTION_MASK: 0, REAL_TOKENS: 0}

# Columns of answers that the losses read and the model's forward does not take.
OWN_COLUMNS = frozenset(
    {
        *(AT, WANTED, ANSWER, ENDS, PLACE, REAL, MARGIN, LABEL, RIGHT),
        *(REFERENCE, OLD, SAMPLED, ADVANTAGES, ITEMS, BONUS, CORRECTS),
    }
)


def model_inputs(batch: Batch, *more: str) -> dict[str, Any]:
    """Return the columns without those of `OWN_COLUMNS` and `more`."""
    return {name: value for name, value in batch.items() if name not in OWN_COLUMNS and name not in more}


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


def take_counts(batches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Remove `COUNTS` from every batch and return their sums."""
    counts = [batch.pop(COUNTS) for batch in batches]
    return {name: sum(each[name] for each in counts) for name in counts[0]}


def is_per_token(value: Any, rows: int, length: int) -> bool:
    """Return whether a value has an entry per token of `rows` sequences of `length`."""
    from torch import Tensor

    return isinstance(value, Tensor) and value.shape[:2] == (rows, length)


def pad_tokens(value: Tensor, added: int, fill: int = 0) -> Tensor:
    """Return [B, T, ...] with `added` tokens of `fill` at the end of each sequence."""
    import torch.nn.functional as F

    return F.pad(value, (0, 0) * (value.dim() - 2) + (0, added), value=fill)


def padded(batch: Batch, added: int) -> dict[str, Any]:
    """Return the batch with `added` tokens at the end of each sequence: untrained, and a document of their own where
    the batch has `POSITION_IDS`. `BOUNDS` are left to `padded_bounds`."""
    import torch

    grown = dict(batch)
    for name, fill in TOKEN_COLUMNS.items():
        if name in batch and added:
            grown[name] = pad_tokens(batch[name], added, fill)
    if POSITION_IDS in batch and added:
        positions = torch.arange(added, device=batch[POSITION_IDS].device).expand(len(batch[POSITION_IDS]), -1)
        grown[POSITION_IDS] = torch.cat([batch[POSITION_IDS], positions], 1)
    return grown


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
