"""Low-rank routers: plain PEFT's numbers and files, names, merges, and refused requests."""

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

from halfbyte.adapters.lora import add_adapter, load_adapter, save_adapter
from halfbyte.adapters.router_adapters import router_wrappers
from halfbyte.config import RunConfig
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.merge import merge
from halfbyte.export.served_adapter import export_served
from halfbyte.loading.load import load_model
from halfbyte.methods import method_of
from halfbyte.modeling.compute_dtype import compute_autocast, no_input_casts
from halfbyte.modeling.routers import track_routers
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ModelError
from tests.helpers.expert_models import ADAPTER_KEYS, MIXTURES, TOKENS, adapted, assert_same_step, mixture, step
from tests.helpers.merge_runs import byte_tokenizer, save_run

BATCH = {"input_ids": TOKENS, "position_ids": torch.arange(13).expand(2, -1), "labels": TOKENS}
WAYS = {
    "a list": {"target_modules": ["q_proj", "{}"]},
    "the router alone": {"target_modules": ["{}"]},
    "an expression": {"target_modules": r".*\.(q_proj|{})"},
    "a parameter": {"target_modules": ["q_proj"], "target_parameters": ["mlp.{}.weight"]},
    "a layer's, beside experts": {
        "target_modules": "all-linear",
        "target_parameters": ["model.layers.1.mlp.{}.weight", "experts.down_proj"],
    },
}


def filled(value, router):
    if isinstance(value, list):
        return [name.replace("{}", router) for name in value]
    return value.replace("{}", router)


def routed(model, router="gate", **keys):
    return adapted(model, **{"target_modules": ["o_proj", router]} | keys)


def routers_of(name):
    return "router" if name == "GptOss" else "gate"


@pytest.mark.parametrize("name", MIXTURES)
def test_as_plain_peft(name, tmp_path):
    """Results equal PEFT's with the adapter's files on the same base, and differ from the base's."""
    router = routers_of(name)
    model = routed(mixture(name), router)
    save_adapter(model, tmp_path)
    plain = PeftModel.from_pretrained(mixture(name), tmp_path, is_trainable=True, autocast_adapter_dtype=False)
    actual = step(model)
    assert_same_step(actual, step(plain))
    of_routers = [key for key in actual[1] if f".{router}." in key]
    assert len(of_routers) == 2 * sum(1 for _ in router_wrappers(model)) > 0
    assert all(actual[1][key].abs().sum() > 0 for key in of_routers)

    reloaded = load_adapter(mixture(name), tmp_path, "m")
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits
        torch.testing.assert_close(reloaded(TOKENS).logits, logits, rtol=1e-6, atol=1e-6)
        with model.disable_adapter():
            bare = model(TOKENS).logits
        assert torch.equal(bare, mixture(name)(TOKENS).logits)
    assert not torch.equal(bare, logits)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", WAYS)
@pytest.mark.parametrize("name", ["Qwen3Moe", "Qwen2Moe", "Mixtral"])
def test_names(form, name, tmp_path):
    """Every way to name it; Qwen2-MoE has a shared_expert_gate, which ends as the router does, and stays frozen."""
    keys = {key: filled(value, "gate") for key, value in WAYS[form].items()}
    model = routed(mixture(name), **keys)
    layers = ["1"] if "layer's" in form else ["0", "1"]
    assert [key for key, _ in router_wrappers(model.get_base_model())] == [
        f"model.layers.{at}.mlp.gate.weight" for at in layers
    ]
    if "layer's" not in form:
        assert not any("shared_expert_gate" in key for key, p in model.named_parameters() if p.requires_grad)
        save_adapter(model, tmp_path)
        plain = PeftModel.from_pretrained(mixture(name), tmp_path, is_trainable=True, autocast_adapter_dtype=False)
        assert_same_step(step(model), step(plain))
        assert not any("q_proj" in key for key in load_file(tmp_path / "adapter_model.safetensors")) or "q_proj" in str(
            keys["target_modules"]
        )


