"""Training with an fp8 recipe: scales are updated once a step, saved in checkpoints, and restored on resume."""

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.modeling.projections import configured_recipe
from halfbyte.runs import checkpoints
from halfbyte.train.checkpoint import SCALING, load_scaling
from halfbyte.utils.errors import CheckpointError
from tests.helpers.tiny_runs import losses, make_loop, rows, run_config

KEYS = {"recipe": "fp8-hybrid", "amax_history_len": 4, "num_train_epochs": 1, "save_steps": 2, "lora_dropout": 0.0}
KEYS |= {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 1}


def loop_in(output, **keys):
    config = run_config(output, **KEYS | keys)
    recipe = configured_recipe(config.precision)
    return make_loop(config, train=rows(12), held_out=rows(3, 9), recipe=recipe)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    loop = loop_in(tmp_path_factory.mktemp("fp8"))
    loop.train()
    return loop


def test_scales_are_updated_once_a_step(trained):
    history = trained.fp8_scales.history
    assert len(losses(trained)) == 4  # of three micro-batches each, and an evaluation after the last
    assert not history[:, 0].any()
    assert history[0, 1:].all()
    torch.testing.assert_close(trained.fp8_scales.scale[0], 448 / history[0].max())


def test_a_resumed_run_restores_scales(trained, tmp_path):
    middle, end = checkpoints.checkpoints(trained.output)
    state = load_file(middle / SCALING)
    assert state["history"][0].count_nonzero() == 2
    again = loop_in(trained.output)
    again.train(middle)
    assert again.fp8_scales.settled[0]
    for name, value in load_file(end / SCALING).items():
        assert torch.equal(again.fp8_scales.state_dict()[name], value)
    theirs = dict(trained.model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in again.model.named_parameters())


def test_missing_scales_and_those_of_another_model_are_refused(trained, tmp_path):
    with pytest.raises(CheckpointError, match=SCALING):
        load_scaling(tmp_path, trained.fp8_scales)
    other = loop_in(tmp_path / "other", amax_history_len=5)
    with pytest.raises(CheckpointError, match="history"):
        load_scaling(checkpoints.checkpoints(trained.output)[0], other.fp8_scales)
