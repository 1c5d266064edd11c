"""Adapters: what is trained, in which dtype, and that plain PEFT reads what is saved."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from halfbyte.adapter_kinds import LORA
from halfbyte.adapters.lora import (
    add_adapter,
    load_adapter_weights,
    reads_base_weights,
    save_adapter,
    saved_adapter_config,
)
from halfbyte.config import RunConfig
from halfbyte.methods.answers import as_adapter, without_adapter
from halfbyte.modeling.compute_dtype import compute_autocast, no_input_casts
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError

LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def tiny_llama(dtype=torch.float32, **keys):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64} | keys
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)).to(dtype)


def adapted(model=None, **keys):
    torch.manual_seed(2)
    keys = {"model_name_or_path": "org/tiny", "dataset": "d", "r": 4} | keys
    return add_adapter(model if model is not None else tiny_llama(), RunConfig(**keys))


def randomize(model):
    """Adapters start as the identity; give every trained weight a value that shows."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def logits(model):
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad(), no_input_casts(model), compute_autocast(model):
        return model.eval()(input_ids=ids).logits


def targets(model):
    return {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}


def test_all_linear_takes_every_linear_but_the_head_and_freezes_the_rest():
    model = adapted()
    assert targets(model) == LINEARS
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * len(LINEARS)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (["layers.1.mlp.up_proj"], {"up_proj"}),
        (r".*layers\.0\.self_attn\.[kv]_proj", {"k_proj", "v_proj"}),
    ],
)
def test_lists_and_patterns_name_the_adapted_modules(names, expected):
    assert targets(adapted(target_modules=names)) == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"target_modules": ["q_prj"]}, "q_proj"),
        ({"target_modules": ["q_proj", "gate"]}, "gate_proj"),
        ({"target_modules": r".*\.up_porj"}, "up_proj"),
        ({"modules_to_save": ["lm_hed"]}, "lm_head"),
        ({"rank_pattern": {"down_pro": 2}}, "down_proj"),
        ({"alpha_pattern": {"o_projj": 2.0}}, "o_proj"),
        ({"target_modules": ["input_layernorm"]}, None),
        ({"target_modules": ["q_proj"], "rank_pattern": {"v_proj": 2}}, "target_modules"),
        (
            {"target_modules": r".*\.0\.self_attn\.q_proj", "alpha_pattern": {r"layers\.1\..*": 2.0}},
            "target_modules",
        ),
        ({"alpha_pattern": {"lm_head": 2.0}}, "target_modules"),
    ],
)
def test_a_name_that_matches_nothing_names_the_closest(keys, named):
    with pytest.raises(ModelError, match=named):
        adapted(**keys)


def test_an_invalid_pattern_is_a_config_error():
    for key in ("target_modules", "exclude_modules"):
        with pytest.raises(ConfigError):
            adapted(**{key: "*.q_proj"})


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"exclude_modules": ["q_proj", "mlp.down_proj"]},
            {(i, n) for i in "01" for n in LINEARS - {"q_proj", "down_proj"}},
        ),
        ({"exclude_modules": r".*layers\.0\..*|.*_proj\.x"}, {("1", name) for name in LINEARS}),
        ({"layers_to_transform": 1}, {("1", name) for name in LINEARS}),
        ({"layers_to_transform": [0], "target_modules": ["k_proj"], "layers_pattern": ["layers"]}, {("0", "k_proj")}),
        ({"exclude_modules": ["o_proj"], "target_modules": ".*[ok]_proj"}, {("0", "k_proj"), ("1", "k_proj")}),
    ],
)
def test_modules_that_are_excluded_or_in_other_layers_get_no_adapter(keys, expected):
    names = [name.split(".") for name, module in adapted(**keys).named_modules() if hasattr(module, "lora_A")]
    assert {(name[-3], name[-1]) for name in names} == expected


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"exclude_modules": ["q_projs"]}, "exclude_modules"),
        ({"exclude_modules": "q_proj"}, "exclude_modules"),  # an expression matches full names
        ({"exclude_modules": ["q_proj"], "target_modules": ["q_proj"]}, "exclude_modules"),
        ({"exclude_modules": ["q_proj"], "target_modules": ["k_proj"]}, "exclude_modules"),
        ({"layers_to_transform": [0, 2]}, "layer 2"),
        ({"layers_to_transform": [0], "layers_pattern": "h"}, "layers_to_transform"),
    ],
)
def test_a_selection_that_names_nothing_is_refused(keys, named):
    with pytest.raises(ModelError, match=named):
        adapted(**keys)


