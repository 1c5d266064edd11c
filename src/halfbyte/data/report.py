"""The numbers of data_report.json: counts per split, samples that show which tokens are trained, and values that
nothing reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..ops import IGNORE_INDEX
from ..utils.notices import notice
from ..utils.text import brief
from .formats import MARKS, MESSAGE_KEYS, ROLES
from .images import IMAGES
from .sources import Row, Source

SAMPLES, SAMPLE_TOKENS = 3, 400
HELD_OUT_TOKENS = 4096  # enough to measure 0.01 nats between two similar models
BINS = 30
TURN_PARTS = ("messages", "prompt", "completion", "chosen", "rejected")  # parts that may hold turns
TEXT_PROMPT_PARTS = ("context", "input", "history")  # parts that are shown with a text prompt only
CALL_KEYS, FUNCTION_KEYS = {"id", "type", "function", "name", "arguments"}, {"name", "arguments"}
EMPTY: tuple[Any, ...] = (None, "", [], {})
MOST_NAMED = 20


def split_report(
    encoded: Dataset, trainable: Dataset, rows: Dataset, truncated: int, empty: int, row_capacity: int | None
) -> dict[str, Any]:
    """Return the report's part on one split.

    Args:
        encoded: every document, with its length in tokens before truncation and the reason for dropping it, if any.
        trainable: the documents that are trained on.
        rows: the rows made of `trainable`, packed or not.
        truncated: number of truncated documents.
        empty: number of documents with empty answers.
        row_capacity: tokens that a packed row may hold; None if rows are not packed.
    """
    labels, lengths = ragged(trainable, "labels")
    tokens = int(lengths.sum())
    return images_report(trainable) | {
        "documents": len(trainable),
        "rows": len(rows),
        "tokens": tokens,
        "trained_tokens": int(np.count_nonzero(labels != IGNORE_INDEX)),
        "dropped": dict(Counter(reason for reason in encoded["dropped"] if reason)),
        "truncated": truncated,
        "empty_answers": empty,
        "packing_efficiency": tokens / (len(rows) * row_capacity) if row_capacity else None,
        "length_histogram": _histogram(np.array(list(encoded["length"]))),
    }


def images_report(trainable: Dataset) -> dict[str, Any]:
    """Return the number of images of a split and their tokens, as `images`; empty without images."""
    images = [image["tokens"] for row in trainable[IMAGES] for image in row] if IMAGES in trainable.column_names else []
    return {"images": {"count": len(images), "tokens": sum(images), "largest": max(images)}} if images else {}


def answers_report(encoded: Dataset, trainable: Dataset, names: Sequence[str], truncated: int) -> dict[str, Any]:
    """Return the report's part on one split of rows with prompts and answers.

    Args:
        encoded: every row, with the tokens of its prompt and longest answer before truncation and the reason for
            dropping it, if any.
        trainable: the rows that are trained on.
        names: names of the answers: `NAME_ids` and `NAME_mask` are columns.
        truncated: number of rows with truncated answers.
    """
    prompts = ragged(trainable, "prompt_ids")[1]
    lengths = {name: ragged(trainable, f"{name}_ids")[1] for name in names}
    trained = sum(int(ragged(trainable, f"{name}_mask")[0].sum()) for name in names)
    tokens = {"prompt": prompts, **lengths}
    if "label" in trainable.column_names:
        good = np.array(trainable["label"])
        tokens |= {"desirable": lengths["completion"][good], "undesirable": lengths["completion"][~good]}
    report = {
        "documents": len(trainable),
        "rows": len(trainable),
        "tokens": int(prompts.sum()) + sum(int(counts.sum()) for counts in lengths.values()),
        "trained_tokens": trained,
        "dropped": dict(Counter(reason for reason in encoded["dropped"] if reason)),
        "truncated": truncated,
        "empty_answers": sum(trainable["empty"]),
        "packing_efficiency": None,
        "length_histogram": _histogram(np.array(list(encoded["length"]))),
        "mean_tokens": {name: float(counts.mean()) for name, counts in tokens.items() if len(counts)},
    }
    if "chosen" in lengths:
        report["chosen_longer"] = float((lengths["chosen"] > lengths["rejected"]).mean())
    if "label" in trainable.column_names:
        report["desirable"] = int(good.sum())
    if "steps" in lengths:
        right = ragged(trainable, "right")[0]
        report |= {"steps": len(right), "right_steps": int(right.sum())}
    return report


def ragged(dataset: Dataset, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all values of a column of lists, concatenated, and the length of each list; faster than row by row."""
    chunks = dataset.select_columns(column).with_format("arrow")[:][column].chunks
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate(values), np.concatenate([chunk.value_lengths().to_numpy() for chunk in chunks])


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Count document lengths before truncation in bins of whole tokens, [edge, next edge); the last edge is
    included."""
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1, -(-(high - low) // BINS))
    edges = np.arange(low, high + step + 1, step) if high > low else np.array([low, low + 1])
    counts, _ = np.histogram(lengths, bins=edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def endings(trainable: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return whether the model learns to stop: `eos_trained`, and `stop_tokens`, the tokens that end trained turns.

    Warns if a trained turn has no end token, or another one than the tokenizer's EOS.
    """
    ends = Counter(ragged(trainable, "ends")[0].tolist())
    total, open_turns = ends.total(), ends.pop(-1, 0)
    names = [str(tokenizer.convert_ids_to_tokens(end)) for end, _ in ends.most_common()]
    if open_turns:
        notice(
            "eos-trained",
            f"{open_turns} of {total} trained turns end without EOS or another special token, so the model does not "
            "learn to stop there; use a chat template that writes one after every assistant turn",
        )
    elif not ends:
        notice("eos-trained", "every document was truncated, so no end of text is trained; raise max_length")
    elif tokenizer.eos_token_id not in ends:
        notice(
            "stop-token",
            f"halfbyte stops generation at {', '.join(names)} and {tokenizer.eos_token}; other servers need both as"
            " stop tokens, which merge and export write",
        )
    return {"eos_trained": bool(ends) and not open_turns, "stop_tokens": names}


