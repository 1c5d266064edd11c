"""Changes that pages make: stop a run, save notes, move runs to the trash, change the queue, start runs.

Commands are argument lists of this Python in child processes. A new run's keys pass `RunConfig`, and cannot run code of
a model, send anything to other machines, or name paths outside the allowed folders.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import RunConfig, load_config
from ..reading import read_text
from ..runs import layout
from ..runs.lock import run_lock
from ..runs.queue import Queue, queue_folder
from ..utils.errors import ConfigError, HalfbyteError, explain_os_error
from ..utils.files import write_text
from .chat import Engines, chosen_weights, needed_bytes
from .folders import Notes, Runs, Summary, save_notes

TRASH = ".halfbyte-trash"
ANSWER_SECONDS = 4.0  # that a page waits for a command which may go on
CHECK_SECONDS = 300.0
FORBIDDEN = ("trust_remote_code", "hub_token", "push_to_hub", "vllm_server_base_url", "report_to")
Fields = Mapping[str, str]


class Actions:
    """Changes that pages may make.

    Args:
        runs: the runs of the board.
        allowed: folders that keys of a new run may name, besides the board's.
        folder: of the files that the board writes; of this user only.
    """

    def __init__(self, runs: Runs, allowed: Sequence[Path], folder: Path):
        self.runs, self.folder = runs, folder
        self.engines = Engines(folder)
        self.allowed = [path.resolve() for path in (*runs.roots, *allowed)]
        self._children: list[subprocess.Popen[bytes]] = []

    def command(self, *words: str, seconds: float | None = None) -> str:
        """Run `halfbyte WORDS`; return its output, or "" if it goes on after `seconds` (default: `ANSWER_SECONDS`).

        Raises:
            ConfigError: it has failed; with its message.
        """
        self._children = [child for child in self._children if child.poll() is None]
        child = subprocess.Popen(
            [sys.executable, "-m", "halfbyte", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
        try:
            output, _ = child.communicate(timeout=ANSWER_SECONDS if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            self._children.append(child)
            return ""
        text = output.decode(errors="replace").strip()
        if child.returncode:
            raise ConfigError(f"halfbyte {words[0]}: {text[-2000:] or 'it failed'}", "correct it, and try again")
        return text

    def write_config(self, text: str) -> tuple[Path, RunConfig]:
        """Write the YAML of a new run; return file and keys.

        Raises:
            HalfbyteError: `halfbyte train` would refuse a key, or a page must not set it.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.folder / f"run-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 10**6:06d}.yaml"
        write_text(path, text)
        try:
            config = load_config(path)
            self.check(config)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path, config

    def check(self, config: RunConfig) -> None:
        """Check that a page may start a run with these keys.

        Raises:
            ConfigError: names the key.
        """
        for key in sorted(config.model_fields_set):
            if key in FORBIDDEN and not config.is_default(key):
                raise ConfigError(f"{key}: a page cannot set it", "start this run from a terminal")
            for value in _texts(getattr(config, key)):
                if _is_path(key, value) and not self._is_allowed(value):
                    fix = "start the board with --allow FOLDER, or name another path"
                    raise ConfigError(f"{key}: {value} is outside of the board's folders", fix)
        if not self._is_allowed(str(config.output_path)):
            raise ConfigError(f"output_dir: {config.output_path} is outside of the board's folders", "name another one")

    def _is_allowed(self, path: str) -> bool:
        file = re.sub(r"(\.py):\w+$", r"\1", path)  # a reward function
        resolved = Path(os.path.expanduser(file)).resolve()
        return any(resolved.is_relative_to(folder) for folder in self.allowed)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a key's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _is_path(key: str, value: str) -> bool:
    """Return whether a text names a file or folder, rather than a repository of the hub, a format or a word."""
    if key == "sample_prompts" or "\0" in value or "\n" in value:
        return False
    file = re.sub(r"(\.py):\w+$", r"\1", value)
    looks = value.startswith(("/", "~", ".")) or ".." in Path(file).parts or file.endswith(".py")
    return looks or ("/" in value and len(file) < 4096 and os.path.exists(file)) or os.path.isfile(file)


# --- the actions -----------------------------------------------------------------------------------------------------


def _run(run: Summary | None) -> Summary:
    if run is None:
        raise ConfigError("run: the request names no run", "name one")
    return run


