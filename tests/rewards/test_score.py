"""Reward functions of users: TRL's signature, and every way they can fail."""

import sys
import time

import pytest

from halfbyte.rewards.score import BATCHES, Rewards
from halfbyte.rewards.specs import read_specs
from halfbyte.utils.errors import ConfigError, TrainingError
from halfbyte.utils.notices import notices_so_far

FUNCTIONS = """
import asyncio, os, sys, time
from helper import factor

def correct(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **columns):
    log_extra("seen", [f"{p}{c}" for p, c in zip(prompts, completions)])
    log_metric("step", trainer_state.global_step)
    print("printing is no harm")
    return [factor * (c == a) if a else None for c, a in zip(completions, answer)]

async def slowly(completions, **columns):
    await asyncio.sleep(0.01)
    return [float("nan") if c == "b" else len(c) for c in completions]

def hangs(completions, **columns):
    if "hang" in completions: time.sleep(600)
    return [1.0] * len(completions)

def exits(completions, **columns):
    if "exit" in completions: os._exit(7)
    if "raise" in completions: raise KeyError("no such thing")
    if "killed" in completions: os.kill(os.getpid(), 9)
    return [1.0] * len(completions)

def short(completions, **columns): return [1.0]
def text(completions, **columns): return ["good"] * len(completions)
def infinite(completions, **columns): return [float("inf")] * len(completions)
def number(completions, **columns): return 1.0
def strict(completions): return []
def needs(completions, solution, **columns): return []
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper.py").write_text("factor = 2\n")
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def rewards_of():
    made = []

    def make(*entries, columns=("answer",), timeout=20.0):
        made.append(Rewards(read_specs(entries, columns), columns, timeout, 64))
        return made[-1]

    yield make
    for each in made:
        each.close()


def ask(rewards, completions, answer=None, step=3):
    ids = [[1] * len(text) for text in completions]
    answer = answer or [""] * len(completions)
    return rewards.score(["p"] * len(completions), completions, ids, {"answer": answer}, {"global_step": step})


def test_sync_and_async(file, rewards_of):
    rewards = rewards_of(f"{file}:correct", f"{file}:slowly", {"regex": "^a+$"}, {"regex": "b"})
    rewards.check()
    scored = ask(rewards, ["a", "b", "aaa"], ["a", "x", ""])
    assert scored.rewards == {
        "correct": [2.0, 0.0, None],
        "slowly": [1.0, None, 3.0],
        "regex": [1.0, 0.0, 1.0],
        "regex_2": [0.0, 1.0, 0.0],
    }
    assert scored.extra == {"seen": ["pa", "pb", "paaa"]}
    assert scored.metrics == {"step": 3.0}
    assert list(rewards.files) == [str(file)]


def test_format_reads_rendered_prompts_and_other_functions_the_datas(file, rewards_of):
    rewards = rewards_of({"format": "think"}, f"{file}:correct")
    texts, read = ["a</think>b"] * 2, ["assistant\n<think>\n", "assistant\n"]
    scored = rewards.score(["p", "q<think>"], texts, [[1], [1]], {"answer": texts}, {"global_step": 1}, (), read)
    assert next(iter(scored.rewards.values())) == [1.0, 0.0]
    assert scored.extra == {"seen": [f"p{texts[0]}", f"q<think>{texts[1]}"]}


def test_hanging_function_fails_its_batch(file, rewards_of):
    rewards = rewards_of(f"{file}:hangs", {"regex": "x"}, timeout=1.0)
    assert ask(rewards, ["x"]).rewards["hangs"] == [1.0]
    began = time.monotonic()
    scored = ask(rewards, ["hang", "x"])
    assert time.monotonic() - began < 1.0 + 2.0
    assert scored.rewards == {"hangs": [None, None], "regex": [0.0, 1.0]}
    assert scored.failed == {"hangs": 2}
    assert any("hangs" in each for each in notices_so_far().values())
    assert ask(rewards, ["x", "y"]).rewards["hangs"] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("word", "why"),
    [("exit", "exited with 7"), ("killed", "SIGKILL"), ("raise", r"KeyError: 'no such thing' \(mine.py")],
)
def test_too_many_failures_end_the_run(file, rewards_of, word, why):
    rewards = rewards_of(f"{file}:exits")
    assert ask(rewards, [word, "x"]).failed == {"exits": 2}
    for _ in range(BATCHES):
        assert ask(rewards, ["x", "y"]).rewards["exits"] == [1.0, 1.0]
    assert ask(rewards, [word, "x"]).failed == {"exits": 2}, "the first one is long ago"
    with pytest.raises(TrainingError, match=f"4.*{why}"):
        ask(rewards, [word, "x"])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("short", "gave 1 rewards for 2 completions"),
        ("text", "gave a str as reward 0"),
        ("infinite", "gave inf as reward 0"),
        ("number", "gave a float, not a list of 2 rewards"),
    ],
)
def test_what_is_no_list_of_rewards(file, rewards_of, name, why):
    with pytest.raises(TrainingError, match=f"function {name} {why}"):
        ask(rewards_of(f"{file}:{name}"), ["a", "b"])


@pytest.mark.parametrize(
    ("name", "why"),
    [("strict", r"\*\*kwargs"), ("needs", "solution"), ("nothing", "'nothing'")],
)
def test_a_function_that_does_not_fit(file, rewards_of, name, why):
    with pytest.raises(ConfigError, match=why):
        rewards_of(f"{file}:{name}").check()


def test_a_file_that_cannot_be_imported(tmp_path, rewards_of):
    path = tmp_path / "broken.py"
    path.write_text("import no_such_module_at_all\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        rewards_of(f"{path}:f").check()
    path.write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match="SystemExit"):
        rewards_of(f"{path}:f").check()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ("https://example.com/rewards.py:f", "URL"),
        ("someone/reward-model", None),
        ("nowhere.py:f", "nowhere.py"),
        ("mine.py", None),
        ("mine.txt:f", None),
        ({"regex": "("}, None),
        ("regex", None),
        ({"regex": 3}, "regex is 3"),
        ({"length": {"min": 3}}, "'min'"),
        ({"format": "xml"}, "'xml'"),
        ({"regex": "a", "exact": "b"}, None),
        ({"exact": "gold"}, None),
        ("code", "'tests'"),
        ({"model": {}}, None),
        (3, "3"),
    ],
)
def test_entries_that_are_refused(entry, why):
    with pytest.raises(ConfigError, match=why):
        read_specs([entry], ["answer"])


def test_world_writable_file_is_refused(file):
    file.chmod(0o666)
    with pytest.raises(ConfigError):
        read_specs([f"{file}:correct"], [])
    file.chmod(0o644)
    file.parent.chmod(0o777)
    with pytest.raises(ConfigError):
        read_specs([f"{file}:correct"], [])


def test_math_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"halfbyte\[rl\]"):
        read_specs(["math"], ["answer"])
