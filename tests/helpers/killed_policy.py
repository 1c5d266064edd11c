"""Runs that are SIGKILLed at chosen moments, and resumed; a program, so that it can fork.

    python -m tests.helpers.killed_policy SETTINGS.json

SETTINGS: `config` (keys of the run), `output` (a folder), and `moments`, a number for each kill. Prints a line of JSON
for each: what was killed, the checkpoint it resumed from, and what differs from the run that was left alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from halfbyte.config import load_config
from halfbyte.generation.paged import PagedDecoder
from halfbyte.rewards.process import RewardProcess
from halfbyte.runs import checkpoints
from halfbyte.runs.metrics import MetricsFile
from halfbyte.train import checkpoint
from halfbyte.train import loop as loops
from halfbyte.train.run import train
from tests.helpers.run_records import lines, timeless

# What is counted, and where a run is killed: as the n-th of these begins (or has been asked for, of rewards).
MOMENTS: dict[str, list[tuple[Any, str]]] = {
    "rollout": [(PagedDecoder, "step"), (PagedDecoder, "prefill")],
    "reward": [(RewardProcess, "answer")],
    "step": [(loops.TrainingLoop, "forward"), (loops, "next_rate"), (loops.TrainingLoop, "evaluate")],
    "record": [(MetricsFile, "append")],
    "save": [(loops, name) for name in ("save_weights", "save_optimizer", "save_random")]
    + [(checkpoint, "write_manifest"), (checkpoints, "keep_newest")],
}


def watch(seen: Callable[[str], None]) -> None:
    """Call `seen` with the phase at the start of each of its moments."""
    for phase, places in MOMENTS.items():
        for holder, name in places:
            own = getattr(holder, name)

            def noted(*args: Any, _own: Any = own, _phase: str = phase, **keys: Any) -> Any:
                seen(_phase)
                return _own(*args, **keys)

            setattr(holder, name, noted)


def in_a_fork(work: Callable[[], None]) -> int:
    """Run `work` in a forked process and return its exit status."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def contents(output: Path) -> dict[str, Any]:
    """Return the parts of a run that must be equal after a resume: records, completions, adapter."""
    records = timeless(lines(output / "metrics.jsonl"))
    adapter = hashlib.sha256((output / "adapter/adapter_model.safetensors").read_bytes()).hexdigest()
    sampled = output / "completions.jsonl"
    best = json.loads((output / "environment.json").read_text()).get("best")
    kept = [path.name for path in checkpoints.checkpoints(output)] if best else None
    completions = sampled.read_text() if sampled.is_file() else ""
    return {"records": records, "completions": completions, "adapter": adapter, "best": best, "kept": kept}


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["output"])

    def run(output: Path, resume: bool | None = None) -> None:
        train(load_config(None, settings["config"] | {"output_dir": str(output)}), resume=resume)

    def counted() -> None:
        counts: Counter[str] = Counter()
        watch(lambda phase: counts.update([phase]))
        run(folder / "whole")
        (folder / "counts.json").write_text(json.dumps(counts))

    assert in_a_fork(counted) == 0
    counts, whole = json.loads((folder / "counts.json").read_text()), contents(folder / "whole")
    for moment in settings["moments"]:
        draw, output = random.Random(moment), folder / f"killed-{moment}"
        phase = list(MOMENTS)[moment % len(MOMENTS)]
        number = draw.randrange(counts[phase]) + 1

        def killed(phase: str = phase, number: int = number, output: Path = output) -> None:
            left = [number]

            def seen(each: str) -> None:
                left[0] -= each == phase
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)

            watch(seen)
            run(output)

        assert in_a_fork(killed) == signal.SIGKILL, (phase, number)
        saved = checkpoints.checkpoints(output)
        resumed = in_a_fork(partial(run, output, resume=True))
        found = contents(output) if resumed == 0 else {}
        differs = [name for name in whole if found.get(name) != whole[name]]
        from_ = saved[-1].name if saved else None
        print(json.dumps({"phase": phase, "number": number, "from": from_, "status": resumed, "differs": differs}))
        shutil.rmtree(output)


if __name__ == "__main__":
    main()
