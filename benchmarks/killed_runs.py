"""SIGKILL of a random rank of `halfbyte train` at a random step after its first checkpoint, and losses after a resume.

    python -m benchmarks.killed_runs [--kills 10] [--first 0] [--at-once 5] [--gpus 4] [--way data] [--json FILE]

Kill number k seeds the choice of rank and step with k, and resumes on the k-th of --resumed GPUs, in turn. The model is
a smaller one than that of `benchmarks.same_run`; a WAY is one of its ways. Prints and writes for every kill: the rank,
the steps that were recorded before, the seconds until all processes had ended, the checkpoint's step, and the relative
difference of the losses of all steps from those of an undisturbed run on all GPUs: the largest, and how many steps
differ at all.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import parser_of, write_result
from benchmarks.same_run import WINDOW, degrees, train_command, trained, write_place

START_SECONDS = 240  # until the first steps of a run
END_SECONDS = 60  # until all processes of a killed run have ended
SAVE_STEPS = 4
LAYERS, TEXTS, LENGTH = 4, 300, 128  # small, since a run is mostly its start


def command_of(given: argparse.Namespace, output: Path, gpus: int) -> list[str]:
    """Return the command of a run; each step has the same sequences on any number of GPUs."""
    ways = degrees(given.way, gpus) if gpus > 1 else None
    rows = WINDOW // given.gpus  # as the killed run had it; a run that resumes on fewer ranks adapts it
    keys = {"max_length": LENGTH, "save_steps": SAVE_STEPS, "save_total_limit": 3, "deterministic": "true"}
    return [sys.executable, *train_command(given, output, ways, rows, **keys)]


def finish(given: argparse.Namespace, output: Path, gpus: int, *more: str) -> list[dict[str, Any]]:
    """Run or resume to the end, and return the records of the steps."""
    ran = subprocess.run([*command_of(given, output, gpus), *more], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{output.name}: exit {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}")
    return trained(output)


def kill(given: argparse.Namespace, output: Path, chance: random.Random) -> dict[str, Any]:
    """Start a run, kill one of its ranks and return which, when, and how the run ended."""
    victim, steps = (
        chance.randrange(given.gpus),
        chance.randrange(SAVE_STEPS + 1, max(given.steps * 3 // 4, SAVE_STEPS + 2)),
    )
    with output.with_suffix(".txt").open("w") as said:
        process = subprocess.Popen(command_of(given, output, given.gpus), stdout=said, stderr=subprocess.STDOUT)
        until = time.monotonic() + START_SECONDS
        while len(trained(output)) < steps:
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise SystemExit(f"{output.name}: no step {steps}\n{output.with_suffix('.txt').read_text()[-3000:]}")
            time.sleep(0.005)
        ranks = {child.environ().get("RANK"): child for child in psutil.Process(process.pid).children(recursive=True)}
        ranks[str(victim)].send_signal(signal.SIGKILL)
        began = time.monotonic()
        code = process.wait(END_SECONDS)
        _, alive = psutil.wait_procs([ranks[str(rank)] for rank in range(given.gpus)], timeout=END_SECONDS)
    checkpoints = [int(path.name.rpartition("-")[2]) for path in output.glob("checkpoint-*")]
    return {
        "rank": victim, "steps_before": len(trained(output)), "exit": code, "seconds_to_end": time.monotonic() - began,
        "left_alive": len(alive), "checkpoint": max(checkpoints, default=0),
    }  # fmt: skip


def killed_and_resumed(given: argparse.Namespace, number: int, calm: list[dict[str, Any]]) -> dict[str, Any]:
    """Kill a run, resume it, and compare it with the `calm` one."""
    output = given.work / f"killed-{number}"
    ended = kill(given, output, random.Random(number))
    gpus = given.resumed[number % len(given.resumed)]
    records = finish(given, output, gpus, "--resume")
    found = {"number": number, **ended, "resumed_on": gpus, **compared(records, calm)}
    print(" ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in
                   found.items()), flush=True)  # fmt: skip
    return found


def compared(records: list[dict[str, Any]], calm: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how the records of a run's steps differ from those of an undisturbed run."""
    same = [(record["step"], record["tokens"]) for record in records] == [
        (record["step"], record["tokens"]) for record in calm
    ]
    if not same:
        return {"same_steps": False, "most_apart": None, "steps_apart": None}
    apart = [abs(one["loss"] / other["loss"] - 1) for one, other in zip(records, calm, strict=True)]
    return {"same_steps": True, "most_apart": max(apart), "steps_apart": sum(each > 0 for each in apart)}


def parser() -> argparse.ArgumentParser:
    made = parser_of(__doc__)
    made.add_argument("--kills", type=int, default=10)
    made.add_argument("--first", type=int, default=0, help="number of the first kill")
    made.add_argument("--at-once", type=int, default=1, help="killed runs that share the GPUs")
    made.add_argument("--gpus", type=int, default=4)
    made.add_argument("--resumed", type=int, nargs="+", default=[4, 2, 1], help="GPUs to resume on")
    made.add_argument("--way", default="data")
    made.add_argument("--steps", type=int, default=40)
    made.add_argument("--rate", type=float, default=2e-4)
    made.add_argument("--hidden", type=int, default=256)
    made.add_argument("--device", default="cuda")
    made.add_argument("--work", type=Path, default=Path("/tmp/killed-runs"))
    return made


def main(words: Sequence[str] | None = None) -> None:
    given = parser().parse_args(words)
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write_place(given.work, given.hidden, LAYERS, TEXTS)
    calm = finish(given, given.work / "calm", given.gpus)
    keys = {"gpus": given.gpus, "way": given.way, "steps": given.steps, "hidden": given.hidden}
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(given.at_once) as pool:
        numbers = range(given.first, given.first + given.kills)
        for each in pool.map(lambda number: killed_and_resumed(given, number, calm), numbers):
            found.append(each)
            write_result(given.json, {**keys, "losses": [record["loss"] for record in calm], "kills": found})


if __name__ == "__main__":
    main()
