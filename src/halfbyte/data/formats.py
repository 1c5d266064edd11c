"""Recognising what rows mean from their columns, and turning each into one document.

A document is one of three things, whatever the file called its columns:

- `{"messages": [...], "tools": [...]}`: a conversation in the form chat templates take (roles system, user,
  assistant, tool; an assistant may carry `tool_calls`); with `"given": n` its first n assistant turns are a prompt's,
  with `"untrained": [i, ...]` those numbers of its assistant turns, from 0, are shown alone;
- `{"prompt": ..., "completion": ..., "system": ..., "history": [...], "tools": [...]}`: a question and its answer; the
  turns of the history come before it, and are not trained;
- `{"text": ...}`: plain text.

Sources: ShareGPT's from/value turns and function_call/observation as LLaMA-Factory writes them; Alpaca's
instruction/input/output (Taori et al. 2023); messages and prompt-completion as in TRL.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..reading import parse_json
from ..utils.errors import DataError
from ..utils.notices import notice
from ..utils.text import brief
from .context import instructing, shown_beside
from .sources import Row, Source

Document = dict[str, Any]
Message = dict[str, Any]

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
PAIRS = [
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "response"),
    ("query", "response"),
    ("input", "output"),
]
CHAT_COLUMNS = ("messages", "conversations", "conversation")
# What `column_mapping` may name, and the message keys that chat templates read.
PARTS = (
    *("messages", "prompt", "completion", "instruction", "input", "output", "text"),
    *("system", "tools", "context", "history"),
)
WRITE_CALL = 'write a call as {"function": {"name": "f", "arguments": {"x": 1}}}'
# Keys of a turn that say whether it is trained: of Axolotl (train, training), ms-swift (loss), verl (loss_mask), OpenAI
# (weight); and what a message has where one of them says that it is not, until it is part of a document.
MARKS = ("train", "training", "loss", "loss_mask", "weight", "loss_weight")
UNTRAINED = "untrained"
MESSAGE_KEYS = ("tool_calls", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


PAIR_COLUMNS = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
STEP_COLUMNS = ("completions", "labels")
# Kinds of rows, and the methods that take them.
WORDS = {
    "text": "examples to imitate",
    "pairs": "preference pairs",
    "unpaired": "answers with a label",
    "prompts": "prompts",
    "stepwise": "steps with labels",
}
METHODS_FOR = {
    "text": "sft",
    "pairs": "dpo, orpo, simpo, cpo or reward",
    "unpaired": "kto",
    "prompts": "grpo, rloo or gkd",
    "stepwise": "prm",
}


@dataclass(frozen=True)
class Layout:
    """How the rows of one source are read: the format, the column that plays each part, and why it was chosen."""

    format: str
    columns: dict[str, str]
    why: str


def recognise(
    source: Source,
    *,
    format: str = "auto",
    mapping: Mapping[str, str] | None = None,
    text_field: str = "text",
) -> Layout:
    """Choose the format of `source` from its columns (those of its first 100 rows).

    Args:
        source: at least one row.
        format: auto, or one of messages, sharegpt, prompt-completion, alpaca, text to insist on.
        mapping: part (see `PARTS`) to column name, for columns with names of their own.
        text_field: the column that holds plain text.

    Raises:
        DataError: a mapped column does not exist, or the columns fit no format.
    """
    present, mapped = columns_of(source), dict(mapping or {})
    if text_field != "text":
        mapped.setdefault("text", text_field)
    check_mapping(source, mapped, PARTS, mapping or {})
    others = [("pairs", pair) for pair in PAIR_COLUMNS] + [("stepwise", STEP_COLUMNS)]
    for kind, columns in others if format == "auto" else ():
        if set(columns) <= set(present):
            raise DataError(
                f"{source.path} holds {WORDS[kind]} (columns {' and '.join(columns)}), not {WORDS['text']}",
                f"set method: {METHODS_FOR[kind]}; or name the columns to train on with column_mapping and"
                " dataset_format",
            )
    # Columns that the user named come first; the others count where those alone decide nothing.
    names = {column: column for column in present}
    layout = _match(source, mapped, format) or _match(source, {**names, **mapped}, format)
    if layout is None:
        said = f"the columns of {source.path} ({', '.join(present)}) fit"
        if format != "auto" and (other := _match(source, {**names, **mapped}, "auto")):
            wrong = f"{said} dataset_format {other.format}, not {format}"
            raise DataError(wrong, f"set dataset_format: {other.format}, or name the columns with column_mapping")
        raise DataError(
            f"{said} {'no known format' if format == 'auto' else f'not dataset_format {format}'}; {_nearest(present)}",
            "map them, e.g. column_mapping: {prompt: your_column, completion: your_other_column}",
        )
    optional = {} if layout.format == "text" else instructing(source, layout.columns, mapped)
    optional |= shown_beside(source, layout.columns, mapped)
    return Layout(layout.format, {**layout.columns, **optional}, source.note or layout.why)


def check_mapping(source: Source, mapped: Mapping[str, str], parts: Sequence[str], given: Mapping[str, str]) -> None:
    """Whether the columns that play parts are there.

    Args:
        mapped: part to column.
        parts: those that there are.
        given: what of `mapped` comes from column_mapping; the rest from dataset_text_field.

    Raises:
        DataError: there is no such part or column.
    """
    present = columns_of(source)
    for part, column in mapped.items():
        if other := next((each for each in given if each != part and given[each] == given.get(part)), None):
            wrong = f"column_mapping: the column {brief(column)} is to be both {part} and {other}"
            raise DataError(wrong, "give each part a column of its own")
        if part not in parts:
            raise DataError(
                f"column_mapping names an unknown part {brief(part)}{did_you_mean(part, parts)}",
                f"its parts are: {', '.join(parts)}",
            )
        if column not in present:
            key = "column_mapping" if part in given else "dataset_text_field"
            raise DataError(
                f"{key}: {source.path} has no column {brief(column)} (for {part}){did_you_mean(column, present)}",
                f"its columns are: {', '.join(present)}",
            )


def columns_of(source: Source) -> list[str]:
    """The columns of the first 100 rows."""
    return list(dict.fromkeys(column for row in source.rows[:100] for column in row))


def _match(source: Source, columns: Mapping[str, str], format: str) -> Layout | None:
    """The first format whose parts are all in `columns` (part to column)."""

    def allowed(name: str) -> bool:
        return format in ("auto", name)

    for part in CHAT_COLUMNS:
        if part in columns and (allowed("messages") or allowed("sharegpt")):
            column = columns[part]
            style = "sharegpt" if _has_from_value(source, column) else "messages"
            keys = "from/value" if style == "sharegpt" else "role/content"
            return Layout(style, {"messages": column}, f"column {column} holds {keys} turns")
    if allowed("alpaca") and {"instruction", "output"} <= set(columns):
        parts = {part: columns[part] for part in ("instruction", "input", "output") if part in columns}
        return Layout("alpaca", parts, f"columns {', '.join(parts.values())}")
    for prompt, completion in PAIRS if allowed("prompt-completion") else ():
        if prompt in columns and completion in columns:
            parts = {"prompt": columns[prompt], "completion": columns[completion]}
            if (prompt, completion) != ("prompt", "completion"):
                notice(
                    f"columns:{source.path}",
                    f"{source.path}: {parts['prompt']} is read as the prompt, {parts['completion']} as the completion",
                )
            return Layout("prompt-completion", parts, f"columns {parts['prompt']}, {parts['completion']}")
    if allowed("text") and "text" in columns:
        return Layout("text", {"text": columns["text"]}, f"column {columns['text']}")
    return None


def _has_from_value(source: Source, column: str) -> bool:
    turns = source.rows[0].get(column)
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and "from" in turns[0]


def did_you_mean(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _nearest(present: Sequence[str]) -> str:
    known = sorted({*CHAT_COLUMNS, *PARTS, *(name for pair in PAIRS for name in pair)})
    for column in present:
        if column not in known and (near := difflib.get_close_matches(column, known, n=1)):
            return f"did you mean {near[0]!r} by {column!r}?"
    return f"known names are {', '.join(known)}"


def documents(source: Source, layout: Layout) -> Iterator[tuple[str, Document]]:
    """Yield `(where, document)` for every row, `where` naming file and line.

    Raises:
        DataError: a row lacks a column or holds the wrong type in it; the row is named.
    """
    convert = {"messages": _chat, "sharegpt": _chat, "alpaca": _alpaca, "prompt-completion": _pair, "text": _text}
    for index, row in enumerate(source.rows):
        where = source.where(index)
        yield where, convert[layout.format](row, layout.columns, where)


def text_in(row: Row, column: str, where: str) -> str:
    if column not in row:
        missing = f"{where}: the row has no column {column!r}{did_you_mean(column, list(row))}"
        raise DataError(missing, "give it in every row, or name another with column_mapping")
    if not isinstance(row[column], str):
        raise DataError(
            f"{where}: column {column!r} holds {described(row[column])}, not text", "make it a string in every row"
        )
    return row[column]


def number_in(row: Row, column: str, where: str) -> float:
    """The finite number in a column."""
    value = row.get(column)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise DataError(f"{where}: column {column!r} holds {brief(value)}, not a number", "give one in every row")
    return number


def described(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _text(row: Row, columns: Mapping[str, str], where: str) -> Document:
    return {"text": text_in(row, columns["text"], where)}


def _pair(row: Row, columns: Mapping[str, str], where: str) -> Document:
    names = [columns[part] for part in ("prompt", "completion")]
    if any(isinstance(row.get(name), list) for name in names):
        return _pair_of_turns(row, columns, where)
    document = {part: text_in(row, columns[part], where) for part in ("prompt", "completion")}
    return {**document, **asked_with(document["prompt"], row, columns, where)}


def _pair_of_turns(row: Row, columns: Mapping[str, str], where: str) -> Document:
    """TRL's conversational form: the turns before the answer, and those that are trained."""
    names = [columns[part] for part in ("prompt", "completion")]
    for name, other in zip(names, reversed(names), strict=True):
        if not isinstance(row.get(name), list):
            found = described(row[name]) if name in row else "nothing"
            raise DataError(
                f"{where}: column {name!r} holds {found}, not a list of turns, as column {other!r} does",
                "make both columns lists of turns, or both texts",
            )
    prompt, completion = (turns_in(row, name, where, f"{name}, ") for name in names)
    if not any(message["role"] == "assistant" for message in completion):
        raise DataError(f"{where}: column {names[1]!r} has no assistant turn", "put what is to be learnt there")
    given = sum(message["role"] == "assistant" for message in prompt)
    return {**conversation(prompt + completion, row, columns, where), "given": given}


