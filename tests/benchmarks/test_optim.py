"""benchmarks.optim: FLOPs of Muon, the plain algorithms of the papers, and the sections at tiny sizes on a CPU."""

import re

import pytest
import torch
from torch import nn

from benchmarks import optim
from halfbyte.optim.low_rank import LowRank, LowRankOptimizer

ALL = re.compile("")


def test_flops_of_the_products():
    assert len(optim.QWEN3_06B) == 196
    assert optim.newton_schulz_flops([(2, 3)], steps=1) == 2 * (2 * 2 * 3) + 2 * 2 * 2 * 2 + 2 * (2 * 2 * 3)
    assert optim.newton_schulz_flops([(3, 2), (2, 3)]) == 10 * optim.newton_schulz_flops([(2, 3)], steps=1)


def test_muon_section():
    rows = dict(optim.muon([(6, 4), (4, 6), (6, 4)], "cpu", ALL))
    assert len(rows) == 7
    assert all(value > 0 for row in rows.values() for value in row.values())
    own = rows["halfbyte muon_8bit, bf16 weights"]
    assert own["times faster than torch"] == rows["torch.optim.Muon, bf16 weights"]["ms"] / own["ms"]
    assert [*dict(optim.muon([(6, 4)], "cpu", re.compile("8bit")))] == [
        "products by torch.bmm",
        "halfbyte muon_8bit, fp32 weights", "halfbyte muon_8bit, bf16 weights",
    ]  # fmt: skip


def test_low_rank_section():
    rows = dict(optim.low_rank([(8, 6), (6, 16)], 3, 4, "cpu", ALL))
    assert {"SVD of all matrices", "first bases of all matrices", "halfbyte apollo_mini", "plain APOLLO"} <= set(rows)
    assert all(value > 0 for row in rows.values() for value in row.values())
    galore = rows["halfbyte galore_adamw"]["state bytes per element"]
    bases, moments = 2 * 4 * (6 + 6), 2 * 2 * 4 * (8 + 16)
    steps = 4 * 2
    assert galore == (bases + moments + steps) / (8 * 6 + 6 * 16)


@pytest.mark.parametrize("kind", [optim.PlainGaLore, optim.PlainApollo])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5)])
def test_plain_algorithms_equal_halfbytes_with_the_same_bases(kind, shape):
    galore = kind is optim.PlainGaLore
    options = LowRank(3, 10, 0.25 if galore else 1.0, scaling="" if galore else "channel", random=not galore)
    first, second = (nn.Parameter(torch.ones(shape)) for _ in range(2))

    def inner(groups):
        return torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0, fused=True)

    optimizer = LowRankOptimizer([{"params": [first], "low_rank": options}], inner, lr=0.1)
    plain = kind([second], 0.1, 3)
    for step in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        first.grad, second.grad = gradient, gradient.clone()
        optimizer.step()
        if step == 0:
            (bases,) = optimizer.units[0].stacks[0].bases(0)
            plain.start([*bases.values()])
        plain.step()
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_a_plain_refresh_is_an_svd():
    gradient = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    basis = optim.PlainGaLore([], 0.1, 2).refresh(gradient)
    best = torch.linalg.svdvals(gradient)[:2].square().sum()
    torch.testing.assert_close((basis.T @ gradient.T).square().sum(), best)


def test_sections_are_chosen_by_name():
    given = optim.parser().parse_args(["--sections", "muon", "low_rank", "--only", "8bit"])
    assert given.sections == ["muon", "low_rank"]
    assert optim.parser().parse_args([]).sections == optim.SECTIONS
    assert tuple(optim.sections(given)) == optim.SECTIONS
    with pytest.raises(SystemExit):
        optim.parser().parse_args(["--sections", "other"])
