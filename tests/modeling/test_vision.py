"""The vision tower in training: its attention equals transformers' loop over images, and frozen towers save nothing."""

import itertools
from collections import Counter

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import halfbyte
from halfbyte.autograd import attention as causal
from halfbyte.config import load_config
from halfbyte.formats import Blockwise4
from halfbyte.layers.plain import is_plain_lora
from halfbyte.loading.load import load_model
from halfbyte.modeling import projections, vision
from halfbyte.modeling import tower as tower_forwards
from halfbyte.modeling.architectures import all_linear, non_text_modules
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from tests.helpers.image_models import save_image_model
from tests.helpers.patch_models import loop_over_documents

GRIDS = {
    "one": [(1, 4, 6)],
    "uneven": [(1, 4, 6), (1, 18, 10), (1, 8, 8), (1, 22, 14)],
    "equal": [(1, 8, 8), (1, 8, 8)],
    "windows": [(1, 16, 16), (1, 16, 16), (1, 16, 6)],
}


LORA = {"r": 4, "lora_alpha": 12, "init_lora_weights": False}


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
        attend = tower_forwards.attend_segments
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(tower_forwards, "attend_segments", lambda *a, **k: calls.append(1) or attend(*a, **k))  # noqa: B023
            assert vision.bind_vision(model)
            results = outputs_and_gradients(model, pixels, grid)
        assert len(calls) == len(model.model.visual.blocks)
        for tensors, others in zip(results, expected, strict=True):
            for tensor, other in zip(tensors, others, strict=True):
                torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
        vision.unbind_vision(model)
        assert not bound_forwards(model.model.visual)
        assert model.model.visual.config._attn_implementation == "sdpa"
        assert "get_image_features" not in vars(model.model)


def bound_forwards(tower):
    """Number of modules with each of halfbyte's forwards."""
    forwards = (vars(module).get("forward") for module in tower.modules())
    return Counter(forward.__func__.__name__.removesuffix("_forward") for forward in forwards if forward is not None)


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("qwen2_5_vl", {"rms_norm": 9, "attention": 4, "gated": 4, "patch": 1}),
        ("qwen3_vl", {"layer_norm": 10, "attention": 4, "patch": 1}),
        ("glm4v", {"rms_norm": 6, "attention": 2, "gated": 2, "patch": 1}),
        ("gemma3", {"layer_norm": 6}),
        ("llava", {"layer_norm": 6}),
        ("mistral3", {"rms_norm": 8, "gated": 3}),
        ("mllama", {}),
    ],
)
def test_classes_are_known_by_what_they_compute(name, fused, tmp_path):
    model = save_image_model(tmp_path, name)
    vision.bind_vision(model)
    towers = [model.get_submodule(part) for part in non_text_modules(model)]
    assert sum(map(bound_forwards, towers), Counter()) == fused


@pytest.mark.parametrize("context", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_classes_are_known_where_tensors_have_no_values(context, tmp_path):
    """The memory plan may be the first to bind; the answers are kept for the run after it."""
    model = save_image_model(tmp_path, "qwen2_5_vl")
    tower_forwards._computes.cache_clear()
    with context():
        vision.bind_vision(model)
    assert bound_forwards(model.model.visual).keys() == {"rms_norm", "attention", "gated", "patch"}


@pytest.mark.parametrize("storage", ["plain", "nf4"])
def test_gated_units_of_odd_widths_are_padded_with_zeros(storage, tmp_path, monkeypatch):
    """As on CUDA in 16 bits; what is trained, or differentiated, runs at its own width."""
    monkeypatch.setattr(tower_forwards, "_reads_aligned", lambda x: True)
    model = save_image_model(tmp_path, "qwen2_5_vl")
    unit, x = model.model.visual.blocks[0].mlp, torch.randn(5, 32)
    for name, size in ("gate_proj", (42, 32)), ("up_proj", (42, 32)), ("down_proj", (32, 42)):
        linear = torch.nn.Linear(size[1], size[0])
        weight = linear.weight.detach()
        weight = QuantizedTensor.quantize(weight, Blockwise4("nf4", 64, True)) if storage == "nf4" else weight
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        setattr(unit, name, linear)
    expected = unit(x)
    vision.bind_vision(model)
    sizes, product = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: sizes.append(args[1].shape[0]) or product(*args))
    torch.testing.assert_close(unit(x), expected, rtol=1e-5, atol=1e-6)
    assert sizes == [64, 64, 32]
    unit(x.requires_grad_())
    assert sizes[3:] == [42, 42, 32]