def stop(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Stop a run with a checkpoint, or at once."""
    words = ["stop", str(_run(run).folder), *(["--now"] if fields.get("now") else [])]
    return {"message": actions.command(*words) or "The run is ending: it saves a checkpoint after its step."}


def trash(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Move the folder of an ended run into the trash folder of its parent folder."""
    folder, root = _run(run).folder, _run(run).root
    if folder == root:
        raise ConfigError(f"{folder} is the board's own folder", "start the board in the folder above it")
    if _run(run).is_running:
        raise ConfigError(f"{folder}: the run is {_run(run).state}", f"halfbyte stop {folder}")
    target = folder.parent / TRASH / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with run_lock(folder):
        try:
            target.parent.mkdir(exist_ok=True)
            os.rename(folder, target)
        except OSError as error:
            raise ConfigError(f"{folder}: {explain_os_error(error)}", "move it on the command line") from error
    (target / layout.LOCK).unlink(missing_ok=True)
    return {"message": f"Moved to {target}.", "location": "/"}


def notes(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Write the notes of a run."""
    tags = [tag.strip() for tag in fields.get("tags", "").split(",") if tag.strip()]
    save_notes(_run(run).folder, Notes(fields.get("text", "").strip(), tags, bool(fields.get("hidden"))))
    return {"message": "Saved."}


def _job_number(fields: Fields) -> int:
    if not fields.get("job", "").isdecimal():
        raise ConfigError("job: the request names no job", "name one by its number")
    return int(fields["job"])


def move_job(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Move a waiting job to a place among the waiting jobs."""
    place = int(fields["place"]) if fields.get("place", "").isdecimal() else 1
    Queue(queue_folder()).move(_job_number(fields), max(place, 1))
    return {"message": "Moved."}


def remove_job(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Remove a job that does not run."""
    Queue(queue_folder()).remove(_job_number(fields))
    return {"message": "Removed."}


def run_queue(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Start the runner of the queue, which outlives the board."""
    return {"message": actions.command("queue", "run", seconds=60) or "The runner is starting."}


def check_run(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Run `halfbyte check` on the keys of a new run, and list the differences from the run that was copied."""
    path, config = actions.write_config(fields.get("keys", ""))
    try:
        report = actions.command("check", str(path), seconds=CHECK_SECONDS) or "The check takes longer than 5 minutes."
    finally:
        path.unlink(missing_ok=True)
    return {"message": f"{_differences(run, config)}{report}"}


def _differences(run: Summary | None, config: RunConfig) -> str:
    """Return a line for each key that differs from another run's; empty without another run."""
    if run is None:
        return ""
    path = run.folder / layout.GIVEN_CONFIG
    try:
        read_text(path, ConfigError)
        source = load_config(path)
    except HalfbyteError as error:
        return f"No differences are shown: {error.message}\n\n"
    names = sorted(config.model_fields_set | source.model_fields_set)
    pairs = [(name, getattr(source, name), getattr(config, name)) for name in names]
    lines = [f"{name}: {old} → {new}" for name, old, new in pairs if old != new]
    return "".join(f"{line}\n" for line in (lines or ["No key differs from the copied run."])) + "\n"


def add_job(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Check a new run and append it to the queue."""
    path, _ = actions.write_config(fields.get("keys", ""))
    message = actions.command("queue", "add", str(path), seconds=CHECK_SECONDS)
    return {"message": message or "It is still being checked; see the queue.", "location": "/queue"}


def start(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Append a new run to the queue, and start the runner if none is running."""
    answer = add_job(actions, run, fields)
    with contextlib.suppress(ConfigError):  # a runner is running
        run_queue(actions, run, fields)
    return answer


def start_engine(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """Load weights of a run to talk to, and another adapter on its base.

    Args:
        fields: `step`, of a checkpoint of the run; `with`, the id of other weights.
    """
    weights = chosen_weights(_run(run), fields.get("step", ""))
    number, _, step = fields.get("with", "").partition(":")
    other = chosen_weights(actions.runs.summary(number), step) if number in actions.runs.folders() else None
    actions.engines.start(weights, other, needed_bytes(actions.runs, weights.run))
    address = f"/chat?run={weights.run.id}"
    address += "" if weights.step is None else f"&step={weights.step}"
    address += "" if other is None else f"&with={other.id}"
    return {"message": "The model is being loaded.", "location": address}


def stop_engine(actions: Actions, run: Summary | None, fields: Fields) -> dict[str, str]:
    """End the engine."""
    actions.engines.stop()
    return {"message": "The engine has ended.", "location": "/chat"}


ACTIONS: dict[str, Callable[[Actions, Summary | None, Fields], dict[str, str]]] = {
    "stop": stop,
    "trash": trash,
    "notes": notes,
    "queue-move": move_job,
    "queue-remove": remove_job,
    "queue-run": run_queue,
    "check": check_run,
    "queue-add": add_job,
    "start": start,
    "chat-start": start_engine,
    "chat-stop": stop_engine,
}
