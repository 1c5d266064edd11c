"""The instruction set that ships with the package: well-formed, without duplicates, and about things that exist."""

import builtins
import importlib.util
import json
import keyword
import re

import pytest

from halfbyte.demo.run import INSTRUCTIONS

ROWS = [json.loads(line)["messages"] for line in INSTRUCTIONS.read_text(encoding="utf-8").splitlines()]
PAIRS = [(question["content"], answer["content"]) for question, answer in ROWS]


def subjects(pattern: str) -> list[str]:
    return sorted({match[1] for _, answer in PAIRS if (match := re.match(pattern, answer))})


def test_questions_are_unique_and_sentences_end():
    questions = [question for question, _ in PAIRS]
    assert len(set(questions)) == len(questions)
    assert all(question[-1] in "?." for question in questions)
    assert all(answer[-1] == "." and len(answer) <= 120 for _, answer in PAIRS)


def test_answers_name_modules_keywords_and_builtins_that_exist():
    modules, keywords = subjects(r"The `(\w+)` module "), subjects(r"The keyword `(\w+)` ")
    assert len(modules) > 20
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    assert len(keywords) > 10
    assert [name for name in keywords if not keyword.iskeyword(name)] == []
    builtin = [name for name in subjects(r"`([a-z_]+)` ") if name != "halfbyte"]
    assert len(builtin) > 25
    assert [name for name in builtin if not hasattr(builtins, name)] == []


@pytest.mark.parametrize("name", subjects(r"`((?:str|list|dict|set)\.\w+)` "))
def test_answers_name_methods_that_exist(name):
    owner, method = name.split(".")
    assert callable(getattr(getattr(builtins, owner), method))
