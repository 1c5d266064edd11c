"""Run an untrusted program: without network or files, with limits, and killed at the end.

`jail` isolates it. This side enforces the bounds that a process cannot be trusted to keep: wall-clock time, the total
memory of its processes, and the length of its output. If this user may create a control group (cgroup v2), the kernel
also bounds memory and processes, without polling.
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

from ..reading.files import MEBIBYTE
from ..utils.errors import ConfigError, explain_os_error
from . import jail

POLL_SECONDS = 0.05  # between measurements of a program's memory
FOLDERS = ("/usr", "/lib", "/lib64", "/bin")


@dataclass(frozen=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: wall-clock time, and CPU time of each process.
        memory: bytes of each process' address space, and of the resident and swapped memory of all processes together.
        processes: number of concurrent processes.
        file_bytes: size of one file; /tmp holds `temporary_bytes`, in memory.
        files: open files of each process.
        output_bytes: length of its output.
    """

    seconds: int = 5
    memory: int = 512 * MEBIBYTE
    processes: int = 16
    file_bytes: int = 16 * MEBIBYTE
    files: int = 64
    temporary_bytes: int = 64 * MEBIBYTE
    output_bytes: int = MEBIBYTE


class Outcome(NamedTuple):
    """Result of a program.

    Attributes:
        output: its output, as far as it was read.
        ended: "exit", or the limit that it was killed for: "time", "memory", "output".
        code: its exit code; 128 + the signal that ended it.
    """

    output: bytes
    ended: str
    code: int


def run(program: str, stdin: bytes = b"", limits: Limits | None = None) -> Outcome:
    """Run a Python program (standard library only) with `stdin` on its standard input.

    Raises:
        ConfigError: this machine has no sandbox.
    """
    if why := unsupported_reason():
        raise ConfigError(f"reward_funcs: code runs programs only in a sandbox, but {why}", FIX)
    return _run(program, stdin, limits or Limits())


FIX = "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or remove code from reward_funcs"


@functools.cache
def unsupported_reason() -> str | None:
    """Return why this machine has no sandbox, or None, by running a program in one."""
    if sys.platform != "linux":
        return f"{sys.platform} has no sandbox"
    if (machine := os.uname().machine) not in jail.MACHINES:
        return f"halfbyte has no sandbox for {machine} processors"
    try:
        outcome = _run("print(6 * 7)", b"", Limits(seconds=10))
    except OSError as error:
        return f"the sandbox does not start: {explain_os_error(error)}"
    if outcome.code == jail.REFUSED:
        return "user namespaces are not permitted here"
    return None if outcome.output == b"42\n" else f"a test program in it ends with {outcome.code}"


@contextlib.contextmanager
def control_group(limits: Limits, own_group: Path | None = None) -> Iterator[Path | None]:
    """Create a sibling cgroup v2 that bounds memory and processes; yields None if that is not permitted.

    Args:
        limits: its bounds; /tmp counts as memory.
        own_group: this process' group; default: from /proc/self/cgroup.
    """
    group = None
    try:
        if own_group is None:  # the folder does not exist on machines without cgroup v2
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
            own_group = Path("/sys/fs/cgroup") / name
        parent = own_group.parent
        if {"memory", "pids"} <= set((parent / "cgroup.subtree_control").read_text().split()):
            group = Path(tempfile.mkdtemp(prefix="halfbyte-", dir=parent))
            (group / "memory.max").write_text(str(limits.memory + limits.temporary_bytes))
            (group / "memory.swap.max").write_text("0")
            (group / "pids.max").write_text(str(limits.processes + 4))  # plus the processes of `jail`
    except OSError:  # most users may not create one; the other bounds apply anyway
        _remove(group)
        group = None
    try:
        yield group
    finally:
        _remove(group)


def _remove(group: Path | None) -> None:
    """Remove a control group after its processes were killed; retries, since the kernel empties it asynchronously."""
    for _ in range(20 if group else 0):
        with contextlib.suppress(OSError):
            group.rmdir()  # type: ignore[union-attr]
            return
        time.sleep(POLL_SECONDS / 10)


def _run(program: str, stdin: bytes, limits: Limits) -> Outcome:
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    folders = [folder for folder in FOLDERS if os.path.isdir(folder)]
    if not python.startswith("/usr/"):
        folders.append(os.path.realpath(sys.base_prefix))
    with control_group(limits) as group:
        request = {
            "program": program,
            "folders": folders,
            "command": [python, "-I", "-S"],
            "limits": {name: value for name, value in asdict(limits).items() if name in jail.LIMITS},
            "group": group and str(group),
            "temporary_bytes": limits.temporary_bytes,
        }
        descriptor = os.memfd_create("request", 0)
        try:
            os.write(descriptor, json.dumps(request).encode())
            os.lseek(descriptor, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [python, "-I", "-S", "-c", inspect.getsource(jail), str(descriptor)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
                env={},
                cwd="/",
            )
        finally:
            os.close(descriptor)
        try:
            return _watch(process, stdin, limits)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the sandbox's init process, and with it all others."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _watch(process: subprocess.Popen[bytes], stdin: bytes, limits: Limits) -> Outcome:
    """Write the input and read the output of a program until it ends or exceeds a limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    output, waiting = bytearray(), memoryview(stdin)
    end = time.monotonic() + limits.seconds
    os.set_blocking(process.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        while True:
            for key, _ in selector.select(POLL_SECONDS):
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
                unread = process.stdout.read(limits.output_bytes)  # all its writers have ended
                return Outcome(bytes(output) + unread, "exit", process.returncode)
            if time.monotonic() > end:
                return Outcome(bytes(output), "time", 0)
            if _used_memory(process.pid) > limits.memory:
                return Outcome(bytes(output), "memory", 0)


def _feed(descriptor: int, waiting: memoryview) -> memoryview:
    try:
        return waiting[os.write(descriptor, waiting[:65536]) :]
    except BrokenPipeError:
        return waiting[:0]
    except BlockingIOError:
        return waiting


def _used_memory(pid: int) -> int:
    """Return the resident and swapped bytes of a process and its descendants."""
    import psutil

    try:
        first = psutil.Process(pid)
        processes = [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    used = 0
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith(("VmRSS:", "VmSwap:")):
                    used += int(line.split()[1]) * 1024
    return used
