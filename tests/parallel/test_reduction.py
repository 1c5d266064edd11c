"""Gradient reduction and clipping."""

import pytest
import torch
from torch import nn

from halfbyte.mesh import reduction
from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.mesh.reduction import sum_gradients

pytestmark = pytest.mark.dist


def gradients(mesh, bucket):
    """Return parameters with a gradient on all ranks, on rank 0 only, on none, and in another dtype."""
    reduction.BUCKET = bucket
    both, first, none = (nn.Parameter(torch.zeros(3, size)) for size in (5, 7, 2))
    half = nn.Parameter(torch.zeros(11, dtype=torch.bfloat16))
    both.grad = torch.arange(15.0).view(3, 5) * (mesh.rank + 1)
    kept = both.grad
    if mesh.is_main:
        first.grad = torch.ones(3, 7)
    half.grad = torch.full((11,), 1.0 + mesh.rank, dtype=torch.bfloat16)
    here = torch.tensor([1.0, 10.0])
    sums = sum_gradients(mesh, [both, first, none, half], here)
    assert both.grad is kept  # a graph writes there
    assert here.tolist() == [1.0, 10.0]
    return both.grad, first.grad, none.grad, half.grad, sums


@pytest.mark.parametrize("bucket", [1, 64, 2**20])
def test_gradients_are_summed(two, bucket):
    for both, first, none, half, sums in two.run(gradients, bucket):
        assert both.equal(torch.arange(15.0).view(3, 5) * 3)
        assert first.equal(torch.ones(3, 7))
        assert none is None
        assert half.equal(torch.full((11,), 3.0, dtype=torch.bfloat16))
        assert sums.tolist() == [2.0, 20.0]


def test_reduction_of_one_process_is_the_identity():
    sums = torch.ones(2)
    assert sum_gradients(SINGLE_PROCESS, [nn.Parameter(torch.ones(1))], sums) is sums


def cut(mesh):
    """Return a weight [4, 3] sharded along tensor, a replicated one with partial gradients, and a stage's own."""
    torch.manual_seed(0)
    full = {name: torch.randn(2, 4, 3) for name in ("cut", "whole", "stage")}  # [stage, ...]
    stage, place = mesh.coordinate("pipeline"), mesh.coordinate("tensor")
    rows = slice(2 * place, 2 * place + 2)
    parameters = {"cut": nn.Parameter(torch.zeros(2, 3)), "whole": nn.Parameter(torch.zeros(4, 3))}
    setattr(parameters["cut"], reduction.SHARDED_ALONG, ("tensor",))
    parameters["cut"].grad = full["cut"][stage][rows].clone()
    parameters["whole"].grad = full["whole"][stage] * (0.25 if place else 0.75)
    if stage:
        parameters["stage"] = nn.Parameter(torch.zeros(4, 3))
        parameters["stage"].grad = full["stage"][stage] * 0.5
    sums = sum_gradients(mesh, list(parameters.values()), torch.tensor([5.0 * stage]))
    norm = reduction.clip_gradients(mesh, list(parameters.values()), 1.0)
    expected = torch.stack(
        [full["cut"][0], full["cut"][1], full["whole"][0], full["whole"][1], full["stage"][1]]
    ).norm()
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(parameters["cut"].grad, full["cut"][stage][rows] / expected)
    torch.testing.assert_close(parameters["whole"].grad, full["whole"][stage] / expected)
    return sums.tolist()


def test_reduction_with_shards_and_stages(four):
    assert four.run(cut, layout={"pipeline": 2, "tensor": 2}) == [[5.0]] * 4
