"""A process with everything imported, which forks one child for each command: a case costs no imports.

`Stage` starts it (`python stage.py FD`) and talks to it in JSON lines over a socket. A child is a session of
its own with its own folder, environment, standard streams and limits; when it has ended, whatever it left running is
killed. A child acts like an ordinary user's process even where root runs the tests: its capabilities are dropped.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import glob
import importlib
import json
import os
import pty
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import weakref
from dataclasses import dataclass
from pathlib import Path

from halfbyte.report import plots
from halfbyte.utils.streams import quiet_libraries

TICK = 0.005  # seconds between looks at what a case waits for


@dataclass
class Ended:
    """Result of one command.

    Attributes:
        code: exit code; minus the signal's number where one ended it.
        seconds: wall time minus the time the command was runnable but not scheduled.
        memory: peak MiB above the memory of the stage itself.
        timed_out: whether it was killed at its limit.
        modules: names of the modules it imported, if requested.
    """

    code: int
    seconds: float
    memory: float
    timed_out: bool
    out: bytes
    err: bytes
    modules: list[str]


class Stage:
    """The client: one process of this file, as long as the object is open; where it dies, another one.

    Attributes:
        slowness: how many times longer a good `check` takes here than `cases.GOOD_CHECK`; at least 1.
    """

    def __init__(self, environment: dict[str, str]):
        self._environment, self._made_ready, self.slowness = environment, [], 1.0
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=self._environment
            )
        self._lines = ours.makefile("rw", encoding="ascii")
        ours.close()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._lines.close()
        self._process.wait(30)

    def ask(self, **request) -> dict:
        """Send a request to the process and return its answer.

        Raises:
            AssertionError: the process ended; a new one in the same state serves the next request.
        """
        try:
            self._lines.write(json.dumps(request) + "\n")
            self._lines.flush()
            answer = self._lines.readline()
        except OSError:
            answer = ""
        if not answer:
            self.close()
            code = self._process.returncode
            self._start()
            for each in self._made_ready:
                self.ask(**each)
            what = " ".join(request.get("arguments", request))
            raise AssertionError(f"the stage's process ended (exit code {code}) in: {what}")
        return json.loads(answer)

    def import_all(self, modules: list[str]) -> None:
        self._make_ready(modules=modules)

    def warm(self, function: str) -> None:
        """Call a function (module:function) there: what torch keeps of it, every child finds."""
        self._make_ready(warm=function)

    def _make_ready(self, **request) -> None:
        self.ask(**request)
        self._made_ready.append(request)

    def run(self, arguments: list[str], place: Path, scratch: Path, **wishes) -> Ended:
        """One command in `place`.

        Args:
            scratch: folder for its streams.
            wishes: environment (all of it), stdin (bytes), limit (seconds), limits (a resource's name to its number;
                RLIMIT_AS counts from what the stage has), columns (a terminal that wide; its output is `out`), fresh
                (a new python, not a fork), signal (its name) and when (a glob that shows that it is time, or
                "glob: text in that file", or seconds),
                closed (numbers of streams), broken (streams into a pipe that nobody reads), full (streams onto a full
                disk), nowhere (its folder is gone), call (module:function for the arguments, in place of a command).
        """
        (scratch / "in").write_bytes(wishes.pop("stdin", b""))
        found = self.ask(arguments=arguments, place=str(place), scratch=str(scratch), **wishes)
        streams = {name: scratch / name for name in ("out", "err")}  # killed early, a child has opened neither
        return Ended(**{n: path.read_bytes() if path.exists() else b"" for n, path in streams.items()}, **found)


def _serve(descriptor: int) -> None:
    connection = socket.socket(fileno=descriptor)
    lines = connection.makefile("rw", encoding="ascii")
    for line in iter(lines.readline, ""):
        request = json.loads(line)
        if "modules" in request:
            quiet_libraries()  # as a command does before it imports any
            for name in request["modules"]:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            for finalizer in weakref.finalize._registry:  # torch's operators are not a child's to undo
                finalizer.atexit = False
            plots._svg = lambda *arguments: "<svg></svg>"  # as in the tests of one process
            answer = {}
        elif "warm" in request:
            module, _, function = request["warm"].partition(":")
            getattr(importlib.import_module(module), function)()
            answer = {}
        else:
            answer = _command(request)
        if "arguments" not in request:
            gc.collect()
            gc.freeze()  # collections in a child need not go through, and so copy, what all share
        lines.write(json.dumps(answer) + "\n")
        lines.flush()


def _command(request: dict) -> dict:
    began, held = time.monotonic(), _resident(os.getpid())
    master, slave = pty.openpty() if "columns" in request else (None, None)
    child = os.fork()
    if child == 0:
        _child(request, slave)  # does not come back
    if slave is not None:
        os.close(slave)
    timed_out = _watch(child, request, began, master)
    seconds = time.monotonic() - began - _queued(child)
    _, status, used = os.wait4(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if master is not None:
        os.close(master)
    modules = Path(request["scratch"], "modules")
    return {
        "code": os.waitstatus_to_exitcode(status),
        "seconds": seconds,
        "memory": used.ru_maxrss / 1024 - held,
        "timed_out": timed_out,
        "modules": modules.read_text().split() if modules.exists() else [],
    }


def _watch(child: int, request: dict, began: float, master: int | None) -> bool:
    """Wait for the child to end, copy its terminal, send its signal; whether it had to be killed."""
    ending, sent = os.pidfd_open(child), False
    deadline = began + request.get("limit", 60)
    try:
        with open(Path(request["scratch"], "out"), "ab", buffering=0) as out:
            while True:
                sources = [ending] if master is None else [ending, master]
                wanted = "signal" in request and not sent
                ready, _, _ = select.select(sources, [], [], TICK if wanted else max(0, deadline - time.monotonic()))
                if master in ready:
                    try:
                        out.write(os.read(master, 65536))
                        continue
                    except OSError:  # all its ends are closed
                        master = None
                if ending in ready:
                    return False
                due = wanted and _is_time(request, began)
                if due:
                    os.kill(child, getattr(signal, request["signal"]))
                    sent = True
                if time.monotonic() > deadline:
                    os.killpg(child, signal.SIGKILL)
                    os.waitid(os.P_PIDFD, ending, os.WEXITED | os.WNOWAIT)
                    return True
    finally:
        os.close(ending)


def _is_time(request: dict, began: float) -> bool:
    when = request["when"]
    if isinstance(when, str):
        paths, _, text = when.partition(": ")
        found = glob.glob(paths, root_dir=request["place"], include_hidden=True)
        return bool(found) and (not text or text in Path(request["place"], found[0]).read_text())
    return time.monotonic() - began >= when


def _resident(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _queued(process: int) -> float:
    """Seconds that it was ready to run and had no processor."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except OSError:  # a kernel without these numbers
        return 0.0


