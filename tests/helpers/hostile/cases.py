"""One hostile case: what is there, what is run, and what must be said and left. The rows are in `rows_*.py`.

**To add a case**, append a `Case` to the `ROWS` of its subject's file:

    Case("4 seed below zero", "check run.yaml seed=-1", says="seed", fix="0 to"),

The number is that of `shared/docs/hostile-input.md`; a case that is not on that list has `+`. Everything else has a
default that suits a refused command: exit code 1, no file changed, at most 2 seconds, more on a slow machine
(`Stage.slowness`). What is asserted without being asked: `judge`.

In the folder where the command runs are `model/`, `data.jsonl` (17 rows of messages), `prompts.jsonl` and `run.yaml`
(2 steps into `out`); with `given=("run",)` also `run/`, a finished run of 4 steps with checkpoint-2 and checkpoint-4,
and with `given=("stopped",)` what a run that was killed left behind: train run.yaml with `STOPPED`.
`files` adds to them or replaces:

    files={"data.jsonl": '{"prompt": 1}\n',                # text, or bytes
           "model/config.json": edited(hidden_size="64"),  # any function of the path; this one edits JSON
           "link.jsonl": Link("nowhere"), "dir": None,     # a symbolic link; an empty folder
           "model/model.safetensors": gone}

Several commands that must all answer alike: a tuple of them; each has a folder of its own.

To run one:  python -m pytest tests/hostile -q -k "seed"    To see what it says:  HOSTILE_SHOW=1 ... -s -k "seed"
"""

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 2.0, 1024  # a case's most, the imports not counted; MiB
GOOD_CHECK = 0.6  # seconds of `check run.yaml` on a machine where the limits of seconds hold as they are written
Maker = Callable[[Path], object]


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: number in hostile-input.md (or +) and words.
        run: the command line after `halfbyte`, as a shell reads it; or a list; or a tuple of such, each a test.
        says: part of the error line, or several; of stdout where the code is 0.
        fix: part of the fix, or several; None where none is asked.
        code: exit code; several where the case leaves it to halfbyte whether it works or is refused.
        files: path to content; see the module.
        given: what else is there: "run".
        after: globs of files that may and must be new or changed; `*` matches slashes too.
        gone: globs of files that may have been removed.
        never: what must be in neither stream.
        first: a command that is run before, which must succeed.
        seconds: the most it may take on a machine where `check run.yaml` takes GOOD_CHECK; twice that where it writes.
        slow: left to `make test-all`, as what it shows is shown by others or takes long.
        wishes: see `Stage.run`.
    """

    name: str
    run: str | list[str] | tuple[str, ...]
    says: str | tuple[str, ...] = ()
    fix: str | tuple[str, ...] | None = ""
    code: int | tuple[int, ...] = 1
    files: dict[str, "str | bytes | Maker | None"] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    first: str = ""
    slow: bool = False
    seconds: float = SECONDS
    memory: float = MEMORY
    environment: dict[str, str | None] = field(default_factory=dict)
    wishes: dict[str, Any] = field(default_factory=dict)

    @property
    def most_seconds(self) -> float:
        return self.seconds * (1 + bool(self.after))  # a command that writes trains or merges a whole model

    def commands(self) -> list[list[str]]:
        runs = self.run if isinstance(self.run, tuple) else (self.run,)
        return [shlex.split(run) if isinstance(run, str) else run for run in runs]


def later(*cases: Case) -> list[Case]:
    """Left to `make test-all`."""
    return [replace(case, slow=True) for case in cases]


# Contents of `files`.


@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str

    def __call__(self, path: Path) -> None:
        path.symlink_to(self.target)


def gone(path: Path) -> None:
    """Not there."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def edited(*removed: str, **values: Any) -> Maker:
    """A JSON file with other values for these keys, and without the `removed`."""

    def edit(path: Path) -> None:
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: content[key] for key in content if key not in removed} | values))

    return edit


def cut(keep: float = 0.5) -> Maker:
    """A file of which the first part is there."""
    return lambda path: os.truncate(path, int(path.stat().st_size * keep))


def mode(bits: int) -> Maker:
    return lambda path: path.chmod(bits)


