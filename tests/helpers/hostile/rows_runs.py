"""Cases of interrupted runs and `--resume`, of signals, and of folders."""

import pickle
from pathlib import Path

from tests.helpers.hostile.cases import Case, Maker, cut, edited, gone, later, mode, some
from tests.helpers.hostile.inputs import STOPPED
from tests.helpers.hostile.rows_models import Pwned

RESUME = f"train run.yaml {STOPPED} --resume"
STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
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
    *some(
        finished(f"+ a finished run without report: {name} odd", NO_REPORT | files, after=("run/report.html",))
        for name, files in {
            "environment.json's numbers": {"run/environment.json": edited(numbers=[1])},
            "environment.json's start": {"run/environment.json": edited(started="yesterday")},
            "generations.json": {"run/generations.json": holds('[1, {"a": 2}]')},
            "checks.json": {"run/checks.json": holds('{"first_step": 3}')},
            "data_report.json": {"run/data_report.json": holds('{"splits": 3}')},
            "memory.json's prediction": {"run/memory.json": edited(predicted=3)},
            "config.resolved.yaml": {"run/config.resolved.yaml": holds("r: {a: b}\n")},
            "metrics.jsonl": {"run/metrics.jsonl": holds("")},
        }.items()
    ),
    *some(
        finished(f"+ a finished run resumed: metrics.jsonl of {text[:40]}", {"run/metrics.jsonl": holds(text)}, code=1,
                 says="metrics.jsonl:1")
        for text in (RECORD % 0, RECORD % '"fast"', '{"kind": "train", "step": 1}\n', '{"kind": "x", "step": "y"}\n')
    ),
    *some(
        finished(f"+ a finished run resumed: {name} is damaged", {f"run/{name}": what}, code=1, says=name)
        for name, what in (("memory.json", cut()), ("environment.json", cut()), ("metrics.jsonl", holds("what\n")))
    ),
    *some(
        finished(f"+ what {name} of a finished run lacks is done again", {f"run/{name}": what}, says="report.html",
                 after=("run/*",))
        for name, what in (
            ("memory.json", edited(measured={"peak_bytes": "much"})),
            ("memory.json", holds("[]")),
            ("checks.json", gone),
            ("adapter", gone),
        )
    ),
]  # fmt: skip
ODD_STATES = some(
    stopped(f"+ halfbyte.json in which {name}", in_all("halfbyte.json", edited(**values)), code=(0, 1), after=RAN,
            gone=RAN)
    for name, values in (
        ("ways are text", {"ways": "two"}),
        ("there are no ways", {"ways": 0}),
        ("config is a list", {"config": []}),
        ("data is text", {"data": "x"}),
        ("window is a list", {"window": []}),
        ("the format is of the future", {"format": 99}),
    )
)  # fmt: skip


ROWS = [
    *FINISHED,
    *ODD_STATES,
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
        (
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
        0,
    ),
    *[stopped(f"28 each {name} is cut", in_all(name, cut()), says=("checkpoint-4", name)) for name in STATES],
    *[
        stopped(f"28 each {name} is a pickle", in_all(name, pickle.dumps(Pwned())), says=("checkpoint-4", name))
        for name in STATES[:3]
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
    *later(
        stopped("+ the newest may not be read", {ALL[1]: mode(0)}, code=0, says="checkpoint-4", after=RAN, gone=RAN)
    ),
    Case(
        "+ the run's folder for a checkpoint",
        f"train run.yaml {STOPPED} resume_from_checkpoint=stopped",
        says="stopped",
        fix="stopped/checkpoint-4",
        given=("stopped",),
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
