"""Waiting for other processes: without end where they are known to work, else for `PATIENCE`, naming who did not come.

A process that waits longer than `SLICE` leaves a mark in the store where the processes met; who has none is missed.
Nothing of this costs anything while all come.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..utils.errors import TrainingError

PATIENCE = timedelta(minutes=10)
OWN_LIMITS = PATIENCE + timedelta(minutes=5)  # of gloo and NCCL, which name nobody
SLICE = timedelta(seconds=30)
LOOK = 0.2  # seconds between two looks at the store


def meeting_place() -> dist.TCPStore:
    """The store through which the processes met: the launcher's, or the first process's."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10)
    )


def _key(what: str, number: int) -> str:
    """In that store, which may be the same after a restart."""
    return f"halfbyte/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}/{number}"


def finish(work: Any, group: Any) -> None:
    """Wait for a collective of numbers on the host.

    Args:
        work: torch's handle of it.
        group: the processes that take part.

    Raises:
        TrainingError: after `PATIENCE`, naming those that did not come.
        RuntimeError: gloo's, where a process is gone.
    """
    began, mark = time.monotonic(), ""
    while True:
        try:
            work.wait(SLICE)
            break
        except RuntimeError as error:
            if "Operation timed out" not in str(error):  # the slice's; all others are gloo's own
                raise
            if time.monotonic() - began >= PATIENCE.total_seconds():
                raise _missing(group) from error
        if not mark:
            mark = _key("waits", dist.get_rank())
            meeting_place().set(mark, "")
    if mark:
        meeting_place().delete_key(mark)


def _missing(group: Any) -> TrainingError:
    """Who of the group does not wait."""
    try:
        store = meeting_place()
        absent = [rank for rank in dist.get_process_group_ranks(group) if not store.check([_key("waits", rank)])]
    except RuntimeError:  # the first process may keep the store, and be the one
        absent = [0]
    who = ", ".join(map(str, absent)) or "one that has come meanwhile"
    return TrainingError(
        f"process {who} of this run did not come within {PATIENCE.total_seconds() / 60:g} minutes; the others waited",
        "look at what it does (`py-spy dump`), and continue with --resume",
    )


def say_done(number: int) -> None:
    """For `wait_until_done` of the same number."""
    meeting_place().add(_key("done", number), 1)


def wait_until_done(number: int, count: int) -> None:
    """Until so many have said so, however long that takes: a launcher ends the others where one dies."""
    store = meeting_place()
    while store.add(_key("done", number), 0) < count:
        time.sleep(LOOK)
