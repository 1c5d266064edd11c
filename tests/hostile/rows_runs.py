"""What a run left behind and what `--resume` makes of it; signals; folders."""

import pickle
from pathlib import Path

from hostile import Case, Maker, cut, gone, later, mode, some
from hostile_inputs import STOPPED
from rows_models import Pwned

RESUME = f"train run.yaml {STOPPED} --resume"
STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
ALL, RAN = ("stopped/checkpoint-2", "stopped/checkpoint-4"), ("stopped/*",)


def in_all(name: str, what: Maker | bytes) -> dict:
    return {f"{folder}/{name}": what for folder in ALL}


def renamed(path: Path) -> None:
    path.rename(path.with_name("checkpoint-9999"))


def stopped(name: str, files: dict, **more) -> Case:
    return Case(name, RESUME, given=("stopped",), files=files, **more)


ROWS = [
    *later(stopped("+ a killed run goes on", {}, code=0, says="step 8/8", after=RAN, gone=RAN)),
    *some(
        stopped(
            f"26 the newest has no {name}", {f"{ALL[1]}/{name}": gone}, code=0, says="checkpoint-4", after=RAN, gone=RAN
        )
        for name in (*STATES, "halfbyte.json")
    ),
    stopped("27 none has halfbyte.json", in_all("halfbyte.json", gone), says="checkpoint-4"),
    stopped("27 none has trainer_state.json", in_all("trainer_state.json", gone), says="checkpoint-4"),
    *some(
        stopped(
            f"28 the newest {name} is cut",
            {f"{ALL[1]}/{name}": cut()},
            code=0,
            says="checkpoint-4",
            after=RAN,
            gone=RAN,
        )
        for name in STATES
    ),
    *[stopped(f"28 each {name} is cut", in_all(name, cut()), says=("checkpoint-4", name)) for name in STATES],
    *[
        stopped(f"28 each {name} is a pickle", in_all(name, pickle.dumps(Pwned())), says=("checkpoint-4", name))
        for name in STATES[:3]
    ],
    stopped(
        "62 a checkpoint under another number", {ALL[1]: renamed}, code=0, says="checkpoint-9999", after=RAN, gone=RAN
    ),
    stopped("58 a run that may not be written", {"stopped": mode(0o555)}, says="stopped"),
    *later(Case("40 nothing to resume", "train run.yaml --resume", code=0, says="out", after=("out", "out/*"))),
    Case(
        "40 an empty folder to resume",
        "train run.yaml --resume",
        code=0,
        says="out",
        after=("out/*",),
        files={"out": None},
    ),
    *[
        Case(
            f"81 {name} saves and leaves",
            "train run.yaml max_steps=2000 save_steps=5",
            code=code,
            after=("out", "out/*", "out/checkpoint-*/optimizer.pt"),
            wishes={"signal": name, "when": "out/checkpoint-5"},
            seconds=6,
        )
        for name, code in (("SIGTERM", 143), ("SIGHUP", 129))
    ],
    Case(
        "81 SIGTERM before the first step leaves nothing",
        "train run.yaml",
        code=143,
        wishes={"signal": "SIGTERM", "when": "out/environment.json"},
    ),
    Case(
        "81 Ctrl-C saves and leaves",
        "train run.yaml max_steps=2000 save_steps=5",
        code=130,
        seconds=6,
        after=("out", "out/*"),
        wishes={"signal": "SIGINT", "when": "out/checkpoint-5"},
    ),
]