def test_experts_of_other_layers_get_no_adapter():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 64, "head_dim": 16}
    model = MixtralForCausalLM(
        MixtralConfig(num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, **sizes)
    )
    names = {name for name, p in adapted(model, layers_to_transform=[1]).named_parameters() if p.requires_grad}
    assert all(".layers.1." in name for name in names)
    assert {name.partition(".lora_")[0].rpartition("experts")[2] for name in names if "experts" in name} == {
        "", ".base_layer"
    }  # fmt: skip


@pytest.mark.parametrize("keys", [{"use_dora": True}, {"init_lora_weights": "gaussian"}, {"qat_scheme": "int4"}])
def test_a_bias_of_b_is_refused_where_nothing_holds_it(keys, tmp_path):
    with pytest.raises(ValueError, match="lora_bias"):
        adapted(lora_bias=True, load_in_4bit=False, **keys)
    save_adapter(adapted(lora_bias=True), tmp_path)
    config = saved_adapter_config(tmp_path)
    assert [key for key in LORA.unmerged if getattr(config, key)] == ["lora_bias"]
    layers = [module for module in adapted(lora_bias=True).modules() if hasattr(module, "lora_A")]
    assert all(isinstance(LORA.factors(layer), str) for layer in layers)


def test_lora_fa_trains_b_alone_also_after_a_reference(tmp_path):
    model = adapted(lora_fa=True, use_dora=True)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert {name.split(".lora_")[1].split(".")[0] for name in trained} == {"B", "magnitude_vector"}
    assert {parameter.dtype for name, parameter in model.named_parameters() if "lora_A" in name} == {torch.float32}
    for reference in (without_adapter, lambda model: as_adapter(model, "default")):
        with reference(model):
            pass
        assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    save_adapter(randomize(model), tmp_path)
    continued = add_adapter(
        tiny_llama(), RunConfig(model_name_or_path="m", dataset="d", lora_fa=True, adapter_path=str(tmp_path))
    )
    assert [name for name, parameter in continued.named_parameters() if parameter.requires_grad] == trained


