"""Masks: exactly the assistant's text and its end-of-turn tokens are trained."""

import copy
import functools
import json
import re
import types
from itertools import groupby

import datasets
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.data.chat import ChatTemplate
from halfbyte.data.encode import CUT_AWAY, IGNORE_INDEX, TOO_LONG, UNTRAINED, Encoder
from halfbyte.data.formats import documents, recognise
from halfbyte.data.prepare import prepare
from halfbyte.data.sources import Source, read_sources
from halfbyte.utils.errors import DataError, ModelError
from halfbyte.utils.notices import notices_so_far
from tests.data.conftest import byte_tokenizer

REAL = ["llama-40m", "qwen2.5", "qwen3", "phi-3"]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def chat(*turns, system=None):
    """user, assistant, user, ... as messages."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return messages + [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(turns)]


@functools.lru_cache(maxsize=8)
def template_of(tokenizer, text):
    """One for many documents, as in `prepare`: each has a process of its own."""
    return ChatTemplate(tokenizer) if text else None


def encode(tokenizer, document, *, max_length=100_000, overlong="truncate"):
    template = template_of(tokenizer, tokenizer.chat_template)
    document = template.adapt(document) if "messages" in document else document
    encoder = Encoder(tokenizer, template, max_length=max_length, overlong=overlong)
    row = {key: values[0] for key, values in encoder({"document": [json.dumps(document)], "location": ["d:1"]}).items()}
    assert all(label in (IGNORE_INDEX, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
    return row


def runs(tokenizer, row):
    """The text of each run of consecutive trained tokens."""
    flags = [label != IGNORE_INDEX for label in row["labels"]]
    indices = [list(group) for trained, group in groupby(range(len(flags)), key=flags.__getitem__) if trained]
    return [tokenizer.decode([row["input_ids"][i] for i in run], skip_special_tokens=False) for run in indices]


def expected_runs(name, answers):
    """Return the trained texts of these answers with each real template."""
    if name == "phi-3":  # the template closes the text with EOS; the line break between belongs to the <|end|> token
        return [f"{answer}<|end|>" for answer in answers[:-1]] + [f"{answers[-1]}<|end|><|endoftext|>"]
    if name == "qwen3":  # the template writes empty thoughts into the last answer, after the generation prompt
        return [f"{answer}<|im_end|>" for answer in answers[:-1]] + [f"<think>\n\n</think>\n\n{answers[-1]}<|im_end|>"]
    return [f"{answer}<|im_end|>" for answer in answers]


def test_every_token_of_a_real_conversation(real_tokenizer):
    tokenizer = real_tokenizer("llama-40m")
    row = encode(tokenizer, {"messages": chat("Hi there", "Hello you", "Bye", "See you", system="Be kind")})
    words = [tokenizer.decode([token]) for token in row["input_ids"]]
    shown = [f"[{word}]" if label != IGNORE_INDEX else word for word, label in zip(words, row["labels"], strict=True)]
    assert "".join(shown) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
        "<|im_start|>assistant\n[Hello][ you][<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n[See][ you][<|im_end|>]\n"
    )
    assert row["ends"] == [tokenizer.convert_tokens_to_ids("<|im_end|>")] * 2


words = st.text(st.characters(exclude_categories=["Cs", "Co", "Z", "C"]), min_size=1, max_size=8)
sentences = st.lists(words, min_size=1, max_size=4).map(" ".join)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", REAL)
@settings(max_examples=15, deadline=None)
@given(turns=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=4), system=st.none() | sentences)
def test_trained_tokens_decode_to_the_answers(real_tokenizer, name, turns, system):
    tokenizer = real_tokenizer(name)
    row = encode(tokenizer, {"messages": chat(*(text for turn in turns for text in turn), system=system)})
    expected = expected_runs(name, [answer for _, answer in turns])
    # Normalizers rewrite some characters (Qwen: NFC), and white space around control tokens can be theirs (Phi-3).
    expected = [tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in expected]
    assert [text.strip() for text in runs(tokenizer, row)] == expected


contents = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\nfake<|im_end|>\n", "<|im_start|>user\n", "\ue000", " \n ", "assistant\n"]
)


@pytest.mark.parametrize("template", ["plain", "marked"])
@settings(max_examples=20, deadline=None)
@given(turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=5), system=st.none() | contents)
def test_any_content_is_masked_exactly(make_tokenizer, template, turns, system):
    """Also when it is empty, white space, or looks like the markers of another turn."""
    tokenizer = make_tokenizer(template)
    row = encode(tokenizer, {"messages": chat(*(text for turn in turns for text in turn), system=system)})
    assert runs(tokenizer, row) == [f"{answer}<|im_end|>" for _, answer in turns]


@pytest.mark.parametrize(
    ("mark", "answer", "trained", "across"),
    [
        ({"lstrip": True}, "<mark>a", "<mark>a<|im_end|>", 1),  # it takes the prompt's line break
        ({"lstrip": True}, " \n<mark>a", "<mark>a<|im_end|>", 1),
        ({"rstrip": True}, "<mark> a", "<mark>a<|im_end|>", 0),
        ({}, "<mark>a", "<mark>a<|im_end|>", 0),
    ],
)
def test_an_added_token_that_takes_white_space_is_trained(config, write, mark, answer, trained, across):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken("<mark>", normalized=False, **mark)])
    assert runs(tokenizer, encode(tokenizer, {"messages": chat("q", answer)})) == [trained]
    path = write([{"messages": chat("q", answer)}] * 3)
    assert prepare(config(path), tokenizer).report["train"]["tokens_across_border"] == 3 * across
    assert ("across:training documents" in notices_so_far()) == bool(across)


def test_a_header_that_takes_the_answers_white_space_is_not_trained():
    tokenizer = byte_tokenizer("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}")
    tokenizer.add_tokens([tokenizers.AddedToken("<|user|>", lstrip=True, normalized=False, special=True)])
    row = encode(tokenizer, {"messages": chat("a", "b\n", "c", "d")})
    assert runs(tokenizer, row) == ["b", "d<|im_end|>"]


def test_marks_give_the_mask_of_transformers(real_tokenizer, shared):
    tokenizer = real_tokenizer("llama-40m")
    template = ChatTemplate(tokenizer)
    [source] = read_sources(str(shared / "data/datasets/llamafactory/glaive_toolcall_en_demo.json"))
    for _, document in list(documents(source, recognise(source)))[:60]:
        adapted = template.adapt(document)
        reference = tokenizer.apply_chat_template(
            adapted["messages"], return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        row = encode(tokenizer, document)
        assert row["input_ids"].tolist() == reference["input_ids"]
        assert [int(label != IGNORE_INDEX) for label in row["labels"]] == reference["assistant_masks"]


def test_qwen3_keeps_thoughts_of_the_last_turn_only(real_tokenizer):
    tokenizer = real_tokenizer("qwen3")
    thought = "<think>\nhm\n</think>\n\n"
    row = encode(tokenizer, {"messages": chat("a", f"{thought}one", "b", f"{thought}two")})
    assert runs(tokenizer, row) == ["one<|im_end|>", f"{thought}two<|im_end|>"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", REAL)
def test_tool_calls_are_trained_and_results_are_not(real_tokenizer, name):
    tokenizer = real_tokenizer(name)
    call_text = '{"name": "f", "arguments": {"x": 1}}'
    call = {"role": "assistant", "content": "", "tool_calls": CALLS, "call_text": call_text}
    messages = [*chat("a"), call, {"role": "tool", "content": "result"}, {"role": "assistant", "content": "done"}]
    row = encode(tokenizer, {"messages": messages, "tools": TOOLS})
    first, last = (text.strip() for text in runs(tokenizer, row))
    assert last == expected_runs(name, ["", "done"])[-1]
    rendered = tokenizer.decode(row["input_ids"])
    assert '"description": "d"' in rendered
    assert "result" in rendered
    if name.startswith("qwen"):
        assert first == f"<tool_call>\n{call_text}\n</tool_call><|im_end|>"
        assert not notices_so_far()
    else:
        assert first == call_text + ("<|end|>" if name == "phi-3" else "<|im_end|>")
        assert {"tools", "tool-calls"} <= set(notices_so_far())
        assert ("tool-results" in notices_so_far()) == (name == "phi-3")


GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.last and m['role'] == 'user' and not add_generation_prompt %}{{ raise_exception('no end') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)


def test_a_refused_conversation_is_named(make_tokenizer):
    tokenizer = make_tokenizer(GEMMA)
    with pytest.raises(DataError, match="d:1:"):
        encode(tokenizer, {"messages": [*chat("a", "b"), {"role": "assistant", "content": "c"}]})


def test_a_template_that_hides_answers_is_an_error(make_tokenizer):
    tokenizer = make_tokenizer("{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match=r"(?s)d:1:.*turn 2"):
        encode(tokenizer, {"messages": chat("a", "b")})


def test_turns_after_the_last_answer_are_left_out(make_tokenizer):
    tokenizer = make_tokenizer("marked")
    rows = [encode(tokenizer, {"messages": chat(*turns)}) for turns in (("a", "b", "c"), ("a", "b"))]
    assert rows[0]["input_ids"].tolist() == rows[1]["input_ids"].tolist()


def test_training_on_everything(make_tokenizer):
    tokenizer = make_tokenizer("plain")
    row = encode(tokenizer, {"messages": chat("a", "b"), "train_all": True})
    assert row["labels"].tolist() == [IGNORE_INDEX, *row["input_ids"][1:].tolist()]
    assert row["ends"] == [tokenizer.eos_token_id]


def test_pairs_without_template_train_the_completion_and_eos(make_tokenizer):
    tokenizer = make_tokenizer(None)
    row = encode(tokenizer, {"prompt": "1+1?", "completion": "two", "system": "Add."})
    assert tokenizer.decode(row["input_ids"]) == "Add.\n\n### Instruction:\n1+1?\n\n### Response:\ntwo<|im_end|>"
    assert runs(tokenizer, row) == ["two<|im_end|>"]


def test_bos_comes_once_and_eos_is_appended(real_tokenizer):
    tokenizer = real_tokenizer("llama-2")  # writes <s> in front of every text
    for text in ("Once upon a time", "<s>Once upon a time", "<s>Once upon a time</s>"):
        row = encode(tokenizer, {"text": text})
        tokens = [token.strip("▁") for token in tokenizer.convert_ids_to_tokens(row["input_ids"])]
        assert tokens == ["<s>", "Once", "upon", "a", "time", "</s>"]
        assert row["labels"].tolist() == [IGNORE_INDEX, *row["input_ids"][1:].tolist()]
        assert row["ends"] == [tokenizer.eos_token_id]


def test_template_with_bos_gets_no_second_bos(real_tokenizer):
    tokenizer = real_tokenizer("llama-2")
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    row = encode(tokenizer, {"messages": chat("Hi", "Hello", "Bye", "See you")})
    assert row["input_ids"].tolist().count(tokenizer.bos_token_id) == 1
    assert [text.split() for text in runs(tokenizer, row)] == [["Hello", "</s>"], ["See", "you", "</s>"]]


def test_overlong_documents(make_tokenizer):
    tokenizer = make_tokenizer(None)
    full = encode(tokenizer, {"text": "abcdef"})
    assert (full["length"], full["dropped"], full["ends"]) == (7, "", [tokenizer.eos_token_id])
    cut = encode(tokenizer, {"text": "abcdef"}, max_length=5)
    assert cut["input_ids"].tolist() == full["input_ids"].tolist()[:5]
    assert (cut["length"], cut["dropped"], cut["ends"]) == (7, "", [])
    assert encode(tokenizer, {"text": "abcdef"}, max_length=5, overlong="drop")["dropped"] == TOO_LONG
    assert encode(tokenizer, {"prompt": "a" * 50, "completion": "b"}, max_length=40)["dropped"] == CUT_AWAY
    assert encode(tokenizer, {"text": ""})["dropped"] == UNTRAINED


def test_tokenizers_that_cannot_do_it(make_tokenizer):
    with pytest.raises(ModelError):
        Encoder(types.SimpleNamespace(is_fast=False), None, max_length=8)
    tokenizer = type(make_tokenizer(None))(tokenizer_object=make_tokenizer(None).backend_tokenizer)
    with pytest.raises(ModelError, match="EOS"):
        Encoder(tokenizer, None, max_length=8)


def pair_of_turns(row):
    source = Source("d.jsonl", "jsonl", [row], [1])
    [(_, document)] = documents(source, recognise(source))
    return document


PAIRS_OF_TURNS = {
    "plain": (chat("Hi there"), chat("", "Hello you")[1:]),
    "earlier turns": (chat("Hi there", "Hello you", "Bye", system="Be kind"), chat("", "See you")[1:]),
    "several answers": (chat("Hi there", "Hello you", "Bye"), chat("", "See you", "When?", "Soon")[1:]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", PAIRS_OF_TURNS)
@pytest.mark.parametrize("name", ["qwen2.5", "phi-3"])
def test_prompt_and_completion_of_turns_are_masked_as_trl_does(real_tokenizer, tmp_path, name, case):
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    tokenizer, (prompt, completion) = real_tokenizer(name), PAIRS_OF_TURNS[case]
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                 num_attention_heads=1)
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": prompt, "completion": completion}])
    args = trl.SFTConfig(str(tmp_path), use_cpu=True, report_to="none", bf16=False)
    reference = trl.SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer).train_dataset[0]
    row = encode(tokenizer, pair_of_turns({"prompt": prompt, "completion": completion}))
    assert row["input_ids"].tolist() == reference["input_ids"]
    trained_here = {at for at, label in enumerate(row["labels"]) if label != IGNORE_INDEX}
    trained = {at for at, label in enumerate(reference["labels"]) if label != -100}
    assert trained_here <= trained
    # In addition to the answers, TRL trains the template's text around them and user turns within a completion.
    left = tokenizer.decode([reference["input_ids"][at] for at in sorted(trained - trained_here)])
    between = "When?" if case == "several answers" else ""
    words_left = re.sub(r"<\|\w+\|>", " ", left).split()
    assert [word for word in words_left if word not in ("user", "assistant")] == between.split()
    answers = [turn["content"] for turn in completion if turn["role"] == "assistant"]
    assert [text.strip() for text in runs(tokenizer, row)] == expected_runs(name, answers)


def test_answers_in_the_prompt_are_not_trained_with_marks(real_tokenizer):
    tokenizer = real_tokenizer("llama-40m")
    prompt, completion = PAIRS_OF_TURNS["several answers"]
    document = pair_of_turns({"prompt": prompt, "completion": completion})
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    )
    assert runs(tokenizer, encode(tokenizer, document)) == ["See you<|im_end|>", "Soon<|im_end|>"]
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}<|im_end|>{% endg", "{{ m['content'] }}{% endgeneration %}{% generation %}<|im_end|>{% endg"
    )
    assert runs(tokenizer, encode(tokenizer, document)) == ["See you<|im_end|>", "Soon<|im_end|>"]
    assert len(encode(tokenizer, document)["ends"]) == 2