def samples(trainable: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, list[Any]]]:
    """Return the first three documents, at most 400 tokens each, as token strings and whether each token is trained."""
    shown = []
    for row in trainable.select(range(min(SAMPLES, len(trainable)))):
        ids, labels = row["input_ids"][:SAMPLE_TOKENS], row["labels"][:SAMPLE_TOKENS]
        shown.append({"tokens": token_strings(tokenizer, ids), "trained": [label != IGNORE_INDEX for label in labels]})
    return shown


def held_out(documents: Dataset) -> list[dict[str, list[Any]]]:
    """Return the first held-out documents, `HELD_OUT_TOKENS` tokens in total, as ids and whether each counts in the
    loss.

    `merge` compares losses on them, even if the data have moved since.
    """
    selected: list[dict[str, list[Any]]] = []
    left = HELD_OUT_TOKENS
    for row in documents:
        ids, labels = row["input_ids"][:left], row["labels"][:left]
        if any(label != IGNORE_INDEX for label in labels[1:]):
            selected.append({"input_ids": ids, "trained": [label != IGNORE_INDEX for label in labels]})
            left -= len(ids)
        if left <= 0:
            break
    return selected


def token_strings(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """Return one readable string per token; concatenated, they are the decoded text.

    A character that spans several tokens is shown at its last token; the other strings are empty.
    """
    strings, shown = [], ""
    for count in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if text.endswith("\ufffd") and count < len(ids):
            strings.append("")
            continue
        strings.append(text[len(shown) :])
        shown = text
    return strings


# --- columns and keys that nothing reads ------------------------------------------------------------------------------


def count_unread(source: Source, columns: Mapping[str, str], further: Collection[str] | None = ()) -> Counter[str]:
    """Count the rows of `source` with a value in each column, and in each key of turns, that nothing reads.

    A key of turns is written `column[].key`.

    Args:
        columns: part to column.
        further: other columns that are read; None: all of them.
    """
    read = {*columns.values(), *(further or ())}
    with_turns = [columns[field] for field in TURN_PARTS if field in columns]
    unread: Counter[str] = Counter()
    for row in source.rows:
        names = {name for name, value in row.items() if name not in read and value not in EMPTY}
        names = set() if further is None else names
        for column in with_turns:
            names |= {f"{column}[].{key}" for turn in _turns(row, column) for key in _unread_keys(turn)}
        unread.update(names | _shadowed(row, columns))
    return unread


def _turns(row: Row, column: str) -> list[dict[str, Any]]:
    value = row.get(column)
    several = value if isinstance(value, list) else [value]  # LLaMA-Factory stores a single turn without a list
    return [turn for turn in several if isinstance(turn, dict)]


def _unread_keys(turn: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a turn that are not part of its message."""
    read = {"role" if "role" in turn else "from", "content" if "content" in turn else "value", *MESSAGE_KEYS, *MARKS}
    yield from (key for key, value in turn.items() if key not in read and value not in EMPTY)
    calls = turn.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        for read_here, prefix, value in ((CALL_KEYS, "", call), (FUNCTION_KEYS, "function.", _function(call))):
            yield from (f"tool_calls[].{prefix}{key}" for key in value if key not in read_here)


def _function(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return function if isinstance(function, dict) else {}


def _shadowed(row: Row, columns: Mapping[str, str]) -> set[str]:
    """Return the columns that a row's turns replace.

    A system turn replaces a system column. A conversation in the answers replaces a text prompt that is not in it, and
    the columns shown with that prompt.
    """
    turns = [turn for field in TURN_PARTS if field in columns for turn in _turns(row, columns[field])]
    texts = {text.strip() for turn in turns if isinstance(text := turn.get("content", turn.get("value")), str)}
    shadowed = set()
    system, prompt = columns.get("system", ""), columns.get("prompt", "")
    if any(_role(turn) == "system" for turn in turns[:1]) and row.get(system):
        shadowed |= {system} if str(row[system]).strip() not in texts else set()
    with_prompt = {columns[field] for field in TEXT_PROMPT_PARTS if row.get(columns.get(field, ""))}
    if isinstance(row.get(prompt), list):
        shadowed |= with_prompt
    elif isinstance(row.get(prompt), str) and any(_role(turn) != "assistant" for turn in turns[:1]):
        shadowed |= with_prompt | ({prompt} if row[prompt].strip() not in texts else set())
    return shadowed


def _role(turn: Mapping[str, Any]) -> str | None:
    return ROLES.get(str(turn.get("role", turn.get("from"))))


def report_unread(names: str | Sequence[str], unread: Mapping[str, int]) -> None:
    """Log one notice with the columns and keys of a dataset that nothing reads."""
    if not unread:
        return
    dataset = names if isinstance(names, str) else ", ".join(names)
    counts = sorted(unread.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{brief(name)} ({count:,} row{'s' * (count > 1)})" for name, count in counts[:MOST_NAMED])
    remainder = f" and {len(counts) - MOST_NAMED} more" if len(counts) > MOST_NAMED else ""
    notice(
        f"left-out:{dataset}",
        f"{dataset}: ignoring {shown}{remainder}; to use a column, map its part with column_mapping",
    )