def test_all_linear_excludes_routers_with_a_notice(tmp_path):
    model = routed(mixture("Qwen3Moe"), target_modules="all-linear")
    assert not any(router_wrappers(model))
    assert not any("routers" in message for message in notices.notices_so_far().values())

    routed(mixture("Qwen3Moe"))
    [message] = [notice for notice in notices.notices_so_far().values() if "routers" in notice]
    weights = 2 * 4 * (64 + 4)  # two layers, r = 4, 64 inputs, 4 experts
    assert f"{weights / 1e6:.3g}M " in message
    assert "2 routers" in message


def test_routers_learn_with_quantized_experts(tmp_path):
    """Quantized, in bf16 under autocast, balanced: only adapters move, and the loss falls."""
    mixture("Qwen3Moe").save_pretrained(tmp_path)
    model = add_adapter(load_model(str(tmp_path), dtype="bfloat16", device="cpu"),
                        RunConfig(**ADAPTER_KEYS, target_modules=["gate"])).train()  # fmt: skip
    routers_before = {key: p.detach().clone() for key, p in model.named_parameters() if ".gate.base_layer." in key}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4
    assert {p.dtype for p in trained} == {torch.float32}
    steps, losses = torch.optim.Adam(trained, lr=0.05), []
    method = method_of(RunConfig(**ADAPTER_KEYS, router_aux_loss_coef=0.01))
    with track_routers(model, balanced=True) as routers, no_input_casts(model):
        for _ in range(12):
            with compute_autocast(model):
                loss = routers.counted(lambda batch: method.sums(model, batch))(BATCH)["loss"] / TOKENS.numel()
            steps.zero_grad()
            loss.backward()
            steps.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.01
    assert all(torch.equal(p, routers_before[key]) for key, p in model.named_parameters() if key in routers_before)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged(dtype, tmp_path):
    model = mixture("Qwen3Moe", vocab_size=272, eos_token_id=257, bos_token_id=256).to(dtype)
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    run = save_run(tmp_path / "run", tmp_path / "base", target_modules=["q_proj", "gate"])
    report = merge(run, tmp_path / "merged", base="original")
    assert report.targets["original"].explained
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    expected = PeftModel.from_pretrained(twin, run / "adapter").merge_and_unload()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for key, parameter in merged.named_parameters():
        close = {"rtol": 2**-8, "atol": 1e-6}
        torch.testing.assert_close(parameter, expected.get_parameter(key), **close)
    gate = "model.layers.1.mlp.gate.weight"
    assert not torch.equal(merged.get_parameter(gate), model.get_parameter(gate).float())

    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.gate\.weight"):
        export_adapter(run)
    with pytest.raises(CheckpointError, match=r"\(model\.layers\.0\.mlp\.gate"):
        export_served(run)


def test_forward_equals_merged_weights(tmp_path):
    """In bf16: the router's weight is rounded once, after the addition in fp32, as merged weights are."""
    model = routed(mixture("Qwen3Moe").to(torch.bfloat16))
    name, wrapper = next(iter(router_wrappers(model.get_base_model())))
    a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    router = wrapper.get_base_layer()
    merged = (router.weight.float() + wrapper.scaling["default"] * b @ a).bfloat16()
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        folded = wrapper(x)
        router.weight.copy_(merged)
        expected = router(x)
    assert all(torch.equal(mine, merged_output) for mine, merged_output in zip(folded, expected, strict=True))
    assert name == "model.layers.0.mlp.gate.weight"


REFUSED = {
    r"(?s)use_dora: model\.layers\.0\.mlp\.gate\.weight.*use_dora: false": {"use_dora": True},
    r"modules_to_save: 'gate'.*model\.layers\.0\.mlp\.gate\.weight": {"modules_to_save": ["gate"]},
    "'mlp.gate.bias'": {"target_parameters": ["mlp.gate.bias"]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_invalid_router_adapters_are_refused(message):
    with pytest.raises(ModelError, match=message):
        routed(mixture("Qwen3Moe"), **REFUSED[message])
