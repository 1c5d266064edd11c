"""Boards and runners that are SIGKILLed again and again while a queue of real runs is worked off."""

import contextlib
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from halfbyte.cli import main
from halfbyte.cli.queue import start_runner
from halfbyte.runs.queue import Queue
from halfbyte.utils.errors import ConfigError

KILLS, NAMES = 20, ("a", "b", "c")
LIMIT = 600.0  # seconds for all runs


def train(*words):
    return subprocess.run([sys.executable, "-m", "halfbyte", *words], check=True, capture_output=True)


def tensors_of(folder):
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def start_board(root):
    """Start a board that has answered one request."""
    words = [sys.executable, "-m", "halfbyte", "board", str(root), "--port", "0"]
    board = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    address = re.search(r"127\.0\.0\.1:(\d+)/\?token=(\S+)", board.stdout.readline())
    connection = http.client.HTTPConnection("127.0.0.1", int(address[1]), timeout=60)
    connection.request("GET", "/", headers={"cookie": f"halfbyte-board-{address[1]}={address[2]}"})
    assert connection.getresponse().status == 200
    connection.close()
    return board


@pytest.mark.slow
def test_killed_boards_and_runners_neither_change_nor_repeat_a_run(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_QUEUE", str(tmp_path / "state" / "queue"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    keys = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"), "device": "cpu"}
    keys |= {"dtype": "float32", "max_steps": 300, "max_length": 64, "r": 4, "sample_prompts": 0}
    (tmp_path / "run.yaml").write_text(json.dumps(keys))
    train("train", "run.yaml", "output_dir=alone")
    for name in NAMES:
        with pytest.raises(SystemExit) as end:
            main(["queue", "add", "run.yaml", f"output_dir=runs/{name}"])
        assert not end.value.code
    queue = Queue(tmp_path / "state" / "queue")
    moments = random.Random(7)
    kills, runner, board, begin = {"runner": 0, "board": 0}, 0, None, time.monotonic()
    while any(job.state in ("queued", "starting", "running") for job in queue.jobs()) or sum(kills.values()) < KILLS:
        assert time.monotonic() - begin < LIMIT, queue.jobs()
        with contextlib.suppress(ConfigError):  # the runner lives
            runner = start_runner(queue.folder, [])
        if sum(kills.values()) == KILLS:
            time.sleep(0.2)
            continue
        if board is None:
            board = start_board(tmp_path)
        time.sleep(moments.uniform(0, 1))
        if moments.random() < 0.5:
            with contextlib.suppress(ProcessLookupError):  # it has ended with the queue
                os.kill(runner, signal.SIGKILL)
                os.waitpid(runner, 0)
                kills["runner"] += 1
        else:
            board.kill()
            board.communicate()
            board = None
            kills["board"] += 1
    if board is not None:
        board.kill()
        board.communicate()
    jobs = queue.jobs()
    assert [(job.state, job.error) for job in jobs] == [("finished", "")] * len(NAMES)
    assert len(jobs) == len(NAMES)
    for name in NAMES:
        assert tensors_of(tmp_path / "runs" / name) == tensors_of(tmp_path / "alone")
        records = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        steps = [record["step"] for record in map(json.loads, records) if record["kind"] == "train"]
        assert steps == sorted(set(steps))  # no run began twice
        assert steps[-1] == keys["max_steps"]
    assert min(kills.values()) > 0
