"""Recognise the layout of rows from their columns, and convert each row to a document.

A document is one of three kinds, whatever the names of the columns:

- `{"messages": [...], "tools": [...]}`: a conversation in the form that chat templates take (roles system, user,
  assistant, tool; an assistant may carry `tool_calls`). With `"given": n` its first n assistant turns belong to the
  prompt; with `"untrained": [i, ...]` the assistant turns with these indices (from 0) are context only;
- `{"prompt": ..., "completion": ..., "system": ..., "history": [...], "tools": [...]}`: a question and its answer; the
  turns of the history come before it and are not trained;
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
# Parts that `column_mapping` may name.
PARTS = (
    *("messages", "prompt", "completion", "instruction", "input", "output", "text"),
    *("system", "tools", "context", "history"),
)
WRITE_CALL = 'write a call as {"function": {"name": "f", "arguments": {"x": 1}}}'
# Keys of a turn that say whether it is trained: Axolotl (train, training), ms-swift (loss), verl (loss_mask), OpenAI
# (weight).
MARKS = ("train", "training", "loss", "loss_mask", "weight", "loss_weight")
UNTRAINED = "untrained"  # temporary key of a message that such a mark excludes from training
# Message keys that chat templates read.
MESSAGE_KEYS = ("tool_calls", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


PAIR_COLUMNS = (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
STEP_COLUMNS = ("completions", "labels")
# Kinds of rows in words, and the methods that take them.
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
# Prompt column → part → columns that are shown with the prompt, the first existing one of each part.
WITH_PROMPT: dict[str, dict[str, tuple[str, ...]]] = {
    "instruction": {"input": ("input", "query", "context")},
    "question": {"context": ("context",), "input": ("input",)},
    "query": {"context": ("context",), "input": ("input",)},
    "input": {"context": ("context",)},
}


@dataclass(frozen=True)
class Layout:
    """Layout of the rows of one source: the format, part to column, and the columns it was recognised by."""

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
    """Choose the format of `source` from its columns, by the first 100 rows.

    Args:
        source: at least one row.
        format: auto, or one of messages, sharegpt, prompt-completion, alpaca, text.
        mapping: part (see `PARTS`) to column name, for other column names.
        text_field: the column of plain text.

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
                f"set method: {METHODS_FOR[kind]}; or map the columns to train on with column_mapping and"
                " dataset_format",
            )
    # Mapped columns decide if they fit a format by themselves; otherwise all columns count.
    names = {column: column for column in present}
    layout = _match(source, mapped, format) or _match(source, {**names, **mapped}, format)
    if layout is None:
        found = f"the columns of {source.path} ({', '.join(present)}) fit"
        if format != "auto" and (other := _match(source, {**names, **mapped}, "auto")):
            wrong = f"{found} dataset_format {other.format}, not {format}"
            raise DataError(wrong, f"set dataset_format: {other.format}, or map the columns with column_mapping")
        raise DataError(
            f"{found} {'no known format' if format == 'auto' else f'not dataset_format {format}'}; {_nearest(present)}",
            "map them, e.g. column_mapping: {prompt: your_column, completion: your_other_column}",
        )
    optional = {} if layout.format == "text" else find_system_and_tools(source, layout.columns, mapped)
    optional |= find_context(source, layout.columns, mapped)
    return Layout(layout.format, {**layout.columns, **optional}, source.note or layout.why)


def check_mapping(source: Source, mapped: Mapping[str, str], parts: Sequence[str], given: Mapping[str, str]) -> None:
    """Check that column_mapping names known parts and existing columns.

    Args:
        mapped: part to column.
        parts: the known parts.
        given: entries of `mapped` that come from column_mapping; the rest comes from dataset_text_field.

    Raises:
        DataError: a part is unknown, a column does not exist, or two parts name the same column.
    """
    present = columns_of(source)
    for part, column in mapped.items():
        if other := next((each for each in given if each != part and given[each] == given.get(part)), None):
            wrong = f"column_mapping: the column {brief(column)} is mapped to both {part} and {other}"
            raise DataError(wrong, "map each part to a different column")
        if part not in parts:
            raise DataError(
                f"column_mapping names an unknown part {brief(part)}{did_you_mean(part, parts)}",
                f"known parts are: {', '.join(parts)}",
            )
        if column not in present:
            key = "column_mapping" if part in given else "dataset_text_field"
            raise DataError(
                f"{key}: {source.path} has no column {brief(column)} (for {part}){did_you_mean(column, present)}",
                f"its columns are: {', '.join(present)}",
            )


def columns_of(source: Source) -> list[str]:
    """Return the columns of the first 100 rows."""
    return list(dict.fromkeys(column for row in source.rows[:100] for column in row))


