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
        asked: the function to load, as `load` takes it.
    """

    def __init__(self, asked: Mapping[str, Any]):
        self.asked = asked
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> str | None:
        """Start the process and load the function; return the error of loading, or None.

        Raises:
            Failed: the process ended, or is not ready after `LOADING` seconds.
        """
        if self._process is not None:
            return None
        own, other = Pipe()
        self._connection = own
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-c", BEGIN, str(other.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a function's output goes to the log
            pass_fds=[other.fileno()],
            start_new_session=True,
            env={**os.environ, LAUNCHER: str(os.getpid()), "PYTHONPATH": self._path()},
        )
        other.close()
        own.send_bytes(json.dumps(self.asked).encode())
        answer = self._answer(time.monotonic() + LOADING, "importing it")
        if "refused" in answer:
            self.close()
        return answer.get("refused")

    @staticmethod
    def _path() -> str:
        """Return a PYTHONPATH with this package."""
        return os.pathsep.join(filter(None, [PACKAGES, os.environ.get("PYTHONPATH", "")]))

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

    def _answer(self, end: float, what: str) -> dict[str, Any]:
        assert self._connection is not None
        try:
            if not self._connection.poll(max(end - time.monotonic(), 0)):
                self.close()
                raise Failed(f"{what} took too long")
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


def load(asked: dict[str, Any]) -> Callable[..., Any]:
    """Return the function that `asked` describes.

    Raises:
        Exception: whatever its file raises, or a ValueError about the file or the function.
    """
    if "file" not in asked:
        from .functions import built_in

        return built_in(asked["name"], asked["options"], asked["longest"])
    path, name = Path(asked["file"]), asked["name"]
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(sorted(key for key, each in vars(module).items() if inspect.isfunction(each)))
        raise ValueError(f"{path} has no function {name!r}; it has: {there or 'none'}")
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
    found = function(
        **arguments,
        trainer_state=state,
        log_extra=lambda column, values: extra.setdefault(column, []).extend(values),
        log_metric=lambda name, value: metrics.setdefault(name, []).append(float(value)),
    )
    if inspect.isawaitable(found):
        found = asyncio.run(_awaited(found))
    return {"rewards": numbers(found, len(arguments["completions"])), "extra": extra, "metrics": metrics}


async def _awaited(found: Any) -> Any:
    return await found


class WrongRewards(ValueError):
    """A reward function returned something else than a list of rewards."""


def numbers(found: Any, rows: int) -> list[float | None]:
    """Return `found` as a number or None for each of `rows` completions; NaN becomes None.

    Raises:
        WrongRewards: `found` is something else.
    """
    try:
        values = list(found)
    except TypeError:
        raise WrongRewards(f"gave a {type(found).__name__}, not a list of {rows} rewards") from None
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

    asked = json.loads(connection.recv_bytes())
    try:
        function = load(asked)
        check_arguments(function, asked["names"])
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
            place = traceback.extract_tb(error.__traceback__)[-1]
            reply(failed=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def main() -> None:
    end_with_launcher()
    serve(Connection(int(sys.argv[1])))
