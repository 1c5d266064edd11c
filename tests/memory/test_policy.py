"""The planner: levels in order, the fastest mix within a budget, and the figures of the 8B target."""

import itertools

import pytest

from halfbyte.memory.policy import FUSED, OFFLOADED, LEVELS, LayerShape, choose, in_words, mixes, peak

GIB = 2**30
LLAMA_8B = {"hidden": 4096, "inner": 14336, "queries": 4096, "keys": 1024, "heads": 32, "rank": 16}
SHORT = LayerShape(tokens=8192, length=2048, **LLAMA_8B)
LONG = LayerShape(tokens=368_640, length=368_640, **LLAMA_8B)
MOMENTS = {"loss": 384 * 2**20, "gradients": 160 * 2**20, "accumulated": False}


@pytest.mark.parametrize("traits", sorted(set(FUSED.values())))
def test_each_level_keeps_less_and_takes_longer(traits):
    shape = LayerShape(tokens=8192, length=2048, **LLAMA_8B, traits=traits)
    saved, seconds = ([getattr(shape, what)(level) for level in LEVELS] for what in ("saved", "seconds"))
    assert all(a >= b for a, b in itertools.pairwise(saved))
    assert all(a < b for a, b in itertools.pairwise(seconds))
    assert [level for level in LEVELS if shape.on_host(level)] == list(OFFLOADED)


def test_a_kept_8b_step_takes_what_was_measured():
    """34.1 GiB in benchmarks.step at 4×2048, of which 6.0 are weights, adapters and their optimizer."""
    assert peak(SHORT, ("keep",) * 32, **MOMENTS) / GIB == pytest.approx(34.1 - 6.0, rel=0.02)


def test_the_choice_is_the_fastest_of_all_mixes_that_fit():
    for budget in (30 * GIB, 10 * GIB, 3 * GIB):
        best = choose(SHORT, 6, budget, host=GIB, **MOMENTS)
        time = sum(map(SHORT.seconds, best))
        assert peak(SHORT, best, **MOMENTS) <= budget
        for levels in mixes(6):
            if peak(SHORT, levels, **MOMENTS) <= budget and sum(map(SHORT.on_host, levels)) <= GIB:
                assert time <= sum(map(SHORT.seconds, levels))


def test_less_memory_takes_more_time():
    chosen = [choose(SHORT, 32, gib * GIB, host=100 * GIB, **MOMENTS) for gib in (40, 20, 10, 4, 2.5)]
    times = [sum(map(SHORT.seconds, levels)) for levels in chosen]
    assert chosen[0] == ("keep",) * 32
    assert all(a < b for a, b in itertools.pairwise(times))
    assert in_words(chosen[2]).count("layers") == 2


def test_without_host_memory_nothing_is_offloaded():
    assert not set(choose(SHORT, 32, 4 * GIB, host=0, **MOMENTS)) & set(OFFLOADED)


def test_what_fits_nowhere_gets_the_smallest_plan():
    least = choose(SHORT, 8, 1, host=100 * GIB, **MOMENTS)
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
