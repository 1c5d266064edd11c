"""`halfbyte import-config`: convert another tool's YAML to our keys, and list mapped and omitted keys."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..config import SECTIONS, TEXT_KEYS, RunConfig, explain
from ..config.aliases import HINTS, OFF_AT_ZERO, OTHER_METHODS, VALUES, WITHOUT_EFFECT_ON_RESULT
from ..config.dataset_keys import llamafactory_datasets
from ..config.foreign import (
    Ignored,
    Mapped,
    Refused,
    detect_tool,
    overridden_keys,
    tool_defaults,
    translate,
)
from ..config.reading import key_of
from ..config.run_config import written_keys
from ..config.yaml import Located, dump_value, read_mapping
from ..utils.errors import ConfigError
from ..utils.text import brief, cut, one_line


@dataclass
class Imported:
    """Our keys, the foreign key that each comes from, and the outcome for all other foreign keys.

    Attributes:
        left_out: foreign keys that do not change what is trained, each with the reason.
        undecided: foreign keys that have no equivalent, each with its value and the reason. They stay in the file,
            and `halfbyte check` and `train` refuse them until a person changes or removes them.
        missing: required keys that the file does not give.
    """

    file: Path
    tool: str
    keys: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, tuple[Any, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def explain(self) -> str:
        """Describe the outcome for each key."""
        lines = [f"{self.file}: {self.tool or 'unknown tool'}, {len(self.keys)} keys"]
        lines += [f"  {self.origin[key]:<34} → {dump_value(key, value)}" for key, value in self.keys.items()]
        if self.left_out:
            lines += ["left out:", *(f"  {key:<34} : {why}" for key, why in self.left_out.items())]
        if self.undecided:
            lines.append("to be decided before the run:")
            lines += [f"  {dump_value(key, value):<34} : {why}" for key, (value, why) in self.undecided.items()]
        if self.missing:
            lines.append(f"to be added before the run: {', '.join(self.missing)}")
        return "\n".join(cut(one_line(line)) for line in lines)

    def as_yaml(self) -> str:
        """Return the configuration by section, after the undecided keys; omitted keys follow as comments."""
        lines = [
            f"# Imported from {_comment(str(self.file))} ({self.tool or 'unknown tool'}); `halfbyte check` it next."
        ]
        if self.undecided:
            lines += ["", "# To be decided: change or remove each of these lines before the run"]
            lines += [f"{dump_value(key, value):<44} # {_comment(why)}" for key, (value, why) in self.undecided.items()]
        for section in SECTIONS:
            converted = [key for key in written_keys(section) if key in self.keys]
            if converted:
                lines += ["", f"# {section.__doc__}"]
                lines += [f"{dump_value(key, self.keys[key]):<44} # {_comment(self.origin[key])}" for key in converted]
        lines += [f"{key}: # to be filled in" for key in self.missing]
        if self.left_out:
            lines += ["", "# Left out", *(f"# {_comment(f'{key}: {why}')}" for key, why in self.left_out.items())]
        return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return cut(one_line(" ".join(text.split())))


def convert(file: Path) -> Imported:
    """Convert the keys of `file`.

    Raises:
        ConfigError: no such file, not YAML, no known key, or an unsupported training method.
    """
    written = read_mapping(file, TEXT_KEYS, fix="name another tool's training YAML")
    values = {key: setting.value for key, setting in written.items()}
    imported = Imported(file, detect_tool(values))
    overridden = overridden_keys(values)
    for key, value in values.items():
        if value == 0 and key in OFF_AT_ZERO:
            imported.left_out[key] = OFF_AT_ZERO[key]
            continue
        if key in RunConfig.model_fields:
            _record(imported, key, {key: value} if value is not None and key not in overridden else {}, value)
            continue
        match translate(key, values):
            case Mapped(keys):
                _record(imported, key, keys, value)
            case Refused(why, fix) if key in OTHER_METHODS:
                raise ConfigError(f"{written[key].source}: {key}: {brief(value)} is an unsupported method: {why}", fix)
            case Refused(why, fix) if key in WITHOUT_EFFECT_ON_RESULT:
                imported.left_out[key] = f"{why}; {fix}"
            case Refused(why, fix):
                imported.undecided[key] = value, f"{why}; {fix}"
            case Ignored(why) if why:
                imported.left_out[key] = why
            case None if key in HINTS:
                _record(imported, key, {HINTS[key]: value}, value)
            case None:
                imported.undecided[key] = value, "unknown key; remove it, or write halfbyte's key instead"
    if not imported.keys:
        reasons = imported.left_out | {key: why for key, (_, why) in imported.undecided.items()}
        listed = "; ".join(f"{key}: {why}" for key, why in list(reasons.items())[:3])
        raise ConfigError(f"{file} has nothing to train{f' ({listed})' * bool(listed)}", "name a training YAML")
    _record(imported, f"{imported.tool}'s default", tool_defaults(values, imported.keys))
    if imported.origin.get("quantization") == "qlora_fp8" and imported.keys["quantization"] == "fp8":
        why = "each row has a scale; quantization: fp8-tile has Surogate's tiles of 128×128"
        imported.left_out["qlora_block_size"] = why
    _resolve_datasets(imported, values)
    _drop_invalid(imported, values)
    imported.missing = [key for key in ("model_name_or_path", "dataset") if key not in imported.keys]
    return imported


def _record(imported: Imported, origin: str, keys: dict[str, Any], value: Any = None) -> None:
    """Record our `keys` for the foreign key `origin`, unless the file gives other values already."""
    for key, setting in keys.items():
        converted = VALUES.get(key, {}).get(setting, setting) if isinstance(setting, str) else setting
        if key not in imported.keys:
            imported.keys[key], imported.origin[key] = converted, origin
        elif imported.keys[key] != converted:
            why = f"{imported.origin[key]} already gives {dump_value(key, imported.keys[key])}; keep one of them"
            imported.undecided[origin] = value, why


def _resolve_datasets(imported: Imported, values: dict[str, Any]) -> None:
    """Replace LLaMA-Factory's dataset names by files and hub ids from dataset_info.json, and ms-swift's `name#rows`."""
    if imported.tool == "ms-swift":
        _limit_rows(imported)
    if imported.tool != "LLaMA-Factory":
        return
    named = values.get("dataset_dir")
    folder = Path(named if isinstance(named, str) and named else "data")
    for key in ("dataset", "eval_dataset"):
        entries = imported.keys.get(key)
        if isinstance(entries, str):
            names, weights = entries, []
        elif isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries):
            names, weights = ",".join(entry["path"] for entry in entries), [entry["weight"] for entry in entries]
        else:
            continue
        resolved, unresolved = llamafactory_datasets(names, [folder, imported.file.parent / folder])
        paths = [resolved] if isinstance(resolved, str) else resolved
        weighted = [{"path": path, "weight": weight} for path, weight in zip(paths, weights, strict=False)]
        imported.keys[key] = weighted or resolved
        for name in unresolved:
            why = f"no entry in {folder}/dataset_info.json; write the name of the file"
            imported.left_out[f"{key} {name}"] = why


def _limit_rows(imported: Imported) -> None:
    """Convert ms-swift's `name#rows` to entries with max_samples."""
    dataset = imported.keys.get("dataset")
    paths = dataset if isinstance(dataset, list) else [dataset]
    limits = [re.fullmatch(r"(.+)#(\d+)", path) if isinstance(path, str) else None for path in paths]
    if any(limits):
        imported.keys["dataset"] = [
            {"path": limit[1], "max_samples": int(limit[2])} if limit else path
            for path, limit in zip(paths, limits, strict=True)
        ]
        imported.left_out["dataset NAME#ROWS"] = "the first rows are read; ms-swift draws them at random"


def _drop_invalid(imported: Imported, values: dict[str, Any]) -> None:
    """Remove keys with invalid values, one at a time, since each removal may resolve a contradiction."""
    required = {"model_name_or_path": "?", "dataset": "?"}
    while True:
        try:
            RunConfig(**{**required, **imported.keys})
            return
        except ValidationError as error:
            located = {key: Located(value, "") for key, value in imported.keys.items()}
            detail = error.errors()[0]
            key = key_of(detail)
            wrong = explain(detail, located)
            why = " ".join("; ".join(filter(None, (wrong.message, wrong.fix))).split())
            if key not in imported.keys:  # a default contradicts a key of the file
                imported.undecided[key] = RunConfig.model_fields[key].default, why
                return
            origin, value = imported.origin.pop(key), imported.keys.pop(key)
            if origin in values:
                imported.undecided[origin] = values[origin], why
            else:
                imported.left_out[f"{origin}: {brief(value)}"] = why