def _alpaca(row: Row, columns: Mapping[str, str], where: str) -> Document:
    prompt, completion = (text_in(row, columns[part], where) for part in ("instruction", "output"))
    return {"completion": completion, **asked_with(prompt, row, columns, where)}


def asked_with(prompt: str, row: Row, columns: Mapping[str, str], where: str) -> Document:
    """`prompt` with all that is shown together with it: a document's prompt, system, history and tools."""
    # A context or an input may be absent, null or empty in rows whose prompt says everything.
    if row.get(columns.get("context", "")):
        prompt = f"{text_in(row, columns['context'], where)}\n\n{prompt}"
    if row.get(columns.get("input", "")):
        prompt = f"{prompt}\n\n{text_in(row, columns['input'], where)}"
    tools = tools_in(row.get(columns.get("tools", "")), where)
    further = {"tools": tools} if tools else {}
    return {"prompt": prompt, **system_of(row, columns, where), **_history_of(row, columns, where), **further}


def _history_of(row: Row, columns: Mapping[str, str], where: str) -> dict[str, list[Message]]:
    """Earlier turns from LLaMA-Factory's history: a list of prompt and answer."""
    column = columns.get("history", "")
    pairs = row.get(column)
    if isinstance(pairs, str) and pairs.strip():
        pairs = parse_json(pairs, f"{where}, column {column}", DataError, "write it as a list")
    turns: list[Message] = []
    for number, pair in enumerate(pairs if isinstance(pairs, list) else [pairs] if pairs else [], 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            wrong = f"{where}: entry {number} of column {column!r} is {described(pair)}, not a prompt and its answer"
            raise DataError(wrong, 'write the earlier turns as [["prompt", "answer"], ...]')
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    if turns:
        notice("history", "earlier turns of the column history are shown, and not trained")
    return {"history": turns} if turns else {}


def system_of(row: Row, columns: Mapping[str, str], where: str) -> dict[str, str]:
    column = columns.get("system")
    return {"system": text_in(row, column, where)} if column and row.get(column) else {}


def _chat(row: Row, columns: Mapping[str, str], where: str) -> Document:
    return conversation(turns_in(row, columns["messages"], where), row, columns, where)


def turns_in(row: Row, column: str, where: str, said: str = "") -> list[Message]:
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        found = described(turns) if column in row else "nothing"
        wrong = f"{where}: column {column!r} holds {found}, not a list of turns"
        raise DataError(wrong, 'write turns as [{"role": "user", "content": "..."}]')
    return [message_of(turn, f"{where}, {said}turn {number}") for number, turn in enumerate(turns, 1)]


def conversation(messages: list[Message], row: Row, columns: Mapping[str, str], where: str) -> Document:
    system = system_of(row, columns, where)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system["system"]})
    said = [message for message in messages if message["role"] == "assistant"]
    document: Document = {"messages": [{k: v for k, v in each.items() if k != UNTRAINED} for each in messages]}
    if untrained := [number for number, message in enumerate(said) if UNTRAINED in message]:
        document["untrained"] = untrained
    if tools := tools_in(row.get(columns.get("tools", "")), where):
        document["tools"] = tools
    return document


