"""The launcher starts ranks and handles failures and signals."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from halfbyte.config import Parallel, RunConfig
from halfbyte.parallel.launch import launcher as launching
from halfbyte.parallel.launch.launcher import launch, layout_to_launch, notice_idle_gpus, smaller_layout
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError, DataError, TrainingError
from halfbyte.utils.processes import Process

pytestmark = pytest.mark.dist
PROGRAMS = str(Path(__file__).parents[1] / "helpers" / "rank_programs.py")


def ranks(case, folder, count=2, **keys):
    """Run a case of `rank_programs` on `n` ranks."""
    began = time.monotonic()
    try:
        launch(lambda layout: ["-P", PROGRAMS, case, str(folder), str(layout)], Parallel(data=count), **keys)
    finally:
        assert time.monotonic() - began < 30


# --- layouts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def wanted(monkeypatch, gpus, **keys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    return layout_to_launch(RunConfig(model_name_or_path="m", dataset="d", **keys)).size


@pytest.mark.parametrize(
    ("gpus", "keys", "count"),
    [
        (0, {}, 1),
        (1, {}, 1),
        (4, {}, 4),
        (4, {"device": "cuda"}, 4),
        (4, {"device": "cuda:0"}, 1),
        (4, {"device": "cpu"}, 1),
        (4, {"parallel": {"data": 1}}, 1),
        (4, {"parallel": {"shard": 2}}, 2),
        (0, {"parallel": {"shard": 2}}, 2),
        (4, {"parallel": {"data": 8}, "device": "cpu"}, 8),
    ],
)
def test_one_process_per_device(monkeypatch, gpus, keys, count):
    assert wanted(monkeypatch, gpus, **keys) == count


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")])
def test_ranks_do_not_launch_ranks(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    config = RunConfig(model_name_or_path="m", dataset="d", device="cpu", parallel={"data": 2})
    assert layout_to_launch(config).size == 1


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"parallel: \{data: 8\}.*8 GPUs.*2"):
        wanted(monkeypatch, 2, parallel={"data": 8})
    with pytest.raises(ConfigError, match=r"parallel: \{data: 1000000\}.*1,000,000 processes.*CPU"):
        wanted(monkeypatch, 0, parallel={"data": 1000000})


@pytest.mark.parametrize(
    ("layout", "most", "smaller"),
    [
        ({"data": 4}, 4, {"data": 4}),
        ({"data": 4}, 3, {"data": 2}),
        ({"data": 3}, 2, {}),
        ({"data": 2, "shard": 4}, 7, {"shard": 4}),
        ({"shard": 4, "tensor": 2}, 6, {"shard": 2, "tensor": 2}),
    ],
)
def test_smaller_layout_keeps_the_batch(layout, most, smaller):
    assert smaller_layout(Parallel(**layout), most) == Parallel(**smaller)


@pytest.mark.parametrize(
    ("gpus", "keys"), [(1, {}), (3, {"device": "cuda:1"}), (3, {"parallel": {"data": 1}}), (3, {})]
)
def test_idle_gpus_are_logged(monkeypatch, gpus, keys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    notice_idle_gpus(RunConfig(model_name_or_path="m", dataset="d", **keys))
    said = notices.notices_so_far().get("idle_gpus", "")
    assert ("2 more GPUs" in said) == (gpus == 3 and not keys)


# --- failure ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_error_of_all_ranks_is_raised_once_without_restart(tmp_path, monkeypatch):
    tried, inner = [], launching._attempt
    monkeypatch.setattr(launching, "_attempt", lambda *given: tried.append(given) or inner(*given))
    with pytest.raises(DataError) as failed:
        ranks("all_alike", tmp_path, max_restarts=3)
    assert len(tried) == 1
    assert (failed.value.message, failed.value.fix) == ("there are no rows", "add some")


@pytest.mark.slow
def test_root_cause_is_raised(tmp_path):
    with pytest.raises(TrainingError, match="process 1:") as failed:
        ranks("one_raises", tmp_path)
    assert "TrainingError:" in failed.value.__notes__[0]


def test_death_of_a_rank_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "GRACE", 1.0)
    with pytest.raises(TrainingError, match=r"process 1.*2.*SIGKILL") as failed:
        ranks("one_is_killed", tmp_path)
    assert "memory" in failed.value.fix
    for rank in range(2):
        assert Process.of_pid(int((tmp_path / f"joined-{rank}").read_text())).since == 0  # of one that has ended


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_restart_after_a_failure(tmp_path):
    ranks("killed_once", tmp_path, max_restarts=1)
    assert {path.name for path in tmp_path.iterdir() if path.name[0] == "1"} == {"1-0", "1-1"}


@pytest.mark.slow
def test_restart_on_remaining_devices(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    ranks("killed_once", tmp_path, count=4, max_restarts=1)
    again = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name[0] == "1"}
    assert again == {"1-0": "{data: 2}", "1-1": "{data: 2}"}


# --- being asked to leave ---------------------------------------------------------------------------------------------

PARENT = """
import sys
from halfbyte.utils import notices
from halfbyte.config import Parallel
from halfbyte.parallel.launch.launcher import launch
from halfbyte.utils.processes import raise_on_signals

with raise_on_signals():
    launch(lambda layout: sys.argv[1:], Parallel(data=2))
"""


@pytest.fixture
def parent(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", PARENT, PROGRAMS, "wait_for_signal", str(tmp_path)])
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.05)
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()


@pytest.mark.slow
def test_signal_is_forwarded_to_every_rank_once(parent, tmp_path):
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(20) == 143
    assert [(tmp_path / f"heard-{rank}").read_text() for rank in range(2)] == ["1", "1"]
