"""Delayed scaling: ranks with different tokens of one tensor share scales; ranks with different tensors do not."""

import math
from functools import partial

import pytest
import torch

from halfbyte.formats.float8 import E4M3
from halfbyte.mesh.mesh import TOKEN_AXES
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions

pytestmark = pytest.mark.dist
AMAXES = ((1.0, 2.0), (math.nan, 1.0), (5.0, math.inf), (8.0, 4.0))  # of each step, on each rank


def scales(mesh, reduced):
    """Return the scales of two tensors after each step; the second has the same amax on all ranks."""
    state, found = DelayedScaling([E4M3, E4M3], ScalingOptions(reduce_amax=reduced)), []
    for amax in AMAXES:
        state.observe(0, torch.tensor(amax[mesh.rank]))
        state.observe(1, torch.tensor(3.0))
        state.roll(partial(mesh.max, axes=TOKEN_AXES))
        found.append(state.scale.tolist())
    return found


@pytest.mark.parametrize("axis", ["data", "shard", "context"])
def test_ranks_with_other_tokens_share_scales(two, axis):
    for found in two.run(scales, True, layout={axis: 2}):  # not finite on one rank: kept on both
        assert found == [pytest.approx([448 / amax, 448 / 3]) for amax in (2, 2, 2, 8)]


def test_scales_are_local_by_default(two):
    """Scales are also local if ranks have different tensors."""
    for layout, reduced in (({"data": 2}, False), ({"pipeline": 2}, True)):
        one, other = two.run(scales, reduced, layout=layout)
        assert [each[0] for each in one] == pytest.approx([448, 448, 448 / 5, 448 / 8])
        assert [each[0] for each in other] == pytest.approx([448 / 2, 448 / 2, 448 / 2, 448 / 4])