def fifo(path: Path) -> None:
    """A named pipe that nobody writes to."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def tensors(change: Callable[[dict], object]) -> Maker:
    """A safetensors file whose mapping from name to tensor was changed in place."""

    def rewrite(path: Path) -> None:
        from safetensors.torch import load_file, save_file

        content = load_file(path)
        change(content)
        save_file(content, path, {"format": "pt"})

    return rewrite


def place(case: Case, folder: Path, base: Path) -> None:
    """Fill `folder` with what the case finds there."""
    for name in ("model", *case.given):
        shutil.copytree(base / name, folder / name, symlinks=True)
    for path in base.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    for name, content in case.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def snapshot(folder: Path) -> dict[str, str]:
    """Each path below `folder`, with a digest of what it is."""
    found = {}
    for at, folders, names in os.walk(folder):
        for name in folders + names:
            path = Path(at, name)
            if path.is_symlink():
                what = f"link to {os.readlink(path)}"
            elif path.is_file():
                try:
                    what = hashlib.sha256(path.read_bytes()).hexdigest()
                except OSError:  # as root without leave to read
                    what = str(path.stat().st_size)
            else:
                what = "folder" if path.is_dir() else "special"
            found[str(path.relative_to(folder))] = what
    return found


# What may be printed: no control characters but line ends and tabs, and no C1; colours only where a terminal is.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\x1b\[\?25[lh]|\r")
# Other people's words.
FOREIGN = (
    "Traceback (most recent call last)",
    "bug in halfbyte",
    "Loading weights",
    "Failed to load CPU gemm",
    "UserWarning",
    "FutureWarning",
    "DeprecationWarning",
    "warnings.warn",
    "newly initialized",
    "Token indices sequence length",
    "weights_only=False",
    "Retrying in",
    "Exception ignored",
    "[Errno",
    "It is recommended",
    "resource_tracker",
)


def _many(words: str | tuple[str, ...]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else words


def judge(case: Case, ended: Any, before: dict[str, str], after: dict[str, str], leftovers: list[str]) -> list[str]:
    """Everything that is wrong with what a command did; nothing for a good one."""
    wrong: list[str] = []
    out, err = (stream.decode("utf-8", "backslashreplace") for stream in (ended.out, ended.err))
    if ended.timed_out:
        wrong.append("did not end")
    codes = (case.code,) if isinstance(case.code, int) else case.code
    if ended.code not in codes and not ended.timed_out:
        wrong.append(f"exit code {ended.code}, not {' or '.join(map(str, codes))}")
    wrong += [f"says {words!r}" for words in (*FOREIGN, *case.never) if words in out + err]
    plain = COLOURS.sub("", out) if "columns" in case.wishes else out
    wrong += [f"prints {found!r}" for found in sorted(set(CONTROLS.findall(plain + err)))]
    if ended.code == 0:
        wrong += [f"does not say {words!r}" for words in _many(case.says) if words not in plain + err]
    elif ended.code in (1, 2) and 2 not in case.wishes.get("closed", ()):
        wrong += _judge_error(case, plain + err if "columns" in case.wishes else err)
    if ended.seconds > case.most_seconds:
        wrong.append(f"took {ended.seconds:.1f} s")
    if ended.memory > case.memory:
        wrong.append(f"took {ended.memory:.0f} MiB")
    new = sorted(name for name in after if before.get(name) != after[name])
    lost = sorted(name for name in before if name not in after)
    expected = case.after if ended.code in codes and ended.code == codes[0] else ()
    for what, names, globs in (("wrote", new, expected), ("removed", lost, case.gone)):
        wrong += [f"{what} {name}" for name in names if not any(fnmatch(name, glob) for glob in globs)]
    wrong += [f"wrote no {glob}" for glob in expected if not any(fnmatch(name, glob) for name in new)]
    hidden = [name for name in new if any(part.startswith(".") for part in Path(name).parts)]
    hidden = [name for name in hidden if not any(fnmatch(name, glob) for glob in case.after if "/." in f"/{glob}")]
    return wrong + [f"left {name}" for name in [*hidden, *leftovers]]


def _judge_error(case: Case, err: str) -> list[str]:
    """An error is what is said last: its line, the problems if there are several, and a fix for each."""
    if len(re.findall(r"^error: ", err, re.MULTILINE)) != 1:
        return [f"{len(re.findall(r'^error: ', err, re.MULTILINE))} error lines"]
    lines = ("\n" + err).partition("\nerror: ")[2].splitlines()
    fix = "\n".join(line for line in lines if line.startswith("  fix: "))
    said = "\n".join(line for line in lines if not line.startswith("  fix: "))
    wrong = [f"error line without {words!r}" for words in _many(case.says) if words not in said]
    if len(said) > 2000:
        wrong.append(f"an error of {len(said)} characters")
    if case.fix is not None and not fix and not re.search(r" must |, not |, but ", said):  # which say it themselves
        wrong.append("no fix")
    return wrong + [f"fix without {words!r}" for words in _many(case.fix or "") if words not in fix]
