"""A run under torchrun, on one host or on two agents as two hosts, equals that of `halfbyte train`."""

import os
import subprocess
import sys

import pytest

from halfbyte.config import dump_given
from tests.helpers.rank_runs import Left, configured, run, write_place
from tests.helpers.ranks import free_port

pytestmark = [pytest.mark.dist, pytest.mark.slow]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    return run(None, place, tmp_path_factory.mktemp("alone") / "out", gradient_accumulation_steps=4)


def started(launcher, place, folder, **keys):
    """Start a launcher's process for `halfbyte train`, on one of several hosts or the only one."""
    file = folder / "run.yaml"
    given = {"gradient_accumulation_steps": 2, "parallel": {"data": 2}} | keys
    file.write_text(dump_given(configured(place, folder / "out", **given)))
    command = [*launcher, "-m", "halfbyte", "train", str(file)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_torchrun(place, alone, tmp_path):
    process = started([*TORCHRUN, "--nproc-per-node", "2"], place, tmp_path)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    Left(tmp_path / "out").same_as(alone)


def test_two_agents_as_two_hosts(place, alone, tmp_path):
    meeting = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    agents = [started([*TORCHRUN, *meeting, "--node-rank", str(rank)], place, tmp_path) for rank in range(2)]
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    Left(tmp_path / "out").same_as(alone)
