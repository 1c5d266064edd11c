"""Launcher of `halfbyte train` on several devices: starts one process per device with torchrun's machinery.

Each rank runs the same command, in a session of its own, and joins the mesh as under `torchrun`. Rank 0 has the
terminal. The output of other ranks goes to files, whose end is printed if a rank dies without an error report. Signals
are forwarded to all ranks once. After one rank fails, the others have `GRACE` seconds to report and are then killed,
since they may block in a collective with the failed one.
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

from ...config import Parallel
from ...config.policy import SAMPLING
from ...config.schema import RunKeys
from ...mesh.ranks import Failure, read_failure
from ...utils.errors import ConfigError, TrainingError
from ...utils.hardware import chosen_device
from ...utils.notices import notice
from ...utils.processes import LAUNCHER, TERMINATION_SIGNALS, Stopped, StopRequest, is_rank, request_on_signals

GRACE = 5.0  # seconds that other ranks have to report after one has failed
POLL = 0.1  # seconds between checks of the processes
MAX_RANKS_PER_CORE = 8  # on a CPU
LAST_LINES = 20  # of a dead rank's stderr
HOST = "127.0.0.1"
SEVERAL_HOSTS = "for several hosts, start it with torchrun on each (docs/several-gpus.md)"


def layout_to_launch(config: RunKeys) -> Parallel:
    """Return the mesh whose ranks are to be started; of size 1 if this process needs none or is a rank itself.

    Raises:
        ConfigError: `parallel` needs more GPUs than there are, or several devices of a kind that does not support it.
    """
    if is_rank():
        return Parallel()
    layout, device = config.layout, config.device
    if layout is None:
        on_one = config.method in SAMPLING or config.trains_several
        several = device in (None, "cuda") and not on_one
        return Parallel(data=max(1, torch.cuda.device_count()) if several else 1)
    if layout.size == 1:
        return layout
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if not gpus and device in (None, "cpu") and layout.size > (limit := MAX_RANKS_PER_CORE * _cores()):
        problem = f"parallel: {layout} needs {layout.size:,} processes on a CPU of {_cores()} cores"
        raise ConfigError(problem, f"change parallel so that its numbers multiply to at most {limit}")
    if device == "cpu":
        return layout
    if device == "xpu" or (device is None and not gpus and torch.xpu.is_available()):
        raise ConfigError(f"parallel: {layout} is not built for xpu", "set parallel: {data: 1}, or device: cpu")
    if device and not gpus:
        chosen_device(device)  # raises the error
    if layout.size > gpus > 0:
        problem = f"parallel: {layout} needs {layout.size} GPUs, and this host has {gpus}"
        raise ConfigError(problem, f"change parallel so that its numbers multiply to {gpus}; {SEVERAL_HOSTS}")
    return layout


def notice_idle_gpus(config: RunKeys) -> None:
    """Log which GPUs a single-process run leaves idle, unless the user chose that."""
    if config.parallel == "auto" and (idle := layout_to_launch(config).size - 1):
        idle_gpus = f"{idle} more GPU{'s are' if idle > 1 else ' is'} idle"
        fix = "start it with `halfbyte train` or torchrun to use all, or set device: cuda:0 to hide this notice"
        notice("idle_gpus", f"this process trains on one GPU, and {idle_gpus}: {fix}")


def launch(program: Callable[[Parallel], Sequence[str]], layout: Parallel, max_restarts: int = 0) -> None:
    """Run a program as the ranks of a mesh until all have exited successfully.

    Args:
        program: returns the arguments of this Python for a mesh.
        layout: the mesh.
        max_restarts: restarts after failures that may pass; ranks detect them by `utils.processes.was_restarted`. If a
            GPU is gone by then, a restart uses a smaller mesh.

    Raises:
        HalfbyteError: a rank failed; its error, or its exit code and last output.
        SystemExit: this process received a signal, and the ranks have exited and printed what is saved.
        Stopped: likewise, but the ranks exited before they could save.
    """
    restarts = 0
    while (failure := _attempt(program(layout), layout.size, restarts)) is not None:
        smaller = smaller_layout(layout, torch.cuda.device_count() or layout.size)
        if restarts == max_restarts or not failure.may_pass or smaller is None:
            if failure.trace:
                failure.error.add_note(failure.trace)
            raise failure.error
        restarts, on = restarts + 1, "" if smaller == layout else f" on {smaller.size} devices"
        action = f"restarting{on} from the last checkpoint ({restarts} of {max_restarts} restarts)"
        notice(f"restart {restarts}", f"{failure.error.message}: {action}")
        layout = smaller


def smaller_layout(layout: Parallel, limit: int) -> Parallel | None:
    """Return the largest mesh of at most `limit` ranks that keeps the batches of a step, or None.

    Its data and shard degrees divide those of `layout`; other degrees are unchanged.
    """
    rows = layout.data * layout.shard
    for degree in (n for n in range(rows, 0, -1) if rows % n == 0):
        shard = math.gcd(layout.shard, degree)
        smaller = replace(layout, data=degree // shard, shard=shard)
        if smaller.size <= limit:
            return smaller
    return None


def _attempt(program: Sequence[str], count: int, restarts: int) -> Failure | None:
    """Start the ranks and wait for their end; returns the root cause of a failure."""
    with tempfile.TemporaryDirectory(prefix="halfbyte-ranks-") as logs, _stop_requests() as request:
        store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # the rendezvous, on a free port
        ranks = _start(program, count, restarts, store.port, logs)
        try:
            ends = _watch(ranks, request)
        except Stopped as again:  # a second signal: the ranks save nothing
            ranks.close(again.number, int(GRACE))
            raise
        finally:
            ranks.close(signal.SIGKILL, int(GRACE))
        clean = _clean_exits(request)
        cause = _root_cause(
            [(poll, _failure(ranks, rank, code)) for rank, (poll, code) in ends.items() if code not in clean]
        )
        if request.number and (
            cause is None or not cause.recorded
        ):  # a rank may have died of the signal before its first step
            if ends.get(0, (0, 0))[1] == 128 + request.number:  # rank 0 has printed what is saved
                raise SystemExit(128 + request.number)
            raise Stopped(request.number)
        return replace(cause, may_pass=False) if cause and request.number else cause


def _clean_exits(request: StopRequest) -> set[int]:
    """Return the exit codes of ranks that ended well; after a signal, a rank may have died of it before it started."""
    return {0, 128 + request.number, -request.number}


@contextlib.contextmanager
def _stop_requests() -> Iterator[StopRequest]:
    with request_on_signals(lambda number: None) as request:
        try:
            yield request
        except SignalException as early:  # torch's handler, before ours was restored
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
    handlers = {number: signal.getsignal(number) for number in (*TERMINATION_SIGNALS, signal.SIGINT, signal.SIGQUIT)}
    try:
        ranks = start_processes(
            "halfbyte",
            sys.executable,
            {rank: tuple(program) for rank in range(count)},
            {rank: {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)},
            DefaultLogsSpecs(logs, redirects=quiet),
            **_numa(),
        )
    finally:  # torch installs handlers, even for ignored signals (nohup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert isinstance(ranks, SubprocessContext)
    return ranks


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numa() -> dict[str, Any]:
    """Bind each rank to its GPU's NUMA node (`torchrun --numa-binding=node`), given several nodes and `numactl`."""
    several = Path("/sys/devices/system/node/node1").is_dir() and torch.cuda.device_count() > 0
    if not several or shutil.which("numactl") is None:
        return {}
    from torch.numa.binding import AffinityMode, NumaOptions

    return {"numa_options": NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)}


