"""Adapters on stacked experts: PEFT's own numbers on dequantized weights, its files, and refused requests."""

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file

from halfbyte.adapters.expert_adapters import expert_wrappers
from halfbyte.adapters.lora import load_adapter, save_adapter
from halfbyte.loading.load import load_model
from halfbyte.utils.errors import ModelError
from tests.helpers.expert_models import MIXTURES, TOKENS, adapted, assert_same_step, dequantized, mixture, step


def quantized(name, folder):
    """The mixture, what `load_model` makes of it, and the twin with the values that it holds."""
    model = mixture(name)
    model.save_pretrained(folder)
    stored = load_model(str(folder), dtype="float32", device="cpu")
    return stored, dequantized(model, stored)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MIXTURES)
def test_as_plain_peft_on_dequantized_experts(name, tmp_path):
    """PEFT folds B·A into the whole stack; the files it reads are those we write."""
    stored, twin = quantized(name, tmp_path / "model")
    model = adapted(stored)
    save_adapter(model, tmp_path / "adapter")
    plain = PeftModel.from_pretrained(twin, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    actual = step(model)
    assert_same_step(actual, step(plain))
    assert sum(".experts." in key for key in actual[1]) == (4 if name == "DeepseekV3" else 8)

    base = load_model(str(tmp_path / "model"), dtype="float32", device="cpu")
    reloaded = load_adapter(base, tmp_path / "adapter", "m")
    with torch.no_grad():
        torch.testing.assert_close(reloaded(TOKENS).logits, model.eval()(TOKENS).logits, rtol=1e-6, atol=1e-6)
        with reloaded.disable_adapter(), plain.disable_adapter():
            torch.testing.assert_close(reloaded(TOKENS).logits, plain(TOKENS).logits, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_peft_merges_into_quantized_experts_and_restores_their_bytes(tmp_path):
    stored, _ = quantized("Qwen3Moe", tmp_path)
    base = stored(TOKENS).logits
    model = adapted(stored).eval()
    expected = model(TOKENS).logits
    stacks = {name: weight for name, weight in model.named_parameters() if name.endswith("gate_up_proj")}
    before = {name: {part: codes.clone() for part, codes in weight.parts.items()} for name, weight in stacks.items()}
    model.merge_adapter()
    merged = model(TOKENS).logits
    assert (merged - expected).norm() < 0.4 * (base - expected).norm()
    model.unmerge_adapter()
    assert len(stacks) == 2
    for name, weight in stacks.items():
        assert all(torch.equal(codes, before[name][part]) for part, codes in weight.parts.items())
    assert torch.equal(model(TOKENS).logits, expected)
    assert torch.equal(model.merge_and_unload()(TOKENS).logits, merged)


def test_all_linear_takes_experts_and_no_router(tmp_path, caplog):
    stored, _ = quantized("Qwen3Moe", tmp_path / "model")
    model = adapted(stored)
    save_adapter(model, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    assert not any("gate.weight" in name or ".gate.lora" in name for name in tensors)
    assert {name.split(".self_attn.")[1].split(".")[0] for name in tensors if "self_attn" in name} == {
        "q_proj", "k_proj", "v_proj", "o_proj"
    }  # fmt: skip
    prefix = "base_model.model.model.layers.0.mlp.experts"  # gate and up inside, down around them
    assert experts[f"{prefix}.base_layer.lora_A.weight"].shape == (4 * 4, 64)
    assert experts[f"{prefix}.base_layer.lora_B.weight"].shape == (64, 4 * 4)
    assert experts[f"{prefix}.lora_A.weight"].shape == (4 * 4, 32)
    assert f"{sum(t.numel() for t in experts.values()) / 1000000.0:.3g}M" in caplog.text


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_b_proj", "gate_proj", "up_proj", "down_proj"], r".*(mlp|shared_experts)\.\w+_proj"]
)
def test_dense_layers_and_shared_experts(targets, tmp_path):
    """Dense layers and shared experts that look like routed experts: adapted linears here, and in plain PEFT the same
    numbers from the same names of tensors."""
    stored, twin = quantized("DeepseekV3", tmp_path / "model")
    model = adapted(stored, target_modules=targets, rank_pattern={"down_proj": 2}, alpha_pattern={"up_proj": 3})
    save_adapter(model, tmp_path / "adapter")
    ranks = {"down_proj": 2}
    for name in ("layers.0.mlp", "layers.1.mlp.shared_experts"):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            layer = model.get_submodule(f"base_model.model.model.{name}.{leaf}")
            assert type(layer) is LoraLinear
            assert layer.r["default"] == ranks.get(leaf, 4)
            assert layer.scaling["default"] == (3 if leaf == "up_proj" else 8) / layer.r["default"]
    plain = PeftModel.from_pretrained(twin, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    assert_same_step(step(model), step(plain))

    base = load_model(str(tmp_path / "model"), dtype="float32", device="cpu")
    reloaded = load_adapter(base, tmp_path / "adapter", "m")
    load_adapter(reloaded, tmp_path / "adapter", "m", "second")
    for name in ("default", "second"):
        reloaded.set_adapter(name)
        with torch.no_grad():
            torch.testing.assert_close(reloaded(TOKENS).logits, model.eval()(TOKENS).logits, rtol=1e-6, atol=1e-6)


def test_named_experts_are_adapted(tmp_path):
    stored, _ = quantized("Qwen3Moe", tmp_path / "model")
    model = adapted(stored, target_parameters=["experts.down_proj"], rank_pattern={"1.mlp.experts.down_proj": 2})
    wrappers = dict(expert_wrappers(model))
    assert [name.rpartition("layers.")[2] for name in wrappers] == [f"{at}.mlp.experts.down_proj" for at in (0, 1)]
    assert [wrapper.r["default"] for wrapper in wrappers.values()] == [4, 2]
    stored, _ = quantized("Qwen3Moe", tmp_path / "model")
    assert not dict(expert_wrappers(adapted(stored, target_parameters=[])))
    stored, _ = quantized("Qwen3Moe", tmp_path / "model")
    assert not dict(expert_wrappers(adapted(stored, target_modules=["q_proj"])))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        (
            "Qwen3Moe",
            {"target_parameters": ["experts.gate_proj"]},
            "'experts.gate_proj'",
        ),
        ("Qwen3Moe", {"target_parameters": ["input_layernorm.weight"]}, None),
        ("Qwen3Moe", {"target_parameters": ["gate_up_proj"], "use_dora": True}, "PEFT.*DoRA"),
        ("Qwen3Moe", {"rank_pattern": {"experts.up_proj": 2}}, "rank_pattern"),
    ],
)
def test_unknown_names_are_refused(name, keys, message):
    with pytest.raises(ModelError, match=message):
        adapted(mixture(name), **keys)
