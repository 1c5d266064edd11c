"""From a run's configuration to tokenized training and evaluation data, and a report of what became of every row."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from ..config import RunConfig
from ..utils.errors import ConfigError, DataError
from ..utils.notices import notice
from .chat import ChatTemplate, tool_text
from .csv_values import with_values
from .encode import CUT_AWAY, INSTRUCTION, TOO_LONG, UNTRAINED, Encoder
from .formats import Document, documents, number_in, recognise
from .leftovers import leftovers, say_leftovers
from .pack import pack
from .report import endings, held_out, ragged, samples, split_report
from .sources import read_sources
from .tables import Table

ROWS_PER_PROCESS = 5_000  # with fewer, a process costs more to start than it saves
ROWS_WITH_PROGRESS = 2_000
IDS, NUMBERS = datasets.List(Value("int32")), datasets.List(Value("float64"))
ENCODED = Features(
    {
        "input_ids": IDS,
        "labels": IDS,
        "length": Value("int64"),
        "dropped": Value("string"),
        "ends": IDS,
        "empty": Value("bool"),
        "not_shown": datasets.List(Value("string")),
    }
)
REMEDY = {
    TOO_LONG: "raise max_length, or set overlong: truncate",
    CUT_AWAY: "raise max_length: the answers begin behind it",
    UNTRAINED: "check the roles and columns of the data (column_mapping, dataset_format): no answers were found",
}


@dataclass(frozen=True)
class PreparedData:
    """Tokenized data.

    Attributes:
        train, eval: columns input_ids and labels (unshifted, -100 where untrained) and, when packed, seq_lengths.
        report: the contents of data_report.json.
        answers: documents that each row of the data stands for; rows of several have seq_lengths, packed or not.
        together: how many of these one forward takes.
        counted: what each row is of per_device_train_batch_size.
        shared: whether the documents of a row share their prompt, which stands once before them (`branches`).
    """

    train: Dataset
    eval: Dataset | None
    report: dict[str, Any]
    answers: int = 1
    together: int = 1
    shared: bool = False
    counted: int = 1


@dataclass
class Documents:
    """Documents as JSON text (Arrow would merge the keys of all rows), their places, and how they were read."""

    texts: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    masks: dict[str, None] = field(default_factory=dict)
    columns: Sequence[str] = ()

    @property
    def left_out(self) -> Counter[str]:
        """Rows with a value in each column or key that is neither trained nor shown (`leftovers`)."""
        return sum((Counter(source.get("left_out", {})) for source in self.sources), Counter())

    def select(self, indices: np.ndarray) -> Documents:
        texts, places = [self.texts[i] for i in indices], [self.places[i] for i in indices]
        return Documents(texts, places, self.sources, self.masks, self.columns)


@dataclass(frozen=True)
class _Split:
    """One finished split: the documents kept, the rows made of them, and its part of the report."""

    kept: Dataset
    rows: Dataset
    report: dict[str, Any]


def prepare(config: RunConfig, tokenizer: PreTrainedTokenizerBase, columns: Sequence[str] = ()) -> PreparedData:
    """Read, recognise, split, mask, tokenize and (when asked) pack the data of a run.

    Conversations, and with a chat template also prompt-completion and alpaca rows, are rendered with the template and
    trained on assistant turns. Without a template the latter take a plain instruction format. Plain text is trained
    whole. EOS is appended wherever no template writes it.

    Args:
        config: the keys of `DataSection`, and seed.
        tokenizer: a fast one with EOS. Its chat template counts; chat_template_path is the loader's business.
        columns: of the data, with a number in each row, that the prepared rows keep: as lists, a number a document.

    Raises:
        DataError: the data are missing, malformed, of unknown layout, or leave nothing to train on.
        ModelError: the tokenizer has no character offsets or no EOS token.
        ConfigError: eval_split_size leaves nothing to train on.
    """
    template = template_of(config, tokenizer)
    encoder = Encoder(tokenizer, template, max_length=config.max_length, overlong=config.overlong)
    training, evaluated, sources = read_parts(config, partial(_read, config, template, columns))
    train = _finish(training, encoder, config, "training")
    evaluation = _finish(evaluated, encoder, config, "evaluation") if evaluated else None
    report = {
        "sources": sources,
        "template": tokenizer.chat_template,
        "mask": "; ".join(training.masks),
        "train": train.report,
        "eval": evaluation.report if evaluation else None,
        **endings(train.kept, tokenizer),
        "samples": samples(train.kept, tokenizer),
        "held_out": held_out(evaluation.kept) if evaluation else [],
    }
    return PreparedData(train.rows, evaluation.rows if evaluation else None, report)


def template_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate | None:
    """The tokenizer's chat template; errors name where it comes from."""
    path = config.chat_template_path
    if not tokenizer.chat_template:
        if path is not None:
            raise ConfigError(
                f"chat_template_path: {path} is empty", "give the path of a Jinja file, or remove the key"
            )
        return None
    file = Path(config.model_name_or_path, "chat_template.jinja")
    try:
        return ChatTemplate(tokenizer)
    except DataError as error:
        named = f"chat_template_path: {path}" if path else file if file.is_file() else config.model_name_or_path
        raise DataError(f"{named}: {error.message}", error.fix) from None


