"""A reward function in a process of its own, so that it cannot crash or hang the run: both ends of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..utils.processes import LAUNCHER, end_with_launcher

LOADING = 60.0  # seconds that importing a function's file may take
BEGIN = "from halfbyte.rewards.process import main; main()"
PACKAGES = str(Path(__file__).parents[2])


class Failed(Exception):
    """The process did not answer; the message says why."""


class RewardProcess:
    """Client of a reward function's process, which starts at the first request, and again after a failure.

    Args:
        description: of the function to load, as `load` takes it.
    """

    def __init__(self, description: Mapping[str, Any]):
        self.description = description
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> str | None:
        """Start the process and load the function; return the error of loading, or None.

        Raises:
            Failed: the process ended, or is not ready after `LOADING` seconds.
        """
        if self._process is not None:
            return None
        parent_end, child_end = Pipe()
        python_path = os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH", "")]))
        self._connection = parent_end
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-c", BEGIN, str(child_end.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a function's output goes to the log
            pass_fds=[child_end.fileno()],
            start_new_session=True,
            env={**os.environ, LAUNCHER: str(os.getpid()), "PYTHONPATH": python_path},
        )
        child_end.close()
        parent_end.send_bytes(json.dumps(self.description).encode())
        answer = self._answer(time.monotonic() + LOADING, "importing it")
        if "refused" in answer:
            self.close()
        return answer.get("refused")

    def ask(self, request: Mapping[str, Any]) -> None:
        """Send a request; `answer` receives the result.

        Raises:
            Failed: the process has ended.
        """
        if refused := self.start():
            raise Failed(refused)
        assert self._connection is not None
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except OSError:
            raise self._gone() from None

    def answer(self, end: float) -> dict[str, Any]:
        """Return the result, or kill the process at `end` (monotonic clock).

        Raises:
            Failed: the process timed out, or has ended.
        """
        return self._answer(end, "its batch")

    def _answer(self, end: float, stage: str) -> dict[str, Any]:
        assert self._connection is not None
        try:
            if not self._connection.poll(max(end - time.monotonic(), 0)):
                self.close()
                raise Failed(f"{stage} took too long")
            return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> Failed:
        """Return the error for a process that has closed the connection."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        if code is not None and code < 0:
            return Failed(f"its process was ended by {signal.Signals(-code).name}")
        return Failed("its process closed the connection" if code is None else f"its process exited with {code}")

    def close(self) -> None:
        """Kill the process and its process group."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


# --- in the function's process ----------------------------------------------------------------------------------------


def load(description: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that `description` names: a user's file and function, or halfbyte's function and options.

    Raises:
        Exception: whatever its file raises, or a ValueError about the file or the function.
    """
    if "file" not in description:
        from .functions import built_in

        return built_in(description["name"], description["options"], description["longest"])
    path, name = Path(description["file"]), description["name"]
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = ", ".join(sorted(key for key, member in vars(module).items() if inspect.isfunction(member)))
        raise ValueError(f"{path} has no function {name!r}; it has: {functions or 'none'}")
    return function


def check_arguments(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Check that `function` takes the arguments that it will be called with.

    Raises:
        ValueError: it does not.
    """
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(f"it is called with {', '.join(names)}: {error} (it should end with **kwargs)") from None


def call(function: Callable[..., Any], arguments: dict[str, Any], state: Any) -> dict[str, Any]:
    """Call `function` and return "rewards" (a number or None each), and the "extra" columns and "metrics" that it
    logged."""
    extra: dict[str, list[Any]] = {}
    metrics: dict[str, list[float]] = {}
    rewards = function(
        **arguments,
        trainer_state=state,
        log_extra=lambda column, values: extra.setdefault(column, []).extend(values),
        log_metric=lambda name, value: metrics.setdefault(name, []).append(float(value)),
    )
    if inspect.isawaitable(rewards):
        rewards = asyncio.run(asyncio.wait_for(rewards, None))
    return {"rewards": numbers(rewards, len(arguments["completions"])), "extra": extra, "metrics": metrics}


class WrongRewards(ValueError):
    """A reward function returned something else than a list of rewards."""


def numbers(rewards: Any, rows: int) -> list[float | None]:
    """Return `rewards` as a number or None for each of `rows` completions; NaN becomes None.

    Raises:
        WrongRewards: `rewards` is something else.
    """
    try:
        values = list(rewards)
    except TypeError:
        raise WrongRewards(f"gave a {type(rewards).__name__}, not a list of {rows} rewards") from None
    if len(values) != rows:
        raise WrongRewards(f"gave {len(values)} rewards for {rows} completions")
    return [_number(value, at) for at, value in enumerate(values)]


def _number(value: Any, at: int) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise WrongRewards(f"gave a {type(value).__name__} as reward {at}, not a number or None")
    number = float(value)
    if math.isinf(number):
        raise WrongRewards(f"gave {number} as reward {at}")
    return None if math.isnan(number) else number


def serve(connection: Connection) -> None:
    """Answer requests until the connection is closed."""

    def reply(**answer: Any) -> None:
        sys.stdout.flush()  # the function's output must precede the run's messages about it
        connection.send_bytes(json.dumps(answer).encode())

    description = json.loads(connection.recv_bytes())
    try:
        function = load(description)
        check_arguments(function, description["names"])
    except BaseException as error:
        reply(refused=f"{type(error).__name__}: {error}")
        return
    reply(ready=True)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):  # the run has ended, or was killed
            return
        state = SimpleNamespace(**request.pop("trainer_state"))
        try:
            reply(**call(function, request["arguments"], state))
        except WrongRewards as error:
            reply(wrong=str(error))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reply(failed=f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})")


def main() -> None:
    end_with_launcher()
    serve(Connection(int(sys.argv[1])))