def message_of(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: the turn is {described(turn)}, not an object with role and content")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        hint = did_you_mean(name, list(ROLES)) if isinstance(name, str) else ""
        raise DataError(f"{where}: unknown role {brief(name)}{hint}", f"known roles: {', '.join(ROLES)}")
    content = _content(turn.get("content", turn.get("value")), where, optional=bool(turn.get("tool_calls")))
    message: Message = {"role": ROLES[name], "content": content}
    message |= {key: turn[key] for key in MESSAGE_KEYS if turn.get(key) is not None}
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise DataError(f"{where}: tool_calls are {described(calls)}, not a list", "write [] where there are none")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    elif name == "function_call" and (calls := _parsed_calls(content)):
        # The text is kept for templates that know nothing of tool calls; see chat.ChatTemplate.adapt.
        message |= {"tool_calls": calls, "content": "", "call_text": content}
    return message if _is_trained(turn, message["role"], where) else {**message, UNTRAINED: True}


def _is_trained(turn: Mapping[str, Any], role: str, where: str) -> bool:
    """Whether no mark of a turn says that it is not to be trained."""
    marks = {key: turn[key] for key in MARKS if turn.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float):
            wrong = f"{where}: {key} is {described(value)}, which does not say whether the turn is trained"
            raise DataError(wrong, "write true or false, or 1 or 0")
        if value not in (0, 1):
            said = f"{where}: {key} {value:g}: halfbyte trains a turn fully or not at all, so this one fully"
            notice("loss-weight", f"{said}, and others alike; write 0 or 1")
    if role != "assistant" and any(marks.values()):
        notice("trained-roles", f"{where}: {', '.join(marks)} of role {role}: only turns of the assistant are trained")
    return all(marks.values())


def _content(content: Any, where: str, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        others = {str(part.get("type")) for part in content} - {"text"}
        if others:
            wrong = f"{where}: content of type {', '.join(sorted(others))}; only text can be trained on"
            raise DataError(wrong, "leave that part out, or the row")
        content = "".join(_content(part.get("text", part.get("value")), where, optional=False) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: the content is {described(content)}, not text")
    return content


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """One call in the form templates expect: arguments as an object, where OpenAI's API has them as JSON text."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}: a tool call without a function name: {described(call)}", WRITE_CALL)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{where}, arguments of {function['name']}", DataError, WRITE_CALL)
    if not isinstance(arguments, dict):
        wrong = f"{where}: the arguments of {brief(function['name'])} are {described(arguments)}, not an object"
        raise DataError(wrong, WRITE_CALL)
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}


def _parsed_calls(text: str) -> list[dict[str, Any]] | None:
    """The calls in a function_call turn; None where its text is not JSON of that shape (then it stays text)."""
    try:
        value = parse_json(text, "", DataError)
    except DataError:
        return None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) and "arguments" in c for c in calls):
        return None
    return [{"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls]


def tools_in(value: Any, where: str) -> list[dict[str, Any]]:
    """The list of tools, each wrapped as `{"type": "function", "function": {...}}`, from a list or its JSON text."""
    if isinstance(value, str) and value.strip():
        value = parse_json(value, f"{where}, column of tools", DataError)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{where}: tools are {described(value)}, not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
