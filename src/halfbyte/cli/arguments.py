"""Parsing of a run on the command line: RUN.YAML, or MODEL DATA as in `finetune`, and KEY=VALUE overrides."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..runs.layout import CHECKPOINT, GIVEN_CONFIG
from ..utils.errors import HalfbyteError, UsageError

if TYPE_CHECKING:
    from ..config import RunConfig

_OVERRIDE = re.compile(r"[A-Za-z][\w-]*=")
_YAML, _DATA = (".yaml", ".yml"), (".arrow", ".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tsv", ".txt")


def read_run(command: str, words: Iterable[str], options: Collection[str] = ()) -> RunConfig:
    """Return the configuration that the arguments of `halfbyte COMMAND` describe.

    Args:
        words: arguments that are not options of the command: names, `key=value`, `--key value`, `--key=value`.
        options: options of the command, to suggest the most similar one.

    Raises:
        UsageError: the arguments do not describe a run.
        ConfigError: see `load_config`.
    """
    from ..config import load_config

    names, overrides = _split(list(words), options)
    if len(names) == 1 and not _is_model(names[0]):
        return load_config(names[0], overrides)
    if len(names) > 1 and Path(names[0]).suffix.lower() in _YAML:
        key = "resume_from_checkpoint" if CHECKPOINT.fullmatch(Path(names[1]).name) else "dataset"
        fix = f"write {key}={names[1]}"
        if len(names) > 2 and names[1].isidentifier():
            fix = f"write {names[1]}={names[2]}"
        elif "=" in names[1]:
            name, value = (word.strip() for word in names[1].split("=", 1))
            fix = f"write {shlex.quote(f'{name}={value}')}" if name else "write KEY=VALUE"
        raise UsageError(f"{names[1]} is not KEY=VALUE, and {names[0]} names its own data", fix)
    if len(names) > 2:
        raise UsageError(f"{names[2]} is one name too many", f"write halfbyte {command} MODEL DATA [KEY=VALUE]...")
    keys = {word.partition("=")[0].removeprefix("--") for word in overrides}
    positional = dict(zip(("model_name_or_path", "dataset"), names, strict=False))
    if twice := sorted(positional.keys() & keys):
        raise UsageError(f"{twice[0]} is given twice, first as {positional[twice[0]]}", "name it once")
    if len(names) == 1 and (given_config := Path(names[0]) / GIVEN_CONFIG).is_file():
        ending = _as_new_or_again(given_config, overrides) if command == "train" else ""
        raise UsageError(
            f"{names[0]} is a run's folder, not a configuration file",
            f"write halfbyte {command} {given_config}{ending}",
        )
    as_model = f"{names[0]} is not a configuration file, and a model needs DATA" if names else ""
    for key, word in (("model_name_or_path", "model"), ("dataset", "data")):
        # also other tools' keys: base_model, datasets
        if key not in positional and not any(word in name for name in keys):
            raise UsageError(as_model or f"{key} is missing", f"write halfbyte {command} MODEL DATA, or RUN.YAML")
    if len(names) == 2:
        check_order(command, *names)
    return load_config(None, overrides, positional)


def _as_new_or_again(file: Path, overrides: list[str]) -> str:
    """Return what `halfbyte train` needs after a run's own file: --resume if it would work, else another folder."""
    from ..config import load_config
    from ..runs.checkpoints import can_resume
    from ..utils.notices import silent

    with contextlib.suppress(HalfbyteError), silent():
        if can_resume(load_config(file, overrides)):
            return " --resume"
    return " output_dir=NEW"


def _is_model(name: str) -> bool:
    """Return whether a single name on the command line is a model instead of a configuration file."""
    suffix = Path(name).suffix.lower()
    return suffix not in _YAML and (suffix == ".gguf" or not os.path.isfile(name))


def _split(words: list[str], options: Collection[str]) -> tuple[list[str], list[str]]:
    """Split arguments into names and overrides."""
    names, overrides = [], []
    while words:
        word = words.pop(0)
        if word.startswith("-") and word != "-":
            check_option(word, options)
            overrides.append(word)
            if "=" not in word and words and not words[0].startswith("--"):
                overrides.append(words.pop(0))
        elif _OVERRIDE.match(word) and not os.path.exists(word):
            overrides.append(word)
        else:
            names.append(word)
    return names, overrides


def check_option(word: str, options: Collection[str]) -> None:
    """Check that an option that the command does not have is a key, ours or another tool's.

    Raises:
        UsageError: it is not a key.
    """
    from ..config.aliases import HINTS
    from ..config.foreign import foreign_names
    from ..config.run_config import RunConfig
    from ..config.section import nearest

    key = word.removeprefix("--").partition("=")[0].replace("-", "_")
    if word.startswith("--") and (key in RunConfig.model_fields or key in foreign_names() or key in HINTS):
        return
    spelled = {option.removeprefix("--").replace("-", "_"): option for option in options}
    prefixed = next((name for name in spelled if name.startswith(key)), "")
    near = prefixed or nearest(key, [*spelled, *RunConfig.model_fields])
    raise UsageError(
        f"there is no option {word}", f"did you mean {spelled.get(near, f'--{near}')}?" if near else "leave it out"
    )


def check_order(command: str, model: str, data: str) -> None:
    """Check that MODEL and DATA are not swapped.

    Raises:
        UsageError: they are swapped.
    """
    is_data = Path(model).suffix.lower() in _DATA
    is_model = os.path.isfile(Path(data) / "config.json") or data.endswith(".gguf")
    if is_data and (is_model or not os.path.exists(data)):
        raise UsageError(f"{model} is a dataset in the place of the model", f"write halfbyte {command} {data} {model}")


def finite(param: typer.CallbackParam, value: float | None) -> float | None:
    """Check that the value of an option is finite, which some versions of typer do not.

    Raises:
        UsageError: it is NaN or infinite.
    """
    if value is not None and not math.isfinite(value):
        raise UsageError(f"{param.opts[0]} {value}: it must be a finite number", f"write {param.opts[0]} NUMBER")
    return value


def check_sampling(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """Check that options of sampling come with a temperature, without which the likeliest token is taken.

    Raises:
        UsageError: names the option.
    """
    for option, value, neutral in (("--top-k", top_k, 0), ("--top-p", top_p, 1), ("--min-p", min_p, 0)):
        if temperature == 0 and value != neutral:
            message = f"{option} {value} changes nothing at temperature 0"
            raise UsageError(message, "add --temperature 0.7, or remove it")