def _watch(ranks: SubprocessContext, request: StopRequest) -> dict[int, tuple[int, int]]:
    """Wait until all ranks have ended, or `GRACE` seconds after one has failed.

    Returns:
        rank → (number of the poll that found it ended, exit code; -n: killed by signal n).
    """
    ends: dict[int, tuple[int, int]] = {}
    polls = 0
    last = math.inf  # number of the poll after which the watch ends
    forwarded = False
    while len(ends) < ranks.nprocs and polls < last:
        if request.number and not forwarded:
            forwarded = True
            _signal(ranks, request.number)
        for rank, handler in ranks.subprocess_handlers.items():
            if rank not in ends and (code := handler.proc.poll()) is not None:
                ends[rank] = polls, code
                if code not in _clean_exits(request):
                    last = min(last, polls + GRACE / POLL)
                    _signal(ranks, signal.SIGKILL, rank)  # also its own child processes
        polls += 1
        time.sleep(POLL)
    return ends


def _signal(ranks: SubprocessContext, number: int, only: int | None = None) -> None:
    """Send a signal to all ranks, or to `only` one, with their child processes."""
    for rank, pid in ranks.pids().items():
        if only in (None, rank):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)


def _root_cause(failures: list[tuple[int, Failure]]) -> Failure | None:
    """Return the earliest failure that is not the consequence of another rank's."""
    if not failures:
        return None
    _, cause = min(failures, key=lambda f: (f[1].is_consequence, f[0], not f[1].recorded, f[1].rank))
    same_error = [failure for _, failure in failures if failure.error.message == cause.error.message]
    if main := [failure for failure in same_error if failure.rank == 0]:
        return main[0]
    if not cause.recorded:  # its message names the rank already
        return cause
    error = type(cause.error)(f"process {cause.rank}: {cause.error.message}", cause.error.fix)
    return replace(cause, error=error)


def _failure(ranks: SubprocessContext, rank: int, code: int) -> Failure:
    """Describe how a rank ended: by its error report, or else by its exit code and last output."""
    if reported := read_failure(rank, ranks.error_files[rank]):
        return reported
    end = f"was killed by {_name(-code)}" if code < 0 else f"ended with exit code {code}"
    fix = "continue with --resume"
    if code == -signal.SIGKILL:
        fix = f"check whether the host ran out of memory (`dmesg`), and {fix}"
    output = ""
    with contextlib.suppress(OSError):  # rank 0 prints to the terminal
        text = Path(ranks.stderrs[rank]).read_text(encoding="utf-8", errors="replace")
        if lines := text.splitlines()[-LAST_LINES:]:
            output = "; its last output:\n" + "\n".join(lines)
    return Failure(rank, TrainingError(f"process {rank} of {ranks.nprocs} {end}{output}", fix))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
