"""Runaway templates are stopped, and only the beginning of a very long text is tokenized."""

import json

import pytest

from halfbyte.data.chat import ChatTemplate
from halfbyte.data.encode import CUT_AWAY, Encoder, RenderedText
from halfbyte.utils.errors import DataError

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{%- endfor %}"
)


RUNAWAYS = [
    ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
    ("{{ 'x' * 10000000000 }}", "512 MiB"),
    (CHATML + "{{ 'x' * 20000000 }}", ""),
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", ""),
    ("{% if (10 ** (10 ** 8)) % 7 %}{% endif %}", ""),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    ("{{ ''.__class__.__mro__ }}", "access to attribute"),
    ("{% include 'x' %}", ""),
    ("{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}", ""),
    ("{% broken", ""),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("text", "limit"), RUNAWAYS)
def test_runaway_template_is_stopped(make_tokenizer, text, limit):
    with pytest.raises(DataError) as caught:
        ChatTemplate(make_tokenizer(text))
    assert limit in caught.value.message
    assert "chat_template_path" in caught.value.fix


def test_runaway_template_names_the_row(make_tokenizer):
    text = CHATML + "{% if messages[0]['content'] == 'now' %}{{ 'x' * 10 ** 10 }}{% endif %}"
    tokenizer = make_tokenizer(text)
    rows = [
        json.dumps({"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "b"}]})
        for said in ("a", "now", "a")
    ]
    with pytest.raises(DataError, match=r"d:2:.*512 MiB"):
        Encoder(tokenizer, ChatTemplate(tokenizer), max_length=99)(
            {"document": rows, "location": ["d:1", "d:2", "d:3"]}
        )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["llama-40m", "llama-2", "qwen2.5", "phi-3"])
def test_long_text_has_the_first_tokens_of_the_full_text(real_tokenizer, name, monkeypatch):
    """Words, runs of spaces, and one word that is longer than the tokenized beginning."""
    monkeypatch.setattr("halfbyte.data.encode.READ_BEYOND", 100)
    tokenizer = real_tokenizer(name)
    encoder = Encoder(tokenizer, None, max_length=20)
    spaces, word = " " * 5_000 + "z" * 500, "x" * 5_000 + " y" * 500
    for text in ("a few words\n\n  and more" * 500, word, spaces, "日本語 " * 2_000):
        [(ids, offsets, length)] = encoder._tokenize([RenderedText(text, None, bare=False)])
        whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        assert ids[:21].tolist() == whole["input_ids"][:21]
        assert offsets[:42].reshape(-1, 2).tolist() == [list(pair) for pair in whole["offset_mapping"][:21]]
        assert length == pytest.approx(len(whole["input_ids"]), rel=0.5)


@pytest.mark.parametrize("word", ["a word ", "endless"])
def test_a_very_long_row_is_quick_and_quiet(make_tokenizer, caplog, word):
    tokenizer = make_tokenizer(None)
    rows = [json.dumps({"prompt": word * 700_000, "completion": "b"})]
    found = Encoder(tokenizer, None, max_length=64)({"document": rows, "location": ["d:1"]})
    assert (len(found["input_ids"][0]), found["dropped"]) == (64, [CUT_AWAY])
    assert found["length"][0] == pytest.approx(4_900_000, rel=0.01)
    assert caplog.text == ""
