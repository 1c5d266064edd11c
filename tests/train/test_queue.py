"""The queue: grids, order, memory, and runners that are killed or meet each other."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from halfbyte.cli import main
from halfbyte.cli.queue import grid
from halfbyte.runs import queue as queues
from halfbyte.runs.queue import CPU, Queue, Runner, run_job
from halfbyte.utils.errors import ConfigError, UsageError
from halfbyte.utils.processes import Process

FREE = {CPU: 1000}

# A run without a model: notes its start, waits for a file named `go`, and ends as it is told.
RUN = textwrap.dedent("""
    import sys, time
    from pathlib import Path
    from halfbyte.runs.status import report_status
    from halfbyte.utils.errors import TrainingError
    out, end = Path(sys.argv[1]), sys.argv[2]
    with open(out.parent / "starts", "a") as file:
        file.write(out.name + "\\n")
    if end == "silent":
        sys.exit(3)
    with report_status(out) as progress:
        (out / "config.resolved.yaml").touch()
        progress.state, progress.step = "training", 5
        while end == "wait" and not (out.parent / "go").exists():
            time.sleep(0.02)
        if end == "fail":
            raise TrainingError("step 5: loss is nan", "lower it")
""")


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_QUEUE", str(tmp_path / "queue"))
    return Queue(tmp_path / "queue")


def entry(tmp_path, name, end="done", planned=400, file=""):
    command = ["-c", RUN, str(tmp_path / name), end]
    keys = {"folder": str(tmp_path), "output": str(tmp_path / name), "keys": "", "on_gpu": 0}
    return {"command": command, "planned": planned, "file": file, **keys}


def states(queue):
    return {job.id: job.state for job in queue.jobs()}


def until(condition, runner=None):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if runner is not None:
            runner.advance()
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def starts(tmp_path):
    file = tmp_path / "starts"
    return file.read_text().split() if file.exists() else []


# --- adding ----------------------------------------------------------------------------------------------------------


def test_values_with_commas_make_a_grid():
    runs = grid(["run.yaml", "learning_rate=1e-4,2e-4", "--r=8,16", "target_modules=[a,b]", "seed=3"])
    assert [point for _, point in runs] == [
        {"learning_rate": rate, "r": rank} for rate in ("1e-4", "2e-4") for rank in ("8", "16")
    ]
    assert runs[1][0] == ["run.yaml", "target_modules=[a,b]", "seed=3", "learning_rate=1e-4", "r=16"]
    for single in ("a={x: 1, y: 2}", "a='x,y'", 'a="x,y"', "a=[[1,2],[3,4]]"):
        assert grid([single]) == [([single], {})]
    for wrong in ("r=8,", "r=,", "r=8,8", "r=" + ",".join(map(str, range(65)))):
        with pytest.raises(UsageError):
            grid([wrong])


def test_jobs_are_added_all_or_none_and_a_folder_once(queue, tmp_path):
    assert queue.add([entry(tmp_path, "a"), entry(tmp_path, "b")]) == [1, 2]
    with pytest.raises(ConfigError, match="job 2"):
        queue.add([entry(tmp_path, "c"), entry(tmp_path, "b")])
    assert states(queue) == {1: "queued", 2: "queued"}


def test_jobs_are_moved_and_removed_while_they_wait(queue, tmp_path):
    queue.add([entry(tmp_path, name) for name in "abcd"])
    queue.move(4, 1)
    queue.move(1, 99)
    queue.move(3, 2)
    assert [job.id for job in queue.jobs()] == [4, 3, 2, 1]
    queue.remove(3)
    first, *_ = queue.jobs()
    assert queue.change(first, state="running")
    for act in (lambda: queue.move(4, 1), lambda: queue.remove(4), lambda: queue.remove(3), lambda: queue.move(9, 1)):
        with pytest.raises(ConfigError):
            act()
    assert [job.id for job in queue.jobs()] == [4, 2, 1]


@pytest.mark.parametrize("content", [b"no database at all, but some text", b"SQLite format 3\x00" + b"\xff" * 2000])
def test_a_file_that_is_no_queue_is_named(queue, content):
    queue.folder.mkdir()
    (queue.folder / "queue.sqlite").write_bytes(content)
    with pytest.raises(ConfigError, match="queue"):
        queue.jobs()


# --- running ---------------------------------------------------------------------------------------------------------


def test_jobs_run_in_order_and_after_a_failure(queue, tmp_path):
    names = {"a": "done", "b": "fail", "c": "silent", "d": "done"}
    queue.add([entry(tmp_path, name, end, planned=900) for name, end in names.items()])
    queues.work(queue.folder, lambda: FREE, lambda: None, poll=0.02)
    assert starts(tmp_path) == list(names)
    assert list(states(queue).values()) == ["finished", "failed", "failed", "finished"]
    errors = [job.error for job in queue.jobs()]
    assert "loss is nan" in errors[1]
    assert "exit code 3" in errors[2]
    queues.work(queue.folder, lambda: FREE, lambda: None, poll=0.02)
    assert starts(tmp_path) == list(names)  # nothing is repeated


def test_jobs_run_at_once_where_their_memory_fits(queue, tmp_path):
    used = {"a": 400, "b": 400, "c": 400}
    queue.add([entry(tmp_path, name, "wait", planned) for name, planned in used.items()])

    def free():
        running = [job for job in queue.jobs("running")]
        return {CPU: 1000 - sum(job.planned for job in running), "0": 10_000}

    runner = Runner(queue, free)
    with runner.locked():
        until(lambda: list(states(queue).values()) == ["running", "running", "queued"], runner)
        time.sleep(0.2)
        runner.advance()
        assert starts(tmp_path) == ["a", "b"]  # a GPU with room is none for a job of the CPU
        (tmp_path / "go").touch()
        until(lambda: set(states(queue).values()) == {"finished"}, runner)
    assert starts(tmp_path) == ["a", "b", "c"]


def test_a_job_whose_file_has_changed_is_held(queue, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("r: 8\n")
    queue.add([entry(tmp_path, "a", file=str(file)), entry(tmp_path, "b")])
    file.write_text("r: 16\n")
    queues.work(queue.folder, lambda: FREE, lambda: None, poll=0.02)
    assert states(queue) == {1: "held", 2: "finished"}
    assert starts(tmp_path) == ["b"]
    queue.remove(1)


def test_a_job_for_a_gpu_is_held_where_there_is_none(queue, tmp_path):
    queue.add([entry(tmp_path, "a") | {"on_gpu": 1}])
    queues.work(queue.folder, lambda: FREE, lambda: None, poll=0.02)
    assert states(queue) == {1: "held"}


def test_a_second_runner_is_refused(queue, tmp_path):
    code = (
        "import sys; from pathlib import Path; from halfbyte.runs.queue import work; work(Path(sys.argv[1]), dict, int)"
    )
    with Runner(queue, dict).locked():
        second = subprocess.run(
            [sys.executable, "-c", code, str(queue.folder)], capture_output=True, text=True, check=False
        )
    assert f"process {os.getpid()} is the runner" in second.stderr
    assert subprocess.run([sys.executable, "-c", code, str(queue.folder)], check=False).returncode == 0


def test_a_process_that_starts_late_ends_without_a_run(queue, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it ran"))
    queue.add([entry(tmp_path, "a")])
    (job,) = queue.jobs()
    queue.change(job, state="starting", attempt=1)  # and its runner is killed
    with Runner(queue, dict).locked():
        assert states(queue) == {1: "queued"}
    run_job(queue.folder, 1, 1)
    assert states(queue) == {1: "queued"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.9])
def test_a_killed_runner_loses_and_repeats_nothing(queue, tmp_path, delay):
    names = [f"run-{number}" for number in range(4)]
    queue.add([entry(tmp_path, name) for name in names])
    code = f"""
        import sys
        from pathlib import Path
        from halfbyte.runs.queue import work
        work(Path(sys.argv[1]), lambda: {FREE}, lambda: print("began", flush=True), 0.01)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(queue.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as runner:
        assert runner.stdout.readline() == b"began\n"
        time.sleep(delay)
        runner.kill()
    queues.work(queue.folder, lambda: FREE, lambda: None, poll=0.02)
    assert set(states(queue).values()) == {"finished"}
    assert sorted(starts(tmp_path)) == names


def test_a_job_whose_process_was_killed_fails_and_is_not_retried(queue, tmp_path):
    queue.add([entry(tmp_path, "a", "wait"), entry(tmp_path, "b")])
    runner = Runner(queue, lambda: {CPU: 500})
    with runner.locked():
        until(lambda: (tmp_path / "a" / "config.resolved.yaml").exists(), runner)
        (job,) = queue.jobs("running")
        assert job.process == Process.of_pid(job.process.pid)
        os.kill(job.process.pid, signal.SIGKILL)
        until(lambda: list(states(queue).values()) == ["failed", "finished"], runner)
    assert starts(tmp_path) == ["a", "b"]


# --- the commands ----------------------------------------------------------------------------------------------------


def command(*words):
    with pytest.raises(SystemExit) as end:
        main(["queue", *words])
    return end.value.code or 0


def test_the_commands_run_a_grid_to_its_end(queue, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    keys = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"), "device": "cpu"}
    keys |= {"dtype": "float32", "max_steps": 2, "max_length": 64, "r": 4, "sample_prompts": 0, "output_dir": "out"}
    (tmp_path / "run.yaml").write_text(json.dumps(keys))
    assert command("add", "run.yaml", "learning_rate=1e-3,2e-3") == 0
    assert command("add", "run.yaml", "max_steps=-3") == 1
    assert command("add", "run.yaml", "sweep={r: [4, 8]}") == 1
    assert command("add", "run.yaml", "learning_rate=1e-3,4e-3") == 1  # the first one is queued
    assert [job.planned > 0 for job in queue.jobs()] == [True, True]
    capsys.readouterr()
    assert command("run") == 0
    assert command("run") == 1
    until(lambda: not queue.jobs("queued", "starting", "running"))
    assert command("list") == 0
    shown = capsys.readouterr().out
    assert shown.count("finished") == 2
    assert "learning_rate=2e-3" in shown
    for name in ("learning_rate-1e-3", "learning_rate-2e-3"):
        assert (tmp_path / "out" / name / "adapter").is_dir()


def test_wrong_gpus_and_jobs_are_refused(queue):
    assert command("run", "--gpus", "99") == 2
    assert command("remove", "7") == 1
    assert command("move", "7", "1") == 1
    assert command("list") == 0
