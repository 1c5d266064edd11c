"""Datasets as Axolotl, Surogate and LLaMA-Factory list them, converted to our keys."""

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
    # Surogate
    "text": "text",
    "instruction": "alpaca",
    "conversation": "messages",
    "preference": "auto",
    "auto": "auto",
}
# Surogate's names of columns → Axolotl's.
_SUROGATE = {
    "text_field": "field", "messages_field": "field_messages", "chosen_field": "field_chosen",
    "rejected_field": "field_rejected",
}  # fmt: skip
_EXPRESSIBLE = {
    "path", "type", "split", "ds_type", "data_files", "field", "field_messages", "message_field_role",
    "message_field_content", "message_property_mappings", "roles", "roles_to_train", "train_on_eos", "chat_template",
    "field_chosen", "field_rejected", *_SUROGATE, "samples", "completion_field",
}  # fmt: skip
# Parts of Axolotl's field_* keys → column names that halfbyte detects.
_COLUMNS = {"messages": ("messages", "conversations"), "chosen": ("chosen",), "rejected": ("rejected",)}
_ROLE_FIELDS, _CONTENT_FIELDS = {"role", "from"}, {"content", "value"}


def axolotl_datasets(entries: Any) -> tuple[dict[str, Any], str]:
    """Return our keys for Axolotl's `datasets: [{path:, type:, ...}]`, and an error message or ""."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "path" in entry for entry in entries):
        return {}, "datasets must be a list of entries with a path"
    entries = [{_SUROGATE.get(key, key): option for key, option in entry.items()} for entry in entries]
    for entry in entries:
        if problem := _inexpressible({key: value for key, value in entry.items() if value is not None}):
            return {}, f"datasets: {entry['path']}: {problem}"
    splits = {entry["split"] for entry in entries if entry.get("split")}
    keys: dict[str, Any] = {
        "dataset": _one_or_many([path for entry in entries for path in _paths(entry, len(splits) > 1)])
    }
    formats = {_FORMATS[entry["type"]] for entry in entries if entry.get("type")}
    fields = {entry["field"] for entry in entries if entry.get("field")}
    columns = {
        column: {entry[f"field_{column}"] for entry in entries if entry.get(f"field_{column}")} for column in _COLUMNS
    }
    if max(map(len, (fields, *columns.values()))) > 1:
        return {}, "datasets with different field or field_messages cannot share one file"
    keys["dataset_format"] = formats.pop() if len(formats) == 1 else "auto"
    keys |= {"dataset_split": splits.pop()} if len(splits) == 1 else {}
    keys |= {"dataset_text_field": fields.pop()} if fields else {}
    answers = {entry["completion_field"] for entry in entries if entry.get("completion_field")}
    if len(answers) == 1 and len(columns["messages"]) == 1:  # of Surogate: prompt and answer in two columns
        columns |= {"prompt": columns.pop("messages"), "completion": answers}
        keys["dataset_format"] = "prompt-completion"
    elif answers:
        return {}, "completion_field without messages_field, or with different ones, has no equivalent"
    named = {column: names.pop() for column, names in columns.items() if names - set(_COLUMNS.get(column, (column,)))}
    return keys | ({"column_mapping": named} if named else {}), ""


def axolotl_test_datasets(entries: Any, training: Any) -> tuple[dict[str, Any], str]:
    """Return `eval_dataset` for `test_datasets`, and an error message or "".

    Args:
        training: the value of `datasets`, whose split held-out data has, too.
    """
    keys, problem = axolotl_datasets(entries)
    trained = axolotl_datasets(training)[0] if training else {}
    split = keys.get("dataset_split", "train")
    if keys and split != trained.get("dataset_split", "train"):
        return {}, f"split: {split} of held-out data has no equivalent: eval_dataset has the split of dataset"
    if any(isinstance(path, dict) for path in keys.get("dataset", [])):
        return {}, "held-out data with its own split or number of rows has no equivalent"
    return ({"eval_dataset": keys["dataset"]} if keys else {}), problem


def _inexpressible(entry: dict[str, Any]) -> str:
    unsupported = entry.keys() - _EXPRESSIBLE
    if unsupported:
        return f"{', '.join(sorted(unsupported))} has no equivalent"
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


def _paths(entry: dict[str, Any], own_split: bool) -> list[Any]:
    """Return the paths of an entry, as mappings if it has its own split or number of rows.

    Axolotl names local files as `path: json` with data_files.
    """
    files = entry.get("data_files")
    paths = [entry["path"]] if not files else [files] if isinstance(files, str) else list(files)
    settings = {"split": entry.get("split") if own_split else None, "max_samples": entry.get("samples")}
    options = {key: value for key, value in settings.items() if value is not None}
    return [{"path": path} | options for path in paths] if options else paths


def _one_or_many(paths: list[Any]) -> Any:
    return paths[0] if len(paths) == 1 and isinstance(paths[0], str) else paths


def llamafactory_datasets(names: str, folders: list[Path]) -> tuple[str | list[str], list[str]]:
    """Return files or hub ids for LLaMA-Factory's registered names, and the names that could not be resolved.

    Args:
        names: comma-separated names.
        folders: folders that may have dataset_info.json; the first match wins.

    Raises:
        ConfigError: dataset_info.json does not have LLaMA-Factory's format.
    """
    listing = next((file for folder in folders if look(file := folder / "dataset_info.json") == "file"), None)
    registered = read_json(listing, fix="correct LLaMA-Factory's list of datasets") if listing else {}
    if not isinstance(registered, dict) or not all(isinstance(entry, dict) for entry in registered.values()):
        raise ConfigError(f"{listing}: expected an object with an object for each dataset", "copy LLaMA-Factory's file")
    paths, unresolved = [], []
    for name in map(str.strip, names.split(",")):
        entry = registered.get(name, {})
        if "file_name" in entry and listing:
            paths.append(str(listing.parent / str(entry["file_name"])))
        elif "hf_hub_url" in entry:
            paths.append(str(entry["hf_hub_url"]))
        else:
            paths.append(name)
            unresolved.append(name)
    return _one_or_many(paths), unresolved
