"""Killed at any moment, and a disk that is full from any write on: a clean error or none, nothing left, the same bytes.

Tried are 2 moments and one in 28 writes of a command (KILLS=100 and WRITES=28 in the environment try more and all), in
parts that processes can share (-n 14 --dist worksteal).
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.hostile.cases import Case, judge, snapshot
from tests.helpers.hostile.stage import Ended, Stage

pytestmark = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="forks, and preloads C")

KEYS = "max_steps=4 save_steps=2 save_total_limit=1 eval_split_size=2 eval_steps=2 lora_dropout=0.1"
COMMANDS = {
    "train": f"train run.yaml {KEYS} --resume",
    "merge": "merge run m",
    "export": "export run --gguf q8_0 --out x.gguf",
}
OUTPUTS = {"train": "out", "merge": "m", "export": "x.gguf"}
MEASURED = {"time", "seconds", "step_seconds", "tokens_per_second", "memory_bytes"}
MOMENTS = range(int(os.environ.get("KILLS", "2")))
SHARES = 28  # of a command's writes
WRITES = range(int(os.environ.get("WRITES", "1")))  # the shares that are tried
# What shows that a command is somewhere in the middle of writing.
SIGNS = {
    "train": "out/.lock out/metrics.jsonl out/.checkpoint-2* out/.checkpoint-2*/optimizer.pt out/checkpoint-2"
    " out/.checkpoint-4*/halfbyte.json out/checkpoint-4 out/.adapter* out/adapter out/.checks* out/README.md",
    "merge": ".m.* .m.*/config.json .m.*/model* m run/.merge* run/merge.json",
    "export": ".x.gguf.* x.gguf .x.Modelfile* x.Modelfile",
}


@pytest.fixture(scope="module")
def disk(stage, environment, base) -> "Disk":
    """Folders on a disk that can be full."""
    return Disk(stage, environment, base)


class Disk:
    """Runs commands in fresh folders, each with what a case finds and its own cache and folder of temporary files."""

    def __init__(self, stage: Stage, environment: dict[str, str], base: Path):
        self.stage, self.environment, self.base = stage, environment, base
        self._whole: dict[str, tuple[object, float]] = {}

    @contextmanager
    def folder(self, *given: str) -> Iterator[Path]:
        room = Path(tempfile.mkdtemp(prefix="disk-"))
        shutil.copytree(self.base, room / "case", ignore=lambda *_: {"run", "stopped"} - set(given))
        for name in ("scratch", "tmp", "cache"):
            (room / name).mkdir()
        (room / "cache" / "native").symlink_to(Path(self.environment["HALFBYTE_CACHE"]) / "native")
        yield room / "case"
        shutil.rmtree(room)

    def run(self, folder: Path, command: str, *, full: int | None = None, **wishes) -> Ended:
        room = folder.parent
        theirs = self.environment | {"TMPDIR": str(room / "tmp"), "HALFBYTE_CACHE": str(room / "cache")}
        if full is not None:
            theirs |= {"FULL_AFTER": str(full), "FULL_UNDER": str(room)}
        scratch = Path(tempfile.mkdtemp(prefix="disk-streams-"))
        ended = self.stage.run(command.split(), folder, scratch, environment=theirs, limit=120, **wishes)
        shutil.rmtree(scratch)
        return ended

    def whole(self, name: str) -> tuple[object, float]:
        """What an undisturbed command writes, and the seconds it takes."""
        if name not in self._whole:
            with self.folder("run") as folder:
                began = time.monotonic()
                ended = self.run(folder, COMMANDS[name])
                assert ended.code == 0, ended.err.decode()
                self._whole[name] = written(folder, name), time.monotonic() - began
        return self._whole[name]


def written(folder: Path, name: str) -> object:
    """All that a command wrote and that does not depend on time or place."""
    if name == "train":
        config = folder / "out" / "adapter" / "adapter_config.json"
        config.write_text(config.read_text().replace(str(folder), "FOLDER"))
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        records = [{key: value for key, value in line.items() if key not in MEASURED} for line in lines]
        adapter = snapshot(folder / "out" / "adapter")
        del adapter["README.md"]  # measured times
        return records, adapter, sorted(os.listdir(folder / "out"))
    if name == "merge":
        return snapshot(folder / "m")
    return {file: digest for file, digest in snapshot(folder).items() if file.startswith("x.")}


def check_rerun(disk: Disk, folder: Path, name: str, when: str) -> None:
    """The next command ends as if nothing had happened, and nothing hidden is left."""
    done = name != "train" and (folder / OUTPUTS[name]).exists()  # all of it, and not to be overwritten
    ended = disk.run(folder, COMMANDS[name])
    assert ended.code == (1 if done else 0), f"{when}: {ended.err.decode()}"
    assert written(folder, name) == disk.whole(name)[0], when
    hidden = [path for path in folder.rglob(".*") if path.is_file() or path.is_dir()]
    assert not hidden, f"{when}: {hidden}"


# --- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_killed(disk, name, moment):
    chance, seconds = random.Random(f"{name} {moment}"), disk.whole(name)[1]
    when = chance.choice([chance.uniform(0.0, 1.1 * seconds), chance.choice(SIGNS[name].split())])
    with disk.folder("run") as folder:
        ended = disk.run(folder, COMMANDS[name], signal="SIGKILL", when=when)
        left = [path.name for path in folder.rglob(".*")]
        check_rerun(disk, folder, name, f"killed at {when} (exit {ended.code}, left {left})")


# --- a full disk -----------------------------------------------------------------------------------------------------


def fill(disk: Disk, name: str, full: int, seen: set[frozenset[str]]) -> bool:
    """Whether the command failed on a disk that takes `full` writes; it has said so, and the next one is whole.

    Args:
        seen: names of files that were left before: the next command is tried once for each set of them.
    """
    with disk.folder("run") as folder:
        before = snapshot(folder)
        ended = disk.run(folder, COMMANDS[name], full=full)
        if ended.code == 0:
            assert written(folder, name) == disk.whole(name)[0]
            return False
        after = snapshot(folder)
        allowed = {"train": ("out", "out/"), "merge": ("m", "m/")}.get(name, ())  # m is whole: what failed came later
        case = Case("", COMMANDS[name], says="the disk is full", fix="free some space", seconds=60, memory=4096)
        others = ("wrote ", "says 'Loading", "prints '\\r'")
        wrong = [each for each in judge(case, ended, before, after, []) if not each.startswith(others)]
        wrong += [f"wrote {each}" for each in after if each not in before and not each.startswith(allowed)]
        assert not wrong, f"after {full} writes: {wrong}\n{ended.err.decode()}"
        if (left := frozenset(after)) not in seen:
            seen.add(left)
            check_rerun(disk, folder, name, f"full after {full} writes")
        return True


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("share", WRITES)
@pytest.mark.parametrize("name", COMMANDS)
def test_full_from_every_write_on(disk, name, share):
    full, fails, wrong, seen = share, True, [], set()
    while fails:
        try:
            fails = fill(disk, name, full, seen)
        except AssertionError as error:  # one failure does not hide the others
            wrong.append(str(error))
        full += SHARES
    assert not wrong, "\n\n".join(wrong)
