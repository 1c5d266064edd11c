"""A failure of one rank ends the run on all ranks and is reported once."""

import json
import time
from pathlib import Path

import pytest

from halfbyte.config import Parallel, dump_given
from halfbyte.parallel.launch.launcher import launch
from halfbyte.train.run import train
from halfbyte.utils.errors import HalfbyteError
from tests.helpers.rank_runs import configured, write_place

pytestmark = pytest.mark.dist
PROGRAMS = str(Path(__file__).parents[1] / "helpers" / "rank_programs.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("memory", "(?s)^process 1:"),
        ("nan", "^step 3:.*nan.*nan"),
        pytest.param("bug", "^process 1:.*KeyError:", marks=pytest.mark.slow),
    ],
)
def test_failure_of_one_rank_is_reported_once(place, tmp_path, kind, said):
    keys = {"gradient_accumulation_steps": 1, "parallel": {"data": 2}, "sample_prompts": 0}
    (tmp_path / "run.yaml").write_text(dump_given(configured(place, tmp_path / "out", **keys)))
    began = time.monotonic()
    with pytest.raises(HalfbyteError, match=said) as failed:
        launch(lambda _: ["-P", PROGRAMS, "breaks_on_one", str(tmp_path), kind], Parallel(data=2))
    assert time.monotonic() - began < 90
    if kind == "memory":
        assert "activation_checkpointing" in str(failed.value)  # what the plan advises
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def one_is_slow(mesh, place, output):
    from unittest import mock

    from halfbyte.train.loop import TrainingLoop

    inner = TrainingLoop.forward

    def slow(loop, *arguments):
        time.sleep(0.1 * mesh.rank)
        return inner(loop, *arguments)

    keys = {"gradient_accumulation_steps": 1, "parallel": {"data": 2}, "sample_prompts": 0, "max_steps": 3}
    with mock.patch.object(TrainingLoop, "forward", slow):
        train(configured(place, output, **keys))


@pytest.mark.slow
def test_slow_rank_is_reported(place, tmp_path, two):
    two.run(one_is_slow, place, tmp_path / "out")
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    assert len(trained) == 3
    for record in trained:
        assert 0 < record["fastest_seconds"] < record["slowest_seconds"] < record["step_seconds"]
        assert record["slowest_seconds"] > 0.1
