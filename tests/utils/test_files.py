"""Cache folder and atomic writes: all or nothing, with leftovers of ended processes removed."""

import contextlib
import errno
import os
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from halfbyte.train import checkpoint
from halfbyte.utils import files, notices
from halfbyte.utils.errors import ConfigError, TrainingError
from halfbyte.utils.files import cache_folder
from halfbyte.utils.processes import Process, Stopped


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HALFBYTE_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"HALFBYTE_CACHE": "~/own"}, "/home/me/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/halfbyte"),
        ({"XDG_CACHE_HOME": "~/xdg"}, "/home/me/xdg/halfbyte"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/halfbyte"),
        ({}, "/home/me/.cache/halfbyte"),
    ],
)
def test_cache_folder(monkeypatch, environment, folder):
    for name in ("HALFBYTE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | environment).items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_cache_folder_without_home(monkeypatch):
    for name in ("HALFBYTE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def refuse(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", refuse)
    with pytest.raises(ConfigError, match="HALFBYTE_CACHE"):
        cache_folder()


# --- writing ---------------------------------------------------------------------------------------------------------


def dead_process() -> Process:
    """Return the identity of a process that has just ended."""
    child = os.fork()
    if not child:
        time.sleep(60)
    ended = Process.of_pid(child)
    os.kill(child, signal.SIGKILL)
    assert Process.of_pid(child).since == ended.since  # asking again changes nothing
    os.waitpid(child, 0)
    return ended


def left_by(process, target, kind=files.NEW):
    """Return the temporary path that `process` would have left for `target`."""
    return target.with_name(f".{target.name}.halfbyte-{'-'.join(map(str, process))}-0.{kind}")


def test_only_leftovers_of_ended_processes_are_removed(tmp_path):
    ended, target = dead_process(), tmp_path / "m.gguf"
    assert (ended.is_running, Process.current().is_running, Process.of_pid(os.getppid()).is_running) == (
        False,
        True,
        True,
    )
    reused = Process.current()._replace(since=1)
    gone = [left_by(ended, target), left_by(ended, tmp_path / "another"), left_by(reused, target)]
    others = Process("00000000", 1, 1)
    stays = [
        files.temporary_path(target),
        left_by(others, target),
        tmp_path / ".m.gguf.x",
        tmp_path / "m.gguf.halfbyte",
    ]
    old = left_by(others, tmp_path / "old")
    for path in (*gone, *stays, old):
        path.mkdir()
        (path / "weights").write_text("half")
    for path in (*old.iterdir(), old):
        os.utime(path, (1e9, 1e9))
    with files.new_file(target) as aside:
        aside.write_text("new")
    assert sorted(tmp_path.iterdir()) == sorted([target, *stays])
    assert f"process {ended.pid}" in notices.notices_so_far()[f"leftover {gone[0]}"]


def test_kill_between_renames_loses_nothing(tmp_path):
    target = tmp_path / "m"
    former, ended = left_by(dead_process(), target, files.FORMER), dead_process()
    for path, text in ((former, "former"), (left_by(ended, target), "new")):
        path.mkdir()
        (path / "weights").write_text(text)
    files.clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (target / "weights").read_text() == "former"
    assert f"leftover {former}" in notices.notices_so_far()


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt, Stopped(signal.SIGTERM), ValueError("no"), OSError("no file named")]
)
def test_interrupted_write_keeps_the_previous_version(tmp_path, stop):
    for make, target in ((files.new_file, tmp_path / "f"), (files.new_directory, tmp_path / "d")):
        with make(target) as aside:
            (aside / "x" if aside.is_dir() else aside).write_text("former")
        with contextlib.suppress(BaseException), make(target) as aside:
            (aside / "x" if aside.is_dir() else aside).write_text("new")
            raise stop
        with pytest.raises(KeyboardInterrupt), make(tmp_path / "a" / "b" / "c"):
            raise KeyboardInterrupt
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "f"]
    assert (tmp_path / "f").read_text() == (tmp_path / "d" / "x").read_text() == "former"


