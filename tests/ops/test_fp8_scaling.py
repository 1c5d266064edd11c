"""Compare delayed scaling with a ten-line reference in plain Python; tests/parallel/test_fp8.py tests several ranks."""

import math
import random

import pytest
import torch

from halfbyte.formats.float8 import E4M3, E5M2
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions
from halfbyte.utils.errors import ConfigError


def reference(steps, fp8_max, margin, length, algorithm):
    """Scales after each of `steps`, which list the amaxes of their micro-batches."""
    history, scale, scales = [], 0.0, []
    for amaxes in steps:
        finite = all(math.isfinite(amax) for amax in amaxes)
        history = [max(amaxes) if finite else 0.0, *history][:length]
        amax = max(history) if algorithm == "max" else history[0]
        if finite and amax > 0:
            scale = fp8_max * 2.0**-margin / amax
        scales.append(scale)
    return scales


def draw_steps(seed, count=60):
    generator = random.Random(seed)
    special = [0.0, math.inf, math.nan]
    draw = lambda: generator.choice(special) if generator.random() < 0.15 else generator.lognormvariate(0, 2)  # noqa: E731
    steps = [[draw() for _ in range(generator.randint(1, 3))] for _ in range(count)]
    return [[0.0], [math.inf], [math.nan, 1.0], [1.0, math.nan], *steps]


@pytest.mark.parametrize("margin", [0, 2, -1])
@pytest.mark.parametrize("length", [1, 3, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_scales_follow_the_reference(algorithm, length, margin):
    state = DelayedScaling([E4M3, E5M2], ScalingOptions(margin, length, algorithm))
    steps = [draw_steps(seed) for seed in (0, 1)]
    expected = [
        reference(one, fp8_max, margin, length, algorithm) for one, fp8_max in zip(steps, (448, 57344), strict=True)
    ]
    for at in range(len(steps[0])):
        for index in (0, 1):
            for amax in steps[index][at]:
                state.observe(index, torch.tensor(amax))
        state.roll()
        torch.testing.assert_close(state.scale, torch.tensor([expected[0][at], expected[1][at]]), rtol=1e-6, atol=0)
    assert state.history.shape == (2, length)


def test_micro_batches_share_an_entry_and_steps_do_not():
    state = DelayedScaling([E4M3], ScalingOptions(amax_history_len=3))
    for amax in (1.0, 4.0, 2.0):
        state.observe(0, torch.tensor(amax))
    assert state.history.tolist() == [[4.0, 0, 0]]
    state.roll()
    state.observe(0, torch.tensor(1.0))
    state.roll()
    assert state.history.tolist() == [[0, 1.0, 4.0]]
    assert state.scale.item() == 448 / 4
    state.roll()  # no amax in this step: the oldest entry leaves all the same
    assert state.history.tolist() == [[0, 0, 1.0]]


def test_the_first_steps_scale_by_their_own_amax():
    state = DelayedScaling([E5M2], ScalingOptions(margin=1))
    assert state.scale_for(0, torch.tensor(4.0)).item() == 57344 / 2 / 4
    for unreal in (0.0, math.inf, math.nan):
        assert state.scale_for(0, torch.tensor(unreal)).item() == 1.0
        state.observe(0, torch.tensor(unreal))
        state.roll()
        assert state.scale_for(0, torch.tensor(8.0)).item() == 57344 / 2 / 8  # no history yet: current scaling
    state.observe(0, torch.tensor(2.0))
    state.roll()
    assert state.scale_for(0, torch.tensor(8.0)).item() == 57344 / 2 / 2


def test_a_tiny_amax_gives_a_finite_scale():
    state = DelayedScaling([E5M2], ScalingOptions())
    state.observe(0, torch.tensor(1e-45))
    state.roll()
    assert state.scale.isfinite().all()


def test_state_is_saved_and_stays_in_fp32():
    source, target = (DelayedScaling([E4M3, E5M2], ScalingOptions(amax_history_len=4)) for _ in range(2))
    source.observe(1, torch.tensor(3.3))
    source.roll()
    source.bfloat16()
    assert source.scale.dtype == source.history.dtype == torch.float32
    assert set(source.state_dict()) == {"history", "scale"}
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.scale, source.scale)
    assert target.scale[1].item() == pytest.approx(57344 / 3.3)


@pytest.mark.parametrize(
    ("options", "key"), [({"amax_history_len": 0}, "amax_history_len"), ({"amax_compute_algo": "mean"}, "compute_algo")]
)
def test_wrong_options_are_named(options, key):
    with pytest.raises(ConfigError, match=key):
        ScalingOptions(**options)


@pytest.mark.gpu
def test_a_step_is_captured_in_a_graph():
    state = DelayedScaling([E4M3], ScalingOptions(amax_history_len=4), device="cuda")
    amax = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # fails if the host synchronizes with the device
        used = state.scale_for(0, amax)
        state.observe(0, amax)
        state.roll()
    for value, expected in ((2.0, 224.0), (4.0, 112.0), (math.inf, 112.0), (1.0, 112.0)):
        amax.fill_(value)
        graph.replay()
        assert state.scale.item() == expected
    assert used.item() == 112.0
