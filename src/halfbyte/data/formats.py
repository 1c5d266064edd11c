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
    *("system", "tools", "context", "history", "images"),
)
WRITE_CALL = 'write a call as {"function": {"name": "f", "arguments": {"x": 1}}}'
# Keys of a turn that say whether it is trained: Axolotl (train, training), ms-swift (loss), verl (loss_mask), OpenAI
# (weight).
MARKS = ("train", "training", "loss", "loss_mask", "weight", "loss_weight")
IMAGE_TYPES = ("image", "image_url")  # of parts of a turn's content
IMAGE_KEYS = ("image", "image_url", "url", "path", "base64", "bytes")  # of such a part, which hold the image
IMAGE_ROLES = ("user", "tool")  # of turns that may have images
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
    "labelled": "texts to classify, to embed or to rank",
}
METHODS_FOR = {
    "text": "sft",
    "pairs": "dpo, orpo, simpo, cpo or reward",
    "unpaired": "kto",
    "prompts": "grpo, rloo or gkd",
    "stepwise": "prm",
    "labelled": "sequence_classification, token_classification, embedding or reranker",
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
    other_rows = [("pairs", pair) for pair in PAIR_COLUMNS] + [("stepwise", STEP_COLUMNS)]
    for row_type, columns in other_rows if format == "auto" else ():
        if set(columns) <= set(present):
            raise DataError(
                f"{source.path} holds {WORDS[row_type]} (columns {' and '.join(columns)}), not {WORDS['text']}",
                f"set method: {METHODS_FOR[row_type]}; or map the columns to train on with column_mapping and"
                " dataset_format",
            )
    # Mapped columns decide if they fit a format by themselves; otherwise all columns count.
    names = {column: column for column in present}
    layout = _match(source, mapped, format) or _match(source, {**names, **mapped}, format)
    if layout is None:
        problem = f"the columns of {source.path} ({', '.join(present)}) fit"
        if format != "auto" and (fitting := _match(source, {**names, **mapped}, "auto")):
            wrong = f"{problem} dataset_format {fitting.format}, not {format}"
            raise DataError(wrong, f"set dataset_format: {fitting.format}, or map the columns with column_mapping")
        raise DataError(
            f"{problem} {'no known format' if format == 'auto' else f'not dataset_format {format}'};"
            f" {_nearest(present)}",
            "map them, e.g. column_mapping: {prompt: your_column, completion: your_other_column}",
        )
    optional = {} if layout.format == "text" else find_system_and_tools(source, layout.columns, mapped)
    optional |= find_context(source, layout.columns, mapped)
    return Layout(layout.format, {**layout.columns, **optional}, source.note or layout.why)


def check_mapping(
    source: Source, mapped: Mapping[str, str], fields: Sequence[str], column_mapping: Mapping[str, str]
) -> None:
    """Check that column_mapping names known parts and existing columns.

    Args:
        mapped: part to column.
        fields: the known parts.
        column_mapping: entries of `mapped` that come from column_mapping; the rest comes from dataset_text_field.

    Raises:
        DataError: a part is unknown, a column does not exist, or two parts name the same column.
    """
    present = columns_of(source)
    for field, column in mapped.items():
        if twin := next(
            (name for name in column_mapping if name != field and column_mapping[name] == column_mapping.get(field)),
            None,
        ):
            wrong = f"column_mapping: the column {brief(column)} is mapped to both {field} and {twin}"
            raise DataError(wrong, "map each part to a different column")
        if field not in fields:
            raise DataError(
                f"column_mapping names an unknown part {brief(field)}{did_you_mean(field, fields)}",
                f"known parts are: {', '.join(fields)}",
            )
        if column not in present:
            key = "column_mapping" if field in column_mapping else "dataset_text_field"
            raise DataError(
                f"{key}: {source.path} has no column {brief(column)} (for {field}){did_you_mean(column, present)}",
                f"its columns are: {', '.join(present)}",
            )


def columns_of(source: Source) -> list[str]:
    """Return the columns of the first 100 rows."""
    return list(dict.fromkeys(column for row in source.rows[:100] for column in row))


def _match(source: Source, columns: Mapping[str, str], format: str) -> Layout | None:
    """Return the first format whose parts are all in `columns` (part to column), or None."""

    def allowed(name: str) -> bool:
        return format in ("auto", name)

    for field in CHAT_COLUMNS:
        if field in columns and (allowed("messages") or allowed("sharegpt")):
            column = columns[field]
            turns = source.rows[0].get(column)
            has_from = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]
            style = "sharegpt" if has_from else "messages"
            keys = "from/value" if style == "sharegpt" else "role/content"
            return Layout(style, {"messages": column}, f"column {column} holds {keys} turns")
    if allowed("alpaca") and {"instruction", "output"} <= set(columns):
        fields = {field: columns[field] for field in ("instruction", "input", "output") if field in columns}
        return Layout("alpaca", fields, f"columns {', '.join(fields.values())}")
    for prompt, completion in PAIRS if allowed("prompt-completion") else ():
        if prompt in columns and completion in columns:
            fields = {"prompt": columns[prompt], "completion": columns[completion]}
            if (prompt, completion) != ("prompt", "completion"):
                notice(
                    f"columns:{source.path}",
                    f"{source.path}: reading column {fields['prompt']} as the prompt, {fields['completion']} as the"
                    " completion",
                )
            return Layout("prompt-completion", fields, f"columns {fields['prompt']}, {fields['completion']}")
    if allowed("text") and "text" in columns:
        return Layout("text", {"text": columns["text"]}, f"column {columns['text']}")
    return None


