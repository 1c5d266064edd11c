"""The page Chat, and its engine: a child process that ends after `IDLE_SECONDS` without a request."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..report.sections import missing, text
from ..runs import layout
from ..utils.errors import ConfigError
from .folders import Runs, Summary
from .pages import button, frame, with_query

IDLE_SECONDS = 300.0
WORKSPACE = 1 << 30  # bytes for the KV cache and temporary tensors
LOG_LINES = 20  # of a failed engine that the page shows
NUMBERS = {"temperature": (0.0, 2.0), "seed": (0, 2**31 - 1), "max_tokens": (1, 2048)}  # name → range
FIELDS = {"temperature": ("temperature", "0.7"), "seed": ("seed", "1"), "max_tokens": ("tokens", "256")}
READY = re.compile(r"at http://127\.0\.0\.1:(\d+)/v1")


@dataclass(frozen=True)
class Weights:
    """Weights of a run to talk to.

    Attributes:
        step: of a checkpoint; None: the weights that the run has ended with.
    """

    run: Summary
    step: int | None = None

    @property
    def id(self) -> str:
        """Their name in URLs."""
        return self.run.id if self.step is None else f"{self.run.id}:{self.step}"

    @property
    def name(self) -> str:
        return self.run.name if self.step is None else f"{self.run.name} at step {self.step:,}"

    @property
    def folder(self) -> Path:
        return self.run.folder if self.step is None else self.run.folder / layout.checkpoint_folder(self.step)


def saved_weights(run: Summary) -> list[Weights]:
    """Return the saved weights of a run: the trained ones first, then complete checkpoints, newest first."""
    folders = [path for path in run.folder.glob(layout.CHECKPOINTS) if not path.is_symlink()]
    names = [layout.CHECKPOINT.fullmatch(path.name) for path in folders if (path / layout.MANIFEST).is_file()]
    steps = sorted((int(name[1]) for name in names if name), reverse=True)
    trained = [Weights(run)] if any((run.folder / name).is_dir() for name in layout.WEIGHTS) else []
    return [*trained, *(Weights(run, step) for step in steps)]


def chosen_weights(run: Summary, step: str) -> Weights:
    """Return the weights of a run at a step, which is a text; "": the first of its weights.

    Raises:
        ConfigError: the run has not saved them.
    """
    saved = saved_weights(run)
    chosen = next((weights for weights in saved if not step or str(weights.step) == step), None)
    if chosen is None:
        at = f" at step {step[:20]}" if step else ""
        raise ConfigError(f"{run.name} has no weights{at}", "choose a run or a step that has saved some")
    return chosen


@dataclass
class Engine:
    """A loaded model and its adapters.

    Attributes:
        runs: ids of the weights and, if there are two, of the other ones.
        state: loading, ready or ended.
        names: of the models that requests may name.
        lines: the last lines of its output.
    """

    runs: tuple[str, ...]
    process: subprocess.Popen[str]
    key: str
    state: str = "loading"
    port: int = 0
    names: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    used: float = field(default_factory=time.monotonic)

    def follow(self) -> None:
        """Read the output until the process ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines = [*self.lines, line.rstrip()][-LOG_LINES:]
            if self.state == "loading" and (match := READY.search(line)):
                self.port = int(match[1])
                with contextlib.suppress(OSError, ValueError, LookupError):
                    self.names = [model["id"] for model in json.loads(self.request("GET", "/v1/models").read())["data"]]
                self.used, self.state = time.monotonic(), "ready"
        self.process.wait()
        self.state = "ended"

    def leave_when_idle(self) -> None:
        """End the process when no request has come for `IDLE_SECONDS`."""
        while self.state != "ended":
            time.sleep(min(IDLE_SECONDS / 10, 5.0))
            if self.state == "ready" and time.monotonic() - self.used > IDLE_SECONDS:
                self.lines.append("The engine has left: it was not used.")
                self.end()

    def end(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> http.client.HTTPResponse:
        """Send a request; the response is read by the caller."""
        self.used = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=330)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json", "connection": "close"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()


