"""Quantized merges for vLLM and SGLang, read back by the code of compressed-tensors, GPTQModel and transformers."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from halfbyte.export.layouts import LAYOUTS
from halfbyte.export.merge import merge
from halfbyte.export.verify import stored_values
from halfbyte.loading.load import load_model
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ConfigError, HalfbyteError
from halfbyte.utils.notices import notices_so_far
from tests.helpers.expert_models import mixture, stacks
from tests.helpers.merge_runs import byte_tokenizer, save_base, save_run, tensors

COMPRESSED = [name for name, layout in LAYOUTS.items() if layout.config([], 32)["quant_method"] == "compressed-tensors"]
SIXTEEN_BIT_INPUTS = [name for name in COMPRESSED if not LAYOUTS[name].calibrated]
SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return save_run(folder / "run", save_base(folder / "base", **SIZES, tie_word_embeddings=True))


@pytest.fixture(scope="module")
def merged(run, tmp_path_factory):
    """A function from a layout to the folder of the merge in it, its config and the model that halfbyte loads."""
    written = {}

    def make(target):
        if target not in written:
            folder = tmp_path_factory.mktemp(target) / "merged"
            merge(run, folder, base="original", quantize=target, verify=target != "fp8-block")
            config = json.loads((folder / "config.json").read_text())["quantization_config"]
            written[target] = folder, config, load_model(str(folder), dtype="bfloat16", device="cpu")
        return written[target]

    return make


def entries(folder, module):
    """The checkpoint's entries of one module, by their last name."""
    return {
        name.removeprefix(f"{module}."): tensor
        for name, tensor in tensors(folder).items()
        if name.startswith(f"{module}.")
    }


def quantized_modules(model):
    return [
        name for name, module in model.named_modules() if isinstance(getattr(module, "weight", None), QuantizedTensor)
    ]


# --- other tools' code -----------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", COMPRESSED)
def test_compressed_tensors_decompresses_to_the_same_values(merged, target):
    folder, config, model = merged(target)
    parsed = QuantizationConfig.model_validate({key: value for key, value in config.items() if key != "quant_method"})
    scheme = parsed.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(parsed.format)
    names = quantized_modules(model)
    assert len(names) == 14
    for name in names:
        state = entries(folder, name)
        calibrated = ("input_global_scale",) * LAYOUTS[target].calibrated  # read by servers
        assert state.keys() == {*compressor.compression_param_names(scheme), *calibrated}
        values = compressor.decompress(state, scheme)["weight"]
        assert torch.equal(values, model.get_submodule(name).weight.dequantize(torch.bfloat16)), name


def test_compressed_tensors_reads_tiles_of_fp8(merged):
    folder, config, model = merged("fp8-block")
    tile = config["weight_block_size"]
    arguments = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=tile)
    for name in quantized_modules(model):
        state = entries(folder, name)
        values = dequantize(state["weight"], state["weight_scale_inv"], args=arguments, dtype=torch.float32)
        assert torch.equal(values, stored_values(model.get_submodule(name))), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [*SIXTEEN_BIT_INPUTS, "fp8-block"])
def test_transformers_computes_the_same_logits(merged, target):
    folder, _, model = merged(target)
    options = {}
    if target == "w4a16-asym":  # transformers 5.24 keeps packed zeros in parameters of unpacked ones' shape
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map={"": "cpu"}, **options)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, logits = model(input_ids=ids).logits.float(), theirs(input_ids=ids).logits.float()
    scale = float(logits.abs().max())
    assert float((ours - logits).abs().max()) < (0.02 if target != "fp8-block" else 0.2) * scale  # FP8 activations


def unpacked(words, dim):
    return torch.stack([(words >> 4 * i) & 15 for i in range(8)], dim + 1).flatten(dim, dim + 1)


def test_gptq_stores_zeros_minus_one(merged):
    """The first format of AutoGPTQ: a zero of 8 is stored as 7."""
    folder, config, model = merged("gptq")
    assert (config["checkpoint_format"], config["sym"], config["bits"], config["group_size"]) == ("gptq", True, 4, 32)
    for name in quantized_modules(model):
        state = entries(folder, name)
        assert state.keys() == {"qweight", "qzeros", "scales", "g_idx"}
        assert bool((unpacked(state["qzeros"], 1) == 7).all())
        inputs = state["g_idx"].long()
        assert torch.equal(inputs, torch.arange(len(inputs)) // 32)
        values = (unpacked(state["qweight"], 0) - 8) * state["scales"].float()[inputs]
        assert torch.equal(values.T, model.get_submodule(name).weight.dequantize(torch.float32)), name


@pytest.mark.slow
def test_gptqmodel_dequantizes_to_the_same_values(merged):
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="needs gptqmodel").TorchLinear
    folder, config, model = merged("gptq")
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    settings = QuantizeConfig.from_quant_config(dict(config))
    assert (settings.bits, settings.group_size, settings.sym, settings.desc_act) == (4, 32, True, False)
    for name in quantized_modules(model):
        ours = model.get_submodule(name)
        theirs = linear(
            bits=4,
            group_size=32,
            sym=True,
            desc_act=False,
            in_features=ours.in_features,
            out_features=ours.out_features,
            bias=False,
            pack_dtype=torch.int32,
        )
        theirs.load_state_dict(entries(folder, name), strict=False)
        convert_gptq_v1_to_v2_format_module(theirs, 4, torch.int32)
        theirs.post_init()
        values = theirs.dequantize_weight().T.float()
        torch.testing.assert_close(values, ours.weight.dequantize(torch.float32), rtol=2**-11, atol=0)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("target", [*COMPRESSED, "gptq", "fp8-block"])
