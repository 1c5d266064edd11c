"""Tasks on two ranks equal one process: losses, weights, and numbers of evaluations over the rows of all ranks."""

import pytest

from tests.helpers.rank_runs import run, write_place
from tests.helpers.task_runs import TASKS, rows_of, write

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = write_place(tmp_path_factory.mktemp("place"))
    for task in TASKS:
        write(folder / f"{task}.jsonl", rows_of(task))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "shard"])
@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_equal_one_process(place, two, tmp_path, task, axis):
    """15 held-out rows: a rank has one less than the other."""
    keys = {"dataset": str(place / f"{task}.jsonl"), "sample_prompts": 0, "method": task, "eval_split_size": 15}
    keys |= {"similarity_scale": 1.0} if task == "embedding" else {}  # its loss would become 0
    one = run(None, place, tmp_path / "one", gradient_accumulation_steps=4, **keys)
    both = run(two, place, tmp_path / "two", gradient_accumulation_steps=2, parallel={axis: 2}, **keys)
    both.same_as(one, loss=5e-6, weights=1e-4)
    for mine, theirs in zip(both.evaluated, one.evaluated, strict=True):
        names = mine.keys() & {"loss", "f1", "ndcg_at_10", "recall_at_1", "recall_at_10"}
        assert {name: mine[name] for name in names} == pytest.approx({name: theirs[name] for name in names}, rel=1e-4)
        assert names > {"loss"}
