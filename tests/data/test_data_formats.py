"""Formats are recognised from columns, rows become documents, and errors name the row."""

import json

import pytest

from halfbyte.data.formats import documents, recognise
from halfbyte.data.sources import Source
from halfbyte.utils.errors import DataError
from halfbyte.utils.notices import notices_so_far

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}


def source(*rows):
    return Source("data.jsonl", "jsonl", list(rows), range(1, len(rows) + 1))


def read(*rows, **keys):
    rows_read = source(*rows)
    layout = recognise(rows_read, **keys)
    return layout, [document for _, document in documents(rows_read, layout)]


def test_messages():
    layout, [document] = read({"messages": TURNS})
    assert (layout.format, layout.why) == ("messages", "column messages holds role/content turns")
    assert document == {"messages": TURNS}
    assert read({"conversations": TURNS})[1] == [document]


def test_parts_of_content_are_joined():
    pieces = [{"type": "text", "text": "hel"}, {"type": "text", "value": "lo"}]
    _, [document] = read({"messages": [TURNS[0], {"role": "assistant", "content": pieces, "loss_weight": 0.5}]})
    assert document == {"messages": TURNS}
    assert "loss-weight" in notices_so_far()


def test_sharegpt_with_tools():
    call = {"name": "f", "arguments": {"x": 1}}
    turns = [
        ("system", "s"), ("human", "q"), ("function_call", json.dumps(call)), ("observation", "r"), ("gpt", "a"),
    ]  # fmt: skip
    row = {"conversations": [{"from": role, "value": value} for role, value in turns], "tools": json.dumps([TOOL])}
    layout, [document] = read(row)
    assert layout.format == "sharegpt"
    assert document["tools"] == [{"type": "function", "function": TOOL}]
    assert [message["role"] for message in document["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert document["messages"][2]["tool_calls"] == [{"type": "function", "function": call}]
    assert document["messages"][2]["call_text"] == json.dumps(call)


def test_call_that_is_not_json_stays_text():
    row = {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "f(1)"}]}
    assert read(row)[1][0]["messages"][1] == {"role": "assistant", "content": "f(1)"}


def test_openai_tool_calls_get_their_arguments_parsed():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    _, [document] = read({"messages": [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert document["messages"][1]["content"] == ""
    assert document["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


@pytest.mark.parametrize(
    "names", [("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output")]
)
def test_prompt_completion(names):
    layout, answers = read({names[0]: "q", names[1]: "a", "other": 1})
    assert layout.format == "prompt-completion"
    assert answers == [{"prompt": "q", "completion": "a"}]
    assert bool(notices_so_far()) == (names != ("prompt", "completion"))


def test_prompt_and_completion_may_be_turns():
    earlier = [{"role": "system", "content": "s"}, *TURNS, {"from": "human", "value": "bye"}]
    layout, conversations = read(
        {"prompt": earlier, "completion": [TURNS[1]], "tools": [TOOL]}, {"prompt": "q", "completion": "a"}
    )
    assert layout.format == "prompt-completion"
    assert conversations[0]["messages"] == [earlier[0], *TURNS, {"role": "user", "content": "bye"}, TURNS[1]]
    assert (conversations[0]["given"], conversations[0]["tools"][0]["function"]) == (1, TOOL)
    assert conversations[1] == {"prompt": "q", "completion": "a"}
    assert read({"prompt": TURNS[:1], "completion": TURNS[1:], "system": "s"})[1] == [
        {"messages": [{"role": "system", "content": "s"}, *TURNS], "given": 0}
    ]


def test_alpaca_joins_a_nonempty_input():
    rows = [{"instruction": "i", "input": x, "output": "o", "system": "s"} for x in ("", "x", None)]
    layout, instructions = read(*rows)
    assert layout.format == "alpaca"
    assert [document["prompt"] for document in instructions] == ["i", "i\n\nx", "i"]
    assert (instructions[0]["completion"], instructions[0]["system"]) == ("o", "s")


def test_text_and_text_field():
    assert read({"text": "t", "n": 1})[1] == [{"text": "t"}]
    assert read({"body": "t", "text": 5}, text_field="body")[1] == [{"text": "t"}]


def test_column_mapping_overrides_recognition():
    row = {"question": "q", "answer": "a", "q": "Q", "a": "A"}
    assert read(row, mapping={"prompt": "q", "completion": "a"})[1] == [{"prompt": "Q", "completion": "A"}]
    assert read(row, mapping={"completion": "a", "prompt": "question"})[1] == [{"prompt": "q", "completion": "A"}]
    assert read({"talk": TURNS}, mapping={"messages": "talk"})[0].format == "messages"


def test_dataset_format_overrides_recognition():
    row = {"messages": TURNS, "text": "t"}
    assert read(row)[0].format == "messages"
    assert read(row, format="text")[1] == [{"text": "t"}]
    with pytest.raises(DataError, match="dataset_format"):
        read(row, format="alpaca")


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"prompt": "q", "completion": "a"}, {"mapping": {"prompt": "promt"}}, "'prompt'"),
        ({"prompt": "q"}, {"mapping": {"promt": "prompt"}}, "'promt'.*'prompt'"),
        ({"text": "q"}, {"text_field": "txt"}, "'text'"),
        ({"quesion": "q", "anwser": "a"}, {}, "'question'"),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, {}, None),
    ],
)
def test_unknown_columns(row, keys, message):
    with pytest.raises(DataError, match=message):
        read(row, **keys)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"text": "t"}, {"text": 5}, r"data\.jsonl:2:.*'text'.*int 5"),
        ({"text": "t"}, {"test": "t"}, r"data\.jsonl:2:.*'text'.*'test'"),
        ({"prompt": "", "completion": ""}, {"prompt": "", "completion": None}, ":2:.*'completion'"),
        ({"prompt": TURNS[:1], "completion": TURNS[1:]}, {"prompt": TURNS[:1], "completion": "a"},
         ":2:.*'completion'.*'prompt'"),
        ({"prompt": "q", "completion": "a"}, {"prompt": TURNS[:1], "completion": TURNS[:1]},
         ":2:.*'completion'"),
        ({"prompt": "q", "completion": "a"}, {"prompt": TURNS[:1], "completion": [TURNS[1], {"role": "asistant"}]},
         ":2.*turn 2:.*'asistant'.*'assistant'"),
        ({"messages": TURNS}, {"messages": "hi"}, ":2:.*'messages'"),
        ({"messages": TURNS}, {"messages": ["hi"]}, ":2, turn 1:"),
        ({"messages": TURNS}, {"messages": [{"role": "usr"}]}, ":2, turn 1:.*'usr'.*'user'"),
        ({"messages": TURNS}, {"messages": [{"role": "user", "content": 1}]}, ":2, turn 1:.*int 1"),
        ({"messages": TURNS}, {"messages": [{"role": "user"}]}, ":2, turn 1:.*NoneType"),
        ({"messages": TURNS}, {"messages": [{"role": "user", "content": [{"type": "video"}]}]}, None),
        ({"messages": TURNS}, {"messages": [{"role": "assistant", "tool_calls": 3}]}, "tool_calls.*int 3"),
        ({"messages": TURNS}, {"messages": TURNS, "tools": "[{"}, ":2.*tools:1:.*JSON"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(first, second, message):
    with pytest.raises(DataError, match=message):
        read({**first, "tools": None} if "tools" in second else first, second)
