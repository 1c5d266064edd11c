"""Every column and key of a row is trained, shown as context, or named once with its number of rows."""

import json

import pytest

from halfbyte.data.prepare import prepare
from halfbyte.data.prepare_answers import prepare_answers
from halfbyte.utils.errors import DataError
from halfbyte.utils.notices import notices_so_far

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def prepared(config, write, make_tokenizer):
    """Prepare rows; return the report, the first row as text, and its trained text."""

    def _prepared(rows, *, kind=None, template="plain", **keys):
        tokenizer, asked = make_tokenizer(template), config(write(rows), **keys)
        data = prepare_answers(asked, tokenizer, kind) if kind else prepare(asked, tokenizer)
        sample = data.report["samples"][0]
        pairs = zip(sample["tokens"], sample["trained"], strict=True)
        return data.report, "".join(sample["tokens"]), "".join(token for token, trained in pairs if trained)

    return _prepared


def left_out(report):
    return report["sources"][0].get("left_out", {})


@pytest.mark.parametrize(
    ("row", "shown", "named"),
    [
        ({"instruction": "i", "context": "c", "response": "r", "category": "x"}, "i\n\nc", {"category": 1}),
        ({"id": 0, "title": "t", "context": "c", "question": "q", "answer": "r"}, "c\n\nq", {"id": 1, "title": 1}),
        ({"instruction": "i", "query": "c", "output": "r"}, "i\n\nc", {}),
        ({"instruction": "i", "input": "c", "output": "r", "query": "x"}, "i\n\nc", {"query": 1}),
        ({"instruction": "i", "input": "c", "response": "r"}, "i\n\nc", {}),
        ({"question": "q", "input": "c", "answer": "r"}, "q\n\nc", {}),
        ({"context": "c", "input": "q", "output": "r"}, "c\n\nq", {}),
        ({"instruction": "i", "context": {"title": ["t"]}, "response": "r"}, "i", {"context": 1}),
        ({"instruction": "i", "context": "", "response": "r"}, "i", {}),
        ({"prompt": "p", "completion": "r", "context": "c", "source": None}, "p", {"context": 1}),
    ],
)
def test_contexts_are_shown_and_unread_columns_named(prepared, row, shown, named):
    report, text, trained = prepared([row])
    assert text == f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"
    assert trained == "r<|im_end|>"
    assert left_out(report) == named


def test_a_mapped_context_is_shown(prepared):
    row = {"q": "q", "passage": "c", "a": "r"}
    report, text, _ = prepared([row], column_mapping={"prompt": "q", "completion": "a", "context": "passage"})
    assert "user\nc\n\nq<|im_end|>" in text
    assert left_out(report) == {}


@pytest.mark.parametrize("names", [("instruction", "output"), ("prompt", "response"), ("question", "answer")])
def test_history_is_shown_as_earlier_turns(prepared, names):
    row = {names[0]: "q", names[1]: "r", "history": [["q1", "r1"], ["q2", "r2"]], "system": "s"}
    _, text, trained = prepared([row])
    turns = [("system", "s"), ("user", "q1"), ("assistant", "r1"), ("user", "q2"), ("assistant", "r2"),
             ("user", "q"), ("assistant", "r")]  # fmt: skip
    assert text == "".join(f"<|im_start|>{role}\n{notices_so_far}<|im_end|>\n" for role, notices_so_far in turns)
    assert trained == "r<|im_end|>"


@pytest.mark.parametrize("history", [[["q1"]], [["q1", None]], [["q1", "r1"], "r2"]])
def test_a_malformed_history_is_named(prepared, history):
    with pytest.raises(DataError, match=r"data\.jsonl:1.*'history'"):
        prepared([{"instruction": "q", "output": "r", "history": history}])


def test_unread_columns_of_every_layout_are_named_once(prepared):
    for rows, keys in (
        ([{"messages": TURNS, "id": i, "tag": "" if i else "x"} for i in range(3)], {}),
        ([{"text": "t", "id": i, "tag": None if i else "x"} for i in range(3)], {}),
        ([{"prompt": "p", "chosen": f"a{i}", "rejected": "b", "id": i, "tag": [] if i else "x"} for i in range(3)],
         {"kind": "pairs", "method": "dpo"}),
        ([{"prompt": "p", "completion": f"{i}", "label": i < 1, "id": i, "tag": {} if i else "x"} for i in range(3)],
         {"kind": "unpaired", "method": "kto"}),
        ([{"prompt": "p", "completions": [f"{i}"], "labels": [i < 1], "id": i, **({} if i else {"tag": 0})}
          for i in range(3)], {"kind": "stepwise", "method": "prm"}),
    ):  # fmt: skip
        report, _, _ = prepared(rows, **keys)
        assert left_out(report) == {"id": 3, "tag": 1}
        assert sum(key.startswith("left-out:") for key in notices_so_far()) == 1


def test_margin_is_unread_without_a_reward_model(prepared):
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5}]
    assert left_out(prepared(rows, kind="pairs", method="dpo")[0]) == {"margin": 1}
    assert left_out(prepared(rows, kind="pairs", method="reward")[0]) == {}


