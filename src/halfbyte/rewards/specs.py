"""Parse the key `reward_funcs`: names, options and files, and check them and the columns they read before anything
runs."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..auxiliary.model import adapter_in
from ..reading import parse_json
from ..reading.files import look, open_bytes
from ..reading.tensors import ADAPTER, ADAPTER_AGAIN, read_adapter_config, read_header
from ..utils.errors import ConfigError, DataError, attribute_to_key
from ..utils.text import brief
from . import sandbox
from .functions import COLUMN, OPTIONS, has_result, options_of

FORMATS = ("think",)
MODEL = "model"  # function name of reward models, which run in the training process
HERE = "python:"  # prefix of the name of a function that was given in Python
CALLED_WITH = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
_python_functions: dict[str, Callable[..., Any]] = {}
TESTS = 'write a list of tests, [{"input": TEXT, "output": TEXT}], or that as JSON text; null for none'


@dataclass(frozen=True)
class RewardSpec:
    """A reward function.

    Attributes:
        name: in records, as in TRL: the function's name.
        file: of a user's function, or a reward model's adapter; None for halfbyte's functions and those given in
            Python.
        sha256: of that file.
        options: of halfbyte's functions.
        function: one given in Python.
        function_name: name of halfbyte's function, or of the function in its file.
    """

    name: str
    file: Path | None = None
    sha256: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    function_name: str = ""


def named(function: Callable[..., Any]) -> str:
    """Register a function given in Python and return its entry in a configuration."""
    name = getattr(function, "__name__", type(function).__name__)
    _python_functions[name] = function
    return HERE + name


def read_specs(entries: Sequence[Any], columns: Sequence[str] | None) -> list[RewardSpec]:
    """Return the functions that `reward_funcs` names, for prompts with these further columns.

    Args:
        columns: None before the data are read: the compared columns stay open.

    Raises:
        ConfigError: an entry is not a function, a file is not trustworthy, or a library or the sandbox is missing.
    """
    for name in columns or ():
        if name in CALLED_WITH:
            wrong = f"reward_funcs: the data have a column {name!r}, which is also an argument of every reward function"
            raise ConfigError(wrong, "rename that column of the data")
    specs: list[RewardSpec] = []
    for entry in entries:
        with attribute_to_key("reward_funcs"):
            spec = _read(entry, columns)
        same_names = sum(re.fullmatch(rf"{re.escape(spec.name)}(_\d+)?", earlier.name) is not None for earlier in specs)
        name = f"{spec.name}_{same_names + 1}" if same_names else spec.name
        specs.append(RewardSpec(name, spec.file, spec.sha256, spec.options, spec.function, spec.function_name))
    return specs


def _read(entry: Any, columns: Sequence[str] | None) -> RewardSpec:
    if isinstance(entry, dict):
        if len(entry) != 1:
            raise ConfigError(f"reward_funcs: {brief(entry)} has several functions", "write one function per entry")
        ((name, value),) = entry.items()
        return _built_in(str(name), value, columns)
    if not isinstance(entry, str):
        raise ConfigError(f"reward_funcs: {brief(entry)} is not a function", _KNOWN)
    if entry.startswith(HERE):
        name = entry.removeprefix(HERE)
        if name not in _python_functions:
            raise ConfigError(
                f"reward_funcs: {name} was given in Python, but this process does not have it",
                "pass it to finetune(reward_funcs=...) again, or put it into a file: FILE.py:FUNCTION",
            )
        return RewardSpec(name, function=_python_functions[name])
    path, colon, function = entry.rpartition(":")
    if "://" in entry:
        raise ConfigError(f"reward_funcs: {brief(entry)} is a URL", "download the file, review it, and give its path")
    if colon:
        return _in_file(Path(path), function, entry)
    if entry in OPTIONS:
        return _built_in(entry, None, columns)
    if entry.endswith(".py"):
        raise ConfigError(f"reward_funcs: {brief(entry)} names no function", f"write {entry}:FUNCTION")
    raise ConfigError(f"reward_funcs: there is no {brief(entry)}", f"{_KNOWN}; Hub ids are not supported")


def first_entries(columns: Mapping[str, Any]) -> tuple[list[Any], str]:
    """Return `reward_funcs` for a new configuration, and a remark on the choice.

    Uses a function of halfbyte that fits one of the further columns (given with the values of one row); otherwise
    `repetition`, which needs no column.
    """
    fallback: list[Any] = [{"repetition": {"ngram_size": 3}}]
    fits = {"code": lambda value: isinstance(value, str | list), "math": lambda value: has_result(str(value))}
    for name, is_usable in fits.items():
        column = next((c for c in COLUMN[name] if c in columns and is_usable(columns[c])), None)
        if column is None:
            continue
        try:
            _read(name, [column])
        except ConfigError as error:
            return fallback, f"{name} would compare answers with column {column!r}: {error.fix}"
        return [name], f"{name} compares answers with column {column!r}"
    return fallback, "no column holds solutions: add a function that scores answers"


_KNOWN = f"write FILE.py:FUNCTION, or one of {', '.join(OPTIONS)}"


def _in_file(path: Path, function: str, entry: str) -> RewardSpec:
    fix = "write FILE.py:FUNCTION"
    if not function.isidentifier() or path.suffix != ".py":
        raise ConfigError(f"reward_funcs: {brief(entry)} names no function in a Python file", fix)
    if look(path, ConfigError, fix) != "file":
        raise ConfigError(f"reward_funcs: there is no file {path}", fix)
    for location in (path.resolve(), path.resolve().parent):
        mode = location.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"reward_funcs: every user of this machine may change {location}, which this run would execute",
                f"chmod o-w {location}",
            )
    with open_bytes(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return RewardSpec(function, path.resolve(), digest, function_name=function)


def _built_in(name: str, value: Any, columns: Sequence[str] | None) -> RewardSpec:
    if name not in OPTIONS:
        raise ConfigError(f"reward_funcs: there is no {brief(name)}", _KNOWN)
    options = options_of(name, value)
    label = name
    if name in COLUMN and columns is not None:
        column = options.get("column") or next((c for c in COLUMN[name] if c in columns), None)
        if column not in columns:
            expected = repr(column) if column else " or ".join(map(repr, COLUMN[name]))
            available = ", ".join(columns) or "none"
            raise ConfigError(
                f"reward_funcs: {name} compares with column {expected}, but the prompts' further columns are:"
                f" {available}",
                f"give the column: {{{name}: COLUMN}}",
            )
        options["column"] = column
    match name:
        case "model":
            return _model(options)
        case "regex":
            if "pattern" not in options:
                raise ConfigError("reward_funcs: regex has no pattern", "write {regex: PATTERN}")
            try:
                re.compile(options["pattern"])
            except re.error as error:
                wrong = f"reward_funcs: regex {brief(options['pattern'])}: {error}"
                raise ConfigError(wrong, "correct the pattern") from None
        case "format":
            if options.get("name") not in FORMATS:
                raise ConfigError(f"reward_funcs: format is {options.get('name')!r}", f"one of {', '.join(FORMATS)}")
            label = str(options["name"])
        case "length":
            if options.get("max", 0) < 1:
                raise ConfigError("reward_funcs: length needs a number of tokens", "write {length: {max: 512}}")
        case "math":
            if importlib.util.find_spec("math_verify") is None:
                raise ConfigError("reward_funcs: math needs math-verify", "pip install 'halfbyte[rl]'")
        case "code":
            if why := sandbox.unsupported_reason():
                raise ConfigError(f"reward_funcs: code runs programs only in a sandbox, but {why}", sandbox.FIX)
    return RewardSpec(label, options=options, function_name=name)


def _model(options: Mapping[str, Any]) -> RewardSpec:
    """Return the spec of a reward model, named by the last part of its path as in TRL; an adapter's includes its
    SHA-256."""
    path = str(options.get("path", "")).rstrip("/")
    if not path:
        raise ConfigError("reward_funcs: model has no path", "write {model: PATH}")
    adapter = adapter_in(path)
    if adapter is None:
        return RewardSpec(Path(path).name, options=options, function_name=MODEL)
    read_adapter_config(adapter)
    read_header(adapter / ADAPTER, ADAPTER_AGAIN)
    with open_bytes(adapter / ADAPTER) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return RewardSpec(Path(path).name, (adapter / ADAPTER).resolve(), digest, options, function_name=MODEL)


def check_columns(specs: Sequence[RewardSpec], rows: Iterable[Mapping[str, Any]]) -> None:
    """Check that the columns which halfbyte's own functions compare with hold usable values.

    Args:
        rows: prepared prompts, with `prompt` and `columns`.

    Raises:
        DataError: a column is empty in every row, or does not hold tests for programs.
    """
    compared = {
        str(spec.options["column"]): spec.function_name
        for spec in specs
        if spec.function_name in COLUMN and spec.file is None
    }
    if not compared:
        return
    empty = set(compared)
    for number, row in enumerate(rows, 1):
        for column, function_name in compared.items():
            value = row["columns"].get(column)
            if value is None:
                continue
            empty.discard(column)
            if function_name == "code":
                location = f"prompt {number} ({brief(row['prompt'])}): column {column!r}"
                _check_tests(
                    parse_json(value, location, DataError, TESTS) if isinstance(value, str) else value, location
                )
    for column in sorted(empty):
        wrong = f"column {column!r} is empty in every row, but reward {compared[column]} compares answers with it"
        raise DataError(wrong, "give the solution to each prompt, or name another column")


def _check_tests(tests: Any, location: str) -> None:
    if not isinstance(tests, list):
        raise DataError(f"{location} holds {brief(tests)}, not a list of tests", TESTS)
    for number, test in enumerate(tests, 1):
        missing = [key for key in ("input", "output") if not isinstance(test, Mapping) or key not in test]
        if missing:
            raise DataError(f"{location}: test {number} has no {' and no '.join(missing)}", TESTS)
