"""Launcher environment of one rank (halfbyte's launcher, torchrun or accelerate), rendezvous and failure reports.

A rank that fails does not print its error. It writes the error to the file that torch's launchers name. halfbyte's
launcher reads it and torchrun reports it as the root cause, so an error is printed once, at the end.
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

from ..utils import errors
from ..utils.errors import ConfigError, HalfbyteError, TrainingError, explain_os_error, first_line
from ..utils.notices import notice
from ..utils.processes import is_rank
from ..utils.text import brief

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
OUR_KEY = "halfbyte"  # key of that JSON file for fields that torch does not define
RENDEZVOUS_KEYS = ("RANK", "MASTER_ADDR", "MASTER_PORT")
ACCELERATE_SWITCHES = {
    "ACCELERATE_USE_FSDP": "{shard: N}",
    "ACCELERATE_USE_DEEPSPEED": "{shard: N}",
    "ACCELERATE_USE_MEGATRON_LM": "{tensor: N}, or another axis",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "{data: N}, or another axis",
}
LOST_PEER_MESSAGES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
MAX_PROCESSES = 2**20
NOTICE_AFTER = 10.0  # seconds in the rendezvous before a notice
DNS_TIMEOUT = 30.0  # seconds
CONSEQUENCE_DELAY = 3600  # seconds added to timestamps: torchrun reports the earliest failure as the cause


def launcher_int(name: str, minimum: int, maximum: int, default: int) -> int:
    """Return an integer from the launcher's environment, or `default` if it is not set.

    Raises:
        ConfigError: the value is not an integer from `minimum` to `maximum`.
    """
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and minimum <= int(text[:9]) <= maximum):
        fix = "unset it, or start this with `halfbyte train` or torchrun, which set it (docs/several-gpus.md)"
        raise ConfigError(f"{name} is {brief(text)} in the environment, not a number from {minimum} to {maximum}", fix)
    return int(text)


# --- rendezvous -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rendezvous(size: int) -> Iterator[None]:
    """Check the launcher's environment, and turn errors of joining the process group into instructive ones.

    Raises:
        ConfigError: the environment is incomplete or asks for another library's parallelism, or the port is in use.
        TrainingError: not all processes have joined.
    """
    for name, instead in ACCELERATE_SWITCHES.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            fix = f"set parallel: {instead}, and launch with torchrun or a plain `accelerate launch`"
            raise ConfigError(f"{name} is set: accelerate would divide the run, which the key `parallel` does", fix)
    if missing := [name for name in RENDEZVOUS_KEYS if not os.environ.get(name)]:
        fix = "start it with `halfbyte train` or torchrun, which set them (docs/several-gpus.md)"
        are = "are" if len(missing) > 1 else "is"
        raise ConfigError(f"WORLD_SIZE is {size}, and {', '.join(missing)} {are} not set in the environment", fix)
    launcher_int("RANK", 0, size - 1, 0)
    address = f"{os.environ['MASTER_ADDR']}:{launcher_int('MASTER_PORT', 1, 65535, 0)}"
    _wait_for_dns(os.environ["MASTER_ADDR"])
    text = f"waiting at {address} for all {size} processes (WORLD_SIZE)"
    timer = threading.Timer(NOTICE_AFTER, notice, ("rendezvous", text))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise ConfigError(f"{address} is in use by another program", "choose another --master-port") from error
        fix = "check the other processes, and that every host can reach this address"
        message = f"the {size} processes of this run did not connect at {address}: {first_line(error)}"
        raise TrainingError(message, fix) from error
    finally:
        timer.cancel()


def _wait_for_dns(host: str) -> None:
    """Wait until `host` resolves: names in a cluster may appear after the processes start.

    Raises:
        ConfigError: it does not resolve within `DNS_TIMEOUT`.
    """
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() - began >= DNS_TIMEOUT:
                cause = explain_os_error(error) if isinstance(error, OSError) else str(error)
                message = f"MASTER_ADDR: cannot resolve {brief(host)}: {cause}"
                raise ConfigError(message, "give the address of the first process's host") from error
        time.sleep(1)


def check_device(local: int) -> None:
    """Check that this process has a GPU of its own.

    Raises:
        ConfigError: the host has fewer GPUs than processes.
    """
    if local >= (gpus := torch.cuda.device_count()):
        problem = f"process {local} of this host has no GPU: torch sees {gpus}"
        raise ConfigError(problem, f"start at most {gpus} processes on this host (--nproc-per-node)")


# --- failures ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """How a rank ended.

    Attributes:
        error: the error to print.
        is_consequence: whether the rank failed because another rank did.
        recorded: whether the rank reported the error itself.
        may_pass: whether a restart may help; False for errors that the user has to fix.
        trace: traceback.
    """

    rank: int
    error: HalfbyteError
    is_consequence: bool = False
    recorded: bool = False
    may_pass: bool = True
    trace: str = ""


def lost_peer_error(error: BaseException | None) -> HalfbyteError | None:
    """Return the error to print if a peer in a collective exited or does not respond; None for other exceptions."""
    if error is None or isinstance(error, HalfbyteError):
        return None
    if isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(w in str(error) for w in LOST_PEER_MESSAGES)
    ):
        fix = "see the error of that process, and continue with --resume"
        return TrainingError(f"another process of this run has exited or does not respond: {first_line(error)}", fix)
    return lost_peer_error(error.__cause__ or error.__context__)


def report_error(error: HalfbyteError, cause: BaseException, *, bug: bool) -> bool:
    """Report this rank's error to the launcher. Returns False if no launcher reads it, so that it must be printed.

    Args:
        error: for the user.
        cause: the exception.
        bug: whether the exception was unexpected.
    """
    path = os.environ.get(ERROR_FILE)
    if not (is_rank() and path):
        return False
    follows = lost_peer_error(cause) is not None
    trace = "".join(traceback.format_exception(cause))
    text = f"error: {error.message}\nfix: {error.fix}"
    fields: dict[str, Any] = {"kind": type(error).__name__, "message": error.message, "fix": error.fix, "trace": trace}
    fields |= {"follows": follows, "passing": bug or follows or lost_peer_error(cause.__cause__) is not None}
    when = int(time.time()) + (CONSEQUENCE_DELAY if follows else 0)
    extra = {"py_callstack": f"{trace}\n{text}" if bug else text, "timestamp": str(when)}
    try:
        document = {"message": {"message": text, "extraInfo": extra}, OUR_KEY: fields}
        Path(path).write_text(json.dumps(document), encoding="utf-8")
    except OSError:
        return False
    return True


def read_failure(rank: int, file: str) -> Failure | None:
    """Read the error that a rank reported in `file`; None if there is none."""
    try:
        fields: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))[OUR_KEY]
    except (OSError, ValueError, KeyError):
        return None
    error = getattr(errors, fields["kind"])(fields["message"], fields["fix"])
    return Failure(rank, error, fields["follows"], recorded=True, may_pass=fields["passing"], trace=fields["trace"])
