"""Timeouts of host-side collectives, with the ranks that did not reach them named in the error.

A rank that blocks longer than `POLL_INTERVAL` sets a mark in the rendezvous store. On a timeout, ranks without a mark
are the missing ones. Collectives that finish earlier cost nothing extra.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..utils.errors import TrainingError

TIMEOUT = timedelta(minutes=10)
BACKEND_TIMEOUT = TIMEOUT + timedelta(minutes=5)  # of gloo and NCCL, whose errors do not name the missing rank
POLL_INTERVAL = timedelta(seconds=30)
STORE_POLL = 0.2  # seconds


def rendezvous_store() -> dist.TCPStore:
    """Connect to the rendezvous store, hosted by the launcher or by rank 0."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=10)
    )


def _key(event: str, number: int) -> str:
    """Return a key of the store; it includes the restart count, since the store may outlive a restart."""
    return f"halfbyte/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{event}/{number}"


def wait_for_collective(work: Any, group: Any) -> None:
    """Wait for a host-side collective.

    Args:
        work: torch's handle.
        group: its process group.

    Raises:
        TrainingError: after `TIMEOUT`, naming the ranks that did not reach it.
        RuntimeError: gloo's, if a process is gone.
    """
    began, mark = time.monotonic(), ""
    while True:
        try:
            work.wait(POLL_INTERVAL)
            break
        except RuntimeError as error:
            if "Operation timed out" not in str(error):  # not our polling interval: gloo's own error
                raise
            if time.monotonic() - began >= TIMEOUT.total_seconds():
                raise _timeout_error(group) from error
        if not mark:
            mark = _key("waiting", dist.get_rank())
            rendezvous_store().set(mark, "")
    if mark:
        rendezvous_store().delete_key(mark)


def _timeout_error(group: Any) -> TrainingError:
    """Return the error that names the ranks of `group` which did not reach the collective."""
    try:
        store = rendezvous_store()
        absent = [rank for rank in dist.get_process_group_ranks(group) if not store.check([_key("waiting", rank)])]
    except RuntimeError:  # rank 0 may host the store and be the missing one
        absent = [0]
    missing = ", ".join(map(str, absent)) or "(one that has arrived since)"
    return TrainingError(
        f"process {missing} of this run did not reach a collective within {TIMEOUT.total_seconds() / 60:g} minutes",
        "find out where it is stuck (`py-spy dump`), and continue with --resume",
    )


def mark_done(number: int) -> None:
    """Count towards `wait_until_done` of the same number."""
    rendezvous_store().add(_key("done", number), 1)


def wait_until_done(number: int, count: int) -> None:
    """Block until `count` ranks have called `mark_done`, without a timeout: the launcher ends all if one dies."""
    store = rendezvous_store()
    while store.add(_key("done", number), 0) < count:
        time.sleep(STORE_POLL)
