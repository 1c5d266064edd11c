"""`halfbyte import-config`: another tool's YAML under our names, saying what was mapped and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config import SECTIONS, TEXT_KEYS, RunConfig, explain
from ..config.datasets import llamafactory_datasets
from ..config.foreign import Ignored, Mapped, Refused, implied, overruled, translate, written_for
from ..config.yaml import Located, dump_value, read_mapping
from ..errors import ConfigError


@dataclass
class Imported:
    """Our keys, each with the foreign one it comes from, and the foreign keys left out, each with the reason."""

    file: Path
    tool: str
    keys: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def explain(self) -> str:
        """What became of each key, for a person to read."""
        lines = [f"{self.file}: {self.tool or 'no tool known here'}, {len(self.keys)} keys"]
        lines += [f"  {self.origin[key]:<34} → {dump_value(key, value)}" for key, value in self.keys.items()]
        if self.left_out:
            lines += ["left out:", *(f"  {key:<34} : {why}" for key, why in self.left_out.items())]
        if self.missing:
            lines.append(f"to be added before it runs: {', '.join(self.missing)}")
        return "\n".join(lines)

    def as_yaml(self) -> str:
        """The configuration, by section, with the keys left out as comments at the end."""
        lines = [f"# Imported from {self.file} ({self.tool or 'unknown tool'}); `halfbyte check` it next."]
        for section in SECTIONS:
            own = [key for key in section.model_fields if key in self.keys]
            if own:
                lines += ["", f"# {section.__doc__}"]
                lines += [f"{dump_value(key, self.keys[key]):<44} # {self.origin[key]}" for key in own]
        lines += [f"{key}: # to be filled in" for key in self.missing]
        if self.left_out:
            lines += ["", "# Left out", *(f"# {key}: {' '.join(why.split())}" for key, why in self.left_out.items())]
        return "\n".join(lines) + "\n"


def convert(file: Path) -> Imported:
    """Read `file` and sort its keys into ours and those left out.

    Raises:
        ConfigError: no such file, not YAML, or nothing in it is known.
    """
    written = read_mapping(file, TEXT_KEYS)
    values = {key: setting.value for key, setting in written.items()}
    imported = Imported(file, written_for(values))
    beside = overruled(values)
    for key, value in values.items():
        if key in RunConfig.model_fields:
            _take(imported, key, {key: value} if value is not None and key not in beside else {})
            continue
        match translate(key, values):
            case Mapped(keys):
                _take(imported, key, keys)
            case Refused(why, fix):
                imported.left_out[key] = f"{why}; {fix}"
            case Ignored(why) if why:
                imported.left_out[key] = why
            case None:
                imported.left_out[key] = "unknown here"
    if not imported.keys:
        raise ConfigError(f"{file}: no key of Axolotl, LLaMA-Factory, TRL or halfbyte in it", "name a training YAML")
    _take(imported, f"{imported.tool}'s default", implied(values, imported.keys))
    _resolve_datasets(imported, values)
    _drop_invalid(imported)
    imported.missing = [key for key in ("model_name_or_path", "dataset") if key not in imported.keys]
    return imported


def _take(imported: Imported, origin: str, keys: dict[str, Any]) -> None:
    for key, value in keys.items():
        if key not in imported.keys:
            imported.keys[key], imported.origin[key] = value, origin
        elif imported.keys[key] != value:
            imported.left_out[origin] = f"{imported.origin[key]} already gives {dump_value(key, imported.keys[key])}"


def _resolve_datasets(imported: Imported, values: dict[str, Any]) -> None:
    """LLaMA-Factory names datasets by their entries in dataset_info.json."""
    if imported.tool != "LLaMA-Factory":
        return
    folder = Path(values.get("dataset_dir") or "data")
    for key in ("dataset", "eval_dataset"):
        if isinstance(imported.keys.get(key), str):
            places = [folder, imported.file.parent / folder]
            imported.keys[key], unresolved = llamafactory_datasets(imported.keys[key], places)
            for name in unresolved:
                imported.left_out[f"{key} {name}"] = f"no entry in {folder}/dataset_info.json; write the file's name"


def _drop_invalid(imported: Imported) -> None:
    """Leave out values that our keys do not take, one at a time: a contradiction may end with the first."""
    required = {"model_name_or_path": "?", "dataset": "?"}
    while True:
        try:
            RunConfig(**{**required, **imported.keys})
            return
        except ValidationError as error:
            given = {key: Located(value, "") for key, value in imported.keys.items()}
            detail = error.errors()[0]
            key = str(detail.get("ctx", {}).get("key") or detail["loc"][0])
            problem = explain(detail, given)
            imported.left_out[f"{imported.origin.pop(key)}: {imported.keys.pop(key)}"] = " ".join(str(problem).split())
