"""Axolotl's list of datasets and LLaMA-Factory's dataset_info.json, as our flat data keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..reading import look, read_json
from ..utils.errors import ConfigError

_FORMATS = {
    "alpaca": "alpaca",
    "chat_template": "auto",
    "chat_template.default": "auto",
    "chat_template.argilla": "auto",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "input_output": "prompt-completion",
}
_EXPRESSIBLE = {
    "path", "type", "split", "ds_type", "data_files", "field", "field_messages", "message_field_role",
    "message_field_content", "message_property_mappings", "roles", "roles_to_train", "train_on_eos", "chat_template",
    "field_chosen", "field_rejected",
}  # fmt: skip
# Axolotl's fields of columns, and what those are called that are recognised.
_COLUMNS = {"messages": ("messages", "conversations"), "chosen": ("chosen",), "rejected": ("rejected",)}
_ROLE_FIELDS, _CONTENT_FIELDS = {"role", "from"}, {"content", "value"}


def axolotl_datasets(entries: Any) -> tuple[dict[str, Any], str]:
    """Our keys for `datasets: [{path:, type:, ...}]`, or what of it has no equivalent."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "path" in entry for entry in entries):
        return {}, "datasets must be a list of entries with a path"
    for entry in entries:
        if problem := _inexpressible({key: value for key, value in entry.items() if value is not None}):
            return {}, f"datasets: {entry['path']}: {problem}"
    keys: dict[str, Any] = {"dataset": _one_or_many([path for entry in entries for path in _paths(entry)])}
    formats = {_FORMATS[entry["type"]] for entry in entries if entry.get("type")}
    splits = {entry["split"] for entry in entries if entry.get("split")}
    fields = {entry["field"] for entry in entries if entry.get("field")}
    columns = {part: {entry[f"field_{part}"] for entry in entries if entry.get(f"field_{part}")} for part in _COLUMNS}
    if max(map(len, (splits, fields, *columns.values()))) > 1:
        return {}, "datasets with different split, field or field_messages cannot share one file"
    keys["dataset_format"] = formats.pop() if len(formats) == 1 else "auto"
    keys |= {"dataset_split": splits.pop()} if splits else {}
    keys |= {"dataset_text_field": fields.pop()} if fields else {}
    named = {part: names.pop() for part, names in columns.items() if names - set(_COLUMNS[part])}
    return keys | ({"column_mapping": named} if named else {}), ""


def axolotl_test_datasets(entries: Any) -> tuple[dict[str, Any], str]:
    """`eval_dataset` for `test_datasets`, whose entries are written like those of `datasets`."""
    keys, problem = axolotl_datasets(entries)
    return ({"eval_dataset": keys["dataset"]} if keys else {}), problem


def _inexpressible(entry: dict[str, Any]) -> str:
    others = entry.keys() - _EXPRESSIBLE
    if others:
        return f"{', '.join(sorted(others))} has no equivalent"
    if isinstance(entry.get("type"), dict):
        return "a custom prompt format has no equivalent"
    if entry.get("type") and entry["type"] not in _FORMATS:
        return f"type: {entry['type']} has no equivalent"
    mapping = entry.get("message_property_mappings") or {}
    role = mapping.get("role", entry.get("message_field_role", "role"))
    content = mapping.get("content", entry.get("message_field_content", "content"))
    if role not in _ROLE_FIELDS or content not in _CONTENT_FIELDS or set(mapping) - {"role", "content"}:
        return f"messages with fields {role} and {content} have no equivalent (role/content and from/value do)"
    return ""


def _paths(entry: dict[str, Any]) -> list[str]:
    """`path: json` with data_files is Axolotl's way to name local files."""
    files = entry.get("data_files")
    if not files:
        return [entry["path"]]
    return [files] if isinstance(files, str) else list(files)


def _one_or_many(paths: list[str]) -> str | list[str]:
    return paths[0] if len(paths) == 1 else paths


def llamafactory_datasets(names: str, folders: list[Path]) -> tuple[str | list[str], list[str]]:
    """Files or hub ids for LLaMA-Factory's registered names, and the names that could not be resolved.

    Args:
        names: names with commas between them.
        folders: where to look for dataset_info.json, first match wins.

    Raises:
        ConfigError: dataset_info.json is not LLaMA-Factory's.
    """
    listing = next((file for folder in folders if look(file := folder / "dataset_info.json") == "file"), None)
    known = read_json(listing, fix="mend the list of LLaMA-Factory's datasets") if listing else {}
    if not isinstance(known, dict) or not all(isinstance(entry, dict) for entry in known.values()):
        raise ConfigError(f"{listing}: expected an object with an object for each dataset", "copy it there again")
    found, unresolved = [], []
    for name in (part.strip() for part in names.split(",")):
        entry = known.get(name, {})
        if "file_name" in entry and listing:
            found.append(str(listing.parent / str(entry["file_name"])))
        elif "hf_hub_url" in entry:
            found.append(str(entry["hf_hub_url"]))
        else:
            found.append(name)
            unresolved.append(name)
    return _one_or_many(found), unresolved
