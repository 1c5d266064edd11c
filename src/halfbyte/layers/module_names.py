"""Names of modules as users write them: what they match, and what is said where they match nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable

from ..modeling.architectures import ALL_LINEAR
from ..reading.bounded import Bounded, Failure
from ..utils.errors import ConfigError, ModelError
from ..utils.text import brief

MOST_NAMED = 40  # modules in an error: a model has a dozen or two kinds


def named_by(module: str, target: str) -> bool:
    """PEFT's rule: the whole name, or its end after a dot."""
    return module == target or module.endswith(f".{target}")


def check_names(key: str, wanted: Iterable[str], names: Collection[str], suggest: Collection[str] = ()) -> None:
    """Whether each name is that of a module, or the end of one.

    Args:
        key: that holds the names.
        names: of the modules there are.
        suggest: those of them to suggest; default: all.

    Raises:
        ModelError: one is not.
    """
    for name in wanted:
        if not any(named_by(known, name) for known in names):
            raise ModelError(*unknown(key, name, suggest or names))


def matching(key: str, pattern: str, names: Iterable[str], whole: str = "") -> set[str]:
    """The names that a regular expression matches, or what PEFT makes `whole` of it.

    Some take for ever, and PEFT would try them, too: so they are tried in a process that can be ended.

    Raises:
        ConfigError: it is no regular expression, or takes too long.
    """
    fix = "correct it, or name modules as in a list"
    try:
        re.compile(pattern)
        compiled = re.compile(whole or pattern)
    except re.error as error:
        raise ConfigError(f"{key}: {pattern!r} is not a regular expression ({error})", fix) from error
    matched: Bounded[list[str], set[str]] = Bounded(lambda given: {name for name in given if compiled.fullmatch(name)})
    [found] = matched([list(names)])
    if isinstance(found, Failure):
        raise ConfigError(f"{key}: to match {brief(pattern)} against the names of modules, {found.said}", fix)
    assert isinstance(found, set)
    return found


def unknown(key: str, wanted: str, names: Collection[str]) -> tuple[str, str]:
    """Message and fix for a name that matches no module: the closest ones first, then what there is."""
    said, parts = f"{key}: no module of this model matches {wanted!r}", re.split(r"[\s,]+", wanted.strip())
    if wanted == ALL_LINEAR and key == "target_modules":
        return said, f"write {key}: {ALL_LINEAR}, which stands alone, or name modules without it"
    if key == "target_modules" and len(parts) > 1 and all(any(named_by(n, part) for n in names) for part in parts):
        return said, f"write several as a list: {key}: [{', '.join(parts)}]"
    leaves = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
    known = [*leaves, ALL_LINEAR] if key == "target_modules" else leaves
    close = difflib.get_close_matches(wanted.rpartition(".")[2], known, n=3, cutoff=0.5)
    return said, f"did you mean {', '.join(close)}?" if close else f"the model has: {', '.join(leaves[:MOST_NAMED])}"
