"""Running a program that nobody has read: without network, files or time to spare, and killed at the end.

`jail` says what keeps it in. From outside come the bounds that a process cannot be trusted to keep: wall-clock time,
the memory of all its processes together, and the length of what it prints. Where this user may make a control group
(cgroup v2), the kernel bounds memory and processes too, between two looks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from ...reading import why
from ...reading.files import MEBIBYTE
from ...utils.errors import ConfigError
from . import jail

LOOK = 0.05  # seconds between looks at a program's memory
FOLDERS = ("/usr", "/lib", "/lib64", "/bin")


@dataclass(frozen=True)
class Limits:
    """What a program may take.

    Attributes:
        seconds: of wall-clock time, and of CPU time for each process.
        memory: bytes, of each process' addresses and of what all have resident or swapped out together.
        processes: at once.
        file_bytes: of one file; /tmp holds `temporary_bytes`, in memory.
        files: open at once, in each process.
        output_bytes: of what it prints.
    """

    seconds: int = 5
    memory: int = 512 * MEBIBYTE
    processes: int = 16
    file_bytes: int = 16 * MEBIBYTE
    files: int = 64
    temporary_bytes: int = 64 * MEBIBYTE
    output_bytes: int = MEBIBYTE


class Outcome(NamedTuple):
    """How a program ended.

    Attributes:
        output: what it printed, as far as that was read.
        ended: "exit", or the limit that it was killed for: "time", "memory", "output".
        code: what it exited with; 128 + the signal that ended it.
    """

    output: bytes
    ended: str
    code: int


def run(program: str, given: bytes = b"", limits: Limits | None = None) -> Outcome:
    """Run a Python program (standard library alone) with `given` on its standard input.

    Raises:
        ConfigError: this machine has no sandbox.
    """
    if why := obstacle():
        raise ConfigError(f"reward_funcs: code runs programs in a sandbox alone, and {why}", FIX)
    return _run(program, given, limits or Limits())


FIX = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or leave code out of reward_funcs"


@functools.cache
def obstacle() -> str | None:
    """Why this machine has no sandbox; None where it has one: it is tried."""
    if sys.platform != "linux":
        return f"{sys.platform} has none"
    if (machine := os.uname().machine) not in jail.MACHINES:
        return f"none is written for {machine} processors"
    try:
        outcome = _run("print(6 * 7)", b"", Limits(seconds=10))
    except OSError as error:
        return f"none can be started: {why(error)}"
    if outcome.code == jail.REFUSED:
        return "user namespaces are not permitted here"
    return None if outcome.output == b"42\n" else f"it does not run a program: it ends with {outcome.code}"


@contextlib.contextmanager
def control_group(limits: Limits, own: Path | None = None) -> Iterator[Path | None]:
    """Make a cgroup v2 beside this process' own that bounds memory and processes; None where that is not permitted.

    Args:
        limits: its bounds; /tmp counts as memory there.
        own: this process' group; default: as /proc/self/cgroup names it.
    """
    made = None
    try:
        parent = (own or _own_group()).parent
        if {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
            made = Path(tempfile.mkdtemp(prefix="halfbyte-", dir=parent))
            (made / "memory.max").write_text(str(limits.memory + limits.temporary_bytes))
            (made / "memory.swap.max").write_text("0")
            (made / "pids.max").write_text(str(limits.processes + 4))  # and those of `jail`
    except OSError:  # as a rule a user may not; the other bounds hold all the same
        _remove(made)
        made = None
    try:
        yield made
    finally:
        _remove(made)


def _own_group() -> Path:
    """Return the folder of this process' cgroup v2; it does not exist where the machine has none."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    named = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    return Path("/sys/fs/cgroup") / named


def _remove(group: Path | None) -> None:
    """Remove a control group whose processes have been killed; the kernel may take a moment to see that it is empty."""
    for _ in range(20 if group else 0):
        with contextlib.suppress(OSError):
            group.rmdir()  # type: ignore[union-attr]
            return
        time.sleep(LOOK / 10)


def _asked(program: str, limits: Limits, group: Path | None) -> int:
    """What `jail` is to do, as a file in memory."""
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    folders = [folder for folder in FOLDERS if os.path.isdir(folder)]
    if not python.startswith("/usr/"):
        folders.append(os.path.realpath(sys.base_prefix))
    bounds = {name: value for name, value in asdict(limits).items() if name in jail.LIMITS}
    asked = {
        "program": program,
        "folders": folders,
        "command": [python, "-I", "-S"],
        "limits": bounds,
        "group": group and str(group),
        "temporary_bytes": limits.temporary_bytes,
    }
    descriptor = os.memfd_create("asked", 0)
    os.write(descriptor, json.dumps(asked).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _run(program: str, given: bytes, limits: Limits) -> Outcome:
    with control_group(limits) as group:
        return _run_in(group, program, given, limits)


def _run_in(group: Path | None, program: str, given: bytes, limits: Limits) -> Outcome:
    asked = _asked(program, limits, group)
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    try:
        process = subprocess.Popen(
            [python, "-I", "-S", "-c", inspect.getsource(jail), str(asked)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[asked],
            start_new_session=True,
            env={},
            cwd="/",
        )
    finally:
        os.close(asked)
    try:
        return _watch(process, given, limits)
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left: the first process of a sandbox takes all others with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _watch(process: subprocess.Popen[bytes], given: bytes, limits: Limits) -> Outcome:
    """Feed and read a program until it ends, or passes a limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    output, waiting = bytearray(), memoryview(given)
    end = time.monotonic() + limits.seconds
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while True:
            for key, _ in selector.select(LOOK):
                if key.fileobj is process.stdin:
                    waiting = _feed(process.stdin.fileno(), waiting)
                    if not waiting:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                if not (read := os.read(process.stdout.fileno(), 65536)):
                    selector.unregister(process.stdout)
                output += read
            if len(output) > limits.output_bytes:
                return Outcome(bytes(output[: limits.output_bytes]), "output", 0)
            if process.poll() is not None:
                return Outcome(bytes(output) + _rest(process, limits), "exit", process.returncode)
            if time.monotonic() > end:
                return Outcome(bytes(output), "time", 0)
            if _resident(process.pid) > limits.memory:
                return Outcome(bytes(output), "memory", 0)


def _feed(descriptor: int, waiting: memoryview) -> memoryview:
    try:
        return waiting[os.write(descriptor, waiting[:65536]) :]
    except BrokenPipeError:
        return waiting[:0]
    except BlockingIOError:
        return waiting


def _rest(process: subprocess.Popen[bytes], limits: Limits) -> bytes:
    """What was printed and not read yet, once all its writers are gone."""
    assert process.stdout is not None
    return process.stdout.read(limits.output_bytes)


def _resident(pid: int) -> int:
    """Return the bytes that a process and those under it have resident or swapped out."""
    import psutil

    try:
        first = psutil.Process(pid)
        processes = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_held(process.pid) for process in processes)


def _held(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return 0
    lines = (line.split() for line in status.splitlines() if line.startswith(("VmRSS:", "VmSwap:")))
    return sum(int(kibibytes) * 1024 for _, kibibytes, _ in lines)