def _read(
    config: RunConfig,
    template: ChatTemplate | None,
    columns: Sequence[str],
    names: str | list[str],
    evaluating: bool,
) -> Documents:
    found = Documents(columns=columns)
    for source in read_sources(names, config.dataset_split, evaluating=evaluating):
        layout = recognise(
            source,
            format=config.dataset_format,
            mapping=config.column_mapping,
            text_field=config.dataset_text_field,
        )
        source = with_values(source, layout.columns, columns)
        pairs = layout.format in ("prompt-completion", "alpaca")
        everything = not (config.completion_only_loss if pairs else config.assistant_only_loss)
        for (where, document), row in zip(documents(source, layout), source.rows, strict=True):
            ready = for_template(document, template, where) | {"train_all": everything}
            if columns:
                ready["numbers"] = {name: number_in(row, name, where) for name in columns}
            text = json.dumps(ready, ensure_ascii=False, default=str)
            if not text.isascii():
                check_unicode(text, where)
            found.texts.append(text)
            found.places.append(where)
        found.masks[mask_of(layout.format, everything, template)] = None
        left_out = leftovers(source, layout.columns, columns)
        summary = {"path": source.path, "format": layout.format, "why": layout.why, "rows": len(source.rows)}
        found.sources.append(summary | ({"left_out": dict(left_out)} if left_out else {}))
    say_leftovers(names, found.left_out)
    return found


def for_template(document: Document, template: ChatTemplate | None, where: str) -> Document:
    """Make what the template can render of a document: pairs become a conversation where there is a template."""
    if "prompt" in document:
        if template is None:
            notice("no-template", f"no chat template: rows are written as {INSTRUCTION!r} and the completion")
            before = [document["system"]] if "system" in document else []
            before += [tool_text(document["tools"])] if "tools" in document else []
            return document | ({"system": "\n\n".join(before)} if before else {})
        earlier, answer = asked_turns(document), {"role": "assistant", "content": document["completion"]}
        given = len(document.get("history", ())) // 2
        tools = {"tools": document["tools"]} if "tools" in document else {}
        document = {"messages": [*earlier, answer]} | ({"given": given} if given else {}) | tools
    if "messages" not in document:
        return document
    if template is None:
        raise DataError(
            f"{where} is a conversation, but the tokenizer has no chat template",
            "give one with chat_template_path, or use the tokenizer of the instruction-tuned model",
        )
    return template.adapt(document)


def asked_turns(document: Document) -> list[dict[str, Any]]:
    """The turns of a document with a prompt, up to its answer."""
    system = [{"role": "system", "content": document["system"]}] if "system" in document else []
    return [*system, *document.get("history", ()), {"role": "user", "content": document["prompt"]}]


