"""Merging models whose recurrent mixers read the weights of modules that they do not call."""

import pytest
import torch

from halfbyte.config import load_config
from halfbyte.export.merge import merge
from halfbyte.train.run import train
from tests.helpers.families import FAMILIES, SHAPE
from tests.helpers.patch_models import tiny
from tests.helpers.run_inputs import VOCABULARY, write_model, write_rows


@pytest.mark.slow
@pytest.mark.parametrize("family", ["NemotronH", "Jamba"])
def test_a_run_on_a_base_in_bf16_is_merged_and_verified(tmp_path, family):
    assert family in FAMILIES
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0}
    assert shape.keys() - SHAPE.keys() == {"eos_token_id"}
    write_model(tmp_path / "model", tiny(family, adapter=False, shape=shape))
    write_rows(tmp_path / "data.jsonl", [40, 60, 50, 30])
    keys = {"model_name_or_path": str(tmp_path / "model"), "dataset": str(tmp_path / "data.jsonl"), "device": "cpu"}
    keys |= {"output_dir": str(tmp_path / "out"), "dtype": "float32", "max_steps": 2, "sample_prompts": 0, "r": 4}
    train(load_config(None, keys | {"max_length": 64}))
    merge(str(tmp_path / "out"), tmp_path / "merged")
    assert list((tmp_path / "merged").glob("*.safetensors"))
