"""Rows of preference and RL training, each with the documents that it stands for.

- pairs: `{"answers": [document, document]}`, chosen and rejected; with `"margin": x` where the data has one;
- unpaired: `{"answers": [document], "label": bool}`;
- prompts: `{"prompt": document, "asked": the prompt as its row has it, "columns": {...}}`, the document without answer;
- stepwise: `{"prompt": document, "steps": [text, ...], "labels": [bool, ...]}`, likewise.

A document is one of `data.formats`. Its answer begins behind its `given` assistant turns, behind its prompt, or, of a
text, at the character `answer_from`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..utils.errors import DataError
from ..utils.notices import notice
from .chat import common_prefix
from .formats import (
    Document,
    Message,
    asked_with,
    conversation,
    described,
    message_of,
    number_in,
    text_in,
    turns_in,
)
from .preference import RowLayout
from .sources import Row, Source

Columns = Mapping[str, str]
Side = str | list[Message]
ANSWER = "an answer begins with a turn of role assistant, and the turns before it are the prompt"
# A turn of Anthropic's HH: its dialogues are one text.
SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def rows_in(source: Source, layout: RowLayout, *, templated: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(where, row)`, in order, `where` naming file and line; two for a pair that is taken apart.

    Args:
        templated: whether there is a chat template, for dialogues written as text.

    Raises:
        DataError: a row lacks a column, holds the wrong type in it, or no answer to a prompt; the row is named.
    """
    columns = layout.columns
    for index, row in enumerate(source.rows):
        where = source.where(index)
        if layout.kind == "prompts":
            yield where, _prompt_row(row, columns, where)
            continue
        if layout.kind == "stepwise":
            yield where, _stepwise_row(row, columns, where)
            continue
        names = [columns[part] for part in ("chosen", "rejected", "completion") if part in columns]
        documents = _documents(row, columns, names, where, templated)
        if layout.kind == "pairs":
            margin = {"margin": number_in(row, columns["margin"], where)} if "margin" in columns else {}
            yield where, {"answers": documents, **margin}
        elif layout.paired:
            yield from ((where, {"answers": [document], "label": i == 0}) for i, document in enumerate(documents))
        else:
            yield where, {"answers": documents, "label": _label(row, columns["label"], where)}


def _prompt_row(row: Row, columns: Columns, where: str) -> dict[str, Any]:
    parts = ("prompt", "messages", "instruction", *(["input"] if "instruction" in columns else []))
    own = {columns[part] for part in parts if part in columns}
    document = _asking(row, columns, where)
    turns = columns.get("prompt", columns.get("messages", ""))
    return {
        "prompt": document,
        "asked": document["prompt"] if "prompt" in document else row[turns],
        "columns": {name: value for name, value in row.items() if name not in own},
    }


def _asking(row: Row, columns: Columns, where: str) -> Document:
    """The document of a prompt without an answer."""
    prompt = _prompt(row, columns, where)
    if isinstance(prompt, str):
        return {"completion": "", **asked_with(prompt, row, columns, where)}
    _check_prompt(prompt or [], where)
    return conversation(list(prompt or []), row, columns, where)


def _stepwise_row(row: Row, columns: Columns, where: str) -> dict[str, Any]:
    prompt = _asking(row, columns, where)
    steps, labels = (_listed(row, columns[part], where) for part in ("completions", "labels"))
    names = f"columns {columns['completions']!r} and {columns['labels']!r}"
    if len(steps) != len(labels):
        wrong = f"{where}: {names} hold {len(steps)} steps and {len(labels)} labels"
        raise DataError(wrong, "give each step a label, true or false")
    for number, step in enumerate(steps, 1):
        if not (isinstance(step, str) and step.strip()):
            wrong = f"{where}: step {number} in column {columns['completions']!r} is {described(step)}, not a text"
            raise DataError(wrong, "write what the step says")
    return {"prompt": prompt, "steps": steps, "labels": [_truth(each, columns["labels"], where) for each in labels]}


def _listed(row: Row, column: str, where: str) -> list[Any]:
    value = row.get(column)
    if isinstance(value, list) and value:
        return value
    found = "nothing" if column not in row else "no steps" if value == [] else described(value)
    raise DataError(f"{where}: column {column!r} holds {found}, not a list", "give a list with an entry for each step")


def _prompt(row: Row, columns: Columns, where: str) -> Side | None:
    """The prompt of a row; None where it is part of the answers."""
    if "instruction" in columns:
        return text_in(row, columns["instruction"], where)
    if "prompt" in columns:
        return _side(row, columns["prompt"], where)
    return turns_in(row, columns["messages"], where) if "messages" in columns else None


def _side(row: Row, column: str, where: str) -> Side:
    """A text, or turns: a list of them, or one alone as LLaMA-Factory has it."""
    value = row.get(column)
    if isinstance(value, dict):
        return [message_of(value, f"{where}, {column}")]
    if isinstance(value, list):
        return turns_in(row, column, where, f"{column}, ")
    return text_in(row, column, where)


def _documents(row: Row, columns: Columns, names: Sequence[str], where: str, templated: bool) -> list[Document]:
    """The documents of a row's prompt with each of its answers, which stand in the columns `names`."""
    prompt = _prompt(row, columns, where)
    if not names:  # a whole conversation and its label
        names, answers, prompt = [columns["messages"]], [prompt or ""], None
    else:
        answers = [_side(row, name, where) for name in names]
    if any(isinstance(side, list) for side in (prompt, *answers)):
        return _conversations(prompt, answers, row, columns, names, where)
    texts = [side for side in answers if isinstance(side, str)]
    return _texts(prompt if isinstance(prompt, str) else None, texts, row, columns, where, templated)


