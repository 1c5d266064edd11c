"""Marks of single turns exclude them from training; they are shown as context."""

import pytest

from halfbyte.data.prepare import prepare
from halfbyte.data.prepare_answers import prepare_answers
from halfbyte.utils.errors import DataError
from halfbyte.utils.notices import notices_so_far

OFF = [("train", False), ("training", False), ("loss", False), ("loss_mask", 0), ("weight", 0), ("loss_weight", 0.0)]


def turns(first=None, second=None):
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bad", **(first or {})},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "good", **(second or {})},
    ]


def shown_and_trained(data):
    sample = data.report["samples"][0]
    pairs = zip(sample["tokens"], sample["trained"], strict=True)
    return "".join(sample["tokens"]), "".join(token for token, trained in pairs if trained)


@pytest.fixture
def prepared(config, write, make_tokenizer):
    def _prepared(messages, template="plain", **keys):
        return prepare(config(write([{"messages": messages}]), **keys), make_tokenizer(template))

    return _prepared


@pytest.mark.sampled(3)
@pytest.mark.parametrize("template", ["plain", "marked"])
@pytest.mark.parametrize(("key", "off"), OFF)
def test_a_turn_that_is_marked_untrained_is_context(prepared, template, key, off):
    shown, trained = shown_and_trained(prepared(turns({key: off}), template))
    assert "bad<|im_end|>" in shown
    assert trained == "good<|im_end|>"
    assert shown_and_trained(prepared(turns(None, {key: off}), template))[1] == "bad<|im_end|>"
    assert shown_and_trained(prepared(turns({key: not off}, {key: 1}), template))[1] == "bad<|im_end|>good<|im_end|>"
    assert "loss-weight" not in notices_so_far()


def test_marks_apply_when_every_token_is_trained(prepared):
    shown, trained = shown_and_trained(prepared(turns({"train": False}), assistant_only_loss=False))
    first = "<|im_start|>"  # which nothing predicts
    assert trained == shown.replace("bad<|im_end|>", "").removeprefix(first)
    data = prepared(turns(None, {"train": False}), assistant_only_loss=False)
    assert "good" not in shown_and_trained(data)[1]


def test_a_row_without_a_trained_turn_is_dropped_by_name(config, write, make_tokenizer):
    rows = [{"messages": turns()}, {"messages": turns({"train": False}, {"train": False})}]
    data = prepare(config(write(rows)), make_tokenizer("plain"))
    assert data.report["train"]["dropped"] == {"no trained tokens": 1}


def test_system_texts_and_tools_do_not_shift_marks(config, write, make_tokenizer):
    tool = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    rows = [{"messages": turns({"train": False}), "system": "s", "tools": [tool]}]
    assert shown_and_trained(prepare(config(write(rows)), make_tokenizer("plain")))[1] == "good<|im_end|>"


@pytest.mark.parametrize("keys", [{}, {"assistant_only_loss": False}])
def test_marks_apply_to_pairs_and_labelled_answers(config, write, make_tokenizer, keys):
    tokenizer = make_tokenizer("plain")

    def trained(row, name):
        tokens = zip(row[f"{name}_ids"], row[f"{name}_mask"], strict=True)
        return tokenizer.decode([token for token, is_trained in tokens if is_trained])

    answers = turns({"train": False})[1:]
    shouted = [{**turn, "content": turn["content"].upper()} for turn in answers]
    rows = [{"prompt": turns()[:1], "chosen": answers, "rejected": shouted}]
    [row] = prepare_answers(config(write(rows), method="dpo", **keys), tokenizer, "pairs").train
    for name, bad, good in (("chosen", "bad", "good"), ("rejected", "BAD", "GOOD")):
        assert good in trained(row, name)
        assert bad not in trained(row, name)
    labels = [
        {"prompt": turns()[:1], "completion": answer, "label": answer is shouted} for answer in (answers, shouted)
    ]
    data = prepare_answers(config(write(labels), method="kto", **keys), tokenizer, "unpaired")
    assert [("good" in trained(row, "completion"), "bad" in trained(row, "completion")) for row in data.train] == [
        (True, False), (False, False),
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["no", [1, 0], {}])
def test_a_mark_of_another_kind_is_refused_by_turn_and_key(prepared, value):
    with pytest.raises(DataError, match=r"data\.jsonl:1, turn 2: loss_mask"):
        prepared(turns({"loss_mask": value}))


def test_fractional_and_other_roles_marks_are_reported(prepared):
    assert shown_and_trained(prepared(turns({"weight": 0.5})))[1] == "bad<|im_end|>good<|im_end|>"
    assert "loss-weight" in notices_so_far()
    messages = turns()
    messages[0]["train"] = True
    assert shown_and_trained(prepared(messages))[1] == "bad<|im_end|>good<|im_end|>"
    assert "trained-roles" in notices_so_far()
