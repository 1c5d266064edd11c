"""The hub: what is looked for there, and whether it answers. A path is no hub id, and an absent hub is said at once.

Left alone, huggingface_hub asks six times in 25 seconds before it says that there is no network.
"""

from __future__ import annotations

import difflib
import os
import re
import threading
from pathlib import Path

from .errors import ModelError
from .notices import notice

PATIENCE = 4.0  # seconds for one answer
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_FILE = re.compile(r"\.(bin|csv|gguf|jinja|json|jsonl|ndjson|parquet|safetensors|tsv|txt|yaml|yml)", re.IGNORECASE)
_LONGEST = 200  # characters; the hub's own bound is 96 for each part
_ALIKE = 0.75  # how alike two names are that were meant to be one


def is_local(name: str) -> bool:
    """Whether `name` can only be meant as a path here, be something there or not.

    It is no hub id, or one would not be spelled so: with the ending of a file, within a folder that holds files (that
    of an owner holds models' folders only), or a bare name beside a folder of nearly that name.
    """
    if len(name) > _LONGEST or not _ID.fullmatch(name) or os.path.lexists(name) or _FILE.fullmatch(Path(name).suffix):
        return True
    owner, slash, _ = name.partition("/")
    if slash:
        return any(entry.is_file() for entry in _entries(Path(owner)))
    close = nearest(Path(name), _ALIKE)
    return close is not None and close.is_dir()


def id_in(address: str) -> str:
    """The id of the model or dataset whose page on the hub that is; empty where it is no such address."""
    found = re.match(r"https?://(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+)(?:/tree/main)?/?$", address)
    return found[1] if found else ""


def nearest(path: Path, alike: float = 0.5) -> Path | None:
    """What is there and has nearly the name of `path`, or of the first of its parents that is not there."""
    folder, wanted = path.parent, path.name
    while not folder.is_dir() and folder != folder.parent:
        folder, wanted = folder.parent, folder.name
    there = {entry.name: entry for entry in _entries(folder) if entry.exists() and entry != path}
    return next((there[name] for name in difflib.get_close_matches(wanted, list(there), 1, alike)), None)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def look_for_model(name: str, revision: str | None = None) -> None:
    """Whether a model of that id is in the cache, or the hub can be asked for it.

    Raises:
        ModelError: neither.
    """
    why = reach()
    if not why:
        return
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        say_silent()
        return
    close = nearest(Path(name))
    raise ModelError(
        f"there is no folder {name}, no such model in the cache, and the hub cannot be asked: {why}",
        f"did you mean {close}?" if close else "name a folder, or go online to fetch the model once",
    )


def reach() -> str:
    """Why the hub cannot be asked; empty if it can. It is asked once, and if it is silent, only the cache counts."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _silence or "HF_HUB_OFFLINE is set"
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(_ask()), daemon=True)  # a name may take long to look up
    asking.start()
    asking.join(PATIENCE + 0.5)
    why = answers[0] if answers else f"no answer within {PATIENCE:.0f} s"
    if why:
        _go_offline(f"{constants.ENDPOINT}: {why}")
    return _silence


_silence = ""  # why the hub is not asked any more


def _ask() -> str:
    from huggingface_hub import constants, get_session

    try:
        status = get_session().head(constants.ENDPOINT, timeout=PATIENCE).status_code
    except Exception as error:  # whatever the client of this version raises
        return re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
    return f"status {status}" if status >= 500 else ""


def _go_offline(why: str) -> None:
    """Make the libraries that fetch take what they have, at once."""
    global _silence
    from huggingface_hub import constants

    _silence = why
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later, and for other processes


def say_silent() -> None:
    """Say that only what was fetched before is used, where that was not asked for."""
    if _silence:
        notice("hub", f"the hub cannot be reached ({_silence}); only what was fetched before is used")
