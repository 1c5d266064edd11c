"""Conversations of sentinel words, rendered with one minimal template of each kind.

The assistant's words are trained, other words are not, and words that a template omits are named.
"""

import json
import re
from itertools import groupby

import pytest
from tokenizers import AddedToken

from halfbyte.data.chat import ChatTemplate
from halfbyte.data.encode import IGNORE_INDEX, Encoder
from halfbyte.data.prepare import for_template
from halfbyte.utils.errors import DataError

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


def call(word, number):
    return {"id": f"abcdefgh{number}", "type": "function", "function": {"name": "f", "arguments": {"x": word}}}


def user(word):
    return {"role": "user", "content": word}


def answer(word, *calls, **keys):
    return {"role": "assistant", "content": word, **({"tool_calls": list(calls)} if calls else {}), **keys}


def result(word, number):
    return {"role": "tool", "name": "f", "tool_call_id": f"abcdefgh{number}", "content": word}


TALKS = {
    "plain": [user("USER1"), answer("SAID1"), user("USER2"), answer("SAID2")],
    "system": [{"role": "system", "content": "SYSTEM"}, user("USER1"), answer("SAID1")],
    "call": [user("USER1"), answer("", call("CALL1", 1)), result("RESULT1", 1), answer("SAID1")],
    "text and call": [
        *(user("USER1"), answer("SAID0", call("CALL1", 1)), result("RESULT1", 1), answer("SAID1")),
        *(user("USER2"), answer("SAID2")),
    ],
    "two calls": [
        *(user("USER1"), answer("", call("CALL1", 1)), result("RESULT1", 1)),
        *(answer("", call("CALL2", 2)), result("RESULT2", 2), answer("SAID1")),
    ],
    "parallel calls": [
        *(user("USER1"), answer("", call("CALL1", 1), call("CALL2", 2))),
        *(result("RESULT1", 1), result("RESULT2", 2), answer("SAID1")),
    ],
    "thoughts": [user("USER1"), answer("<think>\nTHOUGHT1\n</think>\n\nSAID1")],
    "reasoning_content": [user("USER1"), answer("SAID1", reasoning_content="THOUGHT1")],
}

HEAD = "<|im_start|>{{ m.role }}\n"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}({{ c.function.arguments.x }})</call>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
EACH = "{% for m in messages %}"
THOUGHTS = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
KINDS = {
    "chatml": f"{EACH}{HEAD}{THOUGHTS}{{{{ m.content }}}}{CALLS}<|im_end|>\n{{% endfor %}}{PROMPT}",
    "thoughts of earlier turns are dropped": EACH
    + HEAD
    + "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    + f"{{% else %}}{{{{ m.content }}}}{{% endif %}}{CALLS}<|im_end|>\n{{% endfor %}}{PROMPT}",
    "thoughts are dropped": EACH
    + HEAD
    + "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    + f"{CALLS}<|im_end|>\n{{% endfor %}}{PROMPT}<think>\n",
    "results inside the model's turn": EACH
    + "{% if m.role == 'tool' %}{% elif m.role == 'assistant' %}"
    + "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>model\n{% endif %}"
    + CALLS
    + "{% if m.tool_calls %}{% for t in messages[loop.index0 + 1:loop.index0 + 1 + m.tool_calls|length]"
    + " if t.role == 'tool' %}<result>{{ t.content }}</result>{% endfor %}{% endif %}"
    + "{{ m.content }}{% if not m.tool_calls or m.content %}<|im_end|>\n{% endif %}"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}",
    "numbered calls": "{% set ns = namespace(n=0) %}"
    + EACH
    + HEAD
    + "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}:{{ ns.n }} "
    + "{{ c.function.arguments | tojson }}</call>{% set ns.n = ns.n + 1 %}{% endfor %}<|im_end|>\n{% endfor %}"
    + PROMPT,
    "results need a call": EACH
    + "{% set before = messages[loop.index0 - 1] %}"
    + "{% if m.role == 'tool' and not (before.tool_calls or before.role == 'tool') %}"
    + "{{ raise_exception('a result needs a call') }}{% endif %}"
    + f"{HEAD}{{{{ m.content }}}}{CALLS}<|im_end|>\n{{% endfor %}}{PROMPT}",
    "an open prompt behind the end": f"{EACH}{HEAD}{{{{ m.content }}}}{CALLS}<|im_end|>{{% endfor %}}"
    + "<|im_start|>assistant\n<|thinks|>",
    "no end at the end": EACH
    + "<|{{ m.role }}|>{{ m.content }}"
    + CALLS
    + "{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "marks around end and newline": EACH
    + HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    + CALLS
    + "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + PROMPT,
    "two marked parts": EACH
    + HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% generation %}"
    + CALLS
    + "<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + PROMPT,
    "content in parts": EACH
    + HEAD
    + "{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
    + f"{CALLS}<|im_end|>\n{{% endfor %}}{PROMPT}",
    "turns alternate": EACH
    + "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + f"{HEAD}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{PROMPT}",
    "the first call alone": EACH
    + HEAD
    + "{{ m.content }}{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    + "<call>{{ f.name }}({{ f.arguments.x }})</call>{% endif %}<|im_end|>\n"
    + "{% endfor %}"
    + PROMPT,
    "no text beside a call": EACH
    + HEAD
    + f"{{% if m.tool_calls %}}{CALLS}{{% else %}}{{{{ m.content }}}}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    + PROMPT,
}
ROLES = ["user", "assistant", "system", "tool", "thinks"]
MARKS = ["<call>", "</call>", "<result>", "</result>", *(f"<|{role}|>" for role in ROLES)]


