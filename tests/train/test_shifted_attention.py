"""Runs with `shift_attn`: packed and resumed, evaluated with full attention, and refused where it cannot be."""

import json
import shutil

import pytest

from halfbyte.config import Parallel, load_config
from halfbyte.config.layouts import unsupported_reason
from halfbyte.runs.metrics import MetricsFile
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.sft_runs import keys

GROUPS = {"shift_attn": True, "shift_attn_group_size": 8, "packing": True, "load_in_4bit": False, "lora_dropout": 0.0}


def run(place, output, **changed):
    return train(load_config(None, keys(place, output, sample_prompts=0, **GROUPS | changed)))


def records(output, kind):
    return [record for record in MetricsFile(output / "metrics.jsonl").records() if record["kind"] == kind]


def test_training_is_shifted_and_evaluation_is_not(place, tmp_path):
    run(place, tmp_path / "shifted", max_steps=1)
    run(place, tmp_path / "full", max_steps=1, shift_attn=False, shift_attn_group_size=None)
    losses = [[r["loss"] for r in records(tmp_path / name, "train")] for name in ("shifted", "full")]
    assert abs(losses[0][0] - losses[1][0]) > 1e-5
    before = [records(tmp_path / name, "eval")[0]["loss"] for name in ("shifted", "full")]
    assert before[0] == before[1]


def test_resumed_run_is_the_same(place, tmp_path):
    run(place, tmp_path / "whole", max_steps=4)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "again" / "checkpoint-2")
    run(place, tmp_path / "again", max_steps=4, resume_from_checkpoint=True)
    weights = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("whole", "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "changed",
    [{"shift_attn_group_size": 7}, {"shift_attn_group_size": 128}, {"shift_attn": False}, {"method": "dpo"}],
)
def test_contradictions_are_refused(place, tmp_path, changed):
    with pytest.raises(ConfigError, match="shift_attn"):
        load_config(None, keys(place, tmp_path, **GROUPS | changed))


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context"])
def test_layouts_that_split_heads_or_rows_are_refused(place, tmp_path, axis):
    config = load_config(None, keys(place, tmp_path, **GROUPS))
    assert unsupported_reason(Parallel(**{axis: 2}), config).key == "shift_attn"
    assert unsupported_reason(Parallel(data=2), config) is None


def test_group_is_a_quarter_of_the_length():
    common = {"model_name_or_path": "m", "dataset": "d"}
    assert load_config(None, common | {"shift_attn": True, "max_length": 8192}).attention_group == 2048
    assert load_config(None, common | {"s2_attention": True, "max_length": 100}).attention_group == 24
    assert load_config(None, common).attention_group is None


def test_check_refuses_other_attention(place, tmp_path):
    base = shutil.copytree(place / "model", tmp_path / "model")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    with pytest.raises(ModelError, match="shift_attn"):
        prepare_run(load_config(None, keys(place, tmp_path / "out", model_name_or_path=str(base), **GROUPS)))
