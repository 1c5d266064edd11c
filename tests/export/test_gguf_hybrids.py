"""Gated DeltaNets in GGUF: order of heads, adapters, importances, preserved types, and refusals."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.graph import checked_family
from halfbyte.gguf.importer import import_gguf
from halfbyte.gguf.tensors import DeltaNet, Layout
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.load import load_model
from halfbyte.utils.errors import CheckpointError, ModelError
from tests.helpers.gguf_models import MODELS, byte_tokenizer, save_model
from tests.helpers.merge_runs import save_run
from tests.helpers.vision_models import PROCESSOR

HEADS = DeltaNet(keys=2, values=6, key_size=1, value_size=1, tiled=True)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))


def read(path):
    return {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in gguf.GGUFReader(path).tensors}


def test_value_heads_take_turns_between_key_heads():
    """Three value heads of each of two key heads: 0 to 2 and 3 to 5; queries and keys stay where they are."""
    heads = torch.arange(6.0)
    assert HEADS.in_file("ssm_dt", heads).tolist() == [0, 3, 1, 4, 2, 5]
    assert HEADS.in_file("attn_qkv", torch.arange(-4.0, 6.0)[:, None])[:, 0].tolist() == [
        *range(-4, 0),
        0,
        3,
        1,
        4,
        2,
        5,
    ]
    assert HEADS.in_file("ssm_out", heads[None]).tolist() == [[0, 3, 1, 4, 2, 5]]
    assert torch.equal(HEADS.in_file("ssm_norm", heads), heads)
    assert torch.equal(HEADS.in_file("ssm_a", heads), -torch.tensor([0.0, 3, 1, 4, 2, 5]).exp())
    for part in ("ssm_dt", "ssm_out", "attn_gate", "ssm_a"):
        value = torch.randn(6, 6) if part in ("ssm_out", "attn_gate") else torch.randn(6)
        torch.testing.assert_close(HEADS.in_model(part, HEADS.in_file(part, value)), value)


@pytest.mark.slow
def test_an_adapter_of_a_mixer_is_the_update_in_the_files_order(tmp_path):
    model = save_model(tmp_path / "m", "qwen3_5")
    layout = Layout(model.config, checked_family(model.config))
    targets = ["in_proj_qkv", "in_proj_a", "out_proj"]
    run = save_run(tmp_path / "run", tmp_path / "m", tokenizer=tmp_path / "m", target_modules=targets)
    found = read(export_adapter(run, "f32"))
    stored = load_file(run / "adapter/adapter_model.safetensors")
    for module, part in zip(targets, ("attn_qkv", "ssm_alpha", "ssm_out"), strict=True):
        name, key = f"blk.1.{part}.weight", f"base_model.model.model.layers.1.linear_attn.{module}.lora_"
        a, b = (stored[f"{key}{each}.weight"] for each in "AB")
        mine = found[f"{name}.lora_b"] @ found[f"{name}.lora_a"]
        assert float((b @ a).norm()) > 0
        torch.testing.assert_close(mine, layout.in_file(name, b @ a))
        assert not torch.allclose(mine, b @ a)


@pytest.mark.slow
def test_kept_layers_of_mixers_have_the_files_values(tmp_path):
    """Rows move with their scales; the output, whose columns moved, is decoded, and counted as that."""
    save_model(tmp_path / "m", "qwen3_5")
    export_gguf(tmp_path / "m", "q8_0", tmp_path / "m.gguf", device="cpu")
    kept = import_gguf(tmp_path / "m.gguf", tmp_path / "kept", keep=True)
    plain = import_gguf(tmp_path / "m.gguf", tmp_path / "plain")
    options = {"dtype": "bfloat16", "device": "cpu"}
    one = load_model(str(kept), **options)
    two = load_model(str(plain), load_in_4bit=False, **options).state_dict()
    mixers = [(name, each) for name, each in one.named_modules() if isinstance(each, QuantizedLinear)]
    mixers = [(name, each) for name, each in mixers if "linear_attn" in name and not name.endswith("out_proj")]
    assert len(mixers) == 6 * 4
    assert all(torch.equal(each.weight.dequantize(), two[f"{name}.weight"]) for name, each in mixers)
    others = json.loads((kept / "config.json").read_text())["quantization_config"]["others"]
    assert others == {"Q8_0 with columns in another order": 6}


def edited(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"linear_value_head_dim": 32}, "linear_value_head_dim: 32"),
        ({"layer_types": ["linear_attention", "full_attention"] * 4}, "layer_types"),
        ({"rope_parameters": MODELS["qwen3_5"][1]["rope_parameters"] | {"mrope_section": [11, 11, 10]}}, "8 pairs"),
    ],
)
def test_unsupported_structures_are_refused_by_key(tmp_path, keys, said):
    save_model(tmp_path / "m", "qwen3_5")
    edited(tmp_path / "m", **keys)
    with pytest.raises(ModelError, match=said):
        export_gguf(tmp_path / "m", "f32", tmp_path / "m.gguf", device="cpu")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("lacks", ["A_log", "dt_bias", "conv1d.weight"])
def test_a_mixers_missing_tensor_is_named(tmp_path, lacks):
    save_model(tmp_path / "m", "qwen3_5")
    file = tmp_path / "m/model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if not key.endswith(f"0.linear_attn.{lacks}")}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"linear_attn|blk\.0\.ssm_(a|dt\.bias|conv1d\.weight)"):
        export_gguf(tmp_path / "m", "f32", tmp_path / "m.gguf", device="cpu")


def next_token_layer(state, config, layer):
    """Weights of a multi-token prediction layer as Qwen stores it, from those of a decoder layer with attention."""
    prefix = f"model.layers.{layer}."
    weights = {
        key.replace(prefix, "mtp.layers.0."): value + 0.25 for key, value in state.items() if key.startswith(prefix)
    }
    size = config.hidden_size
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    weights |= {f"mtp.{name}.weight": torch.full((size,), 0.5 + i) for i, name in enumerate(norms)}
    return weights | {"mtp.fc.weight": torch.randn(size, 2 * size)}


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_layers_for_multi_token_prediction_are_exported(tmp_path, name):
    """As layers after the decoder layers, named as llama.cpp's converter names them; the import leaves them out."""
    model = save_model(tmp_path / "m", name)
    layers = model.config.num_hidden_layers
    export_gguf(tmp_path / "m", "f32", tmp_path / "alone.gguf", device="cpu")
    file = tmp_path / "m/model.safetensors"
    state = load_file(file)
    added = next_token_layer(state, model.config, layers - 1)
    save_file(state | added, file, metadata={"format": "pt"})
    export_gguf(tmp_path / "m", "f32", tmp_path / "m.gguf", device="cpu")
    alone, found = read(tmp_path / "alone.gguf"), read(tmp_path / "m.gguf")
    block = f"blk.{layers}."
    new = {key.removeprefix(block): value for key, value in found.items() if key.startswith(block)}
    assert found.keys() - {block + key for key in new} == alone.keys()
    decoder = {key.removeprefix(f"blk.{layers - 1}.") for key in alone if key.startswith(f"blk.{layers - 1}.")}
    parts = {f"nextn.{part}.weight" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")}
    assert new.keys() == decoder | parts
    assert torch.equal(new["nextn.eh_proj.weight"], added["mtp.fc.weight"])
    assert torch.equal(new["nextn.hnorm.weight"], added["mtp.pre_fc_norm_hidden.weight"] + 1)  # norms multiply by 1 + w
    assert torch.equal(new["attn_output.weight"], added["mtp.layers.0.self_attn.o_proj.weight"])
    keys = gguf.GGUFReader(tmp_path / "m.gguf")
    arch = keys.get_field("general.architecture").contents()
    assert keys.get_field(f"{arch}.block_count").contents() == layers + 1
    assert keys.get_field(f"{arch}.nextn_predict_layers").contents() == 1
    again = load_model(str(tmp_path / "m.gguf"), load_in_4bit=False, dtype="float32", device="cpu")
    assert again.config.num_hidden_layers == layers
    ids = torch.arange(12)[None]
    torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


def test_an_incomplete_layer_for_multi_token_prediction_is_named(tmp_path):
    model = save_model(tmp_path / "m", "qwen3_5")
    file = tmp_path / "m/model.safetensors"
    state = load_file(file)
    added = next_token_layer(state, model.config, model.config.num_hidden_layers - 1)
    del added["mtp.layers.0.mlp.up_proj.weight"]
    save_file(state | added, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"ffn_up\.weight"):
        export_gguf(tmp_path / "m", "f32", tmp_path / "m.gguf", device="cpu")


def test_glm_stores_them_as_layers(tmp_path):
    model = save_model(tmp_path / "m", "glm4_moe")
    layers = model.config.num_hidden_layers
    file = tmp_path / "m/model.safetensors"
    state, prefix = load_file(file), f"model.layers.{layers}."
    last = f"model.layers.{layers - 1}."
    added = {key.replace(last, prefix): value + 0.25 for key, value in state.items() if key.startswith(last)}
    size = model.config.hidden_size
    added |= {f"{prefix}{norm}.weight": torch.rand(size) for norm in ("enorm", "hnorm", "shared_head.norm")}
    added |= {f"{prefix}eh_proj.weight": torch.randn(size, 2 * size)}
    save_file(state | added, file, metadata={"format": "pt"})
    export_gguf(tmp_path / "m", "f32", tmp_path / "m.gguf", device="cpu")
    found = read(tmp_path / "m.gguf")
    assert torch.equal(found[f"blk.{layers}.nextn.eh_proj.weight"], added[f"{prefix}eh_proj.weight"])
    assert torch.equal(found[f"blk.{layers}.nextn.shared_head_norm.weight"], added[f"{prefix}shared_head.norm.weight"])
    assert f"blk.{layers}.ffn_gate_exps.weight" in found


def test_the_vision_part_has_a_file_of_its_own(tmp_path):
    text = save_model(tmp_path / "text", "qwen3_5")
    export_gguf(tmp_path / "text", "f32", tmp_path / "text.gguf", device="cpu")
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=tower | {"num_position_embeddings": 16})
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path / "whole")
    byte_tokenizer().save_pretrained(tmp_path / "whole")
    (tmp_path / "whole/preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    report = export_gguf(tmp_path / "whole", "f32", tmp_path / "whole.gguf", device="cpu")
    assert report.mmproj.is_file()
    alone, found = read(tmp_path / "text.gguf"), read(tmp_path / "whole.gguf")
    assert found.keys() == alone.keys()
    assert all(torch.equal(value, alone[name]) for name, value in found.items())
