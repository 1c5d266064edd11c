"""What became of the data: the numbers of data_report.json, and samples that show what is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from ..ops import IGNORE_INDEX
from ..utils.notices import notice

SAMPLES, SAMPLE_TOKENS = 3, 400
HELD_OUT_TOKENS = 4096  # enough to tell 0.01 nats between two models that are nearly the same
BINS = 30


def split_report(
    encoded: Dataset, kept: Dataset, rows: Dataset, truncated: int, empty: int, row_capacity: int | None
) -> dict[str, Any]:
    """The report's part on one split.

    Args:
        encoded: every document, with its length in tokens before cutting and the reason it was dropped, if any.
        kept: the documents that are trained on.
        rows: what they became; packed rows, or the same.
        truncated: how many of them were cut.
        empty: how many of them have empty answers.
        row_capacity: tokens a packed row may hold; None when rows are not packed.
    """
    labels, lengths = ragged(kept, "labels")
    tokens = int(lengths.sum())
    return {
        "documents": len(kept),
        "rows": len(rows),
        "tokens": tokens,
        "trained_tokens": int(np.count_nonzero(labels != IGNORE_INDEX)),
        "dropped": dict(Counter(reason for reason in encoded["dropped"] if reason)),
        "truncated": truncated,
        "empty_answers": empty,
        "packing_efficiency": tokens / (len(rows) * row_capacity) if row_capacity else None,
        "length_histogram": _histogram(np.array(list(encoded["length"]))),
    }


def answers_report(encoded: Dataset, kept: Dataset, names: Sequence[str], truncated: int) -> dict[str, Any]:
    """The report's part on one split of rows with prompts and answers.

    Args:
        encoded: every row, with the length in tokens of its prompt with its longest answer, before cutting, and the
            reason it was dropped, if any.
        kept: the rows that are trained on.
        names: of their answers: `NAME_ids` and `NAME_mask` are columns.
        truncated: how many of them have answers that were cut.
    """
    prompts = ragged(kept, "prompt_ids")[1]
    lengths = {name: ragged(kept, f"{name}_ids")[1] for name in names}
    trained = sum(int(ragged(kept, f"{name}_mask")[0].sum()) for name in names)
    tokens = {"prompt": prompts, **lengths}
    if "label" in kept.column_names:
        good = np.array(kept["label"])
        tokens |= {"desirable": lengths["completion"][good], "undesirable": lengths["completion"][~good]}
    report = {
        "documents": len(kept),
        "rows": len(kept),
        "tokens": int(prompts.sum()) + sum(int(each.sum()) for each in lengths.values()),
        "trained_tokens": trained,
        "dropped": dict(Counter(reason for reason in encoded["dropped"] if reason)),
        "truncated": truncated,
        "empty_answers": sum(kept["empty"]),
        "packing_efficiency": None,
        "length_histogram": _histogram(np.array(list(encoded["length"]))),
        "mean_tokens": {name: float(each.mean()) for name, each in tokens.items() if len(each)},
    }
    if "chosen" in lengths:
        report["chosen_longer"] = float((lengths["chosen"] > lengths["rejected"]).mean())
    if "label" in kept.column_names:
        report["desirable"] = int(good.sum())
    if "steps" in lengths:
        right = ragged(kept, "right")[0]
        report |= {"steps": len(right), "right_steps": int(right.sum())}
    return report


def ragged(dataset: Dataset, column: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists as all values one after the other, and the length of each list; quicker than row by row."""
    chunks = dataset.select_columns(column).with_format("arrow")[:][column].chunks
    values = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in chunks]
    return np.concatenate(values), np.concatenate([chunk.value_lengths().to_numpy() for chunk in chunks])


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """Counts of document lengths, before cutting, in whole-token bins [edge, next edge); the last edge is included."""
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1, -(-(high - low) // BINS))
    edges = np.arange(low, high + step + 1, step) if high > low else np.array([low, low + 1])
    counts, _ = np.histogram(lengths, bins=edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def endings(kept: Dataset, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Whether the model is taught to stop: `eos_trained`, and `stop_tokens`, the tokens that end trained turns.

    Warns where a trained turn has no end token, and where the token is not the tokenizer's EOS.
    """
    ends = Counter(ragged(kept, "ends")[0].tolist())
    total, open_turns = ends.total(), ends.pop(-1, 0)
    names = [str(tokenizer.convert_ids_to_tokens(end)) for end, _ in ends.most_common()]
    if open_turns:
        notice(
            "eos-trained",
            f"{open_turns} of {total} trained turns end without EOS or another special token, so the model does not "
            "learn to stop there; let the chat template write one after every assistant turn",
        )
    elif not ends:
        notice("eos-trained", "every document was cut, so no end of text is trained; raise max_length")
    elif tokenizer.eos_token_id not in ends:
        notice(
            "stop-token",
            f"trained turns end with {', '.join(names)}, which is not the tokenizer's EOS {tokenizer.eos_token}: "
            "generation has to stop there too",
        )
    return {"eos_trained": bool(ends) and not open_turns, "stop_tokens": names}


def samples(kept: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, list[Any]]]:
    """The first three documents as strings of tokens and whether each is trained, at most 400 tokens each."""
    shown = []
    for row in kept.select(range(min(SAMPLES, len(kept)))):
        ids, labels = row["input_ids"][:SAMPLE_TOKENS], row["labels"][:SAMPLE_TOKENS]
        shown.append({"tokens": token_strings(tokenizer, ids), "trained": [label != IGNORE_INDEX for label in labels]})
    return shown


def held_out(kept: Dataset) -> list[dict[str, list[Any]]]:
    """The first held-out documents as ids and whether each counts in the loss, `HELD_OUT_TOKENS` in all: what `merge`
    compares losses on, wherever the data are by then."""
    found: list[dict[str, list[Any]]] = []
    left = HELD_OUT_TOKENS
    for row in kept:
        ids, labels = row["input_ids"][:left], row["labels"][:left]
        if any(label != IGNORE_INDEX for label in labels[1:]):
            found.append({"input_ids": ids, "trained": [label != IGNORE_INDEX for label in labels]})
            left -= len(ids)
        if left <= 0:
            break
    return found


def token_strings(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """One readable string per token; joined, they are the decoded text.

    A character spread over several tokens is shown at its last one, the others are empty.
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
