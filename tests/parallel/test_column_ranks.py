"""A column of arrays that the tests declare (`tests/data/test_column_from_outside.py`), on several ranks."""

import pytest
import torch

from halfbyte.batch import COLUMNS, SYNCED_SHAPE, Column
from halfbyte.parallel.context import context_shard
from halfbyte.parallel.padding import pad_to_longest
from tests.helpers.pixel_columns import declare, run, write_pixel_place
from tests.helpers.rank_runs import Left

pytestmark = pytest.mark.dist


def case_trains(mesh, place, output, keys):
    with pytest.MonkeyPatch.context() as patches:
        declare(patches)
        run(place, output, parallel={"data": mesh.size}, **keys)


def case_pads(mesh):
    """Return the entries of this rank's micro-batch after ranks have padded theirs to one shape."""
    with pytest.MonkeyPatch.context() as patches:
        declare(patches)
        documents = 2 + mesh.coordinate("shard")
        batch = {"input_ids": torch.ones(1, 8 * documents, dtype=torch.int64)}
        batch |= {"labels": batch["input_ids"], "pixels": torch.ones(documents, 2, 3)}
        (synced,) = pad_to_longest(mesh, [batch])
        return synced["pixels"], synced["input_ids"].shape, synced[SYNCED_SHAPE]


@pytest.mark.slow
def test_two_ranks_train_as_one_process(two, tmp_path, monkeypatch):
    declare(monkeypatch)
    place = write_pixel_place(tmp_path)
    keys = {"packing": True, "max_length": 64, "max_steps": 3, "sample_prompts": 2, "eval_split_size": 4}
    run(place, tmp_path / "one", per_device_train_batch_size=4, **keys)
    two.run(case_trains, place, tmp_path / "two", keys | {"per_device_train_batch_size": 2})
    Left(tmp_path / "two").same_as(Left(tmp_path / "one"))


def test_two_ranks_pad_to_one_number_of_entries(two):
    first, second = two.run(case_pads, layout={"shard": 2})
    assert first[1:] == second[1:]
    assert first[0].shape == second[0].shape == (3, 2, 3)
    assert first[0].sum(dim=(1, 2)).tolist() == [6, 6, 0]


def test_context_parallelism_splits_tokens_and_no_arrays(two):
    """Even an array whose first sizes are those of the tokens is no column of tokens."""
    assert two.run(case_splits, layout={"context": 2}) == [((1, 4), (1, 8))] * 2


def case_splits(mesh):
    with pytest.MonkeyPatch.context() as patches:
        patches.setitem(COLUMNS, "boxes", Column("boxes", per="document"))
        ids = torch.ones(1, 8, dtype=torch.int64)
        shard = context_shard({"input_ids": ids, "labels": ids, "boxes": torch.ones(1, 8)}, mesh)
        return tuple(shard["input_ids"].shape), tuple(shard["boxes"].shape)
