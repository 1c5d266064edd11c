"""Per-layer embeddings (Gemma 3n and 4) stored quantized: loading, looking up, training, saving, the plan, merging."""

import json

import pytest
import torch
import transformers

import halfbyte
from halfbyte.config import RunConfig
from halfbyte.export.merge import merge
from halfbyte.loading.quantizer import assigned_formats
from halfbyte.plan.shapes import ModelShapes
from halfbyte.tensor import QuantizedTensor
from tests.helpers.gguf_models import byte_tokenizer

TABLE = "model.embed_tokens_per_layer"
IDS = torch.tensor([[3, 77, 250, 9, 3, 41]])
SHAPE = {
    "vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 272,
    "pad_token_id": 0, "sliding_window": 16, "num_kv_shared_layers": 2, "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "initializer_range": 0.2,
}  # fmt: skip
CONFIGS = {
    "Gemma3nText": {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8},
    "Gemma4Text": {"global_head_dim": 32, "num_global_key_value_heads": 2, "per_layer_config": {}},
}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**SHAPE | CONFIGS[request.param])
    out = tmp_path_factory.mktemp("models") / request.param
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # some of them begin at zero, and hide the table
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(out)
    byte_tokenizer().save_pretrained(out)
    return out


def loaded(folder, **keys):
    return halfbyte.load_model(str(folder), device="cpu", dtype="float32", **keys).eval()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("spec", ["nf4", "int8", "kbit3"])
def test_lookup_returns_dequantized_rows(folder, spec):
    model = loaded(folder, quantization=spec)
    table = model.get_submodule(TABLE).weight
    assert isinstance(table.data, QuantizedTensor)
    assert not isinstance(model.get_input_embeddings().weight.data, QuantizedTensor)
    found = model(IDS).logits
    model.get_submodule(TABLE).weight = torch.nn.Parameter(table.dequantize(torch.float32))
    torch.testing.assert_close(found, model(IDS).logits)
    whole = loaded(folder, quantization={TABLE: "16bit", "*": spec})
    assert not isinstance(whole.get_submodule(TABLE).weight.data, QuantizedTensor)
    assert not torch.equal(found, whole(IDS).logits)  # the table matters


def test_a_saved_model_loads_with_the_same_bytes(folder, tmp_path):
    model = loaded(folder)
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert any(TABLE in names for names in entry["formats"].values())
    again = loaded(tmp_path)
    for name, part in model.get_submodule(TABLE).weight.parts.items():
        assert torch.equal(again.get_submodule(TABLE).weight.parts[name], part)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_plan_and_merge_of_quantized_tables(folder):
    config = RunConfig(model_name_or_path=str(folder), dataset="d", device="cpu", dtype="float32", r=4)
    model = loaded(folder)
    shapes = ModelShapes(config, type(model.config).from_pretrained(folder), torch.device("cpu"))
    table = model.get_submodule(TABLE).weight
    assert shapes.causal_lm.get_submodule(TABLE).weight.nbytes == table.nbytes < 0.6 * table.numel()
    linears, _ = assigned_formats(config.origin, config.storage)
    assert linears[f"{TABLE}.weight"] == table.format


@pytest.mark.slow
def test_a_run_trains_and_merges(folder, tmp_path):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": chr(65 + n) * 40}) + "\n" for n in range(20)))
    run = tmp_path / "run"
    keys = {"device": "cpu", "dtype": "float32", "max_steps": 2, "max_length": 64, "r": 4, "logging_steps": 1}
    halfbyte.finetune(str(folder), str(tmp_path / "data.jsonl"), output_dir=str(run), **keys)
    merge(run, tmp_path / "merged", base="dequantized")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    table = loaded(folder).get_submodule(TABLE).weight.dequantize(torch.float32)
    assert torch.equal(merged.get_submodule(TABLE).weight, table.to(merged.dtype))
