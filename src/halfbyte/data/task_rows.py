"""Recognise and read the rows of classification, embeddings and reranking.

A row becomes texts with targets, `{"texts": [text, ...]}` and the target as in the data:

- sequence_classification: one text and its label; the text is a string, two strings (`[text, text_pair]`), or
  `{"messages": [...]}`;
- token_classification: `{"words": [...]}` and a label per word;
- embedding: an anchor, its positive and any negatives, without a target; or two texts and their score;
- reranker: `[query, document]` for each document of a query, and a score per document. Rows with one document are
  joined by their query, in the order of the first ones.

The names of columns are from data sets of GLUE, CoNLL and sentence-transformers.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.schema import RunKeys
from ..reading import parse_json
from ..utils.errors import DataError
from ..utils.text import brief
from .formats import CHAT_COLUMNS, check_mapping, columns_of, conversation, described, text_in, turns_in
from .sources import Row, Source

LABEL = ("label", "labels", "class", "score")
QUERY = ("query", "question", "anchor")
POSITIVE = ("positive", "answer", "document", "passage")
NEGATIVE = re.compile(r"negative(_?\d+)?")  # columns of one negative each
NEGATIVES = "negatives"
SCORE = ("score", "label", "similarity", "similarity_score")
SCORES = ("scores", "labels", "relevance")
# Method → layout → part → names of its column, the first layout whose parts all exist.
LAYOUTS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "sequence_classification": {
        "messages": {"messages": CHAT_COLUMNS, "label": LABEL},
        "text pairs": {
            "text": ("sentence1", "premise", "question1", "text"),
            "text_pair": ("sentence2", "hypothesis", "question2", "text_pair"),
            "label": LABEL,
        },
        "texts": {"text": ("text", "sentence", "content"), "label": LABEL},
    },
    "token_classification": {
        "tokens": {"tokens": ("tokens", "words"), "labels": ("ner_tags", "tags", "labels", "pos_tags")}
    },
    "embedding": {
        "scored pairs": {
            "sentence1": ("sentence1", "text1"),
            "sentence2": ("sentence2", "text2"),
            "score": SCORE,
        },
        "positives": {"anchor": ("anchor", "question", "query", "sentence1"), "positive": (*POSITIVE, "sentence2")},
    },
    "reranker": {
        "lists": {"query": QUERY, "documents": ("documents", "docs", "passages"), "scores": SCORES},
        "scored documents": {
            "query": QUERY,
            "document": ("document", "passage", "text", "answer"),
            "score": SCORE,
        },
        "positives": {"query": QUERY, "positive": POSITIVE[:1]},
    },
}
WITH_NEGATIVES = "positives"  # layout that may have columns of negatives
LISTS = ("tokens", "labels", "documents", "scores", NEGATIVES, "messages")  # parts that hold a list


@dataclass(frozen=True)
class TaskLayout:
    """Layout of the rows of one source.

    Attributes:
        name: a key of `LAYOUTS` of the method.
        columns: part to column.
        negatives: columns of negatives.
    """

    name: str
    columns: dict[str, str]
    negatives: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        return f"columns {', '.join([*self.columns.values(), *self.negatives])}"


def recognise_task(source: Source, config: RunKeys) -> TaskLayout:
    """Find the columns of `source` that the rows of the run's method consist of, by the first 100 rows.

    Raises:
        DataError: a mapped column does not exist, the columns fit no layout, or a layout of another `loss_type`.
    """
    layouts = LAYOUTS[config.method]
    mapping = config.column_mapping
    present = columns_of(source)
    parts = list(dict.fromkeys(part for layout in layouts.values() for part in layout))
    retrieves = WITH_NEGATIVES in layouts
    check_mapping(source, mapping, [*parts, *([NEGATIVES] if retrieves else [])], mapping)
    candidates = ((name, _columns(layout, present, mapping)) for name, layout in layouts.items())
    name, columns = next(((name, columns) for name, columns in candidates if columns), ("", dict[str, str]()))
    if not columns:
        needed = " or ".join(" + ".join(layout) for layout in layouts.values())
        near = [close for column in present for close in difflib.get_close_matches(column, parts, 1) if close != column]
        fix = f"did you mean {near[0]!r}? " if near else ""
        raise DataError(
            f"the columns of {source.path} ({', '.join(present)}) are no rows of method: {config.method}: {needed}",
            f"{fix}map them, e.g. column_mapping: {{{parts[0]}: your_column}}",
        )
    if config.method == "embedding":
        _check_loss(source, name, str(config.loss_type))
    negatives: tuple[str, ...] = ()
    if name == WITH_NEGATIVES:
        named = [mapping[NEGATIVES]] if NEGATIVES in mapping else [c for c in present if c == NEGATIVES]
        negatives = tuple(named or (column for column in present if NEGATIVE.fullmatch(column)))
    return TaskLayout(name, columns, negatives)


def _columns(
    layout: Mapping[str, tuple[str, ...]], present: Sequence[str], mapping: Mapping[str, str]
) -> dict[str, str]:
    """Return part → column of a layout; empty if a part has none, or two parts the same one."""
    free = [column for column in present if column not in mapping.values()]
    columns = {
        part: mapping.get(part) or next((column for column in names if column in free), "")
        for part, names in layout.items()
    }
    return columns if all(columns.values()) and len(set(columns.values())) == len(columns) else {}


def _check_loss(source: Source, layout: str, loss_type: str) -> None:
    """Check that the rows of embeddings fit the loss: scores, or positives."""
    scored = layout != WITH_NEGATIVES
    if scored == (loss_type != "multiple_negatives_ranking"):
        return
    raise DataError(
        f"{source.path} holds {layout}, and loss_type: {loss_type} needs {'positives' if scored else 'scores'}",
        f"set loss_type: {'cosent or cosine_similarity' if scored else 'multiple_negatives_ranking'}",
    )


def task_rows(source: Source, layout: TaskLayout, config: RunKeys) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield location, texts and target of every row; see the module's docstring.

    Raises:
        DataError: a row lacks a column, or holds the wrong type in it. The message names the row.
    """
    if config.method == "reranker":
        yield from _queries(source, layout, config)
        return
    for index, row in enumerate(source.rows):
        location, columns = source.location(index), layout.columns
        if config.method == "sequence_classification":
            yield location, {"texts": [_text_of(row, columns, location)]}, _target(row, columns["label"], location)
        elif config.method == "token_classification":
            words, labels = _texts_with_values(row, columns["tokens"], columns["labels"], location)
            yield location, {"texts": [{"words": words}]}, labels
        elif layout.name == WITH_NEGATIVES:
            anchor = config.query_prompt + text_in(row, columns["anchor"], location)
            documents = [text_in(row, columns["positive"], location), *_negatives(row, layout, location)]
            yield location, {"texts": [anchor, *(config.document_prompt + text for text in documents)]}, None
        else:
            first, second = (text_in(row, columns[part], location) for part in ("sentence1", "sentence2"))
            texts = [config.query_prompt + first, config.document_prompt + second]
            yield location, {"texts": texts}, score_in(row.get(columns["score"]), columns["score"], location)