def test_scaling_rank_and_alpha_patterns():
    layer = adapted(lora_alpha=8, use_rslora=True).base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == pytest.approx(8 / 4**0.5)
    model = adapted(lora_alpha=8, rank_pattern={r"layers\.1\.self_attn\.q_proj": 2}, alpha_pattern={"q_proj": 6.0})
    first, second = (layer.self_attn.q_proj for layer in model.base_model.model.model.layers)
    assert (first.lora_A["default"].weight.shape[0], second.lora_A["default"].weight.shape[0]) == (4, 2)
    assert (first.scaling["default"], second.scaling["default"]) == (6 / 4, 6 / 2)


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_weights_have_the_dtype_asked_for_whatever_the_base(base, dtype):
    model = adapted(tiny_llama(base), adapter_dtype=dtype, modules_to_save=["embed_tokens"], use_dora=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = getattr(torch, dtype)
    copies = {p.dtype for name, p in model.named_parameters() if ".modules_to_save." in name}
    # copies of full modules have no fewer bits than the model computes in
    assert copies == {max(base, expected, key=lambda choice: choice.itemsize)}
    assert {p.dtype for p in trained} - copies <= {expected}
    assert {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad} == {base}


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3.0}},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"adapter_dtype": "bfloat16"},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"lora_bias": True},
        {"exclude_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    ],
)
def test_plain_peft_loads_what_is_saved_with_equal_logits(tmp_path, base, keys):
    model = randomize(adapted(tiny_llama(base), **keys))
    save_adapter(model, tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(tiny_llama(base), tmp_path / "adapter")
    # Plain PEFT reads adapters as float32 and whole modules in the base's dtype, so these two round differently.
    rounded = {"adapter_dtype"} if base == torch.float32 else {"modules_to_save"}
    exact = not rounded & keys.keys()
    torch.testing.assert_close(logits(model), logits(reloaded), rtol=0, atol=0 if exact else 0.05)
    assert not torch.equal(logits(model), logits(tiny_llama(base)))


def test_the_saved_configuration_is_plain_peft(tmp_path):
    save_adapter(adapted(lora_alpha=16, model_revision="v2"), tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "org/tiny"
    assert saved["revision"] == "v2"
    assert saved["lora_alpha"] == 16
    assert set(saved["target_modules"]) == LINEARS
    assert "halfbyte" not in json.dumps(saved)


def test_adapter_path_continues_from_a_saved_adapter(tmp_path):
    model = randomize(adapted(r=4, lora_alpha=12))
    save_adapter(model, tmp_path)
    continued = adapted(r=8, adapter_path=str(tmp_path))
    assert torch.equal(logits(model), logits(continued))
    assert {p.dtype for p in continued.parameters() if p.requires_grad} == {torch.float32}
    assert sum(p.numel() for p in continued.parameters() if p.requires_grad) > 0


def test_an_adapter_to_continue_is_not_rounded_to_the_bases_dtype(tmp_path):
    save_adapter(randomize(adapted(r=4)), tmp_path)
    continued = adapted(tiny_llama().to(torch.bfloat16), adapter_path=str(tmp_path))
    weights = {key.replace(".default", ""): value for key, value in continued.named_parameters()}
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(weights[key], value) for key, value in saved.items())
    assert any((value != value.bfloat16()).any() for value in saved.values())


def test_adapters_that_look_at_whole_weights(tmp_path):
    """Loading cuts layers into pieces before others are added; what a saved adapter says counts, not the key."""

    def reads(**keys):
        return reads_base_weights(RunConfig(model_name_or_path="m", dataset="d", **keys).adapter)

    assert [reads(), reads(use_dora=True), reads(modules_to_save=["lm_head"])] == [False, True, True]
    save_adapter(adapted(use_dora=True), tmp_path)
    assert reads(adapter_path=str(tmp_path))
    save_adapter(adapted(), tmp_path)
    assert not reads(adapter_path=str(tmp_path), use_dora=True)


def test_adapter_path_for_another_model_names_the_tensor(tmp_path):
    save_adapter(adapted(), tmp_path)
    with pytest.raises(CheckpointError, match=r"gate_proj.*shape"):
        adapted(tiny_llama(intermediate_size=40), adapter_path=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"lacks.*layers\.2"):
        adapted(tiny_llama(num_hidden_layers=3), adapter_path=str(tmp_path))
    with pytest.raises(CheckpointError, match=r"holds.*layers\.1"):
        adapted(tiny_llama(num_hidden_layers=1), adapter_path=str(tmp_path))


def test_missing_and_truncated_adapters(tmp_path):
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        adapted(adapter_path=str(tmp_path))
    save_adapter(adapted(), tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        load_adapter_weights(adapted(), tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        adapted(adapter_path=str(tmp_path))


@pytest.mark.parametrize("peft_type", ["vera", "randlora", "vblora"])
def test_tensors_that_layers_share_are_in_the_file_of_an_embedding_models_adapter(tmp_path, peft_type):
    """VeRA's random matrices, for example, have the name of no module."""
    sizes = {"num_vectors": 8, "vector_length": 16} if peft_type == "vblora" else {}
    config = RunConfig(model_name_or_path="org/tiny", dataset="d", peft_type=peft_type, peft_config=sizes)
    model = add_adapter(tiny_llama(), config, scores="FEATURE_EXTRACTION")
    saved = {name: parameter.clone() for name, parameter in randomize(model).named_parameters()}
    save_adapter(model, tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    load_adapter_weights(model, tmp_path)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    plain = PeftModel.from_pretrained(tiny_llama().base_model, tmp_path)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        trained = model.get_base_model().base_model(input_ids=ids).last_hidden_state
        torch.testing.assert_close(plain(input_ids=ids).last_hidden_state, trained)


def test_dora_on_rows_of_zeros_is_refused_by_name():
    """Families with a padding token start its row of a tied head at zero, whose norm PEFT's forward divides by."""
    model = tiny_llama()
    model.lm_head.weight.data[3] = 0
    with pytest.raises(ModelError, match="lm_head"):
        adapted(model, use_dora=True, target_modules=["q_proj", "lm_head"])