def with_template(make_tokenizer, template):
    base = make_tokenizer("plain")
    tokenizer = type(base)(tokenizer_object=base.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer


def encoded(tokenizer, messages):
    """Return the trained texts, the rendered text, and the row of a conversation."""
    template = ChatTemplate(tokenizer)
    document = {"messages": json.loads(json.dumps(messages))}
    document |= {"tools": [TOOL]} if any("tool_calls" in message for message in messages) else {}
    ready = for_template(document, template, "d:1")
    out = Encoder(tokenizer, template, max_length=4096)({"document": [json.dumps(ready)], "location": ["d:1"]})
    row = {key: value[0] for key, value in out.items()}
    ids = [int(token) for token in row["input_ids"]]
    pairs = groupby(zip(ids, row["labels"], strict=True), lambda pair: pair[1] != IGNORE_INDEX)
    spans = [tokenizer.decode([token for token, _ in run]) for trained, run in pairs if trained]
    return spans, tokenizer.decode(ids), row


@pytest.mark.sampled(6)
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_assistants_words_are_trained(make_tokenizer, kind, talk):
    tokenizer, messages = with_template(make_tokenizer, KINDS[kind]), TALKS[talk]
    spans, rendered, row = encoded(tokenizer, messages)
    trained = " ".join(spans)
    words = set(re.findall(r"(?:USER|SYSTEM|RESULT|SAID|CALL|THOUGHT)\d?", json.dumps(messages)))
    untrained = {word for word in words if word.startswith(("USER", "SYSTEM", "RESULT"))}
    assert not {word for word in untrained if word in trained}
    assert {word for word in untrained if word not in rendered} == set()
    assert {word for word in words - untrained if word in rendered} == {
        word for word in words - untrained if word in trained
    }
    lost = {word for word in words - untrained if word not in rendered}
    assert bool(lost) == bool(row["not_shown"])
    assert spans[-1].strip().endswith("<|im_end|>")
    assert row["ends"][-1] == tokenizer.eos_token_id
    assert "<result>" not in trained
    assert "im_start" not in trained


@pytest.mark.parametrize(
    ("kind", "talk", "names"),
    [
        ("thoughts are dropped", "thoughts", ["thoughts before </think>"]),
        ("numbered calls", "reasoning_content", ["assistant reasoning_content"]),
        ("the first call alone", "parallel calls", ["tool_calls[1]"]),
        ("no text beside a call", "text and call", ["assistant content"]),
    ],
)
def test_parts_that_a_template_omits_are_named(make_tokenizer, kind, talk, names):
    assert encoded(with_template(make_tokenizer, KINDS[kind]), TALKS[talk])[2]["not_shown"] == names


def test_calls_are_trained_with_their_marks(make_tokenizer):
    spans, _, _ = encoded(with_template(make_tokenizer, KINDS["results inside the model's turn"]), TALKS["two calls"])
    assert spans == ["<call>f(CALL1)</call>", "<call>f(CALL2)</call>", "SAID1<|im_end|>"]


def test_turns_after_the_last_answer_are_named(make_tokenizer):
    tokenizer = with_template(make_tokenizer, KINDS["chatml"])
    assert encoded(tokenizer, [*TALKS["plain"], user("USER3")])[2]["not_shown"] == ["turns after the last answer"]


def test_generation_prompt_at_the_end_does_not_end_an_answer(make_tokenizer):
    spans, _, row = encoded(with_template(make_tokenizer, KINDS["an open prompt behind the end"]), TALKS["plain"])
    assert spans == ["SAID1<|im_end|>", "SAID2<|im_end|>"]
    assert len(set(row["ends"])) == 1


def test_end_token_only_between_turns_is_appended(make_tokenizer):
    spans, rendered, _ = encoded(with_template(make_tokenizer, KINDS["no end at the end"]), TALKS["plain"])
    assert spans == ["SAID1<|im_end|>", "SAID2<|im_end|>"]
    first, second = (f"<|user|>USER{n}<|im_end|><|assistant|>SAID{n}<|im_end|>" for n in (1, 2))
    assert rendered == first + second


def test_two_marked_parts_are_one_turn(make_tokenizer):
    _, _, row = encoded(with_template(make_tokenizer, KINDS["two marked parts"]), TALKS["plain"])
    assert len(row["ends"]) == 2


def test_a_prompt_that_opens_the_thought_is_not_trained(make_tokenizer):
    opened = PROMPT.replace("assistant\n", "assistant\n<think>\n")
    template = KINDS["chatml"].removesuffix(PROMPT) + opened
    spans, _, _ = encoded(with_template(make_tokenizer, template), TALKS["thoughts"])
    assert spans == ["THOUGHT1\n</think>\n\nSAID1<|im_end|>"]


def test_named_templates_are_selected_by_tools(make_tokenizer):
    plain = f"{EACH}{HEAD}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{PROMPT}"
    tools = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    tokenizer = with_template(make_tokenizer, {"default": plain, "tool_use": tools + KINDS["chatml"]})
    assert encoded(tokenizer, TALKS["call"])[0] == ["<call>f(CALL1)</call><|im_end|>", "SAID1<|im_end|>"]
    assert encoded(tokenizer, TALKS["plain"])[0] == ["SAID1<|im_end|>", "SAID2<|im_end|>"]


def test_results_that_cannot_be_separated_from_calls_are_refused(make_tokenizer):
    """The template writes calls only inside results, so neither way of rendering separates them."""
    template = (
        f"{EACH}{{% if m.role == 'tool' %}}{{% set f = messages[loop.index0 - 1].tool_calls[0].function %}}"
        f"{{{{ f.name }}}}{{{{ f.arguments.x }}}}{{{{ m.content }}}}{{{{ f.arguments.x }}}}"
        f"{{% else %}}{HEAD}{{{{ m.content }}}}<|im_end|>\n{{% endif %}}{{% endfor %}}{PROMPT}"
    )
    with pytest.raises(DataError):
        encoded(with_template(make_tokenizer, template), TALKS["call"])


@pytest.mark.parametrize("declared", [[0], [0, 1]])
def test_the_next_roles_token_ends_an_answer_that_generation_stops_at(make_tokenizer, tmp_path, declared):
    """GLM-4: no token ends an answer, and generation_config.json stops at the first token of the user's turn."""
    tokenizer = with_template(make_tokenizer, f"{EACH}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{{% endfor %}}")
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|user|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [ends[index] for index in declared]}))
    tokenizer.name_or_path = str(tmp_path)
    spans, _, _ = encoded(tokenizer, TALKS["plain"])
    assert spans == (["SAID1<|user|>", "SAID2<|user|>"] if 1 in declared else ["SAID1", "SAID2<|im_end|>"])


