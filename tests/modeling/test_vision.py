"""The vision tower in training: its attention equals transformers' loop over images, and frozen towers save nothing."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks

import halfbyte
from halfbyte.autograd import attention as causal
from halfbyte.modeling import vision
from halfbyte.modeling.architectures import all_linear
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.utils.errors import ModelError
from tests.helpers.image_models import save_image_model
from tests.helpers.patch_models import loop_over_documents

GRIDS = {
    "one": [(1, 4, 6)],
    "uneven": [(1, 4, 6), (1, 18, 10), (1, 8, 8), (1, 22, 14)],
    "equal": [(1, 8, 8), (1, 8, 8)],
    "windows": [(1, 16, 16), (1, 16, 16), (1, 16, 6)],
}


@pytest.fixture
def on_gpu(monkeypatch):
    """The path of a CUDA device in 16 bits, on a CPU."""
    monkeypatch.setattr(causal, "DTYPES", (torch.float32,))
    monkeypatch.setattr(causal, "capability", lambda device: causal.AMPERE)
    monkeypatch.setattr(causal, "_varlen", lambda: (loop_over_documents, frozenset({"enable_gqa"})))


def outputs_and_gradients(model, pixels, grid):
    tower = model.model.visual
    output = tower(pixels, grid_thw=grid)
    tensors = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    weights = list(tower.parameters())
    gradients = torch.autograd.grad(sum((t * t.cos()).sum() for t in tensors), weights, materialize_grads=True)
    return tensors, gradients


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
@pytest.mark.parametrize("flash", [False, True])
def test_tower_equals_transformers_loop(name, flash, request, tmp_path):
    if flash:
        request.getfixturevalue("on_gpu")
    model = save_image_model(tmp_path, name)
    width = 3 * 2 * model.config.vision_config.patch_size**2
    for sizes in GRIDS.values():
        grid = torch.tensor(sizes)
        pixels = torch.randn(int(grid.prod(1).sum()), width)
        expected = outputs_and_gradients(model, pixels, grid)
        calls = []
        attend = vision.attend_segments
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(vision, "attend_segments", lambda *a, **k: calls.append(1) or attend(*a, **k))  # noqa: B023
            assert vision.bind_vision(model)
            results = outputs_and_gradients(model, pixels, grid)
        assert len(calls) == len(model.model.visual.blocks)
        for tensors, others in zip(results, expected, strict=True):
            for tensor, other in zip(tensors, others, strict=True):
                torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
        vision.unbind_vision(model)
        assert model.model.visual.config._attn_implementation == "sdpa"
        assert "get_image_features" not in vars(model.model)


@pytest.mark.parametrize("lengths", [[3], [5, 5, 5], [4, 9, 4, 1, 9, 4], [0, 6, 0, 2], [64] * 5 + [12, 64]])
def test_segments_attend_to_themselves_only(lengths):
    query, key, value = torch.randn(3, sum(lengths), 2, 8)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out = vision.segment_attention(query, key, value, bounds, 0.3)
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        alone = ((q @ k.mT) * 0.3).softmax(-1) @ v
        torch.testing.assert_close(out[begin:end], alone.transpose(0, 1), rtol=1e-5, atol=1e-6)


def image_batch(model):
    """A row with an image of 4 tokens for the tiny Qwen2.5-VL."""
    ids = torch.arange(20, 40)[None].clone()
    ids[0, 3:7] = model.config.image_token_id
    types = (ids == model.config.image_token_id).long()
    pixels = torch.randn(16, 3 * 2 * 14**2)
    return {"input_ids": ids, "labels": ids.masked_fill(types == 1, -100), "mm_token_type_ids": types,
            "pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}  # fmt: skip


@pytest.mark.parametrize("trained", [False, True])
def test_only_a_trained_tower_saves_tensors_for_backward(trained, tmp_path):
    """Also under `enable_input_require_grads`, which makes the outputs of the tower's patch embedding require them."""
    model = save_image_model(tmp_path, "qwen2_5_vl")
    targets = all_linear(model, ["freeze_vision_tower"] if trained else [])
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    model.enable_input_require_grads()
    halfbyte.patch(model)
    batch = image_batch(model)
    inside, saved = [False], []
    backbone = model.get_base_model().model
    features = backbone.get_image_features

    def watched(*args, **kwargs):
        inside[0] = True
        output = features(*args, **kwargs)
        inside[0] = False
        return output

    backbone.get_image_features = watched
    with saved_tensors_hooks(lambda tensor: saved.append(inside[0]) or tensor, lambda tensor: tensor):
        causal_lm_loss(model, batch)
    assert any(saved) == trained
    assert not all(saved)


def test_transformers_generates_with_a_bound_tower(tmp_path):
    model = save_image_model(tmp_path, "qwen2_5_vl")
    inputs = image_batch(model)
    del inputs["labels"]
    keys = {"do_sample": False, "max_new_tokens": 3}
    expected = model.generate(**inputs, **keys)
    assert vision.bind_vision(model)
    assert torch.equal(model.generate(**inputs, **keys), expected)


def test_a_model_without_features_of_its_own_is_refused(tmp_path):
    model = save_image_model(tmp_path, "mllama")  # its text reads images by cross-attention
    with pytest.raises(ModelError, match="vision_cache"):
        vision.image_outputs(model, {"pixel_values": torch.zeros(1, 1, 1, 3, 28, 28)})
