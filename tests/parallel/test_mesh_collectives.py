"""Collectives of a mesh of several ranks."""

import pytest
import torch
import torch.distributed as dist

from halfbyte.config import Parallel
from halfbyte.mesh.mesh import AXES, TOKEN_AXES
from halfbyte.utils.errors import ConfigError

pytestmark = pytest.mark.dist


def verbs(mesh):
    counted = torch.tensor([1.0, mesh.rank])
    return {
        "sum": mesh.sum(mesh.rank + 1),
        "float": mesh.sum(0.5),
        "tensor": mesh.sum(counted),
        "in place": counted,
        "max": mesh.max(mesh.rank),
        "same": mesh.all_equal({"rows": 3}),
        "other": mesh.all_equal(mesh.rank),
        "main": mesh.from_main(f"of {mesh.rank}"),
        "first": mesh.local_first(lambda: mesh.rank),
        "every": mesh.gather_ints([mesh.rank, 2**48 + 1]),
    }


def test_collectives_of_two_ranks(two):
    for rank, found in enumerate(two.run(verbs)):
        assert (found["sum"], found["float"], found["max"]) == (3, 1.0, 1)
        assert type(found["sum"]) is int
        assert found["tensor"].tolist() == found["in place"].tolist() == [2.0, 1.0]
        assert (found["same"], found["other"]) == (True, False)
        assert found["main"] == "of 0"
        assert found["first"] == rank
        assert found["every"] == [[0, 2**48 + 1], [1, 2**48 + 1]]


def places(mesh):
    along = {axis: mesh.sum(1 << mesh.rank, (axis,)) for axis in AXES}
    return {
        **along,
        "tokens": mesh.sum(1 << mesh.rank, TOKEN_AXES),
        "place": [mesh.coordinate(axis) for axis in AXES],
        "torch": [dist.get_rank(mesh.group(axis)) if mesh.degree(axis) > 1 else 0 for axis in AXES],
        "both": (mesh.coordinate("data", "tensor"), mesh.degree("data", "tensor")),
    }


def test_axes_of_a_mesh(four):
    """Ranks are bits of the coordinates: tensor-parallel neighbours are 0 and 1, 2 and 3."""
    found = four.run(places, layout={"data": 2, "tensor": 2})
    assert [each["tensor"] for each in found] == [0b0011, 0b0011, 0b1100, 0b1100]
    assert [each["data"] for each in found] == [0b0101, 0b1010, 0b0101, 0b1010]
    assert [each["tokens"] for each in found] == [each["data"] for each in found]
    assert [each["context"] for each in found] == [1, 2, 4, 8]
    assert [each["both"] for each in found] == [(rank, 4) for rank in range(4)]
    for each in found:
        assert each["place"] == each["torch"]


def one_raises(mesh):
    with pytest.raises(ZeroDivisionError):
        mesh.local_first(lambda: 1 / 0)


def test_local_first_raises_on_all_ranks(two):
    two.run(one_raises)


def wrong_layout(mesh):
    with pytest.raises(ConfigError, match=r"parallel: \{shard: 3\}.*3 processes.*2 were"):
        mesh.with_layout(Parallel(shard=3))


def test_layout_of_another_size_is_refused(two):
    two.run(wrong_layout)
