"""Cases of interrupted runs and `--resume`, of signals, and of folders."""

import pickle
from pathlib import Path

from tests.helpers.hostile.cases import Case, Maker, cut, edited, gone, mode
from tests.helpers.hostile.inputs import STOPPED
from tests.helpers.hostile.rows_models import Pwned

RESUME = f"train run.yaml {STOPPED} --resume"
ALL, RAN = ("stopped/checkpoint-2", "stopped/checkpoint-4"), ("stopped/*",)


def in_all(name: str, what: Maker | bytes) -> dict:
    return {f"{folder}/{name}": what for folder in ALL}


def renamed(path: Path) -> None:
    path.rename(path.with_name("checkpoint-9999"))


def stopped(name: str, files: dict, **more) -> Case:
    return Case(name, RESUME, given=("stopped",), files=files, **more)


def holds(text: str) -> Maker:
    return lambda path: path.write_text(text)


AGAIN = "train run.yaml output_dir=run max_steps=4 save_steps=2 eval_split_size=2 lora_dropout=0.1 --resume"
NO_REPORT: dict[str, Maker] = {"run/report.html": gone}


def finished(name: str, files: dict[str, Maker], **more) -> Case:
    """A finished run that is resumed; its report is made again where it went, of whatever else is there."""
    return Case(name, AGAIN, given=("run",), files=files, **({"code": 0, "says": "finished already"} | more))


RECORD = '{"kind": "train", "step": 1, "loss": 1, "tokens": 3, "tokens_per_second": %s}\n'
FINISHED = [
    finished("+ a finished run resumed twice", {}),
    finished("+ a finished run without report, odd generations.json", NO_REPORT | {
             "run/generations.json": holds('[1, {"a": 2}]')}, after=("run/report.html",)),
    finished("+ a finished run resumed: a rate of text", {"run/metrics.jsonl": holds(RECORD % '"fast"')}, code=1,
             says="metrics.jsonl:1"),
    finished("+ a finished run resumed: memory.json is damaged", {"run/memory.json": cut()}, code=1,
             says="memory.json"),
    finished("+ what a finished run lacks is done again", {"run/checks.json": gone}, says="report.html",
             after=("run/*",)),
    stopped("+ halfbyte.json in which ways are text", in_all("halfbyte.json", edited(ways="two")), code=(0, 1),
            after=RAN, gone=RAN),
]  # fmt: skip
ROWS = [
    *FINISHED,
    stopped(
        "26 the newest has no optimizer.pt",
        {f"{ALL[1]}/optimizer.pt": gone},
        code=0,
        says="checkpoint-4",
        after=RAN,
        gone=RAN,
    ),
    stopped("27 none has halfbyte.json", in_all("halfbyte.json", gone), says="checkpoint-4"),
    *[
        stopped(f"28 each {name} is {what}", in_all(name, content), says=("checkpoint-4", name))
        for name, what, content in (
            ("trainer_state.json", "cut", cut()),
            ("optimizer.pt", "cut", cut()),
            ("optimizer.pt", "a pickle", pickle.dumps(Pwned())),
            ("rng_state.pth", "a pickle", pickle.dumps(Pwned())),
        )
    ],
    stopped(
        "62 a checkpoint under another number", {ALL[1]: renamed}, code=0, says="checkpoint-9999", after=RAN, gone=RAN
    ),
    stopped(
        "+ the newest optimizer.pt is that of the checkpoint before",
        {
            f"{ALL[1]}/optimizer.pt": lambda path: path.write_bytes(
                (path.parents[1] / "checkpoint-2" / path.name).read_bytes()
            )
        },
        code=0,
        says="sha256",
        after=RAN,
        gone=RAN,
    ),
    Case(
        "+ the run's folder for a checkpoint",
        f"train run.yaml {STOPPED} resume_from_checkpoint=stopped",
        says="stopped",
        fix="stopped/checkpoint-4",
        given=("stopped",),
    ),
    stopped("58 a run that may not be written", {"stopped": mode(0o555)}, says="stopped"),
    Case(
        "40 an empty folder to resume",
        "train run.yaml --resume",
        code=0,
        says="out",
        after=("out/*",),
        files={"out": None},
    ),
    Case(
        "81 SIGTERM saves and leaves",
        "train run.yaml max_steps=2000 save_steps=5",
        code=143,
        after=("out", "out/*", "out/checkpoint-*/optimizer.pt"),
        wishes={"signal": "SIGTERM", "when": "out/checkpoint-5"},
        seconds=6,
    ),
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
