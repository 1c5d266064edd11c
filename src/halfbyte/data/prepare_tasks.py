"""Prepare the rows of classification, embeddings and reranking.

A text is tokenized as `tokenizer(text)` does, or `tokenizer(text, text_pair)`, with the tokenizer's own special tokens,
so that transformers' pipelines and sentence-transformers compute on the same ids as training. Words are joined by
spaces and tokenized as one text; the first token of a word has its label, as in transformers.

A prepared row has `input_ids`, `labels` and `seq_lengths` of its texts, one after the other; `labels` are the token ids
where the hidden state is read (the last token, all tokens, or the first tokens of words) and -100 elsewhere; `target`
are its numbers, and `texts` their number, in a list.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Any

import datasets
import numpy as np
from datasets import Dataset, Value
from transformers import PreTrainedTokenizerBase

from ..config.datasets import DatasetEntry
from ..config.schema import RunKeys
from ..ops import IGNORE_INDEX
from ..utils.errors import DataError
from ..utils.notices import notice
from .encode import TOO_LONG, Encoder, check_rendered
from .label_ids import UNLABELLED, LabelIds
from .prepare import (
    IDS,
    NO_END,
    NUMBERS,
    Documents,
    Prepare,
    Split,
    check_unicode,
    encode,
    in_turns,
    kept_rows,
    mixed,
    split_preparer,
    template_of,
)
from .report import count_unread, report_unread, split_report
from .sources import Source, read_sources
from .tables import Table, with_column
from .task_rows import recognise_task, task_rows

COLUMNS = {"input_ids": IDS, "labels": IDS, "seq_lengths": IDS, "texts": IDS, "target": NUMBERS}
ENCODED = {
    **{name: IDS for name in ("input_ids", "labels", "seq_lengths", "texts", "words")},
    "length": Value("int64"),
    "dropped": Value("string"),
}
EMPTY, UNREAD = "with an empty text", "without a labelled word left after truncation"
NO_CONTRAST = "with a query whose documents all have the same score"
REMEDY = {
    TOO_LONG: "raise max_length, or set overlong: truncate",
    EMPTY: "check the columns of the data (column_mapping)",
    UNREAD: "raise max_length, or label the words",
    NO_CONTRAST: "give each query documents of different scores, or set loss_type: binary_cross_entropy",
}
WHOLE_NUMBER = re.compile(r"-?\d+(\.0)?")
SCORE_RANGES = {  # loss → smallest and largest score
    "cosine_similarity": (-1.0, 1.0),
    "binary_cross_entropy": (0.0, 1.0),
}


class TaskEncoder(Encoder):
    """Converter from rows of texts (JSON text, see `task_rows`) to columns of ids.

    Args:
        tokenizer, template, max_length, overlong: as in `Encoder`; `max_length` bounds each text.
        reads: tokens whose hidden states are read: "last", "mean" (all), "words" (their first tokens), or "unpadded":
            the last one that is not the pad token, as transformers' classifiers read it.
    """

    def __init__(self, *args: Any, reads: str, **options: Any):
        super().__init__(*args, **options)
        self.reads = reads

    def __call__(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Convert `document` and `location` to the columns of `ENCODED`; `words` are the indices of labelled words."""
        rows = [json.loads(document)["texts"] for document in batch["document"]]
        locations = [location for row, location in zip(rows, batch["location"], strict=True) for _ in row]
        located = zip([text for row in rows for text in row], locations, strict=True)
        groups = groupby(located, key=lambda pair: _form(pair[0]))  # datasets may have texts of different forms
        encoded = chain.from_iterable(self._encode(*map(list, zip(*group, strict=True))) for _, group in groups)
        columns: dict[str, list[Any]] = {name: [] for name in ENCODED}
        for row in rows:
            texts = [next(encoded) for _ in row]
            read, words = zip(*(self._read(ids, spans) for ids, spans, _ in texts), strict=True)
            length = max(length for *_, length in texts)
            dropped = EMPTY if not all(len(ids) for ids, *_ in texts) else "" if all(map(len, read)) else UNREAD
            if length > self.max_length and self.overlong == "drop":
                dropped = TOO_LONG
            labels = [np.full(len(ids), IGNORE_INDEX) for ids, *_ in texts]
            for label, (ids, *_), at in zip(labels, texts, read, strict=True):
                label[at] = ids[at]
            entry = {
                "input_ids": np.concatenate([ids for ids, *_ in texts]),
                "labels": np.concatenate(labels),
                "seq_lengths": [len(ids) for ids, *_ in texts],
                "texts": [len(texts)],
                "words": np.concatenate(words),
                "length": length,
                "dropped": dropped,
            }
            for name, values in columns.items():
                values.append(entry[name])
        return columns

    def _encode(self, texts: list[Any], locations: list[str]) -> list[tuple[np.ndarray, list[tuple[int, int]], int]]:
        """Return ids, offsets (of words only) and length before truncation of each text; all have one `_form`."""
        form = _form(texts[0])
        by_words, special = form == "words", True
        pairs: list[str] | None = None
        if by_words:
            strings = [" ".join(text["words"]) for text in texts]
        elif form == "messages":
            assert self.template is not None
            rendered: list[Any] = self.template.turns_of(texts)
            check_rendered(rendered, locations)
            strings, special = [text for text, *_ in rendered], False
        elif form == "pair":
            strings, pairs = [first for first, _ in texts], [second for _, second in texts]
        else:
            strings = texts
        options: dict[str, Any] = {"add_special_tokens": special, "return_offsets_mapping": by_words, "verbose": False}
        encoded = self.tokenizer(strings, pairs, **options)
        lengths = [len(ids) for ids in encoded["input_ids"]]
        if max(lengths) > self.max_length:
            encoded = self.tokenizer(strings, pairs, truncation=True, max_length=self.max_length, **options)
        offsets = encoded["offset_mapping"] if by_words else [()] * len(texts)
        encoded_texts = []
        for text, ids, spans, length in zip(texts, encoded["input_ids"], offsets, lengths, strict=True):
            words = _first_tokens(text["words"], spans) if by_words else []
            encoded_texts.append((np.asarray(ids, dtype=np.int64), words, length))
        return encoded_texts

    def _read(self, ids: np.ndarray, words: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the tokens to read, and the word of each (only for "words")."""
        none = np.zeros(0, dtype=np.int64)
        if self.reads == "words":
            pairs = np.asarray(words, dtype=np.int64).reshape(-1, 2)
            return pairs[:, 0], pairs[:, 1]
        if self.reads == "mean":
            return np.arange(len(ids)), none
        at = np.arange(len(ids))
        if self.reads == "unpadded":
            unpadded = np.flatnonzero(ids != self.tokenizer.pad_token_id)
            at = unpadded if len(unpadded) else at[:1]  # transformers reads the first token of a text of padding
        return at[-1:], none


def _form(text: Any) -> str:
    """Return how a text is given: as words, messages, a pair, or a string."""
    if isinstance(text, dict):
        return "words" if "words" in text else "messages"
    return "pair" if isinstance(text, list) else "string"


def _first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first token of each word and the word's index; words without a token of their own are left out."""
    first_tokens = []
    begin = 0
    token = 0
    for number, word in enumerate(words):
        end = begin + len(word)
        while token < len(offsets) and offsets[token][1] <= begin:
            token += 1
        if token < len(offsets) and offsets[token][0] < end and len(word):
            first_tokens.append((token, number))
            token += 1
        begin = end + 1
    return first_tokens


def preparer_of_tasks(config: RunKeys, tokenizer: PreTrainedTokenizerBase) -> Prepare:
    """Return the function that prepares rows as the module describes.

    `report["label_names"]` are the labels in the order of their ids.

    Raises:
        DataError, ModelError, ConfigError: as `prepare.prepare`; and for rows of another task, labels of several types
            or of one value, labels that training has not seen, and scores out of range.
    """
    template = template_of(config, tokenizer)
    reads = {"token_classification": "words", "embedding": config.pooling}.get(config.method, "unpadded")
    encoder = TaskEncoder(tokenizer, template, max_length=config.max_length, overlong=config.overlong, reads=reads)
    tasks = _Tasks(config, encoder)
    return split_preparer(
        config,
        encoder,
        tasks.read,
        tasks.finish,
        ends_of=lambda rows: NO_END,
        header={"kind": "labelled"},
        answered=False,
    )


class _Tasks:
    """Reads and finishes the splits of a run; the labels of the training rows apply to all splits.

    Attributes:
        labels: of the run, set by its first split.
    """

    def __init__(self, config: RunKeys, encoder: TaskEncoder):
        self.config, self.encoder = config, encoder
        self.labels: LabelIds | None = None

    def read(
        self, entries: Sequence[DatasetEntry], evaluating: bool = False, sources: Sequence[Source] | None = None
    ) -> Documents:
        config = self.config
        raw = Documents(features={"target": NUMBERS})
        if sources is None:
            sources = read_sources(entries, config.dataset_split, evaluating=evaluating)
        for source in sources:
            layout = recognise_task(source, config)
            rows = list(task_rows(source, layout, config))
            targets = [target for *_, target in rows]
            if source.file_format == "csv" and _are_whole_numbers(targets):
                targets = [int(float(target)) for target in targets]
            for (location, document, _), target in zip(rows, targets, strict=True):
                texts = [self._for_template(text, location) for text in document["texts"]]
                text = json.dumps({"texts": texts}, ensure_ascii=False, default=str)
                if not text.isascii():
                    check_unicode(text, location)
                raw.texts.append(text)
                raw.locations.append(location)
                raw.origins.append(source.dataset)
                raw.columns["target"].append(target)
            raw.masks[f"hidden states: {self.encoder.reads}"] = None
            left_out = count_unread(source, layout.columns, layout.negatives)
            summary = {"path": source.path, "format": layout.name, "why": layout.why, "rows": len(rows)}
            raw.sources.append(summary | ({"left_out": dict(left_out)} if left_out else {}))
        report_unread([entry.path for entry in entries], raw.left_out)
        if config.method == "reranker":
            self._notice_unseparated()
        return raw

    def _for_template(self, text: Any, location: str) -> Any:
        template = self.encoder.template
        if not isinstance(text, dict) or "messages" not in text:
            return text
        text = in_turns(text, template, location)
        assert template is not None  # otherwise a conversation is an error
        messages, tools = template.adapt_messages(text["messages"], text.get("tools"))  # also turns after an answer
        return {"messages": messages, "tools": tools}

    def _notice_unseparated(self) -> None:
        """Give a notice if the tokenizer joins a query and its document without a token between them."""
        first, second, joined = (
            self.encoder.tokenizer(*texts, add_special_tokens=False)["input_ids"]
            for texts in (("a",), ("b",), ("a", "b"))
        )
        with_special: Any = self.encoder.tokenizer("a", "b")["input_ids"]
        if len(with_special) > len(joined) or len(joined) > len(first) + len(second) or self.config.document_prompt:
            return
        notice(
            "unseparated-pairs",
            "the tokenizer puts nothing between a query and its document; set document_prompt, for example to a line"
            " break, and write it before documents when you score them",
        )

    def finish(self, raw: Documents, name: str) -> Split:
        config = self.config
        counts: dict[str, int] = {}
        if config.method in ("sequence_classification", "token_classification"):
            targets = raw.columns["target"]
            if self.labels is None:
                self.labels = LabelIds.of(config, targets, raw.locations)
            numbers = self.labels.numbers(targets, raw.locations)
            counts = self.labels.counts(numbers)
        else:
            numbers = self._scores(raw)
        raw = replace(raw, columns=defaultdict(list, target=numbers))
        encoded = encode(raw, self.encoder, config, ENCODED)
        if config.method == "token_classification":
            encoded = _only_labelled(encoded, raw.features)
        if config.loss_type in ("ranknet", "listnet"):
            encoded = _only_contrasts(encoded)
        trainable = kept_rows(encoded, f"{name} rows", config.max_length, REMEDY)
        truncated = sum(length > config.max_length for length in trainable["length"])
        if truncated:
            longest = f"the longest text has {max(trainable['length']):,} tokens"
            notice(
                f"truncated:{name}",
                f"{truncated} of {len(raw.texts)} {name} rows have texts cut to max_length {config.max_length}:"
                f" {longest}",
            )
        trainable, mixture = mixed(config, trainable, raw, encoded) if name == "training" else (trainable, {})
        rows = trainable.select_columns(list(COLUMNS))
        report = split_report(encoded, trainable, rows, truncated, 0, None)
        report |= {"labels": counts} if counts else {}
        if self.labels is not None and self.labels.problem != "regression":
            report["label_names"] = self.labels.names
        return Split(trainable, rows, {**report, **mixture})

    def _scores(self, raw: Documents) -> list[list[float]]:
        """Return the scores of each row; an empty list for a row without scores.

        Raises:
            DataError: a score is out of the range of the loss.
        """
        loss = str(self.config.loss_type)
        rows = []
        for target, location in zip(raw.columns["target"], raw.locations, strict=True):
            scores = target if isinstance(target, list) else [] if target is None else [target]
            low, high = SCORE_RANGES.get(loss, (float("-inf"), float("inf")))
            wrong = next((score for score in scores if not low <= score <= high), None)
            if wrong is not None:
                problem = (
                    f"{location}: the score {wrong:g} is not in {low:g} to {high:g}, which loss_type: {loss} needs"
                )
                alternative = "cosent" if self.config.method == "embedding" else "ranknet"
                raise DataError(problem, f"divide the scores by their largest value, or set loss_type: {alternative}")
            rows.append(scores)
        return rows


def _are_whole_numbers(targets: Sequence[Any]) -> bool:
    return all(isinstance(target, str) and WHOLE_NUMBER.fullmatch(target.strip()) for target in targets)


def _only_labelled(encoded: Dataset, features: Mapping[str, Any]) -> Dataset:
    """Return rows with one target per token that is read, without words marked as unlabelled."""
    columns = {name: encoded[name][:] for name in encoded.column_names}
    for at, (labels, words, targets) in enumerate(
        zip(columns["labels"], columns["words"], columns["target"], strict=True)
    ):
        read = [token for token, label in enumerate(labels) if label != IGNORE_INDEX]
        of_words = [targets[word] for word in words]
        for token, target in zip(read, of_words, strict=True):
            labels[token] = labels[token] if target != UNLABELLED else IGNORE_INDEX
        columns["target"][at] = [target for target in of_words if target != UNLABELLED]
        if not columns["target"][at] and not columns["dropped"][at]:
            columns["dropped"][at] = UNREAD
    return Table.from_dict(columns, features=datasets.Features({**ENCODED, **features}))


def _only_contrasts(encoded: Dataset) -> Dataset:
    """Drop queries whose documents all have the same score."""
    dropped = [
        reason or (NO_CONTRAST if len(set(scores)) < 2 else "")
        for reason, scores in zip(encoded["dropped"], encoded["target"], strict=True)
    ]
    return with_column(encoded.remove_columns("dropped"), "dropped", dropped)
