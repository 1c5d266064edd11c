"""Ollama's Modelfile: the template renders what the chat template renders, as far as Go's language allows."""

import re

import pytest

from halfbyte.data.chat import ChatTemplate
from halfbyte.export.modelfile import modelfile, rendered_chats
from halfbyte.utils.notices import notices_so_far, reset_notices
from tests.data.test_data_tool_template import CHATML, CONVERSATIONS
from tests.helpers.gguf_models import byte_tokenizer

QUOTES = (
    '{% for m in messages %}{{ \'"""\' + m.role + \'"""\' + m.content + \'""""\' }}{% endfor %}'
    '{% if add_generation_prompt %}{{ \'"""assistant"\' }}{% endif %}'
)
COUNTING = "{% for m in messages %}{{ loop.index }}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def tokenizer_with(template, tools=False):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    if tools:
        chat = ChatTemplate(tokenizer)
        chat.adapt_messages(*CONVERSATIONS["tools"])
        chat.save_tools()
    return tokenizer


def section(text, name):
    """The text of a triple-quoted instruction, read as Ollama does: up to the next triple quotes."""
    found = re.search(rf'^{name} """(.*?)"""$', text, re.MULTILINE | re.DOTALL)
    return found and found[1]


def test_a_default_system_text_becomes_system():
    text = modelfile(["m.gguf"], tokenizer_with(CHATML), [], 512)
    assert section(text, "SYSTEM") == "tiny"
    assert '{{ if eq .Role "user" }}<|user|>{{ .Content }}</s>\n{{ end }}' in section(text, "TEMPLATE")


VICUNA = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Talk.{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ ' USER: ' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ ' ASSISTANT: ' + m.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)


def test_a_default_system_text_without_a_marker_becomes_system():
    text = modelfile(["m.gguf"], tokenizer_with(VICUNA), [], 512)
    assert section(text, "SYSTEM") == "Talk."
    body = section(text, "TEMPLATE")
    assert '{{ if eq .Role "user" }} USER: {{ .Content }}{{ end }}' in body
    assert body.endswith(" ASSISTANT:")


@pytest.mark.parametrize("default", ['say "yes"', 'a """ b'])
def test_a_default_system_text_with_quotes_is_in_the_template(default):
    text = modelfile(["m.gguf"], tokenizer_with(CHATML.replace("tiny", default)), [], 512)
    body = section(text, "TEMPLATE").replace(r'{{ "\"\"\"" }}', '"""')
    assert section(text, "SYSTEM") is None
    assert f'{{{{ if and (eq $i 0) (ne .Role "system") }}}}<|system|>{default}</s>\n{{{{ end }}}}' in body
    assert ".Tools" not in body


def test_a_beginning_of_text_token_that_only_the_template_writes_is_kept():
    """As SmolLM2's, whose turns begin with it."""
    tokenizer = tokenizer_with(CHATML)
    tokenizer.bos_token = "<|system|>"
    assert '{{ if eq .Role "system" }}<|system|>' in section(modelfile(["m.gguf"], tokenizer, [], 512), "TEMPLATE")


def test_triple_quotes_end_no_text():
    text = modelfile(["m.gguf"], tokenizer_with(QUOTES), [], 512)
    body = section(text, "TEMPLATE")
    assert body.replace(r'{{ "\"\"\"" }}', '"""').replace(r'{{ "\"" }}', '"').endswith('{{ end }}"""assistant"')
    assert text.count('"""') == 2


def test_tools_are_in_the_template_if_the_run_trained_on_them():
    plain, tools = (modelfile(["m.gguf"], tokenizer_with(CHATML, tools), [], 512) for tools in (False, True))
    assert ".Tools" not in plain
    body = section(tools, "TEMPLATE")
    assert "$.Tools" in body
    assert '{{ if eq .Role "tool" }}<|tool|>{{ .Content }}' in body
    assert "{{ else }}<|system|>tiny" in body  # tools take the place of the default text
    assert section(tools, "SYSTEM") is None


@pytest.mark.parametrize(
    "template", [COUNTING, "{{ messages }}", "{% for m in messages[1:] %}{{ m.content }}{% endfor %}"]
)
def test_a_template_that_does_more_is_named(template):
    reset_notices()
    assert section(modelfile(["m.gguf"], tokenizer_with(template), [], 512), "TEMPLATE") is None
    assert "ollama-template" in notices_so_far()


@pytest.mark.parametrize(("template", "count"), [(None, 0), (CHATML, 4), ({"default": CHATML, "rag": COUNTING}, 4)])
def test_rendered_chats(template, count):
    assert len(rendered_chats(tokenizer_with(template))) == count
