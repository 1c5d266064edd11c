"""Programs that the launcher's tests start as ranks: `python rank_programs.py CASE FOLDER`."""

import os
import signal
import sys
import time
from pathlib import Path

RANK, FOLDER = int(os.environ["RANK"]), Path(sys.argv[2])


def fail(error, cause=None):
    from halfbyte.mesh.ranks import report_error

    assert report_error(error, cause or error, bug=False)
    os._exit(1)


def all_alike():
    from halfbyte.utils.errors import DataError

    fail(DataError("there are no rows", "add some"))


def one_raises():
    """The other waits for it, and says so."""
    from halfbyte.mesh.mesh import present_mesh
    from halfbyte.mesh.ranks import lost_peer_error
    from halfbyte.utils.errors import TrainingError

    with present_mesh() as mesh:
        mesh.barrier()
        if RANK == 1:
            fail(TrainingError("out of memory", "take less"))
        try:
            mesh.barrier()
        except RuntimeError as error:
            fail(lost_peer_error(error), error)


def one_is_killed():
    (FOLDER / f"joined-{RANK}").write_text(str(os.getpid()))
    while RANK == 0:  # as in a GPU's collective, it neither ends nor hears
        time.sleep(60)
    while not (FOLDER / "joined-0").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_once():
    """It goes on the second time, and says on how many it is."""
    (FOLDER / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{RANK}").write_text(sys.argv[3])
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and RANK == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_signal():
    """Counts the signals that reach it."""
    found = []
    signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    (FOLDER / f"ready-{RANK}").write_text(str(os.getpid()))
    while not found:
        time.sleep(0.02)
    time.sleep(0.5)
    (FOLDER / f"heard-{RANK}").write_text(str(len(found)))
    os._exit(143)


def breaks_on_one():
    """`halfbyte train FOLDER/run.yaml`, in which the second rank meets what argv[3] says in its third step."""
    from unittest import mock

    import torch

    from halfbyte.cli import main
    from halfbyte.train.loop import TrainingLoop

    calls, inner = [], TrainingLoop.sums

    def sums(loop, batch):
        calls.extend([1] * loop.model.training)
        values = inner(loop, batch)
        if RANK != 1 or len(calls) != 3 or not loop.model.training:
            return values
        if sys.argv[3] == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if sys.argv[3] == "bug":
            raise KeyError("nobody foresaw this")
        return {name: value * float("nan") for name, value in values.items()}

    with mock.patch.object(TrainingLoop, "sums", sums):
        main(["train", str(FOLDER / "run.yaml")])


if __name__ == "__main__":
    globals()[sys.argv[1]]()