CHATML = KINDS["chatml"]
FIRST_CALL = "messages[loop.index0 - 1].tool_calls[0].function"
IN_RESULT = f"{{% if m.role == 'tool' %}}{{{{ {FIRST_CALL}.arguments.x }}}}={{% endif %}}{{{{ m.content }}}}"
IN_ANSWER = (
    "{{ m.content }}{% if m.role == 'assistant' and messages[loop.index0 - 1].role == 'tool' %}"
    " (from {{ messages[loop.index0 - 1].content }}){% endif %}"
)
QUESTION_IN_ANSWER = (
    "{% if m.role == 'assistant' and m.content | length > 3 %}({{ messages[loop.index0 - 1].content }}) {% endif %}"
    "{{ m.content }}"
)
COUNT = "{{ messages | selectattr('role', 'equalto', '%s') | map(attribute='content') | join | length }}"
THOUGHTS_FIRST = "{% for m in messages if m.reasoning_content %}{{ m.reasoning_content }}{% endfor %}"
PART_FIRST = "{% for m in messages if '</think>' in m.content %}{{ m.content.split('</think>')[0] }}{% endfor %}"
AMBIGUOUS = {
    "title": ("Title: {{ messages[-1].content }}\n" + CHATML, "plain"),
    "answer in a later turn": (
        CHATML.replace(THOUGHTS, "{% if not loop.first %}{{ messages[loop.index0 - 1].content }}{% endif %}"),
        "plain",
    ),
    "count of answers": (CHATML + COUNT % "assistant", "plain"),
    "count of results": (COUNT % "tool" + CHATML, "call"),
    "random": ("{{ range(99999) | random }}{{ range(99999) | random }}" + CHATML, "plain"),
    "words by chance": ("{{ lipsum(n=1) }}" + CHATML, "plain"),
    "arguments in a result": (CHATML.replace("{{ m.content }}", IN_RESULT), "call"),
    "result in an answer": (CHATML.replace("{{ m.content }}", IN_ANSWER), "call"),
    "question in an answer": (CHATML.replace("{{ m.content }}", QUESTION_IN_ANSWER), "plain"),
    "thoughts twice": (THOUGHTS_FIRST + CHATML, "reasoning_content"),
    "thoughts before the question": (THOUGHTS_FIRST + CHATML.replace(THOUGHTS, ""), "reasoning_content"),
    "a part before the question": (
        PART_FIRST + CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"),
        "thoughts",
    ),
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_a_template_that_writes_more_than_the_answer_is_refused(make_tokenizer, case):
    template, talk = AMBIGUOUS[case]
    with pytest.raises(DataError, match="d:1"):
        encoded(with_template(make_tokenizer, template), TALKS[talk])


@pytest.mark.parametrize("talk", ["plain", "two calls", "reasoning_content"])
@pytest.mark.parametrize("first", ["{{ strftime_now('%H:%M:%S.%f') }} ", "{{ messages[0].content }}: "])
def test_the_time_and_a_title_from_the_question_change_no_mask(make_tokenizer, first, talk):
    plain, timed = (encoded(with_template(make_tokenizer, text + CHATML), TALKS[talk]) for text in ("", first))
    assert timed[0] == plain[0]
    assert timed[1].endswith(plain[1])


@pytest.mark.parametrize("arguments", [{}, {"x": None}, {"x": 71, "y": [True, {"z": "CALL1"}], "e": ""}, {"x": 3.5}])
def test_arguments_that_are_no_text_are_trained(make_tokenizer, arguments):
    calling = {**call("", 1), "function": {"name": "f", "arguments": arguments}}
    messages = [user("USER1"), answer("", calling), result("RESULT1", 1), answer("SAID1")]
    spans, _, _ = encoded(with_template(make_tokenizer, KINDS["numbered calls"]), messages)
    assert spans == [f"<call>f:0 {json.dumps(arguments)}</call><|im_end|>", "SAID1<|im_end|>"]


def test_users_may_say_the_same_as_the_assistant(make_tokenizer):
    messages = [user("no"), answer("no"), user("no"), answer("no")]
    spans, rendered, _ = encoded(with_template(make_tokenizer, CHATML), messages)
    assert spans == ["no<|im_end|>"] * 2
    assert rendered.count("no") == 4