class Engines:
    """The engine of the board; there is one at most.

    Args:
        folder: of the files that the board writes; of this user only.
    """

    def __init__(self, folder: Path):
        self.folder, self.lock = folder, threading.Lock()
        self.engine: Engine | None = None

    def start(self, run: Weights, other: Weights | None, needed: int) -> None:
        """End the present engine, and load weights of a run and, if given, another adapter."""
        with self.lock:
            if self.engine is not None:
                self.engine.end()
            key = secrets.token_urlsafe(32)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = self.folder / f"engine-{time.monotonic_ns()}.key"
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as secret:
                secret.write(key)
            adapters = [] if other is None else [f"{_name_of(other)}={other.folder}"]
            program = "import sys; from halfbyte.board.engine import main; main(*sys.argv[1:])"
            process = subprocess.Popen(
                [sys.executable, "-c", program, str(run.folder), str(file), str(needed), *adapters],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            self.engine = Engine((run.id, *([other.id] if other else [])), process, key)
            for work in (self.engine.follow, self.engine.leave_when_idle):
                threading.Thread(target=work, daemon=True).start()

    def stop(self) -> None:
        """End the engine."""
        with self.lock:
            if self.engine is not None:
                self.engine.end()

    def answer(self, fields: Mapping[str, str]) -> Iterator[bytes]:
        """Return the stream of an answer, as OpenAI's interface sends it.

        Args:
            fields: `model`, `messages` (JSON), and numbers by the names of `NUMBERS`.

        Raises:
            ConfigError: no model is loaded, or it refuses the request.
        """
        engine = self.engine
        if engine is None or engine.state != "ready":
            raise ConfigError("no model is loaded", "start the engine")
        body: dict[str, Any] = {"model": fields.get("model", ""), "stream": True}
        body["stream_options"] = {"include_usage": True}
        try:
            body["messages"] = json.loads(fields.get("messages", ""))
        except (ValueError, RecursionError) as error:
            raise ConfigError("messages: they are no JSON", "send a list of messages") from error
        for name, (low, high) in NUMBERS.items():
            if name in fields:
                body[name] = _number(name, fields[name], low, high)
        try:
            response = engine.request("POST", "/v1/chat/completions", body)
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"the engine does not answer: {error}", "start it again") from error
        if response.status != 200:
            with contextlib.suppress(ValueError, LookupError, TypeError):
                raise ConfigError(str(json.loads(response.read())["error"]["message"]), "change the request")
            raise ConfigError(f"the engine has refused: status {response.status}", "change the request")

        def lines() -> Iterator[bytes]:
            with contextlib.closing(response), contextlib.suppress(OSError, http.client.HTTPException):
                for line in response:
                    engine.used = time.monotonic()
                    yield line

        return lines()


def _number(name: str, written: str, low: float, high: float) -> float | int:
    try:
        value: float | int = int(written) if isinstance(low, int) else float(written)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigError(f"{name}: {written[:40]} is not between {low:g} and {high:g}", "correct it")
    return value


def _name_of(weights: Weights) -> str:
    name = weights.run.name if weights.step is None else f"{weights.run.name}-{weights.folder.name}"
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or weights.run.id


def needed_bytes(runs: Runs, run: Summary) -> int:
    """Return the bytes that answering with a run takes, from its plan; 0 if it has none."""
    memory = runs.document(run.folder, layout.MEMORY, dict) or {}
    predicted = memory.get("predicted")
    stored = [predicted.get(name) for name in ("weights", "adapters")] if isinstance(predicted, dict) else []
    counts = [count for count in stored if isinstance(count, int) and count >= 0]
    return sum(counts) + WORKSPACE if counts else 0


def command_of(run: Weights, other: Weights | None) -> str:
    """Return the command line that loads the same adapters as the page."""
    further = "" if other is None else f" --adapter {_name_of(other)}={other.folder}"
    return f"halfbyte serve {run.folder}{further}"


