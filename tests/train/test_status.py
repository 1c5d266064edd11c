"""status.json: what a run is doing, how it ended, and whether its process is still there."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from halfbyte.config import load_config
from halfbyte.runs import status as statuses
from halfbyte.runs.status import LOST_AFTER, Progress, read_status, report_status, run_folders, stop_processes
from halfbyte.train.loop import TrainingLoop
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError, TrainingError
from halfbyte.utils.processes import Process, Stopped
from tests.helpers.sft_runs import keys, run


def document(folder):
    return json.loads((folder / "status.json").read_text())


def written(folder, **changed):
    """A status.json as this process writes it while it trains, with changes."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {"state": "training", "error": "", "step": 3, "total_steps": 9, "host": "here", "launcher": None}
    values |= {**Process.current()._asdict(), "heartbeat": time.time(), "uptime": time.monotonic()}
    (folder / "status.json").write_text(json.dumps(values | changed))
    return folder


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_passes_through_its_states_and_ends_finished(place, tmp_path, monkeypatch):
    states = []

    def noted(progress, name, value):
        if name == "state" and states[-1:] != [value]:
            states.append(value)
        object.__setattr__(progress, name, value)

    monkeypatch.setattr(Progress, "__setattr__", noted)
    run(place, tmp_path / "out")
    assert states[:4] == ["preparing", "loading", "training", "evaluating"]
    assert states[-3:] == ["evaluating", "saving", "finished"]
    assert states.count("saving") == 4  # three checkpoints and the adapter
    status = read_status(tmp_path / "out")
    assert (status.state, status.step, status.total_steps, status.error) == ("finished", 6, 6, "")
    assert status.process == Process.current()

    again = train(load_config(None, keys(place, tmp_path / "out")), resume=True)
    assert read_status(again.output_dir).state == "finished"


def test_a_failed_run_names_its_error_and_a_resumed_one_counts_its_steps(place, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        inner = TrainingLoop.train_step

        def broken(loop, *arguments):
            if loop.state.global_step == 3:
                raise TrainingError("step 4: loss is broken", "lower it")
            return (yield from inner(loop, *arguments))

        patched.setattr(TrainingLoop, "train_step", broken)
        with pytest.raises(TrainingError):
            run(place, tmp_path / "out")
    status = read_status(tmp_path / "out")
    assert (status.state, status.step, status.error) == ("failed", 3, "step 4: loss is broken")

    before = document(tmp_path / "out")
    with pytest.raises(ConfigError):  # refused while it is prepared: the end of the run before stays
        train(load_config(None, keys(place, tmp_path / "out", learning_rate=1e-3)), resume=True)
    assert document(tmp_path / "out") == before
    train(load_config(None, keys(place, tmp_path / "out")), resume=True)
    assert read_status(tmp_path / "out").step == 6


def test_a_run_without_a_step_leaves_no_status(place, tmp_path, monkeypatch):
    def broken(*_, **__):
        assert document(tmp_path / "out")["state"] == "preparing"
        raise MemoryError("no memory")

    monkeypatch.setattr("halfbyte.train.setup.load_model", broken)
    with pytest.raises(TrainingError):
        run(place, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_each_adapter_of_a_run_has_a_status(place, tmp_path, monkeypatch):
    inner = TrainingLoop.train_step

    def diverging(loop, *arguments):
        if loop.config.r == 8 and loop.state.global_step == 2:
            raise TrainingError("step 3: loss is broken", "lower it")
        return (yield from inner(loop, *arguments))

    monkeypatch.setattr(TrainingLoop, "train_step", diverging)
    with pytest.raises(TrainingError):
        run(place, tmp_path / "out", sweep={"r": [4, 8]})
    folders = list(run_folders(tmp_path))
    assert folders == [tmp_path / "out" / "adapters" / name for name in ("r-4", "r-8")]
    ends = [(status.state, status.step) for status in map(read_status, folders)]
    assert ends == [("finished", 6), ("failed", 2)]


# --- the thread ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (Stopped(signal.SIGTERM), "stopped", ""),
        (KeyboardInterrupt(), "stopped", ""),
        (TrainingError("the disk is full", "free some"), "failed", "the disk is full"),
        (ZeroDivisionError("\x1b[2Jdivision"), "failed", "ZeroDivisionError: \\x1b[2Jdivision"),
    ],
)
def test_the_first_of_nested_ends_counts(error, state, message):
    progress = Progress()
    progress.state = "training"
    with pytest.raises(type(error)), progress.ends(), progress.ends(), progress.during("saving"):
        raise error
    assert (progress.state, progress.error) == (state, message)
    with progress.ends():
        pass
    assert progress.state == state


def test_a_closed_generator_leaves_the_end_to_an_outer_context():
    progress = Progress()

    def steps():
        with progress.ends():
            yield

    inner = steps()
    next(inner)
    inner.close()
    assert progress.state == "preparing"


