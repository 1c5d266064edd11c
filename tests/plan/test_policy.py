"""Activation levels: costs of each level, the fastest mix within a budget, and figures of the 8B."""

import functools
import itertools

import pytest

from halfbyte.plan.costs import LayerCost, extra_seconds
from halfbyte.plan.policy import LEVELS, OFFLOADED, Choice, choose, describe_levels, mixes, peak
from halfbyte.plan.replay import LayerBytes
from tests.helpers.planned_steps import layer_of

GIB = 2**30
GRADIENTS = 5 * 2**20  # of a layer
MOMENTS = {"initial": 0, "head": 384 * 2**20, "table_gradients": 0, "accumulated": False}


def peak_of(shape: LayerCost, levels, **moments) -> int:
    """Peak bytes of a model of equal layers at these levels."""
    gradients = [GRADIENTS] * len(levels)
    found = peak([shape.bytes(level) for level in levels], gradients=gradients, **MOMENTS | moments)
    return found + max(map(shape.host_bytes, levels))


def fastest(shape: LayerCost, layers: int, budget: float, host: int = 100 * GIB, pool: int = 0) -> Choice:
    """The choice for CUDA graphs that need `pool` bytes more."""

    def need(choice: Choice) -> int:
        return peak_of(shape, choice.levels) + choice.graphs * pool

    return choose(layers, int(budget), need, usual=shape, largest=shape, host=host)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Phi3"])
def test_each_level_saves_less_and_takes_longer(family):
    """On the device, and in host memory."""
    shape = layer_of(family, 4, 2048)

    def kept(level):
        return shape.bytes(level).saved

    for levels, saved in (
        (("keep", "recompute", "recompute_mlp", "checkpoint"), kept),
        (("offload_kept", "offload_attention", "offload"), shape.host_bytes),
    ):
        assert all(saved(a) > saved(b) for a, b in itertools.pairwise(levels))
        assert all(shape.extra_seconds(a) < shape.extra_seconds(b) for a, b in itertools.pairwise(levels))
    for level, on_device in OFFLOADED.items():
        assert not kept(level)
        assert shape.host_bytes(level) == kept(on_device)
        assert shape.extra_seconds(level) > shape.extra_seconds(on_device)
    assert set(LEVELS) - set(OFFLOADED) == {level for level in LEVELS if kept(level)}


def test_offload_is_limited_by_the_host_link(layer_8b):
    """At 50 GB/s, copying the activations of one 4×2048 layer takes as long as 2.3 layers' forward."""
    assert layer_8b.offload_seconds(("keep", "keep", "offload_kept") * 10) == 0
    assert layer_8b.offload_seconds(("offload_attention",) * 30) == 0
    both = layer_8b.offload_seconds(("offload_kept", "keep") * 15)
    assert both > 0
    assert extra_seconds(layer_8b, ("offload_kept", "keep") * 15) == pytest.approx(
        15 * layer_8b.extra_seconds("offload_kept") + both
    )


@pytest.mark.slow
def test_small_models_stay_in_cuda_graphs():
    """Qwen3-0.6B at 2×2048: Python launches take longer than recomputing everything."""
    small = layer_of("Qwen3", 2, 2048)
    assert extra_seconds(small, ("offload",) * 28) > extra_seconds(small, ("checkpoint",) * 28)
    budget = peak_of(small, ("checkpoint",) * 28)
    choice = fastest(small, 28, budget)
    assert choice.graphs
    assert set(choice.levels).isdisjoint(OFFLOADED)
    eager = fastest(small, 28, budget, pool=1)
    assert not eager.graphs  # no room for a pool
    assert extra_seconds(small, eager.levels, graphs=False) > extra_seconds(small, choice.levels)


def test_8b_peak_at_keep_matches_the_measurement(layer_8b):
    """benchmarks.step at 4×2048: 34.1 GiB, including 6.0 of weights, adapters and optimizer state."""
    before = 148 * 2**20  # the first layer's input, and the adapters in 16 bits
    assert peak_of(layer_8b, ("keep",) * 32, initial=before) / GIB == pytest.approx(34.1 - 6.0, rel=0.02)


def test_choose_returns_the_fastest_mix_that_fits(layer_8b):
    for budget in (30 * GIB, 10 * GIB, 3 * GIB):
        best = fastest(layer_8b, 6, budget, host=GIB).levels
        time = extra_seconds(layer_8b, best)
        assert peak_of(layer_8b, best) <= budget
        for levels in mixes(6):
            if peak_of(layer_8b, levels) <= budget and sum(map(layer_8b.host_bytes, levels)) <= GIB:
                assert time <= extra_seconds(layer_8b, levels)


@pytest.mark.slow
def test_smaller_budgets_take_longer(layer_8b):
    chosen = [fastest(layer_8b, 32, gib * GIB).levels for gib in (40, 20, 10, 4, 2.5)]
    times = [extra_seconds(layer_8b, levels) for levels in chosen]
    assert chosen[0] == ("keep",) * 32
    assert all(a < b for a, b in itertools.pairwise(times))
    assert describe_levels(("keep",) * 2 + ("offload",) * 3) == "2 layers keep, 3 layers offload"


def test_choose_returns_the_smallest_mix_if_none_fits(layer_8b):
    least = fastest(layer_8b, 8, 1).levels
    assert peak_of(layer_8b, least) == min(peak_of(layer_8b, levels) for levels in mixes(8))


@pytest.mark.slow
def test_bytes_of_long_rows_lie_on_a_line(monkeypatch):
    """What is drawn from two shorter rows is what the row itself allocates."""
    from halfbyte.plan import shapes

    drawn = layer_of("Llama", 1, 81_920)
    monkeypatch.setattr(shapes, "LONG", 10**9)
    whole = layer_of.__wrapped__("Llama", 1, 81_920)
    for level in LEVELS:
        found, expected = (each.bytes(level) for each in (drawn, whole))
        assert found.saved == pytest.approx(expected.saved, rel=0.001), level
        highest = [max(each.forward, each.backward) for each in (found, expected)]
        assert highest[0] == pytest.approx(highest[1], rel=0.01), level


def test_peak_of_two_layers_by_hand():
    """Two layers by hand: forward of the second, the head, backward of the second and of the first."""
    layers = [LayerBytes(10, 1, 2), LayerBytes(20, 7, 3)]
    found = functools.partial(peak, layers, initial=5, gradients=[1, 2], table_gradients=4)
    assert found(head=0, accumulated=True) == 5 + 10 + 20 + 7 + 7
    assert found(head=9, accumulated=True) == 5 + 10 + 20 + 9 + 7
    assert found(head=9, accumulated=False) == max(5 + 30 + 9, 5 + 30 + 3 + 4 + 2, 5 + 10 + 2 + 7)
    assert found(head=0, accumulated=False) == 5 + 30 + 3 + 4 + 2


@pytest.mark.slow
def test_largest_batch_decides_bytes_and_usual_batch_time(layer_8b):
    """Long sequences hide Python's launches, so all activations are saved; short ones are faster in CUDA graphs, whose
    pool must fit next to the longest."""
    short = layer_of("Llama", 1, 256)
    budget = peak_of(layer_8b, ("keep",) * 4)

    def need(choice: Choice) -> int:
        return peak_of(layer_8b, choice.levels) + choice.graphs * 4 * layer_8b.stream

    long, usual = (choose(4, budget, need, usual=u, largest=layer_8b, host=100 * GIB) for u in (layer_8b, short))
    assert long == Choice(("keep",) * 4, False)
    assert usual.graphs
    assert "keep" not in usual.levels[:1]
    assert need(usual) <= budget