def check_unicode(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        wrong = f"{where}: half a surrogate pair ({error.object[error.start]!r}) is no character"
        raise DataError(wrong, "remove it, or write both halves") from error


def mask_of(format: str, everything: bool, template: ChatTemplate | None) -> str:
    if format == "text" or everything:
        return "every token"
    if template is None:
        return "completions, by character offsets"
    if not template.marked:
        notice(
            "generation-marks",
            "the chat template has no {% generation %} marks: assistant turns are found by rendering each "
            "conversation again with one turn replaced",
        )
    return f"assistant turns, by {template.mask}"


def read_parts(
    config: RunConfig, read: Callable[[str | list[str], bool], Documents]
) -> tuple[Documents, Documents | None, list[dict[str, Any]]]:
    """What a run trains on, what it is evaluated on if anything, and the sources of both.

    Args:
        read: takes the names of datasets, and whether the run is evaluated on them.

    Raises:
        ConfigError: eval_split_size leaves nothing to train on.
    """
    training = read(config.dataset, False)
    if config.eval_dataset is not None:
        evaluated = read(config.eval_dataset, True)
        if evaluated.sources == training.sources:
            notice("same-data", "eval_dataset is the dataset that is trained on: its loss says nothing of other rows")
        return training, evaluated, training.sources + evaluated.sources
    if config.eval_split_size:
        return *_split_off(training, config.eval_split_size, config.seed), training.sources
    return training, None, training.sources


def _split_off(found: Documents, size: float, seed: int) -> tuple[Documents, Documents]:
    """Hold out a share (below 1) or a count of documents: the same ones for the same data and seed."""
    total = len(found.texts)
    count = int(size) if size >= 1 else max(1, round(size * total))
    if count >= total:
        raise ConfigError(
            f"eval_split_size {size:g} holds out {count} of {total} documents, which leaves none to train on",
            "lower eval_split_size, or give eval_dataset",
        )
    order = np.random.default_rng(seed).permutation(total)
    return found.select(np.sort(order[count:])), found.select(np.sort(order[:count]))


def _finish(found: Documents, encoder: Encoder, config: RunConfig, name: str) -> _Split:
    encoded = encode(found, encoder, config, {**ENCODED, **{name: NUMBERS for name in found.columns}})
    total, kept = len(found.texts), kept_rows(encoded, f"{name} documents", config.max_length, REMEDY)
    truncated = sum(length > config.max_length for length in kept["length"])
    if truncated:
        words = f"cut to max_length {config.max_length}: the longest has {max(kept['length']):,} tokens"
        notice(f"truncated:{name}", f"{truncated} of {total} {name} documents {words}")
    not_shown = not_shown_of(kept, f"{name} documents")
    empty = sum(kept["empty"])
    if empty == len(kept) and name == "training":
        raise DataError(
            f"all answers are empty: of {total} training documents, nothing is trained but where to stop",
            "check the rows and columns of the data (column_mapping, dataset_format)",
        )
    if empty:
        notice(f"empty:{name}", f"{empty} of {total} {name} documents have empty answers: they teach to say nothing")
    columns = ["input_ids", "labels", *found.columns]
    rows = _pack(kept, config.max_length, found.columns) if config.packing else kept.select_columns(columns)
    capacity = config.max_length if config.packing else None
    report = split_report(encoded, kept, rows, truncated, empty, capacity)
    return _Split(kept, rows, {**report, "not_shown": not_shown})


def kept_rows(encoded: Dataset, name: str, max_length: int, remedies: Mapping[str, str]) -> Dataset:
    """The rows that are not dropped; says why the others are.

    Args:
        name: of the rows, as in "training rows".
        remedies: by the reason why a row is dropped.

    Raises:
        DataError: all are dropped.
    """
    reasons = np.array(list(encoded["dropped"]))
    dropped = Counter(reason for reason in reasons.tolist() if reason)
    if dropped.total() == len(encoded):
        counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
        raise DataError(
            f"zero trained tokens: all {len(encoded)} {name} are dropped ({counts}; max_length={max_length})",
            remedies[dropped.most_common(1)[0][0]],
        )
    for reason, count in dropped.items():
        notice(f"dropped:{name}:{reason}", f"{count} of {len(encoded)} {name} dropped: {reason}")
    return encoded.select(np.flatnonzero(reasons == ""))


def not_shown_of(kept: Dataset, name: str) -> dict[str, int]:
    """Count the rows with each part that the chat template does not write, and name them in one notice.

    Args:
        name: of the rows, as in "training rows".
    """
    found = Counter(each for names in kept["not_shown"] for each in set(names))
    if found:
        counts = ", ".join(f"{part} ({count:,} of {len(kept):,})" for part, count in found.most_common())
        notice(
            f"not-shown:{name}",
            f"{name}: the chat template does not show {counts}, so it is left out; a chat_template_path that writes it"
            " would train it",
        )
    return dict(found)


def encode(found: Documents, encoder: Encoder, config: RunConfig, features: Mapping[str, Any]) -> Dataset:
    """The columns that `encoder` makes of documents, in as many processes as are worth their start."""
    rows = len(found.texts)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = min(config.dataset_num_proc or max(1, rows // ROWS_PER_PROCESS), cores)
    with _progress(rows >= ROWS_WITH_PROGRESS):
        return Table.from_dict({"document": found.texts, "where": found.places}).map(
            encoder,
            batched=True,
            batch_size=256,
            num_proc=min(processes, rows) if processes > 1 else None,
            remove_columns=["document", "where"],
            features=Features(features),
            keep_in_memory=True,
            load_from_cache_file=False,
            new_fingerprint="tokenized",  # nothing is cached, so there is no need to hash the tokenizer
            desc="tokenizing",
        )


@contextlib.contextmanager
def _progress(wanted: bool) -> Iterator[None]:
    """Hide the progress bars of datasets where the work is short or nobody watches."""
    if (wanted and sys.stderr.isatty()) or datasets.are_progress_bars_disabled():
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


def _pack(kept: Dataset, max_length: int, columns: Sequence[str]) -> Dataset:
    (ids, lengths), (labels, _) = ragged(kept, "input_ids"), ragged(kept, "labels")
    stops = np.cumsum(lengths)
    rows = pack(lengths.tolist(), max_length)

    def joined(values: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate([values[stops[i] - lengths[i] : stops[i]] for i in row]) for row in rows]

    made = {"input_ids": joined(ids), "labels": joined(labels), "seq_lengths": [lengths[row] for row in rows]}
    features = {name: IDS for name in made} | {name: NUMBERS for name in columns}
    for name in columns:
        numbers, _ = ragged(kept, name)  # one of each document
        made[name] = [numbers[row] for row in rows]
    return Table.from_dict(made, features=Features(features))