def test_many_changes_are_few_writes(tmp_path, monkeypatch):
    contents = []
    monkeypatch.setattr(statuses, "INTERVAL", 0.1)
    monkeypatch.setattr(statuses, "_write", lambda file, content: contents.append(content))
    (tmp_path / "config.resolved.yaml").touch()
    with report_status(tmp_path) as progress:
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            progress.step += 1
            time.sleep(0.001)
    assert 3 <= len(contents) <= 12
    assert json.loads(contents[-1])["state"] == "finished"
    assert json.loads(contents[-1])["step"] == progress.step


def test_a_run_that_does_not_change_has_a_heartbeat(tmp_path, monkeypatch):
    monkeypatch.setattr(statuses, "INTERVAL", 0.02)
    monkeypatch.setattr(statuses, "HEARTBEAT", 0.2)
    contents = []
    monkeypatch.setattr(statuses, "_write", lambda file, content: contents.append(json.loads(content)["heartbeat"]))
    with report_status(tmp_path):
        time.sleep(0.7)
    assert 3 <= len(contents) <= 6
    assert contents == sorted(contents)


def test_readers_never_see_half_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(statuses, "INTERVAL", 0.0)
    with report_status(tmp_path) as progress:
        while not (tmp_path / "status.json").exists():
            time.sleep(0.001)
        for number in range(300):
            progress.step = number
            assert read_status(tmp_path).state == "preparing"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_vanishes_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(statuses, "INTERVAL", 0.01)
    with report_status(tmp_path / "out") as progress:
        shutil.rmtree(tmp_path / "out")
        progress.step = 1
        time.sleep(0.1)
        assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out").exists()
    assert not notices.notices_so_far()


def test_a_full_disk_is_said_once_and_does_not_stop_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(statuses, "INTERVAL", 0.01)
    monkeypatch.setattr(statuses.os, "replace", full)
    with report_status(tmp_path) as progress:
        for number in range(5):
            progress.step = number
            time.sleep(0.02)
    assert len([key for key in notices.notices_so_far() if key == "status"]) == 1
    assert not list(tmp_path.iterdir())


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"state": "training", "st',
        b"\x00\xff\xfe binary",
        b"[1, 2]",
        b"null",
        b'{"state": "training"}',
        b"9" * (2 << 20),
        b"[" * 200_000,
    ],
    ids=["empty", "half", "binary", "list", "null", "other", "huge", "deep"],
)
def test_a_file_that_is_no_status_is_named(tmp_path, content):
    (tmp_path / "status.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"status\.json"):
        read_status(tmp_path)


@pytest.mark.parametrize(
    "changed",
    [
        {"state": "dancing"},
        {"pid": "x"},
        {"step": None},
        {"step": [1]},
        {"heartbeat": float("nan")},
        {"uptime": float("inf")},
        {"launcher": 3},
        {"machine": None, "pid": 1e400},
    ],
)
def test_wrong_values_are_named(tmp_path, changed):
    with pytest.raises(ConfigError, match=r"status\.json"):
        read_status(written(tmp_path, **changed))


def test_a_run_is_lost_when_its_process_is(tmp_path):
    assert read_status(tmp_path) is None
    assert read_status(written(tmp_path)).state == "training"
    ended = subprocess.Popen(["true"])
    identity = Process.of_pid(ended.pid)._asdict()
    ended.wait()
    assert read_status(written(tmp_path, **identity)).state == "lost"
    recycled = {"since": Process.current().since + 1}
    assert read_status(written(tmp_path, **recycled)).state == "lost"
    for state in ("finished", "stopped", "failed"):
        assert read_status(written(tmp_path, state=state, **recycled)).state == state


def test_a_run_is_lost_when_its_heartbeats_stop_whatever_the_date_is(tmp_path):
    old = time.monotonic() - LOST_AFTER - 5
    assert read_status(written(tmp_path, uptime=old)).state == "lost"
    assert read_status(written(tmp_path, uptime=old, heartbeat=time.time() + 3600)).state == "lost"
    for shift in (-3600, 3600):  # the clock was set after the last heartbeat
        assert read_status(written(tmp_path, heartbeat=time.time() + shift)).state == "training"


def test_on_another_machine_only_the_date_counts(tmp_path):
    elsewhere = {"machine": "01234567", "host": "far"}
    assert read_status(written(tmp_path, **elsewhere, uptime=0.0)).state == "training"
    status = read_status(written(tmp_path, **elsewhere, heartbeat=time.time() - LOST_AFTER - 5))
    assert status.state == "lost"
    assert "far" in status.error


def test_runs_are_searched_without_following_links_or_reading_checkpoints(tmp_path):
    written(tmp_path / "a" / "b" / "run")
    written(tmp_path / "a" / "b" / "run" / "checkpoint-2")
    written(tmp_path / "a" / "sweep" / "adapters" / "r-4")
    (tmp_path / "a" / "sweep" / "config.resolved.yaml").touch()
    written(tmp_path / ".hidden" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    expected = [tmp_path / "a" / "b" / "run", tmp_path / "a" / "sweep" / "adapters" / "r-4"]
    assert list(run_folders(tmp_path)) == expected
    assert not list(run_folders(tmp_path / "missing"))


# --- stopping --------------------------------------------------------------------------------------------------------


def test_stopping_refuses_other_machines_recycled_pids_and_ended_runs(tmp_path):
    def processes(**changed):
        return stop_processes([read_status(written(tmp_path, **changed))])

    assert processes() == [Process.current()]
    assert processes(uptime=0.0) == [Process.current()]  # hangs
    for changed in ({"machine": "01234567"}, {"since": 1}, {"state": "finished"}, {"state": "failed", "error": "x"}):
        with pytest.raises(ConfigError):
            processes(**changed)


def test_the_launcher_of_several_processes_gets_the_signal(tmp_path):
    parent = Process.of_pid(os.getppid())
    status = read_status(written(tmp_path, launcher=parent._asdict()))
    assert stop_processes([status]) == [parent]
    status = read_status(written(tmp_path, launcher=parent._replace(since=1)._asdict()))
    assert stop_processes([status]) == [Process.current()]


def test_a_signal_reaches_the_process_and_no_later_one_with_its_pid():
    sleeping = subprocess.Popen(["sleep", "60"])
    process = Process.of_pid(sleeping.pid)
    for other in (process._replace(since=process.since + 1), process._replace(machine="01234567")):
        with pytest.raises(ProcessLookupError):
            other.send_signal(signal.SIGKILL)
    assert sleeping.poll() is None
    process.send_signal(signal.SIGTERM)
    assert sleeping.wait(10) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        process.send_signal(signal.SIGTERM)


STUBBORN = """
    from pathlib import Path
    import sys, time
    from halfbyte.runs.status import report_status
    from halfbyte.utils.processes import request_on_signals
    out = Path(sys.argv[1])
    with report_status(out) as progress, request_on_signals(lambda number: None) as request:
        (out / "config.resolved.yaml").touch()
        progress.state, progress.step, progress.total_steps = "training", 3, 9
        while sys.argv[2] == "stubborn" or not request.number:
            time.sleep(0.01)
        raise KeyboardInterrupt
"""


def started(out, kind):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STUBBORN), str(out), kind], stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (out / "status.json").exists() and document(out)["state"] == "training":
            return process
        time.sleep(0.05)
    raise AssertionError(process.communicate())


