"""The process that a reward function runs in, so that nothing it does ends the run.

`main` reads requests from a connection and answers each, until that is closed. The first one says which function.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...utils.processes import end_with_launcher


def load(asked: dict[str, Any]) -> Callable[..., Any]:
    """The function that `asked` describes.

    Raises:
        Exception: whatever its file raises, or a ValueError that says what is wrong with it.
    """
    if "file" not in asked:
        from .functions import built_in

        return built_in(asked["name"], asked["options"], asked["longest"])
    path, name = Path(asked["file"]), asked["name"]
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(sorted(key for key, each in vars(module).items() if inspect.isfunction(each)))
        raise ValueError(f"{path} has no function {name!r}; it has: {there or 'none'}")
    return function


def check_arguments(function: Callable[..., Any], names: Sequence[str]) -> None:
    """Whether `function` takes what it will be called with.

    Raises:
        ValueError: it does not.
    """
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(f"it is called with {', '.join(names)}: {error} (it should end with **kwargs)") from None


def call(function: Callable[..., Any], arguments: dict[str, Any], state: Any) -> dict[str, Any]:
    """What `function` answers and logs: "rewards" (None or a number each), "extra" columns and "metrics"."""
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
    """What a reward function gave is no list of rewards."""


def numbers(found: Any, rows: int) -> list[float | None]:
    """`found` as a number or None for each of `rows` completions; NaN is as None.

    Raises:
        WrongRewards: it is something else.
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
    """Answer requests until nobody asks."""

    def tell(**answer: Any) -> None:
        sys.stdout.flush()  # what the function printed stands before what is said of it
        connection.send_bytes(json.dumps(answer).encode())

    asked = json.loads(connection.recv_bytes())
    try:
        function = load(asked)
        check_arguments(function, asked["names"])
    except BaseException as error:
        tell(refused=f"{type(error).__name__}: {error}")
        return
    tell(ready=True)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, OSError):  # the run has ended, or was killed
            return
        state = SimpleNamespace(**request.pop("trainer_state"))
        try:
            tell(**call(function, request["arguments"], state))
        except WrongRewards as error:
            tell(wrong=str(error))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            tell(failed=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")


def main() -> None:
    end_with_launcher()
    serve(Connection(int(sys.argv[1])))