def _match(source: Source, columns: Mapping[str, str], format: str) -> Layout | None:
    """Return the first format whose parts are all in `columns` (part to column), or None."""

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
                    f"{source.path}: reading column {parts['prompt']} as the prompt, {parts['completion']} as the"
                    " completion",
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
            return f"did you mean {near[0]!r} for {column!r}?"
    return f"known names are {', '.join(known)}"


def documents(source: Source, layout: Layout) -> Iterator[tuple[str, Document]]:
    """Yield `(where, document)` for every row; `where` names file and line.

    Raises:
        DataError: a row lacks a column or holds the wrong type in it. The message names the row.
    """
    convert = {"messages": _chat, "sharegpt": _chat, "alpaca": _alpaca, "prompt-completion": _pair, "text": _text}
    for index, row in enumerate(source.rows):
        where = source.where(index)
        yield where, convert[layout.format](row, layout.columns, where)


def text_in(row: Row, column: str, where: str) -> str:
    if column not in row:
        missing = f"{where}: the row has no column {column!r}{did_you_mean(column, list(row))}"
        raise DataError(missing, "add it to every row, or map another column with column_mapping")
    if not isinstance(row[column], str):
        raise DataError(
            f"{where}: column {column!r} holds {described(row[column])}, not text", "make it a string in every row"
        )
    return row[column]


def number_in(row: Row, column: str, where: str) -> float:
    """Return the finite number in a column."""
    value = row.get(column)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise DataError(f"{where}: column {column!r} holds {brief(value)}, not a number", "give a number in every row")
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
    return {**document, **prompt_parts(document["prompt"], row, columns, where)}


def _pair_of_turns(row: Row, columns: Mapping[str, str], where: str) -> Document:
    """Return the conversation of TRL's conversational form; the turns of the prompt are not trained."""
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
        raise DataError(f"{where}: column {names[1]!r} has no assistant turn", "put the answer there")
    given = sum(message["role"] == "assistant" for message in prompt)
    return {**conversation(prompt + completion, row, columns, where), "given": given}


def _alpaca(row: Row, columns: Mapping[str, str], where: str) -> Document:
    prompt, completion = (text_in(row, columns[part], where) for part in ("instruction", "output"))
    return {"completion": completion, **prompt_parts(prompt, row, columns, where)}


def prompt_parts(prompt: str, row: Row, columns: Mapping[str, str], where: str) -> Document:
    """Return the prompt with everything that is shown with it: a document's prompt, system, history and tools."""
    # A context or an input may be missing, null or empty.
    if row.get(columns.get("context", "")):
        prompt = f"{text_in(row, columns['context'], where)}\n\n{prompt}"
    if row.get(columns.get("input", "")):
        prompt = f"{prompt}\n\n{text_in(row, columns['input'], where)}"
    tools = tools_in(row.get(columns.get("tools", "")), where)
    further = {"tools": tools} if tools else {}
    return {"prompt": prompt, **system_of(row, columns, where), **_history_of(row, columns, where), **further}


def _history_of(row: Row, columns: Mapping[str, str], where: str) -> dict[str, list[Message]]:
    """Return earlier turns from LLaMA-Factory's history, a list of [prompt, answer]."""
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
        notice("history", "showing the earlier turns in column history without training them")
    return {"history": turns} if turns else {}


def system_of(row: Row, columns: Mapping[str, str], where: str) -> dict[str, str]:
    column = columns.get("system")
    return {"system": text_in(row, column, where)} if column and row.get(column) else {}


def _chat(row: Row, columns: Mapping[str, str], where: str) -> Document:
    return conversation(turns_in(row, columns["messages"], where), row, columns, where)


def turns_in(row: Row, column: str, where: str, prefix: str = "") -> list[Message]:
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        found = described(turns) if column in row else "nothing"
        wrong = f"{where}: column {column!r} holds {found}, not a list of turns"
        raise DataError(wrong, 'write turns as [{"role": "user", "content": "..."}]')
    return [message_of(turn, f"{where}, {prefix}turn {number}") for number, turn in enumerate(turns, 1)]


def conversation(messages: list[Message], row: Row, columns: Mapping[str, str], where: str) -> Document:
    system = system_of(row, columns, where)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system["system"]})
    answers = [message for message in messages if message["role"] == "assistant"]
    document: Document = {"messages": [{k: v for k, v in each.items() if k != UNTRAINED} for each in messages]}
    if untrained := [number for number, message in enumerate(answers) if UNTRAINED in message]:
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
            raise DataError(f"{where}: tool_calls are {described(calls)}, not a list", "write [] for no calls")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    elif name == "function_call" and (calls := _parsed_calls(content)):
        # Templates without tool calls use the text; see chat.ChatTemplate.adapt.
        message |= {"tool_calls": calls, "content": "", "call_text": content}
    return message if _is_trained(turn, message["role"], where) else {**message, UNTRAINED: True}


