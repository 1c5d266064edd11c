"""Every registered format through transformers' loader and back, and mixtures of formats by pattern."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.config import load_config, storage_of
from halfbyte.formats import FORMATS, Blockwise4
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.assignment import format_assignment
from halfbyte.loading.find import load_model_config
from halfbyte.loading.load import load_model
from halfbyte.plan.shapes import ModelShapes
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import CheckpointError, ModelError

TOKENS = torch.tensor([[5, 9, 3, 77, 21, 4, 4, 60]])
EXAMPLES = [example for cls in FORMATS.values() for example in cls.examples()]
MIXED = {"*.0.mlp.down_proj": "16bit", "*.down_proj": "fp4", "*.mlp.*": "blockwise4:nf4:128:plain", "*": "nf4"}


def formats(model):
    return {name: module.weight.format for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def load(folder, **keys):
    return load_model(str(folder), dtype="float32", device="cpu", **keys)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def entry_of(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("format", EXAMPLES, ids=lambda format: format.spec)
def test_a_model_of_each_format_is_saved_and_loaded_again(format, tiny_checkpoint, tmp_path):
    model = load(tiny_checkpoint(), quantization=format.spec)
    assert len(formats(model)) == 14
    assert set(formats(model).values()) == {format}
    model.save_pretrained(tmp_path / "saved")
    method = "bitsandbytes" if isinstance(format, Blockwise4) else "halfbyte"
    assert entry_of(tmp_path / "saved")["quant_method"] == method
    again = load(tmp_path / "saved")
    assert formats(again) == formats(model)
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "twice")  # weights that were loaded quantized are saved unchanged
    assert entry_of(tmp_path / "twice") == entry_of(tmp_path / "saved")
    assert torch.equal(logits(load(tmp_path / "twice")), logits(model))


@pytest.mark.sampled(14)
@pytest.mark.parametrize("format", EXAMPLES, ids=lambda format: format.spec)
def test_a_missing_entry_of_each_format_is_named(format, tiny_checkpoint, tmp_path):
    load(tiny_checkpoint(), quantization=format.spec).save_pretrained(tmp_path)
    file, module = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj."
    tensors = load_file(file)
    entries = [name for name in tensors if name.startswith(module)]
    assert len(entries) >= 2
    for name in entries:
        if name.endswith(("quant_map", "weight_format")):
            continue  # a constant of the format
        save_file({key: value for key, value in tensors.items() if key != name}, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=module.replace(".", r"\.")):
            load(tmp_path)


def test_patterns(tiny_checkpoint, tmp_path):
    model = load(tiny_checkpoint(), quantization=MIXED)
    found = formats(model)
    assert "model.layers.0.mlp.down_proj" not in found
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert found["model.layers.1.mlp.down_proj"] == Blockwise4("fp4", 64, True)
    assert found["model.layers.0.mlp.up_proj"] == Blockwise4("nf4", 128, False)
    assert found["model.layers.0.self_attn.q_proj"] == Blockwise4("nf4", 64, True)
    assert "lm_head" not in found
    model.save_pretrained(tmp_path)
    assert entry_of(tmp_path)["quant_method"] == "halfbyte"
    again = load(tmp_path)
    assert formats(again) == found
    assert torch.equal(logits(again), logits(model))
    other = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert other.model.layers[0].mlp.down_proj.weight.dtype == torch.bfloat16
    assert other.model.norm.weight.dtype == torch.bfloat16


def test_skipped_layers_at_the_ends(tiny_checkpoint):
    folder = tiny_checkpoint(num_hidden_layers=4)
    found = formats(load(folder, skip_quant_first_layers=1, skip_quant_last_layers=2))
    assert {name.split(".")[2] for name in found} == {"1"}
    assert len(found) == 7
    with pytest.raises(ModelError, match="4 layers"):
        load(folder, skip_quant_first_layers=3, skip_quant_last_layers=1)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"*.down_porj": "nf4"}, "down_porj.*matches"),
        ({"*": "nf5"}, r"quantization: .*'nf5'"),
        ("blockwise4:nf4:60:plain", "60"),
    ],
)
def test_wrong_patterns_and_names(quantization, said, tiny_checkpoint):
    with pytest.raises(ModelError, match=said):
        load(tiny_checkpoint(), quantization=quantization)


def test_nf4_has_the_options_of_bitsandbytes():
    patterns = {"a": "nf4", "b": "fp4", "*": "blockwise4:nf4:32:plain"}
    keys = {"bnb_4bit_blocksize": 128, "bnb_4bit_use_double_quant": False}
    choice = format_assignment(storage_of(quantization=patterns, **keys))
    expected = (Blockwise4("nf4", 128, False), Blockwise4("fp4", 128, False), Blockwise4("nf4", 32, False))
    assert tuple(format for _, format in choice.patterns) == expected


def test_a_damaged_list_of_formats(tiny_checkpoint, tmp_path):
    load(tiny_checkpoint(), quantization=MIXED).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace("model.layers.1.mlp.down_proj", "model.layers.9.mlp.down_proj"))
    with pytest.raises(CheckpointError, match=r"layers\.9\.mlp\.down_proj"):
        load(tmp_path)


def test_planned_bytes_are_those_of_the_loaded_model(tiny_checkpoint):
    folder = tiny_checkpoint()
    config = load_config(
        None, {"model_name_or_path": str(folder), "dataset": "x.jsonl", "quantization": MIXED, "dtype": "float32"}
    )
    shapes = ModelShapes(config, load_model_config(str(folder)), torch.device("cpu"))
    model = load(folder, quantization=MIXED)
    stored = sum(p.nbytes for p in model.parameters()) + sum(buffer.nbytes for buffer in model.buffers())
    assert any(isinstance(p, QuantizedTensor) for p in model.parameters())
    assert shapes.frozen_bytes() == stored
