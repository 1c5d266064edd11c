"""Shared-prefix rows: a prompt stored once before all of its answers, with the layout that attention needs.

A row holds trees: a prompt followed by its answers (Wang & Hegde 2024, arXiv:2410.20305). The positions of each answer
continue the prompt's, and an answer attends to its prompt and itself. Every document, a prompt with one answer, gives
the same results as in its own row, but the prompt is computed once. The log-probability of an answer's first token
comes from the prompt's last position. Only this file lays out a row; `modeling.shared_prefix` implements the
attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..batch import BOUNDS, BRANCHES, KEY_POSITIONS, LONGEST
from .collate import DOCUMENTS, WIDTHS, Batch, Collator, PackedCollator, width_of

ANSWERS = "answers"  # column of a row: number of answers after each of its prompts
GIVEN = "given"  # key of a row with one document: number of prompt tokens

Row = dict[str, Any]


class Tree(NamedTuple):
    """Token counts of a prompt and of its answers."""

    prompt: int
    answers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.answers)


class Segment(NamedTuple):
    """A prompt, an answer or padding: `tokens` tokens from `begin` on.

    Tokens before `last` may attend to the part; the part attends to the `prompt` tokens from `opening` on.
    """

    begin: int
    tokens: int
    last: int
    opening: int = 0
    prompt: int = 0


def trees_of(row: Row) -> list[Tree]:
    """Return the trees of a row from its columns `ANSWERS` and seq_lengths (tokens of each prompt, then of its
    answers)."""
    lengths = iter(row["seq_lengths"])
    return [Tree(next(lengths), tuple(next(lengths) for _ in range(count))) for count in row[ANSWERS]]


def as_trees(rows: Sequence[Row]) -> list[Row]:
    """Convert rows of one prompt (`GIVEN` tokens) and one answer to rows of trees; adjacent rows with equal prompts
    share one."""
    trees: list[Row] = []
    last: list[int] | None = None
    for row in rows:
        ids, prompt_tokens = list(row["input_ids"]), row[GIVEN]
        if ids[:prompt_tokens] != last:
            last = ids[:prompt_tokens]
            trees.append({"input_ids": list(last), "seq_lengths": [prompt_tokens], ANSWERS: [0]})
        tree = trees[-1]
        tree["input_ids"] += ids[prompt_tokens:]
        tree["seq_lengths"].append(len(ids) - prompt_tokens)
        tree[ANSWERS][0] += 1
    return trees


def document_places(tree: Tree, begin: int) -> Iterator[np.ndarray]:
    """Yield the token positions of the prompt plus each answer, for a tree that starts at `begin`."""
    prompt, at = np.arange(begin, begin + tree.prompt), begin + tree.prompt
    for answer in tree.answers:
        yield np.concatenate([prompt, np.arange(at, at + answer)])
        at += answer


def _segments(tree: Tree, begin: int) -> Iterator[Segment]:
    at, end = begin + tree.prompt, begin + tree.tokens
    yield Segment(begin, tree.prompt, end)
    for answer in tree.answers:
        yield Segment(at, answer, at + answer, begin, tree.prompt)
        at += answer


@dataclass(frozen=True)
class BranchCollator:
    """Collate rows of trees, padded on the right to the longest row, or concatenated to one row.

    Returns input_ids and position_ids, int64 [rows, width], and for the N = rows · width tokens

    - branches: int32 [4, N]: start of the token's part; end of the last part that attends to it; start and end of the
      prompt that it attends to in addition (0 and 0 without one);
    - cu_seq_lens_q: int32 [parts + 1]: start of each part; the last value repeats as padding;
    - key_places, cu_seq_lens_k: int64 [K] and int32 [parts + 1]: the tokens that each part attends to, its prompt's
      first, and where each part's keys start;
    - max_length_q, max_length_k: upper bounds of a part's queries and keys.

    Args:
        one_row: concatenate all rows.
        max_length: upper bound of a row's tokens.
        rounded: round sizes up to few shapes, since each shape costs a CUDA graph.
        widths: number of widths per octave if `rounded`.
    """

    pad_token_id: int
    one_row: bool = False
    max_length: int | None = None
    rounded: bool = False
    widths: int = WIDTHS

    @classmethod
    def like(cls, collate: Collator, answers: int) -> BranchCollator:
        """Return the equivalent of `collate` for rows that hold a prompt with up to `answers` answers."""
        one_row = isinstance(collate, PackedCollator) and collate.one_row
        flat = isinstance(collate, PackedCollator)  # its max_length already bounds whole rows
        max_length = collate.max_length if flat or collate.max_length is None else answers * collate.max_length
        return cls(collate.pad_token_id, one_row, max_length, collate.rounded)

    def __call__(self, rows: Sequence[Row]) -> tuple[Batch, list[np.ndarray]]:
        """Return the batch, and the positions of every document's tokens in the flattened batch."""
        ids = [np.asarray(row["input_ids"], dtype=np.int64) for row in rows]
        trees = [trees_of(row) for row in rows]
        if self.one_row:
            ids, trees = [np.concatenate(ids)], [[tree for row in trees for tree in row]]
        width, max_length = max(map(len, ids)), self.max_length
        if self.rounded:
            width = width_of(
                width, max_length if max_length is None or not self.one_row else max_length * len(rows), self.widths
            )
        segments: list[Segment] = []
        positions: list[np.ndarray] = []
        for number, row in enumerate(trees):
            at = number * width
            for tree in row:
                segments += _segments(tree, at)
                positions += document_places(tree, at)
                at += tree.tokens
            left = (number + 1) * width - at
            segments += [Segment(at, left, at + left)] * bool(left)
        return self._laid_out(ids, width, segments), positions

    def further_answers(
        self, answers: Sequence[Sequence[int]], prompts: Sequence[np.ndarray], tokens: int
    ) -> tuple[Batch, list[np.ndarray]]:
        """Lay out further answers to the prompts of a batch, in one row, for a forward that reuses that batch's keys
        and values (`modeling.shared_prefix.PrefixCache`).

        Args:
            prompts: positions of each answer's prompt tokens in the flattened batch.
            tokens: number of tokens of the batch.

        Returns:
            As `__call__`, but branches, key_places and the documents' positions count from the batch's first token.
        """
        ids = np.concatenate([np.asarray(answer, dtype=np.int64) for answer in answers])
        width = width_of(len(ids), widths=self.widths) if self.rounded else len(ids)
        segments: list[Segment] = []
        positions: list[np.ndarray] = []
        at = tokens
        for answer, prompt in zip(answers, prompts, strict=True):
            segments.append(Segment(at, len(answer), at + len(answer), int(prompt[0]), len(prompt)))
            positions.append(np.concatenate([prompt, np.arange(at, at + len(answer))]))
            at += len(answer)
        left = tokens + width - at
        segments += [Segment(at, left, at + left)] * bool(left)
        return self._laid_out([ids], width, segments), positions

    def _laid_out(self, ids: Sequence[np.ndarray], width: int, segments: list[Segment]) -> Batch:
        padded = np.full((len(ids), width), self.pad_token_id)
        for line, tokens in zip(padded, ids, strict=True):
            line[: len(tokens)] = tokens
        batch = {"input_ids": torch.from_numpy(padded), **self._layout(segments)}
        batch["position_ids"] = batch["position_ids"].view(padded.shape)
        return batch

    def _layout(self, segments: list[Segment]) -> Batch:
        lengths, prompts = (np.array([getattr(segment, name) for segment in segments]) for name in ("tokens", "prompt"))
        begins, openings = (np.array([getattr(segment, name) for segment in segments]) for name in ("begin", "opening"))
        keys = lengths + prompts
        bounds, key_bounds = (np.concatenate([[0], sizes.cumsum()]) for sizes in (lengths, keys))
        spans = [begins, np.array([segment.last for segment in segments]), openings, openings + prompts]
        branches = np.stack([span.repeat(lengths) for span in spans])
        seen = np.arange(keys.sum()) - key_bounds[:-1].repeat(keys)  # index among the keys of its part
        first = np.where(seen < prompts.repeat(keys), openings.repeat(keys), (begins - prompts).repeat(keys))
        positions = begins[0] + np.arange(lengths.sum()) + (prompts - begins).repeat(lengths)
        longest, longest_keys = int(lengths.max()), int(keys.max())
        key_places = first + seen
        if self.rounded:
            longest, longest_keys = (1 << (size - 1).bit_length() for size in (longest, longest_keys))
            fill = -(-len(segments) // DOCUMENTS) * DOCUMENTS - len(segments)
            bounds, key_bounds = (np.pad(sizes, (0, fill), mode="edge") for sizes in (bounds, key_bounds))
            filled = width_of(len(key_places), widths=self.widths)
            key_places = np.pad(key_places, (0, filled - len(key_places)))
        return {
            "position_ids": torch.from_numpy(positions),
            BRANCHES: torch.from_numpy(branches.astype(np.int32)),
            KEY_POSITIONS: torch.from_numpy(key_places),
            **dict(
                zip(BOUNDS, (torch.from_numpy(sizes.astype(np.int32)) for sizes in (bounds, key_bounds)), strict=True)
            ),
            **dict(zip(LONGEST, (longest, longest_keys), strict=True)),
        }