def _is_trained(turn: Mapping[str, Any], role: str, where: str) -> bool:
    """Return whether no mark excludes a turn from training."""
    marks = {key: turn[key] for key in MARKS if turn.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float):
            wrong = f"{where}: {key} is {described(value)}, not true or false"
            raise DataError(wrong, "write true or false, or 1 or 0")
        if value not in (0, 1):
            found = f"{where}: {key} is {value:g}, but halfbyte has no weights between turns"
            notice("loss-weight", f"{found}: training this turn and similar ones fully; write 0 or 1")
    if role != "assistant" and any(marks.values()):
        notice(
            "trained-roles", f"{where}: ignoring {', '.join(marks)} of role {role}: only assistant turns are trained"
        )
    return all(marks.values())


def _content(content: Any, where: str, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        others = {str(part.get("type")) for part in content} - {"text"}
        if others:
            wrong = f"{where}: content of type {', '.join(sorted(others))}; halfbyte trains text only"
            raise DataError(wrong, "remove that part, or the row")
        content = "".join(_content(part.get("text", part.get("value")), where, optional=False) for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: the content is {described(content)}, not text")
    return content


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call in the form that templates expect: arguments as an object (OpenAI's API has JSON text)."""
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
    """Return the calls in a function_call turn, or None if its text is not JSON of that shape."""
    try:
        value = parse_json(text, "", DataError)
    except DataError:
        return None
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(c, dict) and isinstance(c.get("name"), str) and "arguments" in c for c in calls):
        return None
    return [{"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}} for c in calls]


def tools_in(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the tools, each wrapped as `{"type": "function", "function": {...}}`, from a list or its JSON text."""
    if isinstance(value, str) and value.strip():
        value = parse_json(value, f"{where}, column of tools", DataError)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{where}: tools are {described(value)}, not a list of objects")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


# --- columns shown with a prompt --------------------------------------------------------------------------------------


def every_column(source: Source) -> list[str]:
    """Return the columns of all rows: an optional column may be missing in most of them."""
    return list(dict.fromkeys(column for row in source.rows for column in row))


def find_system_and_tools(source: Source, columns: Mapping[str, str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Find the columns of a system text and of tools: part to column.

    With a text prompt, a column `tools` counts only if it looks like a list of tools or `mapped` names it.

    Args:
        columns: part to column, as recognised so far.
        mapped: column_mapping.
    """
    every = every_column(source)
    found = {part: mapped.get(part, part) for part in ("system", "tools") if mapped.get(part, part) in every}
    asking = columns.get("prompt", columns.get("instruction"))
    if asking is not None and isinstance(_first_value(source, asking), str) and "tools" not in mapped:
        found = {part: name for part, name in found.items() if part != "tools" or _is_tools(_first_value(source, name))}
    return found


def find_context(source: Source, columns: Mapping[str, str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Find the columns that are shown together with a prompt: part (context, input, history) to column.

    A context is written before a question and after an instruction, an input always after. A column named `prompt` is
    complete, unless `mapped` names more.

    Args:
        columns: part to column, as recognised so far.
        mapped: column_mapping.
    """
    asking = columns.get("prompt", columns.get("instruction"))
    if asking is None or not isinstance(_first_value(source, asking), str):
        return {}
    every, used = every_column(source), set(columns.values())
    found: dict[str, str] = {}
    for part, names in {"context": (), "input": (), "history": ("history",), **WITH_PROMPT.get(asking, {})}.items():
        if part in mapped:
            found[part] = mapped[part]
            continue
        fits = _is_history if part == "history" else _is_text
        free = (name for name in names if name in every and name not in used and part not in columns)
        if name := next((name for name in free if fits(_first_value(source, name))), ""):
            found[part] = name
            if part != "history":  # history has its own notice, once a row contains one
                notice(f"columns:{source.path}:{part}", f"{source.path}: showing column {name} with column {asking}")
    return found


def _first_value(source: Source, column: str) -> Any:
    """Return the first value in a column that is not empty."""
    return next((row[column] for row in source.rows if row.get(column)), None)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_tools(value: Any) -> bool:
    """Return whether a value looks like a list of tools, or its JSON text."""
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and isinstance(value[0], dict)


def _is_history(value: Any) -> bool:
    """Return whether a value looks like pairs of prompt and answer, or their JSON text (CSV files)."""
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and isinstance(value[0], list)
