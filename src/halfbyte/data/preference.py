"""Recognise and read rows of preference and RL training.

`recognise_rows` finds which kind a source holds, from its columns, and `rows_in` reads it. Each kind becomes

- pairs (a prompt, in its own column or inside the answers, with a chosen and a rejected answer): `{"answers":
  [document, document]}`, chosen then rejected, with `"margin": x` if the data has a margin;
- unpaired (a prompt with one answer and a label that says whether it is desirable): `{"answers": [document], "label":
  bool}`;
- prompts (a prompt alone, with any further columns): `{"prompt": document, "asked": the prompt as in the data,
  "columns": {...}}`; the document has no answer. A conversation that ends with an answer is a prompt without it;
- stepwise (a prompt with the steps of an answer, each with a label that says whether it is right): `{"prompt":
  document, "steps": [text, ...], "labels": [bool, ...]}`; the document has no answer.

A document is one of `data.formats`. Its answer starts after its first `given` assistant turns, after its prompt, or, in
plain text, at the character `answer_from`.

Sources: preference, unpaired preference, prompt-only and stepwise rows as in TRL; ranking and `kto_tag` rows and
`chosen_messages` as in LLaMA-Factory; dialogues as text as in Anthropic's HH (Bai et al., 2204.05862).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..utils.errors import DataError
from ..utils.notices import notice
from .formats import (
    CHAT_COLUMNS,
    METHODS_FOR,
    PAIR_COLUMNS,
    PAIRS,
    ROLES,
    STEP_COLUMNS,
    WORDS,
    Document,
    Message,
    check_mapping,
    columns_of,
    conversation,
    described,
    find_context,
    find_system_and_tools,
    message_of,
    number_in,
    prompt_parts,
    text_in,
    turns_in,
)
from .images import COLUMNS as IMAGE_COLUMNS
from .images import IMAGES, OTHER_MEDIA
from .sources import Row, Source
from .turns import common_prefix

Kind = Literal["pairs", "unpaired", "prompts", "stepwise"]
# Parts that `column_mapping` may name.
PARTS = (
    *("prompt", "completion", "chosen", "rejected", "label", "margin"),
    *("completions", "labels", "messages", "instruction", "input", "output", "system", "tools", "context", "history"),
    "images",
)
CHOSEN, REJECTED = zip(*PAIR_COLUMNS, strict=True)
LABELS = ("label", "kto_tag")
# `input` is a prompt only with an `output` column; otherwise it belongs to an instruction.
PROMPTS = tuple(dict.fromkeys(prompt for prompt, _ in PAIRS if prompt != "input"))
ANSWERS = tuple(dict.fromkeys(answer for _, answer in PAIRS))
EXAMPLES = {
    "pairs": "column_mapping: {prompt: your_column, chosen: the_better, rejected: the_worse}",
    "unpaired": "column_mapping: {prompt: your_column, completion: the_answer, label: whether_it_is_good}",
    "prompts": "column_mapping: {prompt: your_column}",
    "stepwise": "column_mapping: {prompt: your_column, completions: the_steps, labels: which_are_right}",
}
Columns = Mapping[str, str]
MISSING = object()  # value of a column that a row does not have
Side = str | list[Message]
ANSWER_RULE = "start each answer with a turn of role assistant; the turns before it are the prompt"
# Start of a turn in Anthropic's HH, which stores a dialogue as one text.
SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


@dataclass(frozen=True)
class RowLayout:
    """Layout of the rows of one source.

    Attributes:
        row_type: the type of rows that the method asks for.
        columns: part (see `PARTS`) to column name.
        why: which columns the layout was recognised by.
        paired: whether the rows are pairs. If `kind` is unpaired, each pair becomes two rows.
    """

    row_type: Kind
    columns: dict[str, str]
    why: str
    paired: bool


def recognise_rows(source: Source, row_type: Kind, mapping: Mapping[str, str] | None = None) -> RowLayout:
    """Find the columns of `source` that rows of `row_type` consist of, by the first 100 rows.

    Args:
        source: at least one row.
        mapping: part (see `PARTS`) to column name, for other column names.

    Raises:
        DataError: a mapped column does not exist, or the columns belong to another method's rows.
    """
    mapped = dict(mapping or {})
    check_mapping(source, mapped, PARTS, mapped)
    columns = {column: column for column in columns_of(source)} | mapped
    present_type = _row_type_of(columns)
    fields = _fields(columns, "pairs" if row_type == "unpaired" and present_type == "pairs" else row_type)
    if fields is None or (row_type == "prompts" and present_type in ("pairs", "stepwise")):
        raise _misfit(source, row_type, present_type)
    fields |= find_system_and_tools(source, fields, mapped)
    fields |= find_context(source, fields, mapped)
    for field in ("prompt", "completion", "label"):
        if fields.get(field, field) != field and field not in mapped:
            notice(f"columns:{source.path}:{field}", f"{source.path}: reading column {fields[field]} as the {field}")
    paired = "chosen" in fields
    if row_type == "unpaired" and paired:
        notice(
            f"unpaired:{source.path}",
            f"{source.path}: splitting each pair into two rows: chosen is desirable, rejected is not",
        )
    return RowLayout(row_type, fields, f"columns {', '.join(fields.values())}", paired)


def _row_type_of(columns: Mapping[str, str]) -> str | None:
    """Return the kind of rows that have these parts, or None."""
    for row_type in ("stepwise", "pairs", "unpaired"):
        if _fields(columns, row_type) is not None:
            return row_type
    pairs = any(prompt in columns and answer in columns for prompt, answer in PAIRS)
    if pairs or "text" in columns or _first(CHAT_COLUMNS, columns):
        return "text"
    return "prompts" if _fields(columns, "prompts") is not None else None


def _fields(columns: Mapping[str, str], row_type: str) -> dict[str, str] | None:
    """Return the columns of rows of `row_type`, by part, or None if one is missing."""
    prompt = _prompt_columns(columns)
    if row_type == "prompts":
        return prompt or None
    if row_type == "stepwise":
        steps = {field: columns[field] for field in STEP_COLUMNS if field in columns}
        return {**prompt, **steps} if prompt and len(steps) == 2 else None
    if row_type == "pairs":
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


def _prompt_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of the prompt, by part; empty if the answers contain the prompt."""
    if "instruction" in columns and "input" in columns and "prompt" not in columns:
        return {field: columns[field] for field in ("instruction", "input")}
    if column := _first(PROMPTS, columns):
        return {"prompt": columns[column]}
    column = _first(CHAT_COLUMNS, columns)
    return {"messages": columns[column]} if column else {}