def _child(request: dict, slave: int | None) -> None:
    code = 70
    try:
        _become(request, slave)
        if request.get("fresh"):
            command = [sys.executable, "-m", "halfbyte", *request["arguments"]]
            os.execve(sys.executable, [part.encode("utf-8", "surrogateescape") for part in command], dict(os.environ))
        code = _run(request)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _become(request: dict, slave: int | None) -> None:
    os.setsid()
    scratch = request["scratch"]
    out, err = (os.open(f"{scratch}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644) for name in ("out", "err"))
    streams = [os.open(f"{scratch}/in", os.O_RDONLY), out, err] if slave is None else [slave] * 3
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    if slave is not None:
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, request["columns"], 0, 0))
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.closerange(3, 1024)
    os.chdir(request["place"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.umask(0o022)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _drop_capabilities()
    for name, most in request.get("limits", {}).items():
        extra = _address_space() if name == "RLIMIT_AS" else 0
        resource.setrlimit(getattr(resource, name), (most + extra, most + extra))
    for number in request.get("closed", ()):
        os.close(number)
    for number in request.get("full", ()):
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    if request.get("nowhere"):
        os.chdir(tempfile.mkdtemp())
        os.rmdir(os.getcwd())
    for number in request.get("broken", ()):
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, number)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _drop_capabilities() -> None:
    """Root without them is asked for permission as anybody is."""
    libc = ctypes.CDLL(None)
    libc.prctl(28, 0x3, 0, 0, 0)  # PR_SET_SECUREBITS, NOROOT: nor does a new program get them back
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))


def _run(request: dict) -> int:
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        how = "backslashreplace" if name == "stderr" else errors or "strict"
        try:
            stream = open(number, mode, encoding=encoding, errors=how, buffering=1, closefd=False)  # noqa: SIM115
        except OSError:  # closed from the start
            stream = None
        setattr(sys, name, stream)
    arguments = request["arguments"]
    sys.argv = ["halfbyte", *arguments]
    try:
        if "call" in request:
            module, _, function = request["call"].partition(":")
            getattr(importlib.import_module(module), function)(*arguments)
        else:
            from halfbyte.cli import main

            main(arguments)
        code = 0
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    if request.get("names_modules"):
        Path(request["scratch"], "modules").write_text("\n".join(sys.modules))
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:  # what Python itself does then
            code = 120
    return code


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
