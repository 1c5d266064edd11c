"""`halfbyte train` on several devices: a process for each, started by torchrun's own means, watched, ended together.

Each process runs the same command, in a session of its own, and joins the mesh as it would under `torchrun`. The first
one, rank 0, has the terminal; what the others write goes into files, whose end is shown when one dies without a word.
A signal goes to all of them once. Where one fails, the others get `GRACE` seconds to say what they met; then they are
killed, since they may wait in a collective for the one that is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    SignalException,
    Std,
    SubprocessContext,
    start_processes,
)

from ...config import Parallel, RunConfig
from ...config.policy import SAMPLING
from ...utils.errors import ConfigError, TrainingError
from ...utils.hardware import chosen_device
from ...utils.notices import notice
from ...utils.processes import LAUNCHER
from ...utils.signals import LEAVING, Request, Stopped, as_requests
from .ranks import Failure, is_rank, read_failure

GRACE = 5.0  # seconds
LOOK = 0.1  # seconds between two looks at the processes
ON_A_CORE = 8  # processes, which have no GPU
LINES = 20  # of what a process wrote before it died
HOST = "127.0.0.1"
SEVERAL_HOSTS = "for several hosts start it with torchrun on each (docs/several-gpus.md)"


def layout_wanted(config: RunConfig) -> Parallel:
    """The mesh whose processes are to be started; of one: none is, since it is this one, or a launcher has done it.

    Raises:
        ConfigError: `parallel` asks for more GPUs than there are, or for several of a kind that cannot work together.
    """
    if is_rank():
        return Parallel()
    layout, kind = config.layout, config.device
    if layout is None:
        several = kind in (None, "cuda") and config.method not in SAMPLING  # which trains on one
        return Parallel(data=max(1, torch.cuda.device_count()) if several else 1)
    if layout.size == 1:
        return layout
    gpus = 0 if kind == "cpu" else torch.cuda.device_count()
    if not gpus and kind in (None, "cpu") and layout.size > (most := ON_A_CORE * _cores()):
        what = f"parallel: {layout} takes {layout.size:,} processes on a CPU of {_cores()} cores"
        raise ConfigError(what, f"change parallel so that its numbers multiply to at most {most}")
    if kind == "cpu":
        return layout
    if kind == "xpu" or (kind is None and not gpus and torch.xpu.is_available()):
        raise ConfigError(f"parallel: {layout} is not built for xpu", "set parallel: {data: 1}, or device: cpu")
    if kind and not gpus:
        chosen_device(kind)  # which says so
    if layout.size > gpus > 0:
        what = f"parallel: {layout} takes {layout.size} GPUs, and {gpus} {'is' if gpus == 1 else 'are'} here"
        raise ConfigError(what, f"change parallel so that its numbers multiply to {gpus}; {SEVERAL_HOSTS}")
    return layout


def say_idle(config: RunConfig) -> None:
    """Say in a run that is one process, though nobody asked for that, which GPUs it leaves idle."""
    if config.parallel == "auto" and (others := layout_wanted(config).size - 1):
        more = f"{others} more GPU{'s are' if others > 1 else ' is'} here"
        how = "`halfbyte train`, or torchrun with this program, starts a process for each"
        notice("idle_gpus", f"this process trains on one GPU, and {more}: {how}; device: cuda:0 leaves them idle")


def launch(program: Callable[[Parallel], Sequence[str]], layout: Parallel, max_restarts: int = 0) -> None:
    """Run a program as the ranks of a mesh, until all have ended well.

    Args:
        program: arguments of this Python, for a mesh.
        layout: the mesh.
        max_restarts: how often the ranks are started again after a failure that may pass; they can tell by
            `utils.processes.was_restarted`. Where a GPU is gone by then, on a smaller mesh.

    Raises:
        HalfbyteError: one failed: its own error, or what is known of its end.
        SystemExit: this process was asked to leave, and the ranks have left and said what is saved.
        Stopped: likewise, before they could.
    """
    restarts = 0
    while (failure := _attempt(program(layout), layout.size, restarts)) is not None:
        smaller = fewer(layout, torch.cuda.device_count() or layout.size)
        if restarts == max_restarts or not failure.passing or smaller is None:
            if failure.trace:
                failure.error.add_note(failure.trace)
            raise failure.error
        restarts, on = restarts + 1, "" if smaller == layout else f" on {smaller.size} devices"
        again = f"the run goes on{on} from its last checkpoint ({restarts} of {max_restarts} restarts)"
        notice(f"restart {restarts}", f"{failure.error.message}: {again}")
        layout = smaller


def fewer(layout: Parallel, most: int) -> Parallel | None:
    """The largest mesh of at most `most` processes on which steps can keep their rows: fewer ways along data and shard,
    that divide those there were. None: there is none."""
    rows = layout.data * layout.shard
    for ways in (n for n in range(rows, 0, -1) if rows % n == 0):
        shard = math.gcd(layout.shard, ways)
        smaller = replace(layout, data=ways // shard, shard=shard)
        if smaller.size <= most:
            return smaller
    return None


def _attempt(program: Sequence[str], count: int, restarts: int) -> Failure | None:
    """Start the ranks and see them end; what went wrong first."""
    with tempfile.TemporaryDirectory(prefix="halfbyte-ranks-") as logs, _asked_to_leave() as request:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # where they meet: a port of the system's
        ranks = _start(program, count, restarts, store.port, logs)
        try:
            ends = _watch(ranks, request)
        except Stopped as again:  # asked a second time, they save nothing
            ranks.close(again.number, int(GRACE))
            raise
        finally:
            ranks.close(signal.SIGKILL, int(GRACE))
        well = _well(request)
        cause = _first([(look, _failure(ranks, rank, code)) for rank, (look, code) in ends.items() if code not in well])
        if request.number and (cause is None or not cause.recorded):  # it may have been on its way to the first step
            if ends.get(0, (0, 0))[1] == 128 + request.number:  # rank 0 has said what is saved
                raise SystemExit(128 + request.number)
            raise Stopped(request.number)
        return replace(cause, passing=False) if cause and request.number else cause


def _well(request: Request) -> set[int]:
    """The exit codes of ranks that have ended well: asked to leave, one may not have begun."""
    return {0, 128 + request.number, -request.number}


@contextlib.contextmanager
def _asked_to_leave() -> Iterator[Request]:
    with as_requests(lambda number: None) as request:
        try:
            yield request
        except SignalException as early:  # torch's own handler, before ours was back
            raise Stopped(early.sigval) from None


def _start(program: Sequence[str], count: int, restarts: int, port: int, logs: str) -> SubprocessContext:
    common = {
        **{name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "halfbyte",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // count))),
        LAUNCHER: str(os.getpid()),
    }
    quiet = dict.fromkeys(range(1, count), Std.ALL)
    before = {number: signal.getsignal(number) for number in (*LEAVING, signal.SIGINT, signal.SIGQUIT)}
    try:
        ranks = start_processes(
            "halfbyte",
            sys.executable,
            {rank: tuple(program) for rank in range(count)},
            {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)},
            DefaultLogsSpecs(logs, redirects=quiet),
            **_numa(),
        )
    finally:  # torch sets handlers of its own, even where a signal is ignored (nohup)
        for number, handler in before.items():
            signal.signal(number, handler)
    assert isinstance(ranks, SubprocessContext)
    return ranks


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numa() -> dict[str, Any]:
    """Each rank beside its GPU, as `torchrun --numa-binding=node`; where the host has several nodes and `numactl`."""
    several = Path("/sys/devices/system/node/node1").is_dir() and torch.cuda.device_count() > 0
    if not several or shutil.which("numactl") is None:
        return {}
    from torch.numa.binding import AffinityMode, NumaOptions

    return {"numa_options": NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)}


def _watch(ranks: SubprocessContext, request: Request) -> dict[int, tuple[int, int]]:
    """Until all have ended, or `GRACE` after one has failed.

    Returns:
        rank → at which look it had ended, and its exit code (-n: by signal n).
    """
    ends: dict[int, tuple[int, int]] = {}
    looks, last, told = 0, math.inf, False
    while len(ends) < ranks.nprocs and looks < last:
        if request.number and not told:
            told = True
            _signal(ranks, request.number)
        for rank, handler in ranks.subprocess_handlers.items():
            if rank not in ends and (code := handler.proc.poll()) is not None:
                ends[rank] = looks, code
                if code not in _well(request):
                    last = min(last, looks + GRACE / LOOK)
                    _signal(ranks, signal.SIGKILL, rank)  # what it has started itself
        looks += 1
        time.sleep(LOOK)
    return ends


def _signal(ranks: SubprocessContext, number: int, only: int | None = None) -> None:
    """To the ranks, or to `only` one, with the processes that they have started."""
    for rank, pid in ranks.pids().items():
        if only in (None, rank):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)


def _first(failures: list[tuple[int, Failure]]) -> Failure | None:
    """The cause of all of them: the first to end that did not fail for want of another one."""
    if not failures:
        return None
    _, cause = min(failures, key=lambda f: (f[1].follows, f[0], not f[1].recorded, f[1].rank))
    alike = [failure for _, failure in failures if failure.error.message == cause.error.message]
    if main := [failure for failure in alike if failure.rank == 0]:
        return main[0]
    if not cause.recorded:  # its number is said already
        return cause
    error = type(cause.error)(f"process {cause.rank}: {cause.error.message}", cause.error.fix)
    return replace(cause, error=error)


def _failure(ranks: SubprocessContext, rank: int, code: int) -> Failure:
    """How a rank ended: by what it has left, or else by its exit code and the last lines it wrote."""
    if left := read_failure(rank, ranks.error_files[rank]):
        return left
    how = f"was ended by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
    fix = "continue with --resume"
    if code == -signal.SIGKILL:
        fix = f"see whether the host ran out of memory (`dmesg`), and {fix}"
    said = _last_lines(ranks.stderrs[rank])
    return Failure(rank, TrainingError(f"process {rank} of {ranks.nprocs} {how}{said}", fix))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(file: str) -> str:
    """What a rank wrote before it died; rank 0's is on the screen."""
    with contextlib.suppress(OSError):
        if lines := Path(file).read_text(encoding="utf-8", errors="replace").splitlines()[-LINES:]:
            return "; it wrote:\n" + "\n".join(lines)
    return ""