def _text_of(row: Row, columns: Mapping[str, str], location: str) -> Any:
    """Return the text of a row to classify: a string, two strings, or a conversation."""
    if "messages" in columns:
        return conversation(turns_in(row, columns["messages"], location), row, columns, location)
    text = text_in(row, columns["text"], location)
    return [text, text_in(row, columns["text_pair"], location)] if "text_pair" in columns else text


def _queries(source: Source, layout: TaskLayout, config: RunKeys) -> Iterator[tuple[str, dict[str, Any], list[float]]]:
    """Yield the queries of a source with all their documents and scores."""
    joined: dict[str, tuple[str, list[str], list[float]]] = {}
    columns = layout.columns
    for index, row in enumerate(source.rows):
        location = source.location(index)
        query = text_in(row, columns["query"], location)
        if layout.name == "lists":
            documents, values = _texts_with_values(row, columns["documents"], columns["scores"], location)
            scores = [score_in(value, columns["scores"], location) for value in values]
        elif layout.name == WITH_NEGATIVES:
            negatives = _negatives(row, layout, location)
            documents = [text_in(row, columns["positive"], location), *negatives]
            scores = [1.0, *[0.0] * len(negatives)]
        else:
            documents = [text_in(row, columns["document"], location)]
            scores = [score_in(row.get(columns["score"]), columns["score"], location)]
        _, all_documents, all_scores = joined.setdefault(query, (location, [], []))
        all_documents += documents
        all_scores += scores
    for query, (location, documents, scores) in joined.items():
        pairs = [[config.query_prompt + query, config.document_prompt + document] for document in documents]
        yield location, {"texts": pairs}, scores


def _negatives(row: Row, layout: TaskLayout, location: str) -> list[str]:
    """Return the negatives of a row, from a list or from columns of one each."""
    negatives: list[str] = []
    for column in layout.negatives:
        value = _parsed(row.get(column), column, location)
        if isinstance(value, list):
            negatives += _texts({column: value}, column, location)
        elif value in (None, ""):
            raise DataError(
                f"{location}: column {column!r} holds no negative", "give one in every row, or remove the column"
            )
        else:
            negatives.append(text_in(row, column, location))
    return negatives


def _parsed(value: Any, column: str, location: str) -> Any:
    """Return the list in a text that is JSON's, as CSV files have it; other values unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parse_json(value, f"{location}, column {column!r}", DataError, "write the list as JSON")
    return value


def _list(row: Row, column: str, location: str) -> list[Any]:
    value = _parsed(row.get(column), column, location)
    if not isinstance(value, list):
        raise DataError(f"{location}: column {column!r} holds {described(value)}, not a list", "write it as a list")
    return value


def _texts(row: Row, column: str, location: str) -> list[str]:
    texts = _list(row, column, location)
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None or not texts:
        value = "nothing" if not texts else described(wrong)
        raise DataError(f"{location}: column {column!r} holds {value}, not texts", "give a list of texts in every row")
    return texts


def _texts_with_values(row: Row, texts: str, values: str, location: str) -> tuple[list[str], list[Any]]:
    """Return the lists of two columns, equally long."""
    lists = _texts(row, texts, location), _list(row, values, location)
    if len(lists[0]) != len(lists[1]):
        wrong = f"{location}: {len(lists[0])} {texts} and {len(lists[1])} {values}"
        raise DataError(wrong, f"give {texts} and {values} of one length")
    return lists


def _target(row: Row, column: str, location: str) -> Any:
    """Return the label of a row as it is, or parsed if it is a list in a CSV file."""
    if row.get(column) is None:
        raise DataError(f"{location}: the row has no label in column {column!r}", "give every row a label")
    return _parsed(row[column], column, location)


def score_in(value: Any, column: str, location: str) -> float:
    """Return a finite score; true and false are 1 and 0, and CSV files have numbers as text."""
    try:
        number = float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        wrong = f"{location}: column {column!r} holds {brief(value)}, not a number"
        raise DataError(wrong, "give a number in every row")
    return number
