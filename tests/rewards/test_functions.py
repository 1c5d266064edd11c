"""Reward functions of halfbyte, compared with TRL's where they exist."""

import json

import pytest
from trl.rewards import get_repetition_penalty_reward, get_soft_overlong_punishment, think_format_reward

from halfbyte.rewards import functions, sandbox
from halfbyte.rewards.specs import first_entries

ANSWERS = [
    "<think>\nso\n</think>\nTherefore.", "<think>\nso", " <think>a</think>b", "<think>a<think>b</think>c", "", "plain",
]  # fmt: skip
IDS = [[1, 2, 3, 4], [5] * 9, [1, 2] * 20, [7], [], list(range(60)), [3] * 100]


def test_think_equals_trl():
    turns = [[{"role": "assistant", "content": text}] for text in ANSWERS]
    assert functions.think(completions=turns) == think_format_reward(turns)
    assert functions.think(completions=ANSWERS) == think_format_reward(turns)


@pytest.mark.parametrize("opening", ["<think>", "<think>\n", "<think>\n\n "])
def test_think_continues_a_thought_opened_in_the_prompt(opening):
    prompt = f"<|im_start|>user\nwrite <think> first<|im_end|>\n<|im_start|>assistant\n{opening}"
    answers = ["so\n</think>\n\n4", "</think>4", "so", "<think>so</think>4", "so</think>4<think>"]
    turns = [[{"role": "assistant", "content": text}] for text in answers]
    for completions in (answers, turns):
        assert functions.think(completions, prompts=[prompt] * 5) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_think_ignores_a_thought_closed_in_the_prompt():
    asked = "user\nwrite <think>\nassistant\n"
    prompts = [f"{asked}<think>\n\n</think>\n\n", asked, [{"role": "user", "content": "<think>"}]]
    assert functions.think(["a</think>b"] * 3, prompts=prompts) == [0.0] * 3
    assert functions.think(["<think>a</think>b"] * 3, prompts=prompts) == [1.0] * 3


@pytest.mark.parametrize("cache", [0, 20, 60])
def test_soft_overlong_equals_trl(cache):
    assert functions.soft_overlong(60, cache, IDS) == pytest.approx(get_soft_overlong_punishment(60, cache)(IDS))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_repetition_equals_trl(size):
    assert functions.repetition(size, -0.5, IDS) == pytest.approx(get_repetition_penalty_reward(size, -0.5)(IDS))


def test_regex_matches_the_stripped_end():
    texts = ["so\n#### 72\n", "#### 72 clips", [{"role": "assistant", "content": "#### -1,200.5"}]]
    assert functions.matches(r"#### -?[\d.,]+$", texts) == [1.0, 0.0, 1.0]


def test_exact_and_length():
    assert functions.exact("answer", [" 7\n", "8", "x"], answer=[7, "9", None]) == [1.0, 0.0, None]
    assert functions.length(3, [[1, 2, 3], [1, 2, 3, 4]]) == [0.0, -1.0]


def test_math_understands_gsm8k():
    pytest.importorskip("math_verify")
    gold = "48/2 = <<48/2=24>>24 clips.\n#### 1,072"
    answers = ["so \\boxed{1072}", "#### 1072", "#### 1,072", "#### 72", "no idea", "$\\frac{2144}{2}$"]
    rewards = functions.math("answer", answers, answer=[gold] * 6)
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]


@pytest.mark.skipif(sandbox.unsupported_reason() is not None, reason=f"no sandbox here: {sandbox.unsupported_reason()}")
def test_code_compares_printed_output():
    tests = [{"input": "2 3", "output": "5"}, {"input": "10 -4", "output": "6\n"}]

    def block(program):
        return f"Here it is:\n```python\n{program}\n```\nDone."

    answers = [
        block("a, b = map(int, input().split())\nprint(a + b)"),
        block("print(5)"),
        block("print('passed')\nraise SystemExit(0)"),
        block("import os; print(5, flush=True); os._exit(1)"),
        block("while True: pass"),
        "no program",
        block("wrong") + block("a, b = map(int, input().split())\nprint(f'{a + b}  ')"),
    ]
    given = [tests, json.dumps(tests), tests, tests, tests, tests, tests]
    assert functions.code("tests", 1, answers, tests=given) == [1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("columns", "library", "entries", "words"),
    [
        ({"answer": "so 2 + 2 = 4\n#### 4"}, True, ["math"], "'answer'"),
        ({"solution": "\\boxed{3}", "answer": "3"}, True, ["math"], "'solution'"),
        ({"answer": "1,200"}, False, [{"repetition": {"ngram_size": 3}}], ""),
        ({"answer": "a long story"}, True, [{"repetition": {"ngram_size": 3}}], ""),
        ({}, True, [{"repetition": {"ngram_size": 3}}], ""),
    ],
)
def test_first_entries_follow_from_the_columns(monkeypatch, columns, library, entries, words):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: library or None)
    found, reason = first_entries(columns)
    assert found == entries
    assert words in reason