def chat_page(
    all_runs: Sequence[Summary],
    run: Summary | None,
    weights: Weights | None,
    other: Weights | None,
    engine: Engine | None,
    read_only: bool,
) -> str:
    """Return the page: the choice of runs, the state of the engine and, when it is ready, the conversation.

    Args:
        weights: of `run`; None: it has saved none yet.
        other: weights that answer beside them; None: the base.
    """
    if read_only:
        note = missing("The board is read-only: it loads no model.")
        return frame("Chat", f"<h1>Chat</h1>{note}", path="/chat")
    if run is None:
        able = [item for item in all_runs if saved_weights(item)]
        items = "".join(f'<li><a href="/chat?run={item.id}">{text(item.name)}</a></li>' for item in able)
        listed = (
            f"<p>Choose a run to talk to.</p><ul>{items}</ul>" if able else "<p class=missing>No run has weights.</p>"
        )
        return frame("Chat", f"<h1>Chat</h1>{listed}", path="/chat")
    header = f'<header><p class="eyebrow"><a href="/run/{run.id}">{text(run.name)}</a></p><h1>Chat</h1></header>'
    if weights is None:
        return frame("Chat", header + missing("This run has not saved weights yet."), path="/chat", live=True)
    fields = {"run": run.id}
    fields |= {} if weights.step is None else {"step": str(weights.step)}
    fields |= {} if other is None else {"with": other.id}
    choose = _choice(all_runs, weights, other)
    is_this = engine is not None and engine.runs == (weights.id, *([other.id] if other else []))
    state = engine.state if engine is not None and is_this else "ended"
    if engine is not None and state == "ready":
        body = button("End the engine", "/api/chat-stop", {}, "") + _conversation(engine)
    elif engine is not None and state == "loading":
        body = f'<p class="state training">loading</p><pre>{text(chr(10).join(engine.lines))}</pre>'
    else:
        log = engine.lines if engine is not None and is_this else []
        last = f"<pre>{text(chr(10).join(log))}</pre>" if log else ""
        body = button("Start the engine", "/api/chat-start", fields, command_of(weights, other)) + last
        if engine is not None and engine.state != "ended" and not is_this:
            number, _, step = engine.runs[0].partition(":")
            second = {"with": engine.runs[1]} if len(engine.runs) > 1 else {}
            loaded = with_query("/chat", {}, run=number, **({"step": step} if step else {}), **second)
            body += f'<p class="note">It replaces <a href="{loaded}">the one that is loaded</a>.</p>'
    return frame("Chat", f"{header}{choose}{body}", path="/chat", live=state != "ready")


def _choice(all_runs: Sequence[Summary], weights: Weights, other: Weights | None) -> str:
    """Return the form with two choices: a checkpoint of the run, and other weights to compare with it."""

    def options(choices: Sequence[tuple[str, str]], chosen: str) -> str:
        return "".join(
            f'<option value="{value}"{" selected" if value == chosen else ""}>{text(label)}</option>'
            for value, label in choices
        )

    run, base = weights.run, weights.run.keys.get("model_name_or_path")
    saved = saved_weights(run)
    steps = [("" if item.step is None else str(item.step), _label(item)) for item in saved]
    companions = [item for item in saved if item.id != weights.id]
    for further in all_runs:
        if further.id != run.id and further.keys.get("model_name_or_path") == base:
            companions += saved_weights(further)
    companion_options = [("", "its base only"), *((item.id, item.name) for item in companions)]
    return (
        f'<form class="filters"><input type="hidden" name="run" value="{run.id}"><label>weights '
        f'<select name="step">{options(steps, "" if weights.step is None else str(weights.step))}</select></label>'
        f'<label>beside <select name="with">{options(companion_options, "" if other is None else other.id)}'
        "</select></label>"
        "<button>Choose</button></form>"
    )


def _label(weights: Weights) -> str:
    return "trained" if weights.step is None else f"step {weights.step:,}"


def _conversation(engine: Engine) -> str:
    names = [engine.names[0], engine.names[-1]] if len(engine.runs) == 2 else engine.names[:2]
    columns = "".join(
        f'<div data-model="{text(name)}"><h2>{text(name)}</h2><div class="turns" role="log" tabindex="0"'
        f' aria-label="conversation with {text(name)}"></div></div>'
        for name in names
    )
    numbers = "".join(
        f'<label>{label} <input name="{name}" size="6" inputmode="decimal" value="{value}"></label>'
        for name, (label, value) in FIELDS.items()
    )
    return (
        f'<div class="chat">{columns}</div><form class="new" data-chat><label>Message '
        f'<textarea name="message" rows="3" required></textarea></label><div class="filters">{numbers}</div>'
        '<div><button>Send</button> <button type="reset">New conversation</button></div></form>'
    )
