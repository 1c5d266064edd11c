"""Matching of module names that users write, and the error messages for names that match nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from ..modeling.architectures import ALL_LINEAR
from ..reading.bounded import Bounded, Failure
from ..utils.errors import ConfigError, ModelError
from ..utils.text import brief

MOST_NAMED = 40  # module names in an error message; models have 12 to 24 distinct ones


def named_by(module: str, target: str) -> bool:
    """Whether `target` is `module` or its suffix after a dot (PEFT's rule)."""
    return module == target or module.endswith(f".{target}")


def check_names(key: str, targets: Iterable[str], names: Collection[str], suggest: Collection[str] = ()) -> None:
    """Check that each wanted name matches a module (see `named_by`).

    Args:
        key: config key of the wanted names, for the message.
        names: names of the model's modules.
        suggest: module names to suggest in the message; default: all.

    Raises:
        ModelError: a name matches no module.
    """
    for name in targets:
        if not any(named_by(module_name, name) for module_name in names):
            raise ModelError(*unknown(key, name, suggest or names))


def matching(key: str, pattern: str, names: Iterable[str], full_pattern: str = "") -> set[str]:
    """The names that a regular expression matches; `full_pattern` is the expression that PEFT derives from it, if any.

    Matching runs in a process with a timeout, since some expressions backtrack without end, in PEFT as well.

    Raises:
        ConfigError: the pattern is not a regular expression, or matching times out.
    """
    fix = "correct it, or name modules as in a list"
    try:
        re.compile(pattern)
        compiled = re.compile(full_pattern or pattern)
    except re.error as error:
        raise ConfigError(f"{key}: {pattern!r} is not a regular expression ({error})", fix) from error
    match: Bounded[list[str], set[str]] = Bounded(lambda listed: {name for name in listed if compiled.fullmatch(name)})
    [matches] = match([list(names)])
    if isinstance(matches, Failure):
        raise ConfigError(f"{key}: to match {brief(pattern)} against the names of modules, {matches.reason}", fix)
    assert isinstance(matches, set)
    return matches


def unknown(key: str, target: str, names: Collection[str]) -> tuple[str, str]:
    """Message and fix for a name that matches no module: close matches, or else the names in the model."""
    message, words = f"{key}: no module of this model matches {target!r}", re.split(r"[\s,]+", target.strip())
    if target == ALL_LINEAR and key == "target_modules":
        return message, f"write {key}: {ALL_LINEAR} without other names, or remove it from the list"
    if key == "target_modules" and len(words) > 1 and all(any(named_by(n, word) for n in names) for word in words):
        return message, f"write several names as a list: {key}: [{', '.join(words)}]"
    leaves = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
    candidates = [*leaves, ALL_LINEAR] if key == "target_modules" else leaves
    close = difflib.get_close_matches(target.rpartition(".")[2], candidates, n=3, cutoff=0.5)
    fix = f"did you mean {', '.join(close)}?" if close else f"the model has: {', '.join(leaves[:MOST_NAMED])}"
    return message, fix