def _first(names: Sequence[str], columns: Mapping[str, str]) -> str:
    return next((name for name in names if name in columns), "")


def _misfit(source: Source, row_type: Kind, present_type: str | None) -> DataError:
    """Return the error for rows that are not of `row_type`."""
    present = columns_of(source)
    subject = f"{source.path} (columns {', '.join(present)})"
    names = sorted({*PARTS, *CHAT_COLUMNS, *PROMPTS, *ANSWERS, *CHOSEN, *REJECTED, *LABELS})
    near = ((column, difflib.get_close_matches(column, names, n=1)) for column in present if column not in names)
    hint = next((f"; did you mean {close[0]!r} for {column!r}?" for column, close in near if close), "")
    if present_type is not None and present_type != row_type:
        fix = f"set method: {METHODS_FOR[present_type]}, or map other columns, e.g. {EXAMPLES[row_type]}"
        return DataError(f"{subject} holds {WORDS[present_type]}, not {WORDS[row_type]}{hint}", fix)
    return DataError(f"{subject} holds no {WORDS[row_type]}{hint}", f"map its columns, e.g. {EXAMPLES[row_type]}")


def rows_in(
    source: Source, layout: RowLayout, *, templated: bool, answers: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield `(location, row)` in order; `location` names file and line. A pair as unpaired answers yields two rows.

    Pairs, unpaired answers and steps have the row's columns of images, videos and audio as `images`.

    Args:
        templated: whether there is a chat template, so that dialogues written as text become conversations.
        answers: for prompts, whether the answer that ends a conversation becomes the column completion.

    Raises:
        DataError: a row lacks a column, holds the wrong type in it, or has no answer to a prompt. The message names the
            row.
    """
    columns, cut = layout.columns, 0
    for index, row in enumerate(source.rows):
        location = source.location(index)
        if layout.row_type == "prompts":
            # An assistant's turn that ends the conversation is an answer, not a part of the prompt.
            column = columns.get("messages", "")
            turns = row.get(column)
            answer = None
            if (
                isinstance(turns, list)
                and len(turns) >= 2
                and isinstance(turns[-1], dict)
                and ROLES.get(str(turns[-1].get("role", turns[-1].get("from")))) == "assistant"
            ):
                answer = message_of(turns[-1], location)
                row = {**row, column: turns[:-1]}
            prompt = _prompt_row(row, columns, location)
            cut += answer is not None
            if answer is not None and answers:
                prompt["columns"]["completion"] = [answer]
            yield location, prompt
            continue
        media = (name for name in (*IMAGE_COLUMNS, *OTHER_MEDIA) if name in row and name not in columns.values())
        images = {name: row[name] for name in media}
        if layout.row_type == "stepwise":
            yield location, _stepwise_row(row, columns, location) | {IMAGES: images}
            continue
        names = [columns[field] for field in ("chosen", "rejected", "completion") if field in columns]
        documents = _answer_documents(row, columns, names, location, templated)
        if layout.row_type == "pairs":
            margin = {"margin": number_in(row, columns["margin"], location)} if "margin" in columns else {}
            yield location, {"answers": documents, IMAGES: images, **margin}
        elif layout.paired:
            for number, document in enumerate(documents):
                yield location, {"answers": [document], IMAGES: images, "label": number == 0}
        else:
            label = _bool_in(row.get(columns["label"], MISSING), columns["label"], location)
            yield location, {"answers": documents, IMAGES: images, "label": label}
    if cut and not answers:
        notice(
            f"answers:{source.path}",
            f"{source.path}: leaving out the answer at the end of {cut:,} of {len(source.rows):,} conversations: the"
            " model answers them itself",
        )


def _prompt_row(row: Row, columns: Columns, location: str) -> dict[str, Any]:
    fields = ("prompt", "messages", "instruction", *(["input"] if "instruction" in columns else []))
    prompt_columns = {columns[field] for field in fields if field in columns}
    document = _prompt_document(row, columns, location)
    turns = columns.get("prompt", columns.get("messages", ""))
    return {
        "prompt": document,
        "asked": document["prompt"] if "prompt" in document else row[turns],
        "columns": {name: value for name, value in row.items() if name not in prompt_columns},
    }


def _prompt_document(row: Row, columns: Columns, location: str) -> Document:
    """Return the document of a prompt without an answer."""
    prompt = _prompt_in(row, columns, location)
    if isinstance(prompt, str):
        return {"completion": "", **prompt_parts(prompt, row, columns, location)}
    _check_prompt_in(prompt or [], location)
    return conversation(list(prompt or []), row, columns, location)


def _stepwise_row(row: Row, columns: Columns, location: str) -> dict[str, Any]:
    prompt = _prompt_document(row, columns, location)
    steps, labels = (_list_in(row, columns[field], location) for field in ("completions", "labels"))
    names = f"columns {columns['completions']!r} and {columns['labels']!r}"
    if len(steps) != len(labels):
        wrong = f"{location}: {names} hold {len(steps)} steps and {len(labels)} labels"
        raise DataError(wrong, "give each step a label, true or false")
    for number, step in enumerate(steps, 1):
        if not (isinstance(step, str) and step.strip()):
            wrong = f"{location}: step {number} in column {columns['completions']!r} is {described(step)}, not a text"
            raise DataError(wrong, "write the step's text")
    return {
        "prompt": prompt,
        "steps": steps,
        "labels": [_bool_in(label, columns["labels"], location) for label in labels],
    }


def _list_in(row: Row, column: str, location: str) -> list[Any]:
    value = row.get(column)
    if isinstance(value, list) and value:
        return value
    content = "nothing" if column not in row else "no steps" if value == [] else described(value)
    raise DataError(f"{location}: column {column!r} holds {content}, not a list", "give a list with one entry per step")


def _prompt_in(row: Row, columns: Columns, location: str) -> Side | None:
    """Return the prompt of a row, or None if the answers contain it."""
    if "instruction" in columns:
        return text_in(row, columns["instruction"], location)
    if "prompt" in columns:
        return _side(row, columns["prompt"], location)
    return turns_in(row, columns["messages"], location) if "messages" in columns else None


def _side(row: Row, column: str, location: str) -> Side:
    """Return a column's text or turns; LLaMA-Factory stores a single turn without a list."""
    value = row.get(column)
    if isinstance(value, dict):
        return [message_of(value, f"{location}, {column}")]
    if isinstance(value, list):
        return turns_in(row, column, location, f"{column}, ")
    return text_in(row, column, location)


def _answer_documents(
    row: Row, columns: Columns, names: Sequence[str], location: str, templated: bool
) -> list[Document]:
    """Return one document per answer column in `names`: the prompt followed by that answer."""
    prompt = _prompt_in(row, columns, location)
    if not names:  # a conversation that contains its answer, with a label
        names, answers = [columns["messages"]], [prompt or ""]
        prompt = None
    else:
        answers = [_side(row, name, location) for name in names]
    if any(isinstance(side, list) for side in (prompt, *answers)):
        return _conversation_documents(prompt, answers, row, columns, names, location)
    texts = [side for side in answers if isinstance(side, str)]
    return _text_documents(prompt if isinstance(prompt, str) else None, texts, row, columns, location, templated)


def _conversation_documents(
    prompt: Side | None, answers: Sequence[Side], row: Row, columns: Columns, names: Sequence[str], location: str
) -> list[Document]:
    sides = [[{"role": "assistant", "content": side}] if isinstance(side, str) else side for side in answers]
    hold_prompt = all(side[0]["role"] in ("system", "user") for side in sides)
    if prompt is None or (isinstance(prompt, str) and hold_prompt):
        # Split conversations after the turns that all share, and a single one before its last assistant turn.
        if len(sides) == 1:
            roles = [message["role"] for message in sides[0]]
            if "assistant" not in roles:
                raise DataError(f"{location}: column {names[0]!r} has no assistant turn", ANSWER_RULE)
            common = len(roles) - 1 - roles[::-1].index("assistant")
        else:
            first, *later = sides
            common = min(map(len, sides)) - 1  # every side keeps at least one turn as its answer
            common = next((i for i in range(common) if any(side[i] != first[i] for side in later)), common)
        if not common:
            columns_named = " and ".join(map(repr, names))
            raise DataError(
                f"{location}: columns {columns_named} differ in their first turn, so they share no prompt",
                "give both the same turns up to the answer, or add a column prompt",
            )
        prompt, sides = sides[0][:common], [side[common:] for side in sides]
    elif isinstance(prompt, str):
        question = prompt_parts(prompt, row, columns, location)
        prompt = [*question.get("history", []), {"role": "user", "content": question["prompt"]}]
    else:
        sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    _check_prompt_in(prompt, location)
    for name, side in zip(names, sides, strict=True):
        if not side or side[0]["role"] != "assistant":
            wrong = f"starts with a turn of role {side[0]['role']}" if side else "ends with the prompt"
            raise DataError(f"{location}: column {name!r} {wrong}, so it is not an answer", ANSWER_RULE)
    prompt_answers = sum(message["role"] == "assistant" for message in prompt)
    return [{**conversation([*prompt, *side], row, columns, location), "given": prompt_answers} for side in sides]


def _check_prompt_in(prompt: Sequence[Message], location: str) -> None:
    if prompt and prompt[-1]["role"] == "assistant":
        raise DataError(f"{location}: the prompt ends with an assistant turn", ANSWER_RULE)


def _text_documents(
    prompt: str | None, answers: Sequence[str], row: Row, columns: Columns, location: str, templated: bool
) -> list[Document]:
    """Return the documents of answers that are texts: an HH dialogue, a prompt with an answer, or texts with a
    common prefix."""
    dialogues = [(prompt or "") + answer for answer in answers]
    if all(text.lstrip().startswith("Human:") and "\n\nAssistant:" in text for text in dialogues):
        # HH's dialogues become conversations if there is a chat template, else plain texts.
        texts = [text.lstrip() for text in dialogues]
        if templated:
            notice("dialogues", "reading texts with Human: and Assistant: turns as conversations")
            roles = {"Human": "user", "Assistant": "assistant"}
            sides = []
            for text in texts:
                _, *pieces = SPEAKER.split(text)  # speaker, text, speaker, text, ...
                turns = zip(pieces[::2], pieces[1::2], strict=True)
                sides.append([{"role": roles[speaker], "content": content.strip()} for speaker, content in turns])
            names = [columns[field] for field in ("chosen", "rejected", "completion") if field in columns]
            return _conversation_documents(None, sides, row, columns, names, location)
        shared = common_prefix(*texts) if len(texts) > 1 else len(texts[0])
        ends = [
            speaker.end()
            for speaker in SPEAKER.finditer(texts[0])
            if speaker[1] == "Assistant" and speaker.end() <= shared
        ]
        if not ends:
            wrong = f"{location}: the dialogues differ in their first question, so they share no prompt"
            raise DataError(wrong, "give both answers to one question, or add a column prompt")
        return [{"text": text, "answer_from": ends[-1]} for text in texts]
    if prompt is not None:
        question = prompt_parts(prompt, row, columns, location)
        return [{**question, "completion": answer} for answer in answers]
    start = _common_prompt_end(dialogues)
    if not start:
        raise DataError(
            f"{location}: the answers share no prompt (column {columns.get('chosen', columns.get('completion'))!r}"
            f" starts with {described(dialogues[0])})",
            "give the prompt in a separate column, named prompt",
        )
    return [{"text": text, "answer_from": start} for text in dialogues]


def _common_prompt_end(texts: Sequence[str]) -> int:
    """Return where the answers start in texts with a common prefix: at the last white space before they differ."""
    if len(texts) < 2:
        return 0
    shared = common_prefix(*texts)
    prefix = texts[0][:shared]
    if all(text[shared : shared + 1].isspace() for text in texts):  # the texts differ in the white space itself
        return len(prefix.rstrip())
    return len(prefix[: max((at for at, char in enumerate(prefix) if char.isspace()), default=0)].rstrip())


def _bool_in(value: Any, column: str, location: str) -> bool:
    if isinstance(value, bool):
        return value
    raise DataError(
        f"{location}: column {column!r} holds {'nothing' if value is MISSING else described(value)}, not true or false",
        "write true for a good answer or step and false for a bad one, without quotes",
    )