def test_failed_rename_restores_the_previous_directory(tmp_path, monkeypatch):
    target = files.write_text(tmp_path / "d" / "x", "former").parent
    replace = os.replace

    def refuse(source, place):
        if Path(source).name.endswith(files.NEW):
            raise OSError(errno.ENOSPC, "", str(source))
        return replace(source, place)

    monkeypatch.setattr(files.os, "replace", refuse)
    with pytest.raises(TrainingError), files.new_directory(target) as aside:
        os.link(target / "x", aside / "y")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert (target / "x").read_text() == "former"


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o027, 0o640, 0o750), (0o002, 0o664, 0o775)])
def test_modes_follow_the_umask(tmp_path, umask, file, folder):
    before = os.umask(umask)
    try:
        with files.new_directory(tmp_path / "d") as aside:
            save_file({"a": torch.zeros(1)}, aside / "a.safetensors")  # in 0600
        with files.new_file(tmp_path / "f") as aside:
            aside.chmod(0o600)
        files.write_text(tmp_path / "t", "\ud800")
    finally:
        os.umask(before)
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "d", *(tmp_path / "d").iterdir(), tmp_path / "f")]
    assert modes == [folder, file, file]
    assert (tmp_path / "t").stat().st_mode & 0o777 == file
    assert (tmp_path / "t").read_text() == "\\ud800"


def libraries(folder):
    """Return functions of libraries that write 80 kB each."""
    tokenizer = Tokenizer(models.BPE(vocab={f"token {number}": number for number in range(3000)}, merges=[]))
    return {
        "safetensors": lambda: save_file({"a": torch.zeros(20000)}, folder / "a.safetensors"),
        "tokenizers": lambda: tokenizer.save(str(folder / "tokenizer.json")),
        "torch": lambda: checkpoint._save({"a": torch.zeros(20000)}, folder / "a.pt"),
        "json": lambda: files.write_json(folder / "a.json", "0" * 80000),
        "numpy": lambda: np.zeros(20000).tofile(folder / "a.npy"),
        "python": lambda: (folder / "a.txt").write_text("0" * 80000),
    }


@pytest.mark.parametrize("library", ["safetensors", "tokenizers", "torch", "json", "numpy", "python"])
def test_write_errors_of_libraries_are_translated(tmp_path, library):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(TrainingError) as refused, files.new_directory(tmp_path / "d") as aside:
            libraries(aside)[library]()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(tmp_path / "d") in refused.value.message
    assert "halfbyte-" not in refused.value.message
    assert refused.value.message.endswith("the file system takes no file of this size")
    assert "ulimit -f" in refused.value.fix
    assert not list(tmp_path.iterdir())


def test_read_errors_are_not_reported_as_write_errors(tmp_path):
    with pytest.raises(FileNotFoundError), files.new_file(tmp_path / "f"):
        (tmp_path / "base" / "weights").read_bytes()
    with pytest.raises(SafetensorError), files.new_file(tmp_path / "f"):
        raise SafetensorError("No such file or directory (os error 2)")


@pytest.mark.parametrize(
    ("place", "said", "fix"),
    [
        ("file/below", "file/below: a file", "name a folder that you may write to"),
        ("n" * 250, "the name is too long", "choose a shorter name"),
        ("/proc/m", "no file can be made there", "name a folder that you may write to"),
        ("/sys/m", "", "name a folder that you may write to"),
    ],
)
def test_unwritable_paths_are_reported(tmp_path, place, said, fix):
    (tmp_path / "file").touch()
    for write in (lambda path: files.write_text(path, ""), lambda path: files.new_directory(path).__enter__()):
        with pytest.raises(TrainingError, match=said) as refused:
            write(tmp_path / place)
        assert refused.value.fix == fix
    files.check_space(tmp_path / place, 0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