def test_shards_index_and_tied_head(merged, target):
    folder, config, _ = merged(target)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert len(files) > 1
    assert index["weight_map"] == {name: file for file, state in files.items() for name in state}
    assert "lm_head.weight" not in index["weight_map"]
    skipped = config.get("ignore") or config.get("modules_to_not_convert") or ["lm_head"] * (config["lm_head"] is False)
    assert skipped == ["lm_head"]
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def test_the_report_says_how_much_of_the_update_is_kept(run, tmp_path):
    report = merge(run, tmp_path / "merged", base="original", quantize="w4a16")
    assert 0.97 < report.kept["original"].share < 1.03
    assert str(report.kept["original"]) in str(report)


def test_modules_that_transformers_does_not_build_are_ignored(tmp_path):
    base = save_base(tmp_path / "base", shard="10MB", **SIZES)
    file = base / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(96, 192)}, file, metadata={"format": "pt"})
    run = save_run(tmp_path / "run", base)
    for target in ("w4a16", "gptq"):
        merge(run, tmp_path / target, base="original", quantize=target, verify=False)
        config = json.loads((tmp_path / target / "config.json").read_text())["quantization_config"]
        assert torch.equal(tensors(tmp_path / target)["mtp.fc.weight"], torch.ones(96, 192))
        assert config.get("ignore", ["lm_head", "mtp.fc"]) == ["lm_head", "mtp.fc"]
        assert config.get("dynamic", {r"-:^mtp\.fc$": {}}) == {r"-:^mtp\.fc$": {}}


# --- experts ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    sizes = {"vocab_size": 272, "eos_token_id": 257, "bos_token_id": 256}

    def make(name):
        folder = tmp_path_factory.mktemp(name)
        mixture(name, **sizes).to(torch.bfloat16).save_pretrained(folder / "base", max_shard_size="60KB")
        byte_tokenizer().save_pretrained(folder / "base")
        return save_run(folder / "run", folder / "base")

    return make


@pytest.mark.slow
@pytest.mark.parametrize("target", [name for name, layout in LAYOUTS.items() if layout.experts])
def test_each_expert_is_quantized_by_itself(mixtures, tmp_path, target):
    run = mixtures("Qwen3Moe")
    report = merge(run, tmp_path / "merged", base="original", quantize=target)
    assert report.targets["original"].explained
    assert report.experts == (24, 24)
    names = tensors(tmp_path / "merged").keys()
    packed = "qweight" if target == "gptq" else "weight_packed"
    assert f"model.layers.0.mlp.experts.3.down_proj.{packed}" in names
    model = load_model(str(tmp_path / "merged"), dtype="bfloat16", device="cpu")
    assert len(stacks(model)) == 4
    config = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization_config"]
    routers = [name for name in ("model.layers.0.mlp.gate", "model.layers.1.mlp.gate")]
    if target == "gptq":
        assert all(f"-:^{name}$".replace(".", r"\.") in config["dynamic"] for name in routers)
    else:
        assert set(config["ignore"]) == {"lm_head", *routers}


def test_stacked_experts_are_refused_by_name(mixtures, tmp_path):
    with pytest.raises(HalfbyteError, match=r"layers\.0\.mlp\.experts\."):
        merge(mixtures("GptOss"), tmp_path / "merged", base="original", quantize="w4a16", verify=False)
    assert not (tmp_path / "merged").exists()


# --- bad input -------------------------------------------------------------------------------------------------------


def test_the_group_size_follows_from_the_model(run, tmp_path):
    merge(run, tmp_path / "merged", base="original", quantize="w4a16", verify=False)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32  # of 96 inputs
    assert entries(tmp_path / "merged", "model.layers.0.mlp.down_proj")["weight_scale"].shape == (96, 8)
    assert "merge-groups" in notices_so_far()


@pytest.mark.parametrize(
    ("target", "sizes", "words"),
    [
        ("w4a16", {"intermediate_size": 104}, r"down_proj\.weight \(64, 104\)"),
        ("gptq", {"intermediate_size": 104}, r"down_proj\.weight \(64, 104\)"),
        ("w4a16-asym", {"intermediate_size": 100}, r"gate_proj\.weight \(100, 64\)"),
    ],
)
def test_weights_that_a_layout_cannot_hold_are_named(tmp_path, target, sizes, words):
    run = save_run(tmp_path / "run", save_base(tmp_path / "base", **sizes))
    with pytest.raises(ConfigError, match=words):
        merge(run, tmp_path / "merged", quantize=target)
    assert not (tmp_path / "merged").exists()


def test_an_unknown_name_lists_the_layouts(run, tmp_path):
    with pytest.raises(ConfigError) as caught:
        merge(run, tmp_path / "merged", quantize="w4a17")
    assert all(name in str(caught.value.fix) for name in LAYOUTS)