def test_columns_of_reward_functions_are_not_unread(prepared):
    rows = [{"question": "q", "context": "c", "answer": "4", "level": 3}]
    keys = {"method": "grpo", "reward_funcs": ["exact"], "per_device_train_batch_size": 8}
    report, text, _ = prepared(rows, kind="prompts", **keys)
    assert left_out(report) == {}
    assert "user\nc\n\nq<|im_end|>" in text
    assert left_out(prepared(rows, kind="prompts", method="gkd", teacher_model_name_or_path="t")[0]) == {
        "answer": 1, "level": 1,
    }  # fmt: skip


TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("template", ["plain", None])
def test_tools_with_text_prompts_are_shown(prepared, template):
    rows = [{"prompt": "q", "completion": "r", "system": "s", "tools": json.dumps([TOOL])}]
    report, text, trained = prepared(rows, template=template)
    assert left_out(report) == {}
    assert json.dumps(TOOL) in text
    assert text.index("s") < text.index(json.dumps(TOOL)) < text.index("q")
    assert trained == "r<|im_end|>"
    pairs = [{"prompt": "q", "chosen": "r", "rejected": "x", "tools": [TOOL]}]
    assert json.dumps(TOOL) in prepared(pairs, kind="pairs", method="dpo", template=template)[1]


def test_column_named_tools_without_tools_is_unread(prepared):
    assert left_out(prepared([{"question": "q", "answer": "r", "tools": ["hammer"]}])[0]) == {"tools": 1}


def test_system_text_not_shown_with_plain_text_is_unread(prepared):
    assert left_out(prepared([{"text": "t", "system": "s", "tools": [TOOL]}])[0]) == {"system": 1, "tools": 1}
    pairs = [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c", "system": "s"}]
    report, text, _ = prepared(pairs, kind="pairs", method="dpo", template=None)
    assert "s" not in text.replace("Assistant", "")
    assert left_out(report) == {"system": 1}
    report, text, _ = prepared(pairs, kind="pairs", method="dpo")
    assert "system\ns<|im_end|>" in text
    assert left_out(report) == {}


def test_unread_keys_of_turns_and_calls_are_named(prepared):
    call = {"id": "1", "index": 0, "type": "function", "function": {"name": "f", "arguments": {}, "strict": True}}
    turns = [
        {"role": "user", "content": "hi", "time": 5, "name": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "assistant", "content": "hello", "time": 6},
    ]
    assert left_out(prepared([{"messages": turns}, {"messages": TURNS}])[0]) == {
        "messages[].time": 1,
        "messages[].tool_calls[].index": 1,
        "messages[].tool_calls[].function.strict": 1,
    }


def test_columns_replaced_by_turns_are_named(prepared):
    system = [{"role": "system", "content": "s"}, *TURNS]
    rows = [{"messages": system, "system": "other"}, {"messages": system, "system": "s"}]
    assert left_out(prepared(rows)[0]) == {"system": 1}
    pair = {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "no"}]}
    report = prepared([{**pair, "prompt": "hi"}, {**pair, "prompt": "bye"}], kind="pairs", method="dpo")[0]
    assert left_out(report) == {"prompt": 1}
    report = prepared([{**pair, "question": "hi", "context": "c"}], kind="pairs", method="dpo")[0]
    assert left_out(report) == {"context": 1}
    rows = [{"question": "q", "answer": "r"}, {"question": TURNS[:1], "answer": TURNS[1:]}]
    assert left_out(prepared([{**row, "context": "c"} for row in rows])[0]) == {"context": 1}


@pytest.mark.parametrize(("good", "bad"), [("True", "False"), ("true", "false"), ("1", "0"), (" TRUE", "0.0")])
def test_labels_of_a_csv_are_parsed(config, write, make_tokenizer, good, bad):
    path = write(f"prompt,completion,label\np,a,{good}\np,b,{bad}\n", "d.csv")
    data = prepare_answers(config(path, method="kto"), make_tokenizer("plain"), "unpaired")
    assert list(data.train["label"]) == [True, False]


def test_margins_steps_and_turns_of_a_csv_are_parsed(config, write, make_tokenizer):
    tokenizer = make_tokenizer("plain")
    path = write("prompt,chosen,rejected,margin\np,a,b,0.5\np,a,c,2\n", "d.csv")
    assert list(prepare_answers(config(path, method="reward"), tokenizer, "pairs").train["margin"]) == [0.5, 2.0]
    path = write('prompt,completions,labels\np,"[""a"", ""b""]","[True, 0]"\n'.replace("True", "true"), "d.csv")
    assert list(prepare_answers(config(path, method="prm"), tokenizer, "stepwise").train["right"]) == [[True, False]]
    turns = json.dumps(TURNS).replace('"', '""')
    assert prepare(config(write(f'messages\n"{turns}"\n', "d.csv")), tokenizer).report["train"]["documents"] == 1
    path = write('prompt,completions,labels\np,"[""a""]",[True]\n', "d.csv")
    with pytest.raises(DataError, match=r"d\.csv:2.*'labels'"):
        prepare_answers(config(path, method="prm"), tokenizer, "stepwise")