@pytest.mark.parametrize(("kind", "options"), [("willing", []), ("stubborn", ["--now"])])
def test_stop_waits_until_the_run_has_ended(tmp_path, kind, options, capsys):
    from halfbyte.cli import main

    process = started(tmp_path / "out", kind)
    reaper = threading.Thread(target=process.wait)
    reaper.start()
    with pytest.raises(SystemExit) as end:
        main(["stop", str(tmp_path / "out"), *options])
    assert not end.value.code
    assert not Process.of_pid(process.pid).is_running or process.poll() is not None
    reaper.join()
    assert read_status(tmp_path / "out").state == "stopped"
    assert "stopped after step 3 of 9" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(["stop", str(tmp_path / "out")])
    assert end.value.code == 1


@pytest.mark.slow
def test_a_killed_run_is_lost_and_a_stopped_one_continues(place, tmp_path):
    """With the command: SIGKILL, `--resume`, `halfbyte stop`, and `--resume` to the end."""
    from halfbyte.cli.watch import stop_run

    given = keys(place, tmp_path / "out", max_steps=400, save_steps=100)
    command = [sys.executable, "-m", "halfbyte", "train", *(f"{key}={value}" for key, value in given.items())]

    def training_after(step):
        process = subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            status = read_status(tmp_path / "out")
            if status and status.process.pid == process.pid and status.state == "training" and status.step > step:
                return process
            time.sleep(0.05)
        raise AssertionError(f"it ended with {process.poll()}")

    killed = training_after(0)
    killed.kill()
    killed.wait()
    assert read_status(tmp_path / "out").state == "lost"
    stopped = training_after(0)
    reaper = threading.Thread(target=stopped.wait)
    reaper.start()
    stop_run(tmp_path / "out", now=False)
    reaper.join()
    assert stopped.returncode == 128 + signal.SIGTERM
    status = read_status(tmp_path / "out")
    assert status.state == "stopped"
    assert (tmp_path / "out" / f"checkpoint-{status.step}" / "manifest.json").is_file()
    assert subprocess.run([*command, "--resume"], stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert read_status(tmp_path / "out").state == "finished"


def test_ps_lists_running_runs_first_and_names_unreadable_files(tmp_path, capsys):
    from halfbyte.cli import main

    written(tmp_path / "done", state="finished", step=9, heartbeat=time.time() - 7200)
    written(tmp_path / "failed", state="failed", error="step 4: loss is nan\nsecond line \x1b[2J")
    written(tmp_path / "now")
    written(tmp_path / "lost", since=1)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "status.json").write_text('{"state": "tr')
    with pytest.raises(SystemExit) as end:
        main(["ps", str(tmp_path)])
    assert not end.value.code
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    lines = shown.splitlines()
    assert len(lines) == 6
    assert str(tmp_path / "now") in lines[1]
    assert "3/9" in lines[1]
    assert "2 h ago" in next(line for line in lines if "finished" in line)
    assert "unreadable" in lines[-1]
    with pytest.raises(SystemExit) as end:
        main(["ps", str(tmp_path / "missing")])
    assert end.value.code == 1
