"""Mixtures in the engines: tokens equal transformers' with packed stacks and an adapter per row."""

import pytest
import torch

from halfbyte import generation
from halfbyte.adapters.lora import add_adapter, load_adapter, save_adapter
from halfbyte.config import RunConfig
from halfbyte.generation import Rollouts, Sampling
from halfbyte.generation.engine import StaticEngine
from halfbyte.loading.load import load_model
from halfbyte.modeling import routers
from halfbyte.utils import notices
from tests.helpers.decoding import PROMPTS, halfbyte_greedy, transformers_greedy
from tests.helpers.expert_models import mixture

# With a shared expert, gate weights scaled, and groups of experts; with a norm over all heads.
SHARED = {
    "Glm4Moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
                "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
}  # fmt: skip
NAMES = ["Qwen3Moe", "Mixtral", "Olmoe", "Glm4Moe"]


def made(name, folder=None):
    """With adapters on attention and experts; from a folder its weights are in NF4."""
    model = mixture(name, **SHARED.get(name, {}))
    if folder is not None:
        model.save_pretrained(folder)
        model = load_model(str(folder), dtype="float32", device="cpu")
    model = add_adapter(model, RunConfig(model_name_or_path="m", dataset="d", output_dir="o", r=4, lora_alpha=8.0))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.05)
    return model.eval()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", NAMES)
def test_packed_experts_with_adapters(name, tmp_path):
    """An adapter whose values have changed since the last call, too."""
    model = made(name, tmp_path)
    assert halfbyte_greedy(model, PROMPTS, 12) == [transformers_greedy(model, ids, 12) for ids in PROMPTS]
    engine = StaticEngine(model, ["default"], 32, None)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.mul_(-3)
    assert engine.renew(model)
    changed = [transformers_greedy(model, ids, 12) for ids in PROMPTS]
    assert halfbyte_greedy(model, PROMPTS, 12) == changed
    with model.disable_adapter():
        base = [transformers_greedy(model, ids, 12) for ids in PROMPTS]
    assert halfbyte_greedy(model, PROMPTS, 12, adapter=None) == base != changed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Qwen3Moe", "Glm4Moe"])
def test_each_row_uses_its_own_adapter(name, tmp_path):
    model = made(name, tmp_path / "model")
    save_adapter(model, tmp_path / "adapter")
    model = load_adapter(model, tmp_path / "adapter", "m", "second").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B.second" in key:
                parameter.mul_(-5)
    expected = {}
    for adapter in ("default", "second"):
        model.set_adapter(adapter)
        expected[adapter] = transformers_greedy(model, PROMPTS[0], 12)
    with model.disable_adapter():
        expected[None] = transformers_greedy(model, PROMPTS[0], 12)
    assert len(set(map(tuple, expected.values()))) == 3
    rows = ["second", None, "default", "second"]
    assert halfbyte_greedy(model, [PROMPTS[0]] * 4, 12, adapter=rows) == [expected[row] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_rollouts_equal_transformers(name, tmp_path):
    """While a run counts how often experts are chosen, in training."""
    model = made(name, tmp_path)
    expected = [transformers_greedy(model, ids, 20) for ids in PROMPTS]
    notices.reset_notices()
    with routers.track_routers(model.train(), balanced=False) as counted:
        found = Rollouts(model, rows=2).generate(PROMPTS, max_new_tokens=20, sampling=Sampling(), stops=[])
        assert counted.usage()["layers"]
        assert not any(sum(each["used"]) for each in counted.usage()["layers"].values())
    assert not any(key.startswith("rollouts") for key in notices.notices_so_far())
    assert [each.ids for each in found] == expected


def test_a_captured_step_sees_new_adapters_in_the_same_memory(tmp_path):
    """A graph holds addresses: nothing that it reads may move."""
    model = made("Qwen3Moe", tmp_path)
    engine = StaticEngine(model, ["default"], 32, None)
    low = [each for layer in engine.layers for each in layer.mlp.experts.adapters_of.values()]
    places = [(each.a.data_ptr(), each.b.data_ptr()) for each in low]
    assert len(places) == 4
    assert engine.renew(model)
    assert places == [(each.a.data_ptr(), each.b.data_ptr()) for each in low]


def falls_back(model):
    notices.reset_notices()
    found = generation.generate(model, PROMPTS, max_new_tokens=8, stops=[])
    assert found == [transformers_greedy(model, ids, 8) for ids in PROMPTS]
    (said,) = [text for key, text in notices.notices_so_far().items() if key.startswith("generation")]
    return said


def test_unsupported_models_run_transformers_forward():
    """Hooks of others on experts, and a router that has been trained."""
    model = mixture("Qwen3Moe")
    hook = model.model.layers[1].mlp.experts.register_forward_hook(lambda *_: None)
    assert "hooks" in falls_back(model)
    hook.remove()
    config = RunConfig(
        model_name_or_path="m", dataset="d", output_dir="o", r=4, target_modules=["q_proj"], modules_to_save=["gate"]
    )
    assert "gate" in falls_back(add_adapter(mixture("Qwen3Moe"), config).eval())
