"""A saved chat template writes tools, calls and results as training does."""

import json

import pytest

from halfbyte.config import RunConfig
from halfbyte.data.chat import ChatTemplate
from halfbyte.data.prepare import prepare
from halfbyte.data.prepare_answers import prepare_answers
from tests.helpers.gguf_models import byte_tokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|system|>tiny</s>\n' }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Refuses system messages, other roles and two user turns in a row; begins with white space that Jinja treats by line.
STRICT = (
    "\n  {% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ['user', "
    "'assistant'] %}{{ raise_exception('roles') }}{% endif %}\n  {% if true %}<{{ m.role }}>{% endif %}\n"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Writes tools and results, not calls.
PARTLY = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "strict": STRICT, "thinking": THINKING, "partly": PARTLY}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Wetter für <b>", "parameters": {"type": "object"}},
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Öslo", "days": [1, 2]}}}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "abcdefghi"}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
THOUGHT = {**CALLS, "reasoning_content": "look it up"}
CALLED_WITH_TEXT = {**CALLS, "tool_calls": [{"function": {**CALL["function"], "arguments": '{"city": "Öslo"}'}}]}


def said(role, text):
    return {"role": role, "content": text}


CONVERSATIONS = {
    "tools": ([said("user", "a"), said("assistant", "b")], [TOOL, TOOL]),
    "a system message": ([SYSTEM, said("user", "a"), said("assistant", "b")], [TOOL]),
    "calls and results": (
        [said("user", "a"), THOUGHT, RESULT, RESULT, said("assistant", "b"), said("user", "c")], [TOOL]
    ),
    "a question after a result": ([said("user", "a"), CALLS, RESULT, said("user", "b"), said("assistant", "c")], None),
    "a tool without a type": ([said("user", "a")], [TOOL["function"]]),
}  # fmt: skip
PLAIN = [[said("user", "a")], [said("user", "a"), said("assistant", "b"), said("user", "c")]]


def tokenizer_with(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def shown(tokenizer, messages, tools=None):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_saved_template_renders_tools_as_trained(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    chat = ChatTemplate(tokenizer)
    trained = {}
    for kind, (messages, tools) in CONVERSATIONS.items():
        adapted, left = chat.adapt_messages(messages, tools)
        trained[kind] = chat.render(adapted, left, add_generation_prompt=True)
    plain = [shown(tokenizer, messages) for messages in PLAIN]
    chat.save_tools()
    assert tokenizer.chat_template != TEMPLATES[name]
    assert {kind: shown(tokenizer, *conversation) for kind, conversation in CONVERSATIONS.items()} == trained
    assert [shown(tokenizer, messages) for messages in PLAIN] == plain
    again = ChatTemplate(tokenizer)  # the run's tokenizer, trained once more
    for kind, (messages, tools) in CONVERSATIONS.items():
        adapted, left = again.adapt_messages(messages, tools)
        assert again.render(adapted, left, add_generation_prompt=True) == trained[kind]


def test_arguments_as_text_are_written_as_they_are():
    tokenizer = tokenizer_with(CHATML)
    chat = ChatTemplate(tokenizer)
    chat.adapt_messages(*CONVERSATIONS["tools"])
    chat.save_tools()
    text = shown(tokenizer, [said("user", "a"), CALLED_WITH_TEXT], [TOOL])
    assert '{"name": "weather", "arguments": {"city": "Öslo"}}</s>' in text


def test_named_templates_are_extended_each_by_what_it_lacks():
    full = "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}</s>{% endfor %}"
    tokenizer = tokenizer_with({"default": CHATML, "tool_use": full})
    chat = ChatTemplate(tokenizer)
    chat.adapt_messages(*CONVERSATIONS["a question after a result"])
    chat.save_tools()
    assert tokenizer.chat_template["tool_use"] == full
    assert tokenizer.chat_template["default"].endswith(CHATML)
    assert tokenizer.chat_template["default"] != CHATML


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize("kind", ["messages", "pairs"])
def test_only_rows_with_tools_change_the_template(tmp_path, kind, with_tools):
    messages = [said("user", "a"), said("assistant", "b")]
    row = {"messages": messages}
    if kind == "pairs":
        row = {"prompt": messages[:1], "chosen": messages[1:], "rejected": [said("assistant", "c")]}
    row |= {"tools": [TOOL]} if with_tools else {}
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    tokenizer = tokenizer_with(CHATML)
    config = RunConfig(model_name_or_path=str(tmp_path), dataset=str(tmp_path / "d.jsonl"), output_dir=str(tmp_path))
    if kind == "pairs":
        prepare_answers(config, tokenizer, "pairs")
    else:
        prepare(config, tokenizer)
    assert (tokenizer.chat_template != CHATML) is with_tools
    assert ("weather" in shown(tokenizer, messages[:1], [TOOL])) is with_tools
