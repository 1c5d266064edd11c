"""From a run's configuration to tokenized rows of preference or RL training, and a report of what became of each."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import datasets
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..ops import IGNORE_INDEX
from ..utils.errors import DataError
from ..utils.notices import notice
from .answers import rows_in
from .chat import ChatTemplate
from .csv_values import with_values
from .encode_answers import ALIKE, CUT, NAMES, NO_PROMPT, NO_ROOM, AnswerEncoder
from .formats import Document
from .leftovers import leftovers, say_leftovers
from .preference import Kind, recognise_rows
from .prepare import (
    ENCODED,
    IDS,
    REMEDY,
    Documents,
    PreparedData,
    asked_turns,
    check_unicode,
    encode,
    for_template,
    kept_rows,
    mask_of,
    not_shown_of,
    read_parts,
    template_of,
)
from .report import answers_report, endings, held_out, samples
from .sources import read_sources
from .tables import Table

MOST_SHOWN = 1_000  # rows that samples, and what `merge` compares losses on, are of
MASK = datasets.List(Value("int8"))
SCORED = ("reward", "prm")  # methods that learn the score of a whole answer
ANSWERED = ("pairs", "unpaired")  # whose trained tokens are an answer's
NO_END: dict[str, Any] = {"eos_trained": None, "stop_tokens": []}  # none is learned
FIXES = {  # where all labels are alike
    "unpaired": "add answers of the other label, or set method: sft to imitate desirable ones",
    "stepwise": "add steps of the other label",
}
REMEDIES = {
    **REMEDY,
    ALIKE: "give another answer as the rejected one: equal ones say nothing (check column_mapping)",
    NO_PROMPT: "give a prompt that ends with white space or a turn, or in a column of its own",
    CUT: "raise max_length: a reward model scores whole answers",
    NO_ROOM: "raise max_length, or lower max_completion_length",
}


def prepare_answers(config: RunConfig, tokenizer: PreTrainedTokenizerBase, kind: Kind) -> PreparedData:
    """Read, recognise, split, mask and tokenize rows of `kind`.

    The rows have, as lists of ints where nothing else is said,

    - pairs: prompt_ids, chosen_ids, rejected_ids, chosen_mask, rejected_mask (1 where a token is trained), and where
      the data has one, margin (float);
    - unpaired: prompt_ids, completion_ids, completion_mask, label (bool: desirable);
    - prompts: prompt_ids, prompt (turns or text, as in the data), columns (the further columns, as in the data);
    - stepwise: prompt_ids, steps_ids, steps_mask (1 at the last token of each step), right (bool, one a step).

    A prompt with an answer is the ids that supervised fine-tuning makes of that conversation, and the trained tokens
    are those it would train; with `assistant_only_loss: false` all of an answer is. What is longer than `max_length` is
    cut at its end, or dropped (`overlong`; always where a reward model is trained, which scores whole answers); a row
    stays where all its answers keep trained tokens.

    Args:
        config, tokenizer: as of `prepare`.

    Raises:
        DataError, ModelError, ConfigError: as of `prepare`; and rows that are another method's, or have a label other
            than true and false, or all the same one.
    """
    template = template_of(config, tokenizer)
    encoder = AnswerEncoder(
        tokenizer,
        template,
        max_length=config.max_length,
        overlong=config.overlong,
        kind=kind,
        everything=not config.assistant_only_loss,
        room=config.max_completion_length,
        separator=config.step_separator,
        uncut=config.method in SCORED,
    )
    training, evaluated, sources = read_parts(config, partial(_read, config, template, kind))
    train, said = _finish(training, encoder, config, "training")
    held, also_said = _finish(evaluated, encoder, config, "evaluation") if evaluated else (None, None)
    texts = _as_texts(train, kind)
    report = {
        "kind": kind,
        "sources": sources,
        "template": tokenizer.chat_template,
        "mask": "; ".join(training.masks),
        "train": said,
        "eval": also_said,
        **(_stops(encoder) if kind == "prompts" else endings(train, tokenizer) if kind in ANSWERED else NO_END),
        "samples": samples(texts, tokenizer),
        "held_out": held_out(_as_texts(held, kind)) if held is not None and kind in ANSWERED else [],
    }
    return PreparedData(_rows(train, kind), _rows(held, kind) if held is not None else None, report)


def _rows(kept: Dataset, kind: Kind) -> Dataset:
    """What training sees of the rows that are kept."""
    rows = kept.select_columns(
        [name for name in _features(kind, kept.column_names) if name not in (*ENCODED, "otherwise")]
    )
    return rows.with_transform(as_read) if kind == "prompts" else rows


def _features(kind: Kind, columns: Any) -> dict[str, Any]:
    """The columns of encoded rows, of which `columns` says whether there is a margin."""
    beside = {name: ENCODED[name] for name in ("length", "dropped", "ends", "empty", "not_shown")}
    beside["otherwise"] = Value("bool")
    ids = {f"{name}_ids": IDS for name in ("prompt", *NAMES[kind])}
    masks = {f"{name}_mask": MASK for name in NAMES[kind]}
    further: dict[str, Any] = {
        "pairs": {"margin": Value("float64")} if "margin" in columns else {},
        "unpaired": {"label": Value("bool")},
        "prompts": {"prompt": Value("string"), "columns": Value("string")},
        "stepwise": {"right": datasets.List(Value("bool"))},
    }[kind]
    return {**ids, **masks, **further, **beside}


def _read(
    config: RunConfig, template: ChatTemplate | None, kind: Kind, names: str | list[str], evaluating: bool
) -> Documents:
    found, margins = Documents(), {}
    for source in read_sources(names, config.dataset_split, evaluating=evaluating):
        layout = recognise_rows(source, kind, config.column_mapping)
        source, before = with_values(source, layout.columns), len(found.texts)
        written = True
        for where, row in rows_in(source, layout, templated=template is not None):
            written = written and any("text" in document for document in row.get("answers", ()))
            found.texts.append(_text(_for_template(row, template, where), where))
            found.places.append(where)
        found.masks[_mask_said(config, template, kind)] = None
        rows = len(found.texts) - before
        # Reward functions get the further columns of prompts; of margins only a reward model learns. Texts that hold
        # their own prompt show nothing else.
        unread = [] if config.method == "reward" else ["margin"]
        unread += ["system", "tools"] if written else []
        read = {part: name for part, name in layout.columns.items() if part not in unread}
        left_out = leftovers(source, read, None if kind == "prompts" and config.reward_funcs else ())
        summary = {"path": source.path, "format": kind, "why": layout.why, "rows": rows}
        found.sources.append(summary | ({"left_out": dict(left_out)} if left_out else {}))
        margins[source.path] = "margin" in layout.columns
    if len(set(margins.values())) > 1:
        having, lacking = (next(path for path, has in margins.items() if has is wanted) for wanted in (True, False))
        raise DataError(f"{lacking} has no column margin, and {having} has one", "give it in both, or in neither")
    say_leftovers(names, found.left_out)
    found.columns = ["margin"] if True in margins.values() else []
    return found


def _mask_said(config: RunConfig, template: ChatTemplate | None, kind: Kind) -> str:
    """What of the rows is trained, in words."""
    if kind == "stepwise":
        return "the last token of each step"
    return mask_of("answers", False, template) if config.assistant_only_loss else "every token of an answer"


def _for_template(row: dict[str, Any], template: ChatTemplate | None, where: str) -> dict[str, Any]:
    """The row with its documents in a form that the template shows."""
    if "answers" in row:
        return {**row, "answers": [for_template(document, template, where) for document in row["answers"]]}
    prompt: Document = row["prompt"]
    if template is None:
        return {**row, "prompt": for_template(prompt, None, where)}
    messages = prompt.get("messages")
    if messages is None:
        messages = asked_turns(prompt)
    messages, tools = template.understood(messages, prompt.get("tools"))
    return {**row, "prompt": {"messages": messages, "tools": tools}}


def _text(row: dict[str, Any], where: str) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False)
    except (TypeError, ValueError) as error:  # dates and bytes of a Parquet file
        raise DataError(f"{where}: the row holds what is neither text nor a number: {error}", "make it text") from error
    if not text.isascii():
        check_unicode(text, where)
    return text


def _finish(found: Documents, encoder: AnswerEncoder, config: RunConfig, name: str) -> tuple[Dataset, dict[str, Any]]:
    """The rows of a split that are kept, with all their columns, and its part of the report."""
    kind, total = encoder.kind, len(found.texts)
    encoded = encode(found, encoder, config, _features(kind, found.columns))
    kept = kept_rows(encoded, f"{name} rows", config.max_length, REMEDIES)
    truncated = sum(length > config.max_length for length in kept["length"])
    if truncated:
        notice(
            f"truncated:{name}",
            f"{truncated} of {total} {name} rows have answers cut to max_length {config.max_length}:"
            f" the longest row has {max(encoded['length']):,} tokens",
        )
    if otherwise := sum(kept["otherwise"]):
        wrong = "the chat template writes the prompt otherwise where no answer follows, so generation sees another one"
        notice(f"otherwise:{name}", f"{otherwise} of {total} {name} rows: {wrong}")
    _check_answers(kept, kind, name)
    contradicting = _contradicting(found.texts, kind)
    if contradicting:
        notice(f"contradicting:{name}", f"{contradicting} {name} rows say the opposite of another one")
    report = answers_report(encoded, kept, NAMES[kind], truncated)
    report["not_shown"] = not_shown_of(kept, f"{name} rows")
    return kept, {**report, "contradicting": contradicting, "prompts_otherwise_alone": otherwise}


def _check_answers(kept: Dataset, kind: Kind, name: str) -> None:
    """Whether the answers of a split say anything, and of those with a label, not all the same."""
    empty, total = sum(kept["empty"]), len(kept)
    if empty == total and kind != "prompts" and name == "training":
        raise DataError(
            f"all {total} {name} rows have an empty answer", "check the rows and columns of the data (column_mapping)"
        )
    if empty:
        notice(f"empty:{name}", f"{empty} of {total} {name} rows have an empty answer")
    if name != "training" or kind not in FIXES:
        return
    labels = set(kept["label"]) if kind == "unpaired" else {label for row in kept["right"] for label in row}
    if len(labels) == 1:
        said = f"all {total} {name} rows have the label {json.dumps(labels.pop())}"
        raise DataError(f"{said}: there is nothing to tell apart", FIXES[kind])


def _contradicting(texts: list[str], kind: Kind) -> int:
    """How many rows say the opposite of an earlier one: the same answers the other way round, or with another label."""
    if kind == "prompts":
        return 0
    seen: set[tuple[int, int]] = set()
    count = 0
    for row in (json.loads(text) for text in texts):
        if kind == "stepwise":
            row = _last_step(row)
        answers = [hash(json.dumps(document)) for document in row["answers"]]
        says = (answers[0], answers[1] if len(answers) > 1 else row["label"])
        opposite = (says[1], says[0]) if len(answers) > 1 else (says[0], not row["label"])
        count += opposite in seen
        seen.add(says)
    return count


def _last_step(row: dict[str, Any]) -> dict[str, Any]:
    """A row of steps as an answer with the label of its last."""
    return {"answers": [[row["prompt"], row["steps"]]], "label": row["labels"][-1]}


def _as_texts(rows: Dataset, kind: Kind) -> Dataset:
    """The first rows as texts with labels, each prompt with its first answer."""
    first = rows.select(range(min(len(rows), MOST_SHOWN)))
    name = next(iter(NAMES[kind]), "")
    ids, labels = [], []
    for row in first:
        answer, mask = (row[f"{name}_ids"], row[f"{name}_mask"]) if name else ([], [])
        ids.append([*row["prompt_ids"], *answer])
        given = [IGNORE_INDEX] * len(row["prompt_ids"])
        labels.append(
            [*given, *(token if trained else IGNORE_INDEX for token, trained in zip(answer, mask, strict=True))]
        )
    return Table.from_dict({"input_ids": ids, "labels": labels}, features=Features({"input_ids": IDS, "labels": IDS}))


def _stops(encoder: AnswerEncoder) -> dict[str, Any]:
    """How answers will end: with the token that the chat template writes behind them, or with EOS.

    Raises:
        DataError: the template writes none, so an answer would never end.
    """
    tokenizer = encoder.tokenizer
    if encoder.template is None:
        return {"eos_trained": True, "stop_tokens": [tokenizer.eos_token]}
    if not encoder.template.ending:
        raise DataError(
            "the chat template writes no special token behind an answer, so a model's answers would never end",
            "give a template with an end-of-turn token with chat_template_path",
        )
    return {"eos_trained": True, "stop_tokens": [encoder.template.ending]}


def as_read(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Prompts and further columns out of the JSON in which they are stored: Arrow would merge the keys of all rows."""
    return {
        name: [json.loads(value) for value in values] if name in ("prompt", "columns") else values
        for name, values in batch.items()
    }
