"""SIGKILL of a random rank at a random moment: all ranks end, no partial checkpoint is used, and resuming is exact."""

import json
import os
import random
import subprocess
import sys
import time

import psutil
import pytest
import torch

from halfbyte.config import dump_given
from halfbyte.runs import checkpoints
from tests.helpers.rank_runs import Left, configured, run, write_place

pytestmark = [pytest.mark.dist, pytest.mark.slow]
STEPS = {"num_train_epochs": 6, "save_steps": 2, "save_total_limit": 3, "eval_steps": 10, "sample_prompts": 0}
ROWS = 4  # micro-batches of a step, in all ranks


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", gradient_accumulation_steps=ROWS, **STEPS)


def keys_on(ranks):
    return {"gradient_accumulation_steps": ROWS // ranks, "parallel": {"data": ranks}, **STEPS}


def start(place, output, ranks, **more):
    """Start `halfbyte train` on `ranks` ranks in a process of its own."""
    file = output.with_suffix(".yaml")
    file.write_text(dump_given(configured(place, output, **keys_on(ranks), **more)))
    said = open(output.with_suffix(".txt"), "w")  # noqa: SIM115 - for as long as the process runs
    command = [sys.executable, "-P", "-m", "halfbyte", "train", str(file)]
    return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})


def kill_one(process, output, ranks, chance):
    """Kill a rank shortly after a random step; returns the seconds until all ended, if `process` does."""
    metrics, steps, until = output / "metrics.jsonl", chance.randrange(3, 20), time.monotonic() + 120
    while time.monotonic() < until and not (metrics.exists() and metrics.read_text().count('"train"') >= steps):
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    family = [child for child in psutil.Process(process.pid).children() if "RANK" in child.environ()]
    assert len(family) == ranks
    time.sleep(chance.random() * 0.1)
    chance.choice(family).kill()
    return family, time.monotonic()


def killed(place, output, ranks, seed):
    """Run until a rank is killed; all processes end within 30 seconds, with a failing exit code."""
    process = start(place, output, ranks)
    family, when = kill_one(process, output, ranks, random.Random(seed))
    assert process.wait(30) == 1
    assert time.monotonic() - when < 30
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    last = output.with_suffix(".txt").read_text().strip().splitlines()
    assert "SIGKILL" in last[-2]
    assert "--resume" in last[-1]
    whole = checkpoints.checkpoints(output)
    assert all(checkpoints.damage(path, contents=True) is None for path in whole)


def test_command_restarts_after_sigkill_of_a_rank(place, alone, tmp_path):
    output = tmp_path / "out"
    process = start(place, output, 2, max_restarts=1)
    kill_one(process, output, 2, random.Random(time.time_ns()))
    assert process.wait(120) == 0
    assert "checkpoint (1" in output.with_suffix(".txt").read_text()
    Left(output).same_as(alone, loss=1e-5, weights=1e-4)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("seed", range(1))
def test_resume_is_exact_after_sigkill_at_random_moments(place, alone, tmp_path, ranks, seed):
    output = tmp_path / "out"
    killed(place, output, ranks, seed)
    fewer = ranks if seed % 2 else ranks // 2
    keys = keys_on(ranks) | {"parallel": {"data": fewer} if fewer > 1 else "auto"}
    if fewer == 1:
        run(None, place, output, resume=True, **keys).same_as(alone, loss=1e-5, weights=1e-4)
        return
    file = output.with_suffix(".yaml")
    file.write_text(dump_given(configured(place, output, **keys)))
    program = [sys.executable, "-P", "-m", "halfbyte", "train", str(file), "--resume"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    Left(output).same_as(alone, loss=1e-5, weights=1e-4)
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("seed", range(10))
def test_sigkill_of_a_rank_on_two_gpus(place, tmp_path, seed):
    """The run restarts on both GPUs or is resumed on one; its losses equal those of an undisturbed run."""
    keys = {"device": "cuda", "dtype": "auto", "deterministic": True}
    calm, output = tmp_path / "calm", tmp_path / "out"
    assert start(place, calm, 2, **keys).wait(300) == 0
    process = start(place, output, 2, **keys, max_restarts=seed % 2)
    family, when = kill_one(process, output, 2, random.Random(seed))
    if seed % 2:
        assert process.wait(300) == 0
    else:
        assert process.wait(30) == 1
        assert time.monotonic() - when < 30
        file = output.with_suffix(".yaml")
        file.write_text(dump_given(configured(place, output, **keys_on(2) | keys | {"parallel": {"data": 1}})))
        command = [sys.executable, "-P", "-m", "halfbyte", "train", str(file), "--resume"]
        assert subprocess.run(command, timeout=300, check=False).returncode == 0
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    Left(output).same_as(Left(calm), loss=1e-3, weights=2e-2)
