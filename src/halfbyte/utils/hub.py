"""Hugging Face hub: hub ids and local paths, and a fast check whether the hub is reachable.

Without this check huggingface_hub retries six times over 25 seconds before it reports that there is no network.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
from pathlib import Path

from .errors import ModelError
from .notices import notice

TIMEOUT = 4.0  # seconds for one answer
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_FILE = re.compile(r"\.(bin|csv|gguf|jinja|json|jsonl|ndjson|parquet|safetensors|tsv|txt|yaml|yml)", re.IGNORECASE)
_LONGEST = 200  # characters; the hub allows 96 per part
_SIMILAR = 0.75  # difflib ratio from which a name counts as a typo


def is_local(name: str) -> bool:
    """Return whether `name` is meant as a local path, existing or not.

    Otherwise it is a hub id. Local names are no valid id, or have a file's suffix, or are in a folder that contains
    files (an owner's folder contains model folders only), or are a bare name close to that of an existing folder.
    """
    if len(name) > _LONGEST or not _ID.fullmatch(name) or os.path.lexists(name) or _FILE.fullmatch(Path(name).suffix):
        return True
    owner, slash, _ = name.partition("/")
    if slash:
        return any(entry.is_file() for entry in _entries(Path(owner)))
    close = nearest_path(Path(name), _SIMILAR)
    return close is not None and close.is_dir()


def id_of_url(address: str) -> str:
    """Return the id of the model or dataset of a hub URL; empty for other strings."""
    match = re.match(r"https?://(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+)(?:/tree/main)?/?$", address)
    return match[1] if match else ""


def nearest_path(path: Path, ratio: float = 0.5) -> Path | None:
    """Return an existing path with a name close to that of `path`, or of its first parent that does not exist."""
    folder, name = path.parent, path.name
    while not folder.is_dir() and folder != folder.parent:
        folder, name = folder.parent, folder.name
    entries = {entry.name: entry for entry in _entries(folder) if entry.exists() and entry != path}
    return next((entries[name] for name in difflib.get_close_matches(name, list(entries), 1, ratio)), None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def check_model_available(name: str, revision: str | None = None) -> None:
    """Check that a model is in the cache or the hub is reachable.

    Raises:
        ModelError: neither.
    """
    why = unreachable_reason()
    if not why:
        return
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        notice_offline()
        return
    close = nearest_path(Path(name))
    raise ModelError(
        f"no folder {name}, no such model in the cache, and the hub cannot be reached: {why}",
        f"did you mean {close}?" if close else "name a folder, or go online to fetch the model once",
    )


def unreachable_reason() -> str:
    """Return why the hub cannot be reached; empty if it can. After one failure only the cache is used."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _offline_reason or "HF_HUB_OFFLINE is set"
    answers: list[str] = []
    request = threading.Thread(target=lambda: answers.append(_request()), daemon=True)  # DNS may block
    request.start()
    request.join(TIMEOUT + 0.5)
    why = answers[0] if answers else f"no answer within {TIMEOUT:.0f} s"
    if why:
        _go_offline(f"{constants.ENDPOINT}: {why}")
    return _offline_reason


_offline_reason = ""  # why the hub is no longer used


def _request() -> str:
    from huggingface_hub import constants, get_session

    try:
        status = get_session().head(constants.ENDPOINT, timeout=TIMEOUT).status_code
    except Exception as error:  # depends on the version of its HTTP client
        return re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return f"status {status}" if status >= 500 else ""


def _go_offline(why: str) -> None:
    """Switch huggingface_hub and the libraries on it to offline mode."""
    global _offline_reason
    from huggingface_hub import constants

    _offline_reason = why
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for later imports and child processes


def notice_offline() -> None:
    """Log that only cached files are used, unless the user chose offline mode."""
    if _offline_reason:
        notice("hub", f"the hub cannot be reached ({_offline_reason}); using cached files only")
