"""Reward functions of halfbyte, by name. Each takes TRL's arguments and returns one number per answer.

A completion is a text, or a list of turns if the prompt is one; `text_of` reads both. Functions that exist in
`trl.rewards` 1.16 return the same numbers (tests/rewards/test_functions.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..reading import parse_json
from ..utils.errors import ConfigError, DataError
from ..utils.text import brief
from . import sandbox

Completion = str | Sequence[Mapping[str, Any]]
Rewards = list[float | None]
Function = Callable[..., Any]

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
GSM8K = re.compile(r"####\s*(.+)")
NUMBER = re.compile(r"[-+]?\$?[\d,]*\.?\d+%?")
OPENED = re.compile(r"<think>\s*\Z")
THINK = re.compile(r"^<think>(?!.*<think>)(.*?)</think>.*$", re.DOTALL | re.MULTILINE)


def text_of(completion: Completion) -> str:
    """Return the text of an answer."""
    return completion if isinstance(completion, str) else "".join(turn.get("content") or "" for turn in completion)


def matches(pattern: str, completions: Sequence[Completion], **_: Any) -> Rewards:
    """Return 1 if `pattern` is found in the stripped answer, else 0."""
    matcher = re.compile(pattern)
    return [float(matcher.search(text_of(completion).strip()) is not None) for completion in completions]


def think(completions: Sequence[Completion], prompts: Sequence[Any] = (), **_: Any) -> Rewards:
    """Return 1 for an answer that starts with exactly one <think> … </think>, else 0.

    Args:
        prompts: as the texts that the model reads. If a prompt ends with <think>, because the chat template opens a
            thought, the answer continues from there. TRL 1.16 returns 0 for such answers (trl#6966).
    """
    openings = [OPENED.search(prompt) if isinstance(prompt, str) else None for prompt in prompts]
    starts = [opening[0] if opening else "" for opening in openings] or [""] * len(completions)
    texts = (start + text_of(completion) for start, completion in zip(starts, completions, strict=True))
    return [float(THINK.match(text) is not None) for text in texts]


def exact(column: str, completions: Sequence[Completion], **columns: Any) -> Rewards:
    """Return 1 for an answer equal to `column`, ignoring white space at both ends, else 0."""
    return [
        None if solution is None else float(text_of(completion).strip() == str(solution).strip())
        for completion, solution in zip(completions, columns[column], strict=True)
    ]


def length(limit: int, completion_ids: Sequence[Sequence[int]], **_: Any) -> Rewards:
    """Return 0 for an answer of up to `limit` tokens, −1 for a longer one."""
    return [-float(len(ids) > limit) for ids in completion_ids]


def soft_overlong(longest: int, cache: int, completion_ids: Sequence[Sequence[int]], **_: Any) -> Rewards:
    """Return a penalty from 0 down to −1 over the last `cache` of `longest` tokens (DAPO, arXiv:2503.14476, equation
    13)."""
    over = [max(len(ids) - (longest - cache), 0) for ids in completion_ids]
    return [-min(excess / cache, 1.0) if cache else -float(excess > 0) for excess in over]


def repetition(size: int, max_penalty: float, completion_ids: Sequence[Sequence[int]], **_: Any) -> Rewards:
    """Return `max_penalty` (≤ 0) times the share of repeated `size`-grams in the answer (arXiv:2502.03373, C.2)."""
    rewards: Rewards = []
    for ids in completion_ids:
        grams = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
        rewards.append((1 - len(set(grams)) / len(grams)) * max_penalty if grams else 0.0)
    return rewards


def math(column: str, completions: Sequence[Completion], **columns: Any) -> Rewards:
    """Return 1 for an answer whose last result equals that of `column`, by math-verify; None if `column` has no result.

    A result is in \\boxed{}, or after GSM8K's ####.
    """
    from math_verify import parse, verify

    rewards: Rewards = []
    for completion, solution in zip(completions, columns[column], strict=True):
        gold = parse(_boxed(str(solution)))
        rewards.append(float(verify(gold, parse(_boxed(text_of(completion))))) if gold else None)
    return rewards


def has_result(text: str) -> bool:
    """Return whether `math` finds a result in a text: in a box, after ####, or because the text is just a number."""
    return bool("\\boxed{" in text or GSM8K.search(text) or NUMBER.fullmatch(text.strip()))


def _boxed(text: str) -> str:
    """Return `text` with its last #### result as a box."""
    results = GSM8K.findall(text)
    return f"\\boxed{{{results[-1].strip().replace(',', '')}}}" if results else text


def code(column: str, seconds: int, completions: Sequence[Completion], **columns: Any) -> Rewards:
    """Return the share of a column's tests that the answer's last Python block passes, each test in its own sandbox.

    The column has `[{"input": …, "output": …}, …]`, or its JSON text. A program reads a test's input from stdin; its
    stdout is compared here, line by line, without trailing white space. Nothing else counts.
    """
    limits = sandbox.Limits(seconds=seconds)
    rewards: Rewards = []
    for completion, tests in zip(completions, columns[column], strict=True):
        if isinstance(tests, str):
            tests = parse_json(tests, f"column {column!r}", DataError)
        programs = FENCED.findall(text_of(completion))
        passed = [bool(programs) and _passes(programs[-1], test, limits) for test in tests]
        rewards.append(sum(passed) / len(passed) if passed else None)
    return rewards


def _passes(program: str, test: Mapping[str, Any], limits: sandbox.Limits) -> bool:
    outcome = sandbox.run(program, str(test["input"]).encode(), limits)
    printed = outcome.output.decode(errors="replace")
    return outcome.ended == "exit" and outcome.code == 0 and _lines(printed) == _lines(str(test["output"]))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


COLUMN = {"exact": ("solution", "answer"), "math": ("solution", "answer"), "code": ("tests",)}
OPTIONS: dict[str, dict[str, tuple[type, ...]]] = {
    "model": {"path": (str,), "step_separator": (str,)},
    "regex": {"pattern": (str,)},
    "format": {"name": (str,)},
    "exact": {"column": (str,)},
    "math": {"column": (str,)},
    "code": {"column": (str,), "seconds": (int,)},
    "length": {"max": (int,)},
    "soft_overlong": {"max": (int,), "cache": (int,)},
    "repetition": {"ngram_size": (int,), "max_penalty": (int, float)},
}
# Minimum and maximum of number options; None: unbounded.
RANGES: dict[tuple[str, str], tuple[int | None, int | None]] = {
    ("code", "seconds"): (1, None),
    ("length", "max"): (1, None),
    ("soft_overlong", "max"): (1, None),
    ("soft_overlong", "cache"): (0, None),
    ("repetition", "ngram_size"): (1, None),
    ("repetition", "max_penalty"): (None, 0),
}
KINDS = {int: "a whole number", float: "a number", str: "text"}
SHORT = {
    "model": "path",
    "regex": "pattern",
    "format": "name",
    "exact": "column",
    "math": "column",
    "code": "column",
    "length": "max",
}


def options_of(name: str, entry: Any) -> dict[str, Any]:
    """Return the options of an entry of `reward_funcs`: a mapping, or just the value of the first option.

    Raises:
        ConfigError: an option is unknown, or its value has another type or is out of range.
    """
    options: dict[str, Any] = {} if entry is None else {SHORT.get(name, "max"): entry}
    if isinstance(entry, dict):
        options = entry
    for key, value in options.items():
        types = OPTIONS[name].get(key)
        if types is None:
            names = ", ".join(OPTIONS[name])
            raise ConfigError(f"reward_funcs: {name} has no option {brief(key)}", f"it has: {names}")
        if not isinstance(value, types) or isinstance(value, bool):
            raise ConfigError(f"reward_funcs: {key} of {name} is {brief(value)}", f"give {KINDS[types[-1]]}")
        lowest, highest = RANGES.get((name, key), (None, None))
        number: Any = value
        if (lowest is not None and not number >= lowest) or (highest is not None and not number <= highest):
            bound = f"{lowest} or more" if lowest is not None else f"at most {highest}"
            raise ConfigError(f"reward_funcs: {key} of {name} is {brief(value)}", f"give {KINDS[types[-1]]}, {bound}")
    if name == "soft_overlong" and options.get("cache", 0) > options.get("max", options.get("cache", 0)):
        wrong = f"reward_funcs: soft_overlong: cache {options['cache']} is more than max {options['max']}"
        raise ConfigError(wrong, "lower cache: it is the part of max over which the reward falls")
    return options


def built_in(name: str, options: Mapping[str, Any], longest: int) -> Function:
    """Return the function of a name in `OPTIONS`.

    Args:
        options: must contain `column` for functions that compare with one.
        longest: maximal tokens of an answer.
    """
    match name:
        case "regex":
            return partial(matches, options["pattern"])
        case "format":
            return think
        case "exact":
            return partial(exact, options["column"])
        case "math":
            return partial(math, options["column"])
        case "code":
            return partial(code, options["column"], options.get("seconds", sandbox.Limits().seconds))
        case "length":
            return partial(length, options["max"])
        case "soft_overlong":
            limit = options.get("max", longest)
            return partial(soft_overlong, limit, options.get("cache", limit // 5))
    return partial(repetition, options.get("ngram_size", 3), options.get("max_penalty", -1.0))
