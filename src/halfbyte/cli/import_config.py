"""`halfbyte import-config`: another tool's YAML under our names, saying what was mapped and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config import SECTIONS, TEXT_KEYS, RunConfig, explain
from ..config.aliases import BESIDE_THE_RESULT, OTHER_METHODS
from ..config.datasets import llamafactory_datasets
from ..config.foreign import Ignored, Mapped, Refused, implied, overruled, translate, written_for
from ..config.reading import key_of
from ..config.yaml import Located, dump_value, read_mapping
from ..utils.errors import ConfigError
from ..utils.text import brief, cut, one_line


@dataclass
class Imported:
    """Our keys, each with the foreign one it comes from, and what became of the rest.

    Attributes:
        left_out: foreign keys that have no say in what is trained, each with the reason.
        undecided: foreign keys that ask for what cannot be had, each with its value and the reason. They stay in the
            file, where `halfbyte check` and `train` refuse them until a person has changed or removed them.
        missing: keys that a run needs and the file does not give.
    """

    file: Path
    tool: str
    keys: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, tuple[Any, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def explain(self) -> str:
        """What became of each key, for a person to read."""
        lines = [f"{self.file}: {self.tool or 'no tool known here'}, {len(self.keys)} keys"]
        lines += [f"  {self.origin[key]:<34} → {dump_value(key, value)}" for key, value in self.keys.items()]
        if self.left_out:
            lines += ["left out:", *(f"  {key:<34} : {why}" for key, why in self.left_out.items())]
        if self.undecided:
            lines.append("to be decided before it runs:")
            lines += [f"  {dump_value(key, value):<34} : {why}" for key, (value, why) in self.undecided.items()]
        if self.missing:
            lines.append(f"to be added before it runs: {', '.join(self.missing)}")
        return "\n".join(cut(one_line(line)) for line in lines)

    def as_yaml(self) -> str:
        """The configuration, by section; what is to be decided first, the keys left out as comments at the end."""
        lines = [
            f"# Imported from {_comment(str(self.file))} ({self.tool or 'unknown tool'}); `halfbyte check` it next."
        ]
        if self.undecided:
            lines += ["", "# To be decided: it runs when each of these lines is changed or removed"]
            lines += [f"{dump_value(key, value):<44} # {_comment(why)}" for key, (value, why) in self.undecided.items()]
        for section in SECTIONS:
            own = [key for key in section.model_fields if key in self.keys]
            if own:
                lines += ["", f"# {section.__doc__}"]
                lines += [f"{dump_value(key, self.keys[key]):<44} # {_comment(self.origin[key])}" for key in own]
        lines += [f"{key}: # to be filled in" for key in self.missing]
        if self.left_out:
            lines += ["", "# Left out", *(f"# {_comment(f'{key}: {why}')}" for key, why in self.left_out.items())]
        return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return cut(one_line(" ".join(text.split())))


def convert(file: Path) -> Imported:
    """Read `file` and sort its keys into ours, those left out, and those that a person must decide.

    Raises:
        ConfigError: no such file, not YAML, nothing in it is known, or it asks for another method.
    """
    written = read_mapping(file, TEXT_KEYS, fix="name another tool's training YAML")
    values = {key: setting.value for key, setting in written.items()}
    imported = Imported(file, written_for(values))
    beside = overruled(values)
    for key, value in values.items():
        if key in RunConfig.model_fields:
            _take(imported, key, {key: value} if value is not None and key not in beside else {}, value)
            continue
        match translate(key, values):
            case Mapped(keys):
                _take(imported, key, keys, value)
            case Refused(why, fix) if key in OTHER_METHODS:
                raise ConfigError(f"{written[key].where}: {key}: {brief(value)} asks for another method: {why}", fix)
            case Refused(why, fix) if key in BESIDE_THE_RESULT:
                imported.left_out[key] = f"{why}; {fix}"
            case Refused(why, fix):
                imported.undecided[key] = value, f"{why}; {fix}"
            case Ignored(why) if why:
                imported.left_out[key] = why
            case None:
                imported.undecided[key] = value, "unknown here; remove it, or write halfbyte's key for it"
    if not imported.keys:
        raise ConfigError(f"{file}: no key of Axolotl, LLaMA-Factory, TRL or halfbyte in it", "name a training YAML")
    _take(imported, f"{imported.tool}'s default", implied(values, imported.keys))
    _resolve_datasets(imported, values)
    _drop_invalid(imported, values)
    imported.missing = [key for key in ("model_name_or_path", "dataset") if key not in imported.keys]
    return imported


def _take(imported: Imported, origin: str, keys: dict[str, Any], value: Any = None) -> None:
    """Give our `keys` for the foreign key `origin`, unless the file says something else already."""
    for key, ours in keys.items():
        if key not in imported.keys:
            imported.keys[key], imported.origin[key] = ours, origin
        elif imported.keys[key] != ours:
            why = f"{imported.origin[key]} already gives {dump_value(key, imported.keys[key])}; keep one of them"
            imported.undecided[origin] = value, why


def _resolve_datasets(imported: Imported, values: dict[str, Any]) -> None:
    """LLaMA-Factory names datasets by their entries in dataset_info.json."""
    if imported.tool != "LLaMA-Factory":
        return
    named = values.get("dataset_dir")
    folder = Path(named if isinstance(named, str) and named else "data")
    for key in ("dataset", "eval_dataset"):
        if isinstance(imported.keys.get(key), str):
            places = [folder, imported.file.parent / folder]
            imported.keys[key], unresolved = llamafactory_datasets(imported.keys[key], places)
            for name in unresolved:
                imported.left_out[f"{key} {name}"] = f"no entry in {folder}/dataset_info.json; write the file's name"


def _drop_invalid(imported: Imported, values: dict[str, Any]) -> None:
    """Take back keys whose value ours do not take, one at a time: a contradiction may end with the first."""
    required = {"model_name_or_path": "?", "dataset": "?"}
    while True:
        try:
            RunConfig(**{**required, **imported.keys})
            return
        except ValidationError as error:
            given = {key: Located(value, "") for key, value in imported.keys.items()}
            detail = error.errors()[0]
            key = key_of(detail)
            wrong = explain(detail, given)
            why = " ".join("; ".join(filter(None, (wrong.message, wrong.fix))).split())
            if key not in imported.keys:  # what the file leaves out contradicts what it gives
                imported.undecided[key] = RunConfig.model_fields[key].default, why
                return
            origin, value = imported.origin.pop(key), imported.keys.pop(key)
            if origin in values:
                imported.undecided[origin] = values[origin], why
            else:
                imported.left_out[f"{origin}: {brief(value)}"] = why