def did_you_mean(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _nearest(present: Sequence[str]) -> str:
    names = sorted({*CHAT_COLUMNS, *PARTS, *(name for pair in PAIRS for name in pair)})
    for column in present:
        if column not in names and (near := difflib.get_close_matches(column, names, n=1)):
            return f"did you mean {near[0]!r} for {column!r}?"
    return f"known names are {', '.join(names)}"


def documents(source: Source, layout: Layout) -> Iterator[tuple[str, Document]]:
    """Yield `(location, document)` for every row; `location` names file and line.

    Raises:
        DataError: a row lacks a column or holds the wrong type in it. The message names the row.
    """
    convert = {"messages": _chat, "sharegpt": _chat, "alpaca": _alpaca, "prompt-completion": _pair, "text": _text}
    for index, row in enumerate(source.rows):
        location = source.location(index)
        yield location, convert[layout.format](row, layout.columns, location)


def text_in(row: Row, column: str, location: str) -> str:
    if column not in row:
        missing = f"{location}: the row has no column {column!r}{did_you_mean(column, list(row))}"
        raise DataError(missing, "add it to every row, or map another column with column_mapping")
    if not isinstance(row[column], str):
        raise DataError(
            f"{location}: column {column!r} holds {described(row[column])}, not text", "make it a string in every row"
        )
    return row[column]


def number_in(row: Row, column: str, location: str) -> float:
    """Return the finite number in a column."""
    value = row.get(column)
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise DataError(
            f"{location}: column {column!r} holds {brief(value)}, not a number", "give a number in every row"
        )
    return number


def described(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def _text(row: Row, columns: Mapping[str, str], location: str) -> Document:
    return {"text": text_in(row, columns["text"], location)}


def _pair(row: Row, columns: Mapping[str, str], location: str) -> Document:
    names = [columns[field] for field in ("prompt", "completion")]
    if any(isinstance(row.get(name), list) for name in names):
        return _pair_of_turns(row, columns, location)
    document = {field: text_in(row, columns[field], location) for field in ("prompt", "completion")}
    return {**document, **prompt_parts(document["prompt"], row, columns, location)}


def _pair_of_turns(row: Row, columns: Mapping[str, str], location: str) -> Document:
    """Return the conversation of TRL's conversational form; the turns of the prompt are not trained."""
    names = [columns[field] for field in ("prompt", "completion")]
    for name, sibling in zip(names, reversed(names), strict=True):
        if not isinstance(row.get(name), list):
            value = described(row[name]) if name in row else "nothing"
            raise DataError(
                f"{location}: column {name!r} holds {value}, not a list of turns, as column {sibling!r} does",
                "make both columns lists of turns, or both texts",
            )
    prompt, completion = (turns_in(row, name, location, f"{name}, ") for name in names)
    if not any(message["role"] == "assistant" for message in completion):
        raise DataError(f"{location}: column {names[1]!r} has no assistant turn", "put the answer there")
    prompt_answers = sum(message["role"] == "assistant" for message in prompt)
    return {**conversation(prompt + completion, row, columns, location), "given": prompt_answers}


def _alpaca(row: Row, columns: Mapping[str, str], location: str) -> Document:
    prompt, completion = (text_in(row, columns[field], location) for field in ("instruction", "output"))
    return {"completion": completion, **prompt_parts(prompt, row, columns, location)}


def prompt_parts(prompt: str, row: Row, columns: Mapping[str, str], location: str) -> Document:
    """Return the prompt with everything that is shown with it: a document's prompt, system, history and tools."""
    # A context or an input may be missing, null or empty.
    if row.get(columns.get("context", "")):
        prompt = f"{text_in(row, columns['context'], location)}\n\n{prompt}"
    if row.get(columns.get("input", "")):
        prompt = f"{prompt}\n\n{text_in(row, columns['input'], location)}"
    tools = tools_in(row.get(columns.get("tools", "")), location)
    further = {"tools": tools} if tools else {}
    return {"prompt": prompt, **system_of(row, columns, location), **_history_of(row, columns, location), **further}


def _history_of(row: Row, columns: Mapping[str, str], location: str) -> dict[str, list[Message]]:
    """Return earlier turns from LLaMA-Factory's history, a list of [prompt, answer]."""
    column = columns.get("history", "")
    pairs = row.get(column)
    if isinstance(pairs, str) and pairs.strip():
        pairs = parse_json(pairs, f"{location}, column {column}", DataError, "write it as a list")
    turns: list[Message] = []
    for number, pair in enumerate(pairs if isinstance(pairs, list) else [pairs] if pairs else [], 1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            wrong = f"{location}: entry {number} of column {column!r} is {described(pair)}, not a prompt and its answer"
            raise DataError(wrong, 'write the earlier turns as [["prompt", "answer"], ...]')
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    if turns:
        notice("history", "showing the earlier turns in column history without training them")
    return {"history": turns} if turns else {}


def system_of(row: Row, columns: Mapping[str, str], location: str) -> dict[str, str]:
    column = columns.get("system")
    return {"system": text_in(row, column, location)} if column and row.get(column) else {}


def _chat(row: Row, columns: Mapping[str, str], location: str) -> Document:
    return conversation(turns_in(row, columns["messages"], location), row, columns, location)


def turns_in(row: Row, column: str, location: str, prefix: str = "") -> list[Message]:
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        value = described(turns) if column in row else "nothing"
        wrong = f"{location}: column {column!r} holds {value}, not a list of turns"
        raise DataError(wrong, 'write turns as [{"role": "user", "content": "..."}]')
    return [message_of(turn, f"{location}, {prefix}turn {number}") for number, turn in enumerate(turns, 1)]


def conversation(messages: list[Message], row: Row, columns: Mapping[str, str], location: str) -> Document:
    system = system_of(row, columns, location)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system["system"]})
    answers = [message for message in messages if message["role"] == "assistant"]
    document: Document = {"messages": [{k: v for k, v in message.items() if k != UNTRAINED} for message in messages]}
    if untrained := [number for number, message in enumerate(answers) if UNTRAINED in message]:
        document["untrained"] = untrained
    if tools := tools_in(row.get(columns.get("tools", "")), location):
        document["tools"] = tools
    return document


def message_of(turn: Any, location: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{location}: the turn is {described(turn)}, not an object with role and content")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        hint = did_you_mean(name, list(ROLES)) if isinstance(name, str) else ""
        raise DataError(f"{location}: unknown role {brief(name)}{hint}", f"known roles: {', '.join(ROLES)}")
    content = _content(turn.get("content", turn.get("value")), location, optional=bool(turn.get("tool_calls")))
    message: Message = {"role": ROLES[name], "content": content}
    if image_parts(message) and message["role"] not in IMAGE_ROLES:
        wrong = f"{location}: an image in a turn of role {message['role']}"
        raise DataError(wrong, "move it to a user or tool turn: models read images, and write text")
    message |= {key: turn[key] for key in MESSAGE_KEYS if turn.get(key) is not None}
    if "tool_calls" in message:
        calls = message["tool_calls"]
        if not isinstance(calls, list):
            raise DataError(f"{location}: tool_calls are {described(calls)}, not a list", "write [] for no calls")
        message["tool_calls"] = [_tool_call(call, location) for call in calls]
    elif name == "function_call" and isinstance(content, str) and (calls := _parsed_calls(content)):
        # Templates without tool calls use the text; see chat.ChatTemplate.adapt.
        message |= {"tool_calls": calls, "content": "", "call_text": content}
    return message if _is_trained(turn, message["role"], location) else {**message, UNTRAINED: True}


def _is_trained(turn: Mapping[str, Any], role: str, location: str) -> bool:
    """Return whether no mark excludes a turn from training."""
    marks = {key: turn[key] for key in MARKS if turn.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, bool | int | float):
            wrong = f"{location}: {key} is {described(value)}, not true or false"
            raise DataError(wrong, "write true or false, or 1 or 0")
        if value not in (0, 1):
            problem = f"{location}: {key} is {value:g}, but halfbyte has no weights between turns"
            notice("loss-weight", f"{problem}: training this turn and similar ones fully; write 0 or 1")
    if role != "assistant" and any(marks.values()):
        notice(
            "trained-roles", f"{location}: ignoring {', '.join(marks)} of role {role}: only assistant turns are trained"
        )
    return all(marks.values())


def _content(content: Any, location: str, *, optional: bool) -> str | list[dict[str, Any]]:
    """Return the content of a turn: a text, or with images a list of parts.

    A part is `{"type": "text", "text": ...}` or `{"type": "image", "image": {key: value}}` with a key of `IMAGE_KEYS`,
    without `image` if the row has its images in a column.
    """
    if content is None and optional:
        return ""
    if isinstance(content, list) and all(isinstance(piece, dict) for piece in content):
        pieces = [_piece(piece, location) for piece in content]
        if all(isinstance(piece, str) for piece in pieces):
            return "".join(pieces)
        return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]
    if not isinstance(content, str):
        raise DataError(f"{location}: the content is {described(content)}, not text")
    return content


def _piece(piece: Mapping[str, Any], location: str) -> Any:
    """Return one part of a content: a text, or an image part."""
    if piece.get("type") in IMAGE_TYPES:
        values = {key: piece[key] for key in IMAGE_KEYS if piece.get(key) is not None}
        return {"type": "image", "image": values} if values else {"type": "image"}
    if piece.get("type") != "text":
        wrong = f"{location}: content of type {piece.get('type')}; halfbyte trains text and reads images"
        raise DataError(wrong, "remove that part, or the row")
    return _content(piece.get("text", piece.get("value")), location, optional=False)


def image_parts(message: Message) -> list[dict[str, Any]]:
    """Return the image parts of a message's content."""
    content = message.get("content")
    return [part for part in content if part["type"] == "image"] if isinstance(content, list) else []


def count_images(document: Document) -> int:
    """Return the number of image parts in a document's turns."""
    return sum(len(image_parts(message)) for message in document.get("messages", ()))


def has_images(document: Document) -> bool:
    """Return whether a turn of a document has an image part."""
    return count_images(document) > 0


def joined_contents(*contents: Any) -> Any:
    """Return contents of turns as one, with an empty line between them: a text, or with images a list of parts."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(contents)
    parts: list[dict[str, Any]] = []
    for number, content in enumerate(contents):
        parts += [{"type": "text", "text": "\n\n"}] if number else []
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _tool_call(call: Any, location: str) -> dict[str, Any]:
    """Return a call in the form that templates expect: arguments as an object (OpenAI's API has JSON text)."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{location}: a tool call without a function name: {described(call)}", WRITE_CALL)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments or "{}", f"{location}, arguments of {function['name']}", DataError, WRITE_CALL)
    if not isinstance(arguments, dict):
        wrong = f"{location}: the arguments of {brief(function['name'])} are {described(arguments)}, not an object"
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


def tools_in(value: Any, location: str) -> list[dict[str, Any]]:
    """Return the tools, each wrapped as `{"type": "function", "function": {...}}`, from a list or its JSON text."""
    if isinstance(value, str) and value.strip():
        value = parse_json(value, f"{location}, column of tools", DataError)
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"{location}: tools are {described(value)}, not a list of objects")
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
    optional = {field: mapped.get(field, field) for field in ("system", "tools") if mapped.get(field, field) in every}
    asking = columns.get("prompt", columns.get("instruction"))
    has_text_prompt = asking is not None and isinstance(_first_value(source, asking), str)
    is_guess = has_text_prompt and "tools" in optional and "tools" not in mapped
    if is_guess and not _is_list_of(_first_value(source, "tools"), dict):
        del optional["tools"]
    return optional


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
    context: dict[str, str] = {}
    for field, names in {"context": (), "input": (), "history": ("history",), **WITH_PROMPT.get(asking, {})}.items():
        if field in mapped:
            context[field] = mapped[field]
            continue
        for name in (name for name in names if name in every and name not in used and field not in columns):
            value = _first_value(source, name)
            if _is_list_of(value, list) if field == "history" else isinstance(value, str):
                context[field] = name
                break
        if field in context and field != "history":  # history has its own notice, once a row contains one
            shown = f"showing column {context[field]} with column {asking}"
            notice(f"columns:{source.path}:{field}", f"{source.path}: {shown}")
    return context


def _first_value(source: Source, column: str) -> Any:
    """Return the first value in a column that is not empty."""
    return next((row[column] for row in source.rows if row.get(column)), None)


def _is_list_of(value: Any, entry: type) -> bool:
    """Return whether a value looks like a list of such entries, or its JSON text (CSV files)."""
    if isinstance(value, str):
        return value.lstrip().startswith("[")
    return isinstance(value, list) and isinstance(value[0], entry)
