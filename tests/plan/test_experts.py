"""Plans with expert offload."""

from __future__ import annotations

import pytest
import torch
import transformers

from halfbyte.config import RunConfig
from halfbyte.loading.expert_offload import WINDOW
from halfbyte.memory import allocators
from halfbyte.plan.estimate import MARGIN, estimate
from halfbyte.plan.experts import INFERENCE_SHARE, offloaded_at_inference
from halfbyte.plan.memory_plan import GIB
from halfbyte.plan.shapes import ModelShapes
from halfbyte.utils.errors import ConfigError

LAYERS = 6
SHAPE = {
    "hidden_size": 1024, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 4096,
}  # fmt: skip
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "intermediate_size": 2048}
MIXTURE = transformers.Qwen3MoeConfig(**SHAPE, **EXPERTS)
DENSE = transformers.Qwen3Config(**SHAPE, intermediate_size=2048)
STACKS = 32 * 3 * 512 * 1024  # weights of a layer's experts


@pytest.fixture(autouse=True)
def a_machine(monkeypatch):
    monkeypatch.setattr(allocators, "available_bytes", lambda: 64 * GIB)
    monkeypatch.setattr("halfbyte.plan.estimate.has_expandable_segments", lambda: False)


@pytest.fixture(scope="module")
def shapes():
    return ModelShapes(run(), MIXTURE, torch.device("cuda"))


def run(**keys):
    given = {"per_device_train_batch_size": 4, "max_length": 512, "use_kernels": True, "r": 8}
    return RunConfig(model_name_or_path="m", dataset="d", dtype="bfloat16", **(given | keys))


def plan(config=None, gib=80.0, model=MIXTURE, device="cuda", **keys):
    return estimate(config or run(**keys), model, device=device, capacity_bytes=int(gib * GIB))


@pytest.mark.slow
def test_mixtures_support_every_level(shapes):
    assert shapes.fused
    found = {level: plan(activation_checkpointing=level) for level in ("keep", "recompute", "checkpoint", "offload")}
    assert all(set(each.levels) == {level} for level, each in found.items())
    activations = [each.activations for each in found.values()]
    assert activations == sorted(activations, reverse=True)


@pytest.mark.slow
def test_experts_stay_on_a_device_that_fits_them():
    found = plan()
    assert found.offloaded == ()


@pytest.mark.slow
def test_auto_offloads_the_fewest_layers():
    least, each = plan(activation_checkpointing="offload").total, STACKS * 4.127 / 8
    for more in range(3):  # the window takes two layers' bytes
        lacking = (more + 0.5) * each
        found = plan(activation_checkpointing="offload", gib=(least - lacking) / MARGIN / GIB)
        assert len(found.offloaded) == WINDOW + more + 1
        assert found.total <= least - lacking
        assert f"{len(found.offloaded)} layers" in found.reason


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("asked", "count"), [(True, LAYERS), (4, 4), (99, LAYERS), (False, 0)])
def test_expert_offload_as_configured(asked, count):
    resident, found = plan(expert_offload=False), plan(expert_offload=asked)
    assert len(found.offloaded) == count
    left = (resident.weights - found.weights) / max(count, 1)
    assert left == pytest.approx(STACKS * (4.127 / 8) if count else 0, rel=1e-3)
    assert found.gathered == pytest.approx(WINDOW * left)
    assert not (found.use_graphs and count)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device": "cpu"}, "experts on cpu"),
        ({"model": DENSE}, "no packed experts"),
        ({"load_in_4bit": False}, "no packed experts"),
    ],
)
def test_unsupported_offload_is_refused(keys, said):
    with pytest.raises(ConfigError, match=f"expert_offload: true: .*{said}"):
        plan(expert_offload=True, **keys)
    assert plan(**keys).offloaded == ()


def test_offload_at_inference():
    cuda = torch.device("cuda")
    assert offloaded_at_inference(run(), MIXTURE, cuda, 64 * GIB) == ()
    packed = ModelShapes(run().model_copy(update={"use_peft": False}), MIXTURE, cuda).frozen_bytes()
    each = STACKS * 4.127 / 8
    for lacking, count in ((0.5, 3), (1.5, 4), (3.5, 6), (9.0, 6)):
        free = int((packed - lacking * each) / INFERENCE_SHARE)
        assert len(offloaded_at_inference(run(), MIXTURE, cuda, free)) == count
    assert offloaded_at_inference(run(expert_offload=2), MIXTURE, cuda, 64 * GIB) == (2, 5)
    assert offloaded_at_inference(run(expert_offload=False), MIXTURE, cuda, 0) == ()
    assert offloaded_at_inference(run(expert_offload=True), MIXTURE, torch.device("cpu"), 0) == ()
    assert offloaded_at_inference(run(expert_offload=True), DENSE, cuda, 0) == ()


@pytest.mark.slow
def test_host_memory_limits_the_offload(monkeypatch):
    each = STACKS * 4.13 / 8
    monkeypatch.setattr(allocators, "available_bytes", lambda: int(3.5 * each / 0.9))
    with pytest.raises(ConfigError, match="expert_offload: 5:") as refused:
        plan(expert_offload=5)
    assert "expert_offload: 3" in refused.value.fix
    assert len(plan(activation_checkpointing="checkpoint", gib=0.1).offloaded) == 3
