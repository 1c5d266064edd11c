"""What one process of several knows of its launcher (halfbyte's, torchrun, accelerate's), and leaves it when it fails.

A rank that fails does not print: it leaves its error in the file that torch's launchers name, where halfbyte's own
reads it and torchrun finds its "root cause". So an error is said once, last, whichever rank met it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...reading import why
from ...utils import errors
from ...utils.errors import ConfigError, HalfbyteError, TrainingError
from ...utils.notices import notice
from ...utils.text import brief

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
OURS = "halfbyte"  # in that file: what torch's own keys have no room for
MEETING = ("RANK", "MASTER_ADDR", "MASTER_PORT")
FOREIGN = {
    "ACCELERATE_USE_FSDP": "{shard: N}",
    "ACCELERATE_USE_DEEPSPEED": "{shard: N}",
    "ACCELERATE_USE_MEGATRON_LM": "{tensor: N}, or another axis",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "{data: N}, or another axis",
}
GONE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
MOST = 2**20  # processes of a run
SILENT = 10.0  # seconds of waiting, after which that is said
NAMED = 30.0  # seconds in which the launcher's host is to have its name
LATER = 3600  # seconds; torchrun takes the earliest failure for the cause


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several, or as the only one that is to be."""
    return "LOCAL_RANK" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1"


def launched_as(name: str, least: int, most: int, default: int) -> int:
    """A whole number that the launcher has put into the environment; `default` where it has not.

    Raises:
        ConfigError: it is none from `least` to `most`.
    """
    given = os.environ.get(name) or str(default)
    if not (given.isascii() and given.isdigit() and least <= int(given[:9]) <= most):
        fix = "unset it, or start this with `halfbyte train` or torchrun, which set it (docs/several-gpus.md)"
        raise ConfigError(f"{name} is {brief(given)} in the environment, not a number from {least} to {most}", fix)
    return int(given)


def is_main_rank() -> bool:
    """Whether this process is the one that speaks: the first, or the only one."""
    return os.environ.get("RANK", "0") == "0"


# --- meeting ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def meeting(size: int) -> Iterator[None]:
    """Around what joins a process group: what keeps processes from meeting is an error that says how they can.

    Raises:
        ConfigError: the launcher's environment is not whole, asks for other software, or its port is in use.
        TrainingError: not all processes have come.
    """
    for name, instead in FOREIGN.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            fix = f"set parallel: {instead}, and launch with torchrun or a plain `accelerate launch`"
            raise ConfigError(f"{name} is set: accelerate is to divide the run, which `parallel` does here", fix)
    if missing := [name for name in MEETING if not os.environ.get(name)]:
        fix = "start it with `halfbyte train` or torchrun, which set them (docs/several-gpus.md)"
        are = "are" if len(missing) > 1 else "is"
        raise ConfigError(f"WORLD_SIZE is {size}, and {', '.join(missing)} {are} not set in the environment", fix)
    launched_as("RANK", 0, size - 1, 0)
    place = f"{os.environ['MASTER_ADDR']}:{launched_as('MASTER_PORT', 1, 65535, 0)}"
    _look_up(os.environ["MASTER_ADDR"])
    waiting = threading.Timer(SILENT, notice, ("meeting", f"waiting at {place} for all {size} processes (WORLD_SIZE)"))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        said = _line(error)
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(f"{place} is in use by another program", "choose another --master-port") from error
        fix = "look at the other processes, and whether every host can reach that address"
        raise TrainingError(f"the {size} processes of this run did not meet at {place}: {said}", fix) from error
    finally:
        waiting.cancel()


def _look_up(host: str) -> None:
    """Wait until the network knows the launcher's host: names of a cluster may come up after the processes.

    Raises:
        ConfigError: it does not in `NAMED` seconds.
    """
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() - began >= NAMED:
                cause = why(error) if isinstance(error, OSError) else str(error)
                said = f"MASTER_ADDR: no host of the name {brief(host)} is found: {cause}"
                raise ConfigError(said, "give the address of the first process's host") from error
        time.sleep(1)


def check_device(local: int) -> None:
    """Whether this process has a GPU of its own.

    Raises:
        ConfigError: there are fewer than processes.
    """
    if local >= (here := torch.cuda.device_count()):
        what = f"process {local} of this host has no GPU: torch sees {here}"
        raise ConfigError(what, f"start at most {here} processes on it (--nproc-per-node)")


# --- failing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """How a rank ended.

    Attributes:
        error: what is to be said.
        follows: whether it failed for want of another one, which is the cause.
        recorded: whether it left its error.
        passing: whether starting again may help: the error is none that the user has to mend first.
        trace: of its exception.
    """

    rank: int
    error: HalfbyteError
    follows: bool = False
    recorded: bool = False
    passing: bool = True
    trace: str = ""


def lost_another(error: BaseException | None) -> HalfbyteError | None:
    """The error of a process whose partner in a collective is gone or silent; None where it is another error."""
    if error is None or isinstance(error, HalfbyteError):
        return None
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in GONE)):
        fix = "look at that one's error, and continue with --resume"
        return TrainingError(f"another process of this run is gone or does not answer: {_line(error)}", fix)
    return lost_another(error.__cause__ or error.__context__)


def leave_error(error: HalfbyteError, cause: BaseException, *, bug: bool) -> bool:
    """Leave what ended this rank to who has started it; False: nobody reads that, so that it must be printed.

    Args:
        error: what the user is to read.
        cause: what was raised.
        bug: whether nobody foresaw it.
    """
    place = os.environ.get(ERROR_FILE)
    if not (is_rank() and place):
        return False
    follows = lost_another(cause) is not None
    trace = "".join(traceback.format_exception(cause))
    said = f"error: {error.message}\nfix: {error.fix}"
    ours: dict[str, Any] = {"kind": type(error).__name__, "message": error.message, "fix": error.fix, "trace": trace}
    ours |= {"follows": follows, "passing": bug or follows or lost_another(cause.__cause__) is not None}
    when = int(time.time()) + (LATER if follows else 0)
    extra = {"py_callstack": f"{trace}\n{said}" if bug else said, "timestamp": str(when)}
    try:
        document = {"message": {"message": said, "extraInfo": extra}, OURS: ours}
        Path(place).write_text(json.dumps(document), encoding="utf-8")
    except OSError:
        return False
    return True


def read_failure(rank: int, file: str) -> Failure | None:
    """What a rank has left in `file`; None: nothing."""
    try:
        ours: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))[OURS]
    except (OSError, ValueError, KeyError):
        return None
    error = getattr(errors, ours["kind"])(ours["message"], ours["fix"])
    return Failure(rank, error, ours["follows"], recorded=True, passing=ours["passing"], trace=ours["trace"])


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
