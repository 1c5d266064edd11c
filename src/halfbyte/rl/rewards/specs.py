"""What the key `reward_funcs` asks for: names, options, files; looked over before anything runs."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...auxiliary.find import adapter_in
from ...reading.files import look, open_bytes
from ...reading.tensors import ADAPTER, ADAPTER_AGAIN, read_adapter_config, read_header
from ...utils.errors import ConfigError, of_key
from ...utils.text import brief
from . import sandbox
from .functions import COLUMN, OPTIONS, has_result, options_of

FORMATS = ("think",)
MODEL = "model"  # the kind that is asked where the model is that trains
HERE = "python:"  # before the name of a function that was given in Python
CALLED_WITH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_given: dict[str, Callable[..., Any]] = {}


@dataclass(frozen=True)
class RewardSpec:
    """A reward function.

    Attributes:
        name: in records, as TRL names it: the function's own.
        file: of a user's function; None for one of halfbyte's, or one given in Python.
        sha256: of that file.
        options: of one of halfbyte's.
        function: one given in Python.
        kind: which of halfbyte's it is, or the function's name in its file.
    """

    name: str
    file: Path | None = None
    sha256: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    kind: str = ""


def named(function: Callable[..., Any]) -> str:
    """What stands for a function that is given in Python, in a configuration."""
    name = getattr(function, "__name__", type(function).__name__)
    _given[name] = function
    return HERE + name


def read_specs(entries: Sequence[Any], columns: Sequence[str] | None) -> list[RewardSpec]:
    """The functions that `reward_funcs` names, for prompts with these further columns.

    Args:
        columns: None while the data are not read: which column is compared with stays open.

    Raises:
        ConfigError: an entry is none, a file is not to be trusted, a library or the sandbox is missing.
    """
    for name in columns or ():
        if name in CALLED_WITH:
            said = (
                f"reward_funcs: functions are called with {name} of their own, and the prompts have a column {name!r}"
            )
            raise ConfigError(said, "rename that column of the data")
    specs: list[RewardSpec] = []
    for entry in entries:
        with of_key("reward_funcs"):
            spec = _read(entry, columns)
        taken = sum(re.fullmatch(rf"{re.escape(spec.name)}(_\d+)?", other.name) is not None for other in specs)
        name = f"{spec.name}_{taken + 1}" if taken else spec.name
        specs.append(RewardSpec(name, spec.file, spec.sha256, spec.options, spec.function, spec.kind))
    return specs


def _read(entry: Any, columns: Sequence[str] | None) -> RewardSpec:
    if isinstance(entry, dict):
        if len(entry) != 1:
            raise ConfigError(f"reward_funcs: {brief(entry)} is several in one", "write one function an entry")
        ((name, given),) = entry.items()
        return _built_in(str(name), given, columns)
    if not isinstance(entry, str):
        raise ConfigError(f"reward_funcs: {brief(entry)} is no function", _KNOWN)
    if entry.startswith(HERE):
        return _in_python(entry.removeprefix(HERE))
    path, colon, function = entry.rpartition(":")
    if "://" in entry:
        raise ConfigError(f"reward_funcs: {brief(entry)} is a URL", "download the file, read it, and name that")
    if colon:
        return _in_file(Path(path), function, entry)
    if entry in OPTIONS:
        return _built_in(entry, None, columns)
    if entry.endswith(".py"):
        raise ConfigError(f"reward_funcs: {brief(entry)} names no function", f"write {entry}:FUNCTION")
    raise ConfigError(f"reward_funcs: there is no {brief(entry)}", f"{_KNOWN}; hub ids are not taken")


def first_entries(columns: Mapping[str, Any]) -> tuple[list[Any], str]:
    """`reward_funcs` to begin with, for prompts with such further columns, of one row; and what to know of them.

    A column that a function of halfbyte's can judge by is taken; without one, what needs no column.
    """
    fallback: list[Any] = [{"repetition": {"ngram_size": 3}}]
    fits = {"code": lambda value: isinstance(value, str | list), "math": lambda value: has_result(str(value))}
    for name, judges in fits.items():
        column = next((each for each in COLUMN[name] if each in columns and judges(columns[each])), None)
        if column is None:
            continue
        try:
            _read(name, [column])
        except ConfigError as error:
            return fallback, f"{name} would judge by column {column!r}: {error.fix}"
        return [name], f"{name} judges by column {column!r}"
    return fallback, "no column says what is right: name a function that judges"


_KNOWN = f"write FILE.py:FUNCTION, or one of {', '.join(OPTIONS)}"


def _in_python(name: str) -> RewardSpec:
    if name not in _given:
        raise ConfigError(
            f"reward_funcs: {name} was given in Python, and this process does not have it",
            "give it again to finetune(reward_funcs=...), or put it into a file: FILE.py:FUNCTION",
        )
    return RewardSpec(name, function=_given[name])


def _in_file(path: Path, function: str, entry: str) -> RewardSpec:
    fix = "write FILE.py:FUNCTION"
    if not function.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"reward_funcs: {brief(entry)} names no function in a Python file", fix)
    if look(path, ConfigError, fix) != "file":
        raise ConfigError(f"reward_funcs: there is no file {path}", fix)
    for place in (path.resolve(), path.resolve().parent):
        mode = place.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"reward_funcs: everybody on this machine may change {place}, and this run would run it",
                f"chmod o-w {place}",
            )
    with open_bytes(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return RewardSpec(function, path.resolve(), digest, kind=function)


def _built_in(name: str, given: Any, columns: Sequence[str] | None) -> RewardSpec:
    if name not in OPTIONS:
        raise ConfigError(f"reward_funcs: there is no {brief(name)}", _KNOWN)
    options = options_of(name, given)
    label = name
    if name in COLUMN and columns is not None:
        column = options.get("column") or next((each for each in COLUMN[name] if each in columns), None)
        if column not in columns:
            wanted = repr(column) if column else " or ".join(map(repr, COLUMN[name]))
            there = ", ".join(columns) or "none"
            raise ConfigError(
                f"reward_funcs: {name} compares with column {wanted}, and the prompts' further columns are: {there}",
                f"name the column: {{{name}: COLUMN}}",
            )
        options["column"] = column
    match name:
        case "model":
            return _model(options)
        case "regex":
            _check_pattern(options)
        case "format":
            if options.get("name") not in FORMATS:
                raise ConfigError(f"reward_funcs: format is {options.get('name')!r}", f"one of {', '.join(FORMATS)}")
            label = str(options["name"])
        case "length":
            if options.get("max", 0) < 1:
                raise ConfigError("reward_funcs: length needs a number of tokens", "write {length: {max: 512}}")
        case "math":
            _check_math()
        case "code":
            if why := sandbox.obstacle():
                raise ConfigError(f"reward_funcs: code runs programs in a sandbox alone, and {why}", sandbox.FIX)
    return RewardSpec(label, options=options, kind=name)


def _model(options: Mapping[str, Any]) -> RewardSpec:
    """Named as in TRL, by the last part of its path; of an adapter, which it mostly is, with the file's hash."""
    path = str(options.get("path", "")).rstrip("/")
    if not path:
        raise ConfigError("reward_funcs: model names none", "write {model: PATH}")
    adapter = adapter_in(path)
    if adapter is None:
        return RewardSpec(Path(path).name, options=options, kind=MODEL)
    read_adapter_config(adapter)
    read_header(adapter / ADAPTER, ADAPTER_AGAIN)
    with open_bytes(adapter / ADAPTER) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return RewardSpec(Path(path).name, (adapter / ADAPTER).resolve(), digest, options, kind=MODEL)


def _check_pattern(options: Mapping[str, Any]) -> None:
    try:
        re.compile(options["pattern"])
    except KeyError:
        raise ConfigError("reward_funcs: regex has no pattern", "write {regex: PATTERN}") from None
    except re.error as error:
        raise ConfigError(f"reward_funcs: regex {brief(options['pattern'])}: {error}", "mend the pattern") from None


def _check_math() -> None:
    from importlib.util import find_spec

    if find_spec("math_verify") is None:
        raise ConfigError("reward_funcs: math needs math-verify", "pip install 'halfbyte[rl]'")
