"""Run every case of tiny_cases.py as a whole training run and write its outcome.

    python -m tests.helpers.tiny_matrix --out matrix.jsonl --device cuda --workers 14
    python -m tests.helpers.tiny_matrix --out part.jsonl --only "Gemma3n|Gemma4" --shard 1/2

Each finished case is a line: {"case", "outcome": ok | refused | failed, "error", "message", "at", "seconds"}. An error
of `halfbyte.utils.errors` counts as refused. Worker processes run one case after the other; a case fails if it takes
longer than `--timeout` seconds or its process dies, and a new process continues.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.helpers.tiny_cases import Case, Place, cases

Result = dict[str, Any]


def run_case(case: Case, place: Place) -> Result:
    """Train one case in this process; never raises for an error of the run."""
    from halfbyte.config import load_config
    from halfbyte.train.run import train
    from halfbyte.utils import notices
    from halfbyte.utils.errors import HalfbyteError

    notices.reset_notices()
    output, began = Path(tempfile.mkdtemp(dir=place.folder)), time.perf_counter()
    found: Result = {"case": case.name, "outcome": "ok"}
    try:
        train(load_config(None, place.keys(case, output / "run")))
    except Exception as error:
        found["outcome"] = "refused" if isinstance(error, HalfbyteError) else "failed"
        found |= {"error": type(error).__name__, "message": str(error)[:1000], "at": _place_of(error)}
    finally:
        shutil.rmtree(output, ignore_errors=True)
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def _place_of(error: BaseException) -> list[str]:
    """Return the last four frames of an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return [f"{'/'.join(Path(frame.filename).parts[-3:])}:{frame.lineno} {frame.name}" for frame in frames]


def _work(connection: Connection, place: Place) -> None:
    """Run the cases received in a worker process, without output, until None is received."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    import torch

    torch.set_num_threads(1)
    while (case := connection.recv()) is not None:
        connection.send(run_case(case, place))


class Worker:
    """A worker process and its current case."""

    def __init__(self, place: Place):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, place), daemon=True)
        self.process.start()
        theirs.close()
        self.case: Case | None = None
        self.began = time.monotonic()

    def begin(self, case: Case) -> None:
        self.case, self.began = case, time.monotonic()
        self.connection.send(case)

    def failed(self, error: str) -> Result:
        """Kill the process and return a failure of its case."""
        self.process.kill()
        self.process.join()
        assert self.case is not None
        seconds = round(time.monotonic() - self.began, 2)
        message = f"exit code {self.process.exitcode}"
        return {"case": self.case.name, "outcome": "failed", "error": error, "message": message, "seconds": seconds}


def run_all(wanted: Iterable[Case], place: Place, workers: int, timeout: float) -> Iterable[Result]:
    """Yield the result of each case when it ends."""
    left = list(wanted)[::-1]
    running = [Worker(place) for _ in range(min(workers, len(left)))]
    for worker in running:
        worker.begin(left.pop())
    while running:
        ready = wait([worker.connection for worker in running], timeout=1)
        for worker in list(running):
            again = worker
            if worker.connection in ready:
                try:
                    yield worker.connection.recv()
                except EOFError:
                    yield worker.failed("Died")
                    again = Worker(place) if left else worker
            elif time.monotonic() - worker.began > timeout:
                yield worker.failed("Timeout")
                again = Worker(place) if left else worker
            else:
                continue
            running.remove(worker)
            if left:
                again.begin(left.pop())
                running.append(again)
            else:
                with contextlib.suppress(OSError):  # it is gone
                    worker.connection.send(None)


def summary(results: list[Result], seconds: float) -> str:
    """Return the counts of outcomes and one line per refused or failed case."""
    counts = Counter(result["outcome"] for result in results)
    lines = [", ".join(f"{counts[name]} {name}" for name in ("ok", "refused", "failed")) + f" in {seconds:.0f} s"]
    for outcome in ("refused", "failed"):
        for result in results:
            if result["outcome"] == outcome:
                said = str(result["message"]).partition("\n")[0][:200]
                lines.append(f"{outcome}: {result['case']}: {result['error']}: {said} {result.get('at', '')}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of results, a line each")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one case")
    parser.add_argument("--only", default="", help="regular expression that a case's name must contain")
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th case, from the i-th on")
    asked = parser.parse_args()
    index, of = map(int, asked.shard.split("/"))
    wanted = [case for case in cases() if re.search(asked.only, case.name)][index - 1 :: of]
    began, results = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder, asked.out.open("w") as out:
        place = Place(Path(folder), asked.device)
        place.write_rows()
        for result in run_all(wanted, place, asked.workers, asked.timeout):
            results.append(result)
            out.write(json.dumps(result) + "\n")
            out.flush()
    print(summary(results, time.monotonic() - began))
    sys.exit(any(result["outcome"] == "failed" for result in results))


if __name__ == "__main__":
    main()
