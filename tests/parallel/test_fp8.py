"""Delayed scaling: ranks with different tokens of one tensor share scales; ranks with different tensors do not."""

import math
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.ops.float8 import E4M3
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions
from halfbyte.parallel.mesh import TOKEN_AXES
from halfbyte.train.checkpoint import SCALING
from tests.helpers import rank_runs

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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return rank_runs.write_place(tmp_path_factory.mktemp("place"), num_hidden_layers=5)


KEYS = {
    "recipe": "fp8-hybrid",
    "gradient_accumulation_steps": 4,
    "sample_prompts": 0,
    "save_steps": 2,
    "save_total_limit": 9,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_checkpointed_scales_of_stages_equal_one_process(two, place, tmp_path, name):
    """Scales are saved layer by layer, and a run resumes from them with or without stages."""
    alone = rank_runs.run(None, place, tmp_path / "alone", **KEYS)
    stages = {"parallel": {"pipeline": 2}, "pipeline_schedule": name}
    rank_runs.run(two, place, tmp_path / "run", **KEYS, **stages).same_as(alone, loss=1e-5, weights=1e-3)
    one, staged = (load_file(tmp_path / each / "checkpoint-2" / SCALING) for each in ("alone", "run"))
    for key, value in one.items():
        torch.testing.assert_close(staged[key], value, rtol=1e-3, atol=1e-6)
    for ranks, keys in ((two, stages), (None, {})):
        folder = tmp_path / f"again-{keys != {}}"
        shutil.copytree(tmp_path / "run", folder)
        for gone in ("checkpoint-4", "checkpoint-5", "adapter"):
            shutil.rmtree(folder / gone, ignore_errors=True)
        again = rank_runs.run(ranks, place, folder, resume=True, **KEYS, **keys)
        assert [each["loss"] for each in again.trained] == pytest.approx([e["loss"] for e in alone.trained], rel=1e-5)
