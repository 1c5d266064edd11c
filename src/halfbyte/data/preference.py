"""Recognising rows of preference and RL training from their columns.

Rows are one of four kinds, whatever the file called its columns (`data.answers` reads them):

- pairs: a prompt, explicit or not, with a chosen and a rejected answer;
- unpaired: a prompt with one answer and a label that says whether it is desirable;
- prompts: a prompt alone, with any further columns;
- stepwise: a prompt with the steps of an answer, each with a label that says whether it is right.

Sources: preference, unpaired preference, prompt-only and stepwise rows as in TRL; ranking and `kto_tag` rows and
`chosen_messages` as in LLaMA-Factory; dialogues as text as in Anthropic's HH (Bai et al., 2204.05862).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..utils.errors import DataError
from ..utils.notices import notice
from .context import instructing, shown_beside
from .formats import (
    CHAT_COLUMNS,
    METHODS_FOR,
    PAIR_COLUMNS,
    PAIRS,
    STEP_COLUMNS,
    WORDS,
    check_mapping,
    columns_of,
)
from .sources import Source

Kind = Literal["pairs", "unpaired", "prompts", "stepwise"]
# What `column_mapping` may name.
PARTS = (
    *("prompt", "completion", "chosen", "rejected", "label", "margin"),
    *("completions", "labels", "messages", "instruction", "input", "output", "system", "tools", "context", "history"),
)
CHOSEN, REJECTED = zip(*PAIR_COLUMNS, strict=True)
LABELS = ("label", "kto_tag")
# An `input` is a prompt beside an output only: elsewhere it goes with an instruction.
PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PAIRS if prompt != "input"))
ANSWERS = tuple(dict.fromkeys(answer for _, answer in PAIRS))
EXAMPLES = {
    "pairs": "column_mapping: {prompt: your_column, chosen: the_better, rejected: the_worse}",
    "unpaired": "column_mapping: {prompt: your_column, completion: the_answer, label: whether_it_is_good}",
    "prompts": "column_mapping: {prompt: your_column}",
    "stepwise": "column_mapping: {prompt: your_column, completions: the_steps, labels: which_are_right}",
}


@dataclass(frozen=True)
class RowLayout:
    """How the rows of one source are read.

    Attributes:
        kind: of the rows that are wanted.
        columns: part (of `PARTS`) to the column that plays it.
        why: what it was recognised by.
        paired: whether the rows are pairs; wanted unpaired, each is taken apart.
    """

    kind: Kind
    columns: dict[str, str]
    why: str
    paired: bool


def recognise_rows(source: Source, kind: Kind, mapping: Mapping[str, str] | None = None) -> RowLayout:
    """Find the columns of `source` (those of its first 100 rows) that rows of `kind` are made of.

    Args:
        source: at least one row.
        mapping: part (see `PARTS`) to column name, for columns with names of their own.

    Raises:
        DataError: a mapped column does not exist, or the columns are of rows that another method takes.
    """
    mapped = dict(mapping or {})
    check_mapping(source, mapped, PARTS, mapped)
    columns = {column: column for column in columns_of(source)} | mapped
    found = _kind_of(columns)
    parts = _parts(columns, "pairs" if kind == "unpaired" and found == "pairs" else kind)
    if parts is None or (kind == "prompts" and found in ("pairs", "stepwise")):
        raise _misfit(source, kind, found)
    parts |= instructing(source, parts, mapped)
    parts |= shown_beside(source, parts, mapped)
    for part in ("prompt", "completion", "label"):
        if parts.get(part, part) != part and part not in mapped:
            notice(f"columns:{source.path}:{part}", f"{source.path}: {parts[part]} is read as the {part}")
    paired = "chosen" in parts
    if kind == "unpaired" and paired:
        notice(f"unpaired:{source.path}", f"{source.path}: each pair is taken apart: chosen desirable, rejected not")
    return RowLayout(kind, parts, f"columns {', '.join(parts.values())}", paired)


def _kind_of(columns: Mapping[str, str]) -> str | None:
    """The kind of rows that have these parts; None: of none."""
    for kind in ("stepwise", "pairs", "unpaired"):
        if _parts(columns, kind) is not None:
            return kind
    pairs = any(prompt in columns and answer in columns for prompt, answer in PAIRS)
    if pairs or "text" in columns or _first(CHAT_COLUMNS, columns):
        return "text"
    return "prompts" if _parts(columns, "prompts") is not None else None


def _parts(columns: Mapping[str, str], kind: str) -> dict[str, str] | None:
    """The columns that rows of `kind` are made of, by part; None where one is missing."""
    prompt = _prompt(columns)
    if kind == "prompts":
        return prompt or None
    if kind == "stepwise":
        steps = {part: columns[part] for part in STEP_COLUMNS if part in columns}
        return {**prompt, **steps} if prompt and len(steps) == 2 else None
    if kind == "pairs":
        chosen, rejected = _first(CHOSEN, columns), _first(REJECTED, columns)
        if not (chosen and rejected):
            return None
        margin = {"margin": columns["margin"]} if "margin" in columns else {}
        return {**prompt, "chosen": columns[chosen], "rejected": columns[rejected], **margin}
    label, answer = _first(LABELS, columns), _first(ANSWERS, columns)
    if not label or not (answer or "messages" in prompt):
        return None
    completion = {"completion": columns[answer]} if answer else {}
    return {**prompt, **completion, "label": columns[label]}


def _prompt(columns: Mapping[str, str]) -> dict[str, str]:
    """The columns of the prompt, by part; none where it is part of the answers."""
    if "instruction" in columns and "input" in columns and "prompt" not in columns:
        return {part: columns[part] for part in ("instruction", "input")}
    if found := _first(PROMPTS, columns):
        return {"prompt": columns[found]}
    found = _first(CHAT_COLUMNS, columns)
    return {"messages": columns[found]} if found else {}


def _first(names: Sequence[str], columns: Mapping[str, str]) -> str:
    return next((name for name in names if name in columns), "")


def _misfit(source: Source, kind: Kind, found: str | None) -> DataError:
    """What is said of rows that are not of `kind`."""
    present = columns_of(source)
    what = f"{source.path} (columns {', '.join(present)})"
    known = sorted({*PARTS, *CHAT_COLUMNS, *PROMPTS, *ANSWERS, *CHOSEN, *REJECTED, *LABELS})
    near = ((column, difflib.get_close_matches(column, known, n=1)) for column in present if column not in known)
    hint = next((f"; did you mean {names[0]!r} by {column!r}?" for column, names in near if names), "")
    if found is not None and found != kind:
        fix = f"set method: {METHODS_FOR[found]}, or name other columns, e.g. {EXAMPLES[kind]}"
        return DataError(f"{what} holds {WORDS[found]}, not {WORDS[kind]}{hint}", fix)
    return DataError(f"{what} holds no {WORDS[kind]}{hint}", f"name its columns, e.g. {EXAMPLES[kind]}")