def test_adapters_on_odd_widths_are_computed_without_a_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(tower_forwards, "_reads_aligned", lambda x: True)
    model = save_image_model(tmp_path, "qwen2_5_vl")
    unit, x = model.model.visual.blocks[0].mlp, torch.randn(5, 32)
    for name, size in ("gate_proj", (42, 32)), ("up_proj", (42, 32)), ("down_proj", (32, 42)):
        linear = torch.nn.Linear(size[1], size[0])
        weight = QuantizedTensor.quantize(linear.weight.detach(), Blockwise4("nf4", 64, True))
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        setattr(unit, name, linear)
    get_peft_model(model, LoraConfig(target_modules=r".*blocks\.0\.mlp\.\w+_proj", **LORA))
    with torch.no_grad():
        expected = unit(x)
        vision.bind_vision(model)
        torch.testing.assert_close(unit(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "storage", "dora"),
    [*itertools.product(["qwen2_5_vl", "gemma3", "llava"], ["plain", "nf4"], [False]), ("qwen2_5_vl", "plain", True)],
)
def test_loras_of_a_tower_equal_peft(name, storage, dora, tmp_path, monkeypatch):
    """Features and gradients; each linear of tower and projector runs as one function, unless it has hooks."""
    save_image_model(tmp_path, name)
    parts = ["freeze_vision_tower"] + ["freeze_multi_modal_projector"] * (name != "gemma3")
    keys = {"load_in_4bit": storage == "nf4", "bnb_4bit_blocksize": 32, "quantize_vision_tower": storage == "nf4"}
    config = load_config(None, {"model_name_or_path": str(tmp_path), "dataset": "d", "output_dir": "o"} | keys)
    model = load_model(str(tmp_path), config.storage, device="cpu", dtype="float32")
    model = get_peft_model(model, LoraConfig(target_modules=all_linear(model, parts), use_dora=dora, **LORA))
    backbone = model.get_base_model().model
    towers = [model.get_base_model().get_submodule(part) for part in non_text_modules(model.get_base_model())]
    linears = [module for tower in towers for module in tower.modules() if is_plain_lora(module)]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "language_model" not in n}
    inputs = features_inputs(model.get_base_model(), name)

    def computed():
        features = torch.cat([*backbone.get_image_features(**inputs).pooler_output])
        return features, torch.autograd.grad(
            (features * features.cos()).sum(), list(trained.values()), materialize_grads=True
        )

    called = []  # not the pooling head's, in whose place attention of torch reads the weight
    handles = [linear.register_forward_hook(lambda *args: called.append(1)) for linear in linears]
    expected, expected_gradients = computed()
    for handle in handles:
        handle.remove()
    calls = []
    function = projections.lora_linear
    monkeypatch.setattr(projections, "lora_linear", lambda *args: calls.append(1) or function(*args))
    vision.bind_vision(model)
    features, gradients = computed()
    assert len(calls) == len(called) > 8
    assert (features - expected).norm() <= 1e-5 * expected.norm()
    for gradient, other in zip(gradients, expected_gradients, strict=True):
        assert (gradient - other).norm() <= 1e-5 * other.norm() + 1e-12
    seen = []
    linears[0].base_layer.register_forward_hook(lambda *args: seen.append(1))
    computed()
    assert seen
    vision.unbind_vision(model)
    assert not any("forward" in vars(module) for module in backbone.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "mistral3"])
@pytest.mark.parametrize("trained", [False, True])
def test_on_a_gpu_fused_towers_equal_transformers(name, trained, tmp_path):
    """In bf16: as close to the tower in float32 as transformers' own forward is."""
    model = save_image_model(tmp_path, name).cuda()
    inputs = {key: value.cuda() for key, value in features_inputs(model, name).items()}
    exact = features_and_gradient(model, inputs, trained)
    model = model.bfloat16()
    stock = features_and_gradient(model, inputs, trained)
    vision.bind_vision(model)
    fused = features_and_gradient(model, inputs, trained)
    for a, b, c in zip(fused, stock, exact, strict=True):
        assert (a - c).norm() <= 1.2 * (b - c).norm() + 1e-3 * c.norm()


def features_inputs(model, name):
    torch.manual_seed(3)
    if name in ("qwen2_5_vl", "qwen3_vl", "glm4v"):
        grid = torch.tensor(GRIDS["uneven"])
        width = 3 * 2 * model.config.vision_config.patch_size**2
        return {"pixel_values": torch.randn(int(grid.prod(1).sum()), width), "image_grid_thw": grid}
    size = model.config.vision_config.image_size
    inputs = {"pixel_values": torch.randn(2, 3, size, size)}
    return inputs | ({"image_sizes": torch.tensor([[size, size]] * 2)} if name == "mistral3" else {})


def features_and_gradient(model, inputs, trained):
    """Features of images, and the gradients of the tower's matrices, in float32."""
    tower = next(model.get_submodule(part) for part in non_text_modules(model))
    weights = [weight for weight in tower.parameters() if weight.dim() == 2]
    model.requires_grad_(False)
    for weight in weights if trained else ():
        weight.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=weights[0].dtype == torch.bfloat16):
        features = torch.cat([*model.model.get_image_features(**inputs).pooler_output]).float()
    if not trained:
        return [features]
    gradients = torch.autograd.grad(features.square().sum(), weights, materialize_grads=True)
    return [features.detach(), *(gradient.float() for gradient in gradients)]


@pytest.mark.parametrize("lengths", [[3], [5, 5, 5], [4, 9, 4, 1, 9, 4], [0, 6, 0, 2], [64] * 5 + [12, 64]])
def test_segments_attend_to_themselves_only(lengths):
    query, key, value = torch.randn(3, sum(lengths), 2, 8)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out = tower_forwards.segment_attention(query, key, value, bounds, 0.3)
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
