"""The planner: levels in order, the fastest mix within a budget, and the figures of the 8B target."""

import itertools

import pytest

from halfbyte.plan.policy import FUSED, LEVELS, OFFLOADED, Choice, LayerShape, choose, cost, in_words, mixes, peak

GIB = 2**30
LLAMA_8B = {"hidden": 4096, "inner": 14336, "queries": 4096, "keys": 1024, "heads": 32, "rank": 16}
SHORT = LayerShape(tokens=8192, length=2048, **LLAMA_8B)
LONG = LayerShape(tokens=368_640, length=368_640, **LLAMA_8B)
MOMENTS = {"loss": 384 * 2**20, "gradients": 160 * 2**20, "accumulated": False}


def fastest(shape: LayerShape, layers: int, budget: float, host: int = 100 * GIB, beside: int = 0) -> Choice:
    """The choice where graphs take `beside` bytes more."""

    def need(choice: Choice) -> int:
        return peak(shape, choice.levels, **MOMENTS) + choice.graphs * beside

    return choose(layers, int(budget), need, usual=shape, largest=shape, host=host)


@pytest.mark.parametrize("traits", sorted(set(FUSED.values())))
def test_each_level_keeps_less_and_takes_longer(traits):
    """On the device, and likewise in host memory."""
    shape = LayerShape(tokens=8192, length=2048, **LLAMA_8B, traits=traits)
    for levels, kept in (
        (("keep", "recompute", "recompute_mlp", "checkpoint"), shape.saved),
        (("offload_kept", "offload_attention", "offload"), shape.on_host),
    ):
        assert all(kept(a) > kept(b) for a, b in itertools.pairwise(levels))
        assert all(shape.seconds(a) < shape.seconds(b) for a, b in itertools.pairwise(levels))
    for level, on_device in OFFLOADED.items():
        assert not shape.saved(level)
        assert shape.on_host(level) == shape.saved(on_device)
        assert shape.seconds(level) > shape.seconds(on_device)
    assert set(LEVELS) - set(OFFLOADED) == {level for level in LEVELS if shape.saved(level)}


def test_copies_to_the_host_wait_for_the_link():
    """50 GB/s carry what one layer of 4×2048 keeps in the time of 2.3 layers' forward."""
    assert SHORT.waiting(("keep", "keep", "offload_kept") * 10) == 0
    assert SHORT.waiting(("offload_attention",) * 30) == 0
    both = SHORT.waiting(("offload_kept", "keep") * 15)
    assert both > 0
    assert cost(SHORT, ("offload_kept", "keep") * 15) == pytest.approx(15 * SHORT.seconds("offload_kept") + both)


def test_small_models_stay_in_cuda_graphs():
    """Qwen3-0.6B at 2×2048: launching it from Python takes longer than computing all of it again."""
    small = LayerShape(
        tokens=4096,
        length=2048,
        hidden=1024,
        inner=3072,
        queries=2048,
        keys=1024,
        heads=16,
        rank=16,
        traits=("qk_norm",),
    )
    assert cost(small, ("offload",) * 28) > cost(small, ("checkpoint",) * 28)
    budget = peak(small, ("checkpoint",) * 28, **MOMENTS)
    choice = fastest(small, 28, budget)
    assert choice.graphs
    assert set(choice.levels).isdisjoint(OFFLOADED)
    eager = fastest(small, 28, budget, beside=1)
    assert not eager.graphs  # no room for a pool
    assert cost(small, eager.levels, graphs=False) > cost(small, choice.levels)


def test_products_in_fp8_leave_copies_less_time():
    fp8 = LayerShape(tokens=8192, length=2048, recipe="fp8-hybrid", **LLAMA_8B)
    assert fp8.seconds("checkpoint") < SHORT.seconds("checkpoint")
    assert fp8.waiting(("offload_attention",) * 30) > 0


def test_a_kept_8b_step_takes_what_was_measured():
    """34.1 GiB in benchmarks.step at 4×2048, of which 6.0 are weights, adapters and their optimizer."""
    assert peak(SHORT, ("keep",) * 32, **MOMENTS) / GIB == pytest.approx(34.1 - 6.0, rel=0.02)


def test_the_choice_is_the_fastest_of_all_mixes_that_fit():
    for budget in (30 * GIB, 10 * GIB, 3 * GIB):
        best = fastest(SHORT, 6, budget, host=GIB).levels
        time = cost(SHORT, best)
        assert peak(SHORT, best, **MOMENTS) <= budget
        for levels in mixes(6):
            if peak(SHORT, levels, **MOMENTS) <= budget and sum(map(SHORT.on_host, levels)) <= GIB:
                assert time <= cost(SHORT, levels)


def test_less_memory_takes_more_time():
    chosen = [fastest(SHORT, 32, gib * GIB).levels for gib in (40, 20, 10, 4, 2.5)]
    times = [cost(SHORT, levels) for levels in chosen]
    assert chosen[0] == ("keep",) * 32
    assert all(a < b for a, b in itertools.pairwise(times))
    assert in_words(("keep",) * 2 + ("offload",) * 3) == "2 layers keep, 3 layers offload"


def test_without_host_memory_nothing_is_offloaded():
    assert not set(fastest(SHORT, 32, 4 * GIB, host=0).levels) & set(OFFLOADED)


def test_what_fits_nowhere_gets_the_smallest_plan():
    least = fastest(SHORT, 8, 1).levels
    assert peak(SHORT, least, **MOMENTS) == min(peak(SHORT, levels, **MOMENTS) for levels in mixes(8))


def test_longest_8b_context():
    """360k tokens within 80 GiB, with inputs in 128 GiB of host memory: what is 2.8 GiB a layer input."""
    levels = ("tiled",) * 32
    assert sum(map(LONG.on_host, levels)) < 0.9 * 108 * GIB
    assert peak(LONG, levels, **MOMENTS) < 0.6 * 74 * GIB
    assert peak(LONG, ("checkpoint",) * 32, **MOMENTS) > 74 * GIB


def test_gradients_of_an_earlier_micro_batch_are_there_all_the_time():
    once, again = (peak(SHORT, ("keep",) * 32, **MOMENTS | {"accumulated": more}) for more in (False, True))
    assert once < again <= once + MOMENTS["gradients"]


def test_the_largest_batch_decides_what_fits_and_the_usual_one_what_is_fast():
    """All is kept where Python's launches hide behind long rows; short ones rather stay in graphs, whose pool has to
    leave room for the longest."""
    short = LayerShape(tokens=256, length=256, **LLAMA_8B)
    budget = peak(SHORT, ("keep",) * 4, **MOMENTS)

    def need(choice: Choice) -> int:
        return peak(SHORT, choice.levels, **MOMENTS) + choice.graphs * 4 * SHORT.stream

    long, usual = (choose(4, budget, need, usual=u, largest=SHORT, host=100 * GIB) for u in (SHORT, short))
    assert long == Choice(("keep",) * 4, False)
    assert usual.graphs
    assert "keep" not in usual.levels[:1]
    assert need(usual) <= budget