def _conversations(
    prompt: Side | None, answers: Sequence[Side], row: Row, columns: Columns, names: Sequence[str], where: str
) -> list[Document]:
    sides = [[{"role": "assistant", "content": side}] if isinstance(side, str) else side for side in answers]
    begins = all(side[0]["role"] in ("system", "user") for side in sides)
    if prompt is None or (isinstance(prompt, str) and begins):  # whole conversations, with or without their question
        prompt, sides = _shared(sides, names, where)
    elif isinstance(prompt, str):
        asked = asked_with(prompt, row, columns, where)
        prompt = [*asked.get("history", []), {"role": "user", "content": asked["prompt"]}]
    else:
        sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    _check_prompt(prompt, where)
    for name, side in zip(names, sides, strict=True):
        if not side or side[0]["role"] != "assistant":
            wrong = f"begins with a turn of role {side[0]['role']}" if side else "ends with the prompt"
            raise DataError(f"{where}: column {name!r} {wrong}, so it is no answer", ANSWER)
    given = sum(message["role"] == "assistant" for message in prompt)
    return [{**conversation([*prompt, *side], row, columns, where), "given": given} for side in sides]


def _shared(
    sides: Sequence[list[Message]], names: Sequence[str], where: str
) -> tuple[list[Message], list[list[Message]]]:
    """Whole conversations as their common beginning, and what follows: of one alone, its last assistant turn."""
    if len(sides) == 1:
        roles = [message["role"] for message in sides[0]]
        if "assistant" not in roles:
            raise DataError(f"{where}: column {names[0]!r} has no assistant turn", ANSWER)
        common = len(roles) - 1 - roles[::-1].index("assistant")
    else:
        first, *others = sides
        common = min(map(len, sides)) - 1  # an answer is left, whatever follows it elsewhere
        common = next((i for i in range(common) if any(side[i] != first[i] for side in others)), common)
    if not common:
        raise DataError(
            f"{where}: columns {' and '.join(map(repr, names))} differ from their first turn on: they share no prompt",
            "give both the same turns up to the answer, or a column with the prompt",
        )
    return sides[0][:common], [side[common:] for side in sides]


def _check_prompt(prompt: Sequence[Message], where: str) -> None:
    if prompt and prompt[-1]["role"] == "assistant":
        raise DataError(f"{where}: the prompt ends with an assistant turn, so it asks for no answer", ANSWER)


def _texts(
    prompt: str | None, answers: Sequence[str], row: Row, columns: Columns, where: str, templated: bool
) -> list[Document]:
    """Documents of answers that are texts: of a dialogue as text, behind a prompt, or of a text that both share."""
    whole = [(prompt or "") + answer for answer in answers]
    if all(text.lstrip().startswith("Human:") and "\n\nAssistant:" in text for text in whole):
        return _dialogues([text.lstrip() for text in whole], row, columns, where, templated)
    if prompt is not None:
        asked = asked_with(prompt, row, columns, where)
        return [{**asked, "completion": answer} for answer in answers]
    cut = _cut(whole)
    if not cut:
        raise DataError(
            f"{where}: the answers share no prompt (column {columns.get('chosen', columns.get('completion'))!r} begins"
            f" {described(whole[0])})",
            "give the prompt in a column of its own, named prompt",
        )
    return [{"text": text, "answer_from": cut} for text in whole]


def _dialogues(texts: Sequence[str], row: Row, columns: Columns, where: str, templated: bool) -> list[Document]:
    """HH's dialogues: conversations where a template can write them, else the texts as they are."""
    if templated:
        notice("dialogues", "texts of turns that begin Human: and Assistant: are read as conversations")
        sides = [_turns(text) for text in texts]
        names = [columns[part] for part in ("chosen", "rejected", "completion") if part in columns]
        return _conversations(None, sides, row, columns, names, where)
    shared = common_prefix(*texts) if len(texts) > 1 else len(texts[0])
    ends = [found.end() for found in SPEAKER.finditer(texts[0]) if found[1] == "Assistant" and found.end() <= shared]
    if not ends:
        wrong = f"{where}: the dialogues differ from their first question on: they share no prompt"
        raise DataError(wrong, "give both answers to one question, or a column prompt")
    return [{"text": text, "answer_from": ends[-1]} for text in texts]


def _turns(text: str) -> list[Message]:
    """The turns of one of HH's dialogues."""
    found = list(SPEAKER.finditer(text))
    stops = [each.start() for each in found[1:]] + [len(text)]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[each[1]], "content": text[each.end() : stop].strip()}
        for each, stop in zip(found, stops, strict=True)
    ]


def _cut(texts: Sequence[str]) -> int:
    """Where the answers of texts that begin alike begin: at the last white space before they differ."""
    if len(texts) < 2:
        return 0
    shared = common_prefix(*texts)
    before = texts[0][:shared]
    if all(text[shared : shared + 1].isspace() for text in texts):  # of two kinds
        return len(before.rstrip())
    return len(before[: max((at for at, char in enumerate(before) if char.isspace()), default=0)].rstrip())


def _label(row: Row, column: str, where: str) -> bool:
    if column in row:
        return _truth(row[column], column, where)
    raise _no_truth("nothing", column, where)


def _truth(value: Any, column: str, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise _no_truth(described(value), column, where)


def _no_truth(found: str, column: str, where: str) -> DataError:
    return DataError(
        f"{where}: column {column!r} holds {found}, not true or false",
        "write true for a good answer or step and false for another, without quotes",
    )
