"""Text parts of models that take images: fused like their families, with vision towers unchanged."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

import halfbyte
from halfbyte.adapters.lora import add_adapter
from halfbyte.autograd import attention as causal
from halfbyte.config import RunConfig
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.find import load_model_config
from halfbyte.loading.load import load_model
from halfbyte.modeling import attention
from halfbyte.modeling.architectures import all_linear, non_text_modules
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.plan.estimate import estimate
from halfbyte.utils.errors import ModelError
from tests.helpers.families import MULTIMODAL
from tests.helpers.patch_models import assert_same, batch, loop_over_documents, loss_and_gradients, tiny, with_image


@pytest.fixture
def on_cpu(monkeypatch):
    """The path of a CUDA device on a CPU."""
    monkeypatch.setattr(causal, "DTYPES", (torch.float32,))
    monkeypatch.setattr(causal, "_varlen", lambda: (loop_over_documents, frozenset({"enable_gqa"})))
    attention.register()


def inputs_of(family: str, image: bool) -> dict[str, torch.Tensor]:
    return with_image(family, batch()) if image else batch()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("family", MULTIMODAL)
def test_loss_and_gradients_equal_the_stock_models(family, image, checkpointing):
    model, inputs = tiny(family), inputs_of(family, image)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    expected = loss_and_gradients(model, inputs)
    stock_loss = model(**inputs, use_cache=False).loss.item()
    assert expected[0] / (inputs["labels"][:, 1:] != -100).sum().item() == pytest.approx(stock_loss, rel=1e-5)
    report = halfbyte.patch(model)
    assert_same(loss_and_gradients(model, inputs), expected)
    assert report.family == family
    assert not report.unfused
    assert report.fused["RoPE"] == report.fused["LoRA of o_proj"] == report.fused["gated activation"] == 2
    halfbyte.unpatch(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("family", MULTIMODAL)
def test_packed_documents_do_not_see_each_other(family):
    """Also in an M-RoPE model, where transformers isolates documents by the first of four rows of positions only."""
    model, inputs = tiny(family), batch(packed=True)
    halfbyte.patch(model)
    together, _ = causal_lm_loss(model, inputs)
    ends = [*(inputs["position_ids"].flatten() == 0).nonzero().flatten().tolist(), inputs["input_ids"].numel()]
    alone = sum(
        causal_lm_loss(model, {key: inputs[key].flatten()[None, begin:end] for key in ("input_ids", "labels")})[0]
        for begin, end in pairwise(ends)
    )
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("family", "image", "types", "maskless"),
    [
        ("Gemma3", True, True, False),
        ("Gemma3", False, True, True),  # token types of text alone
        ("Gemma3", False, False, True),
        ("Qwen2_5_VL", True, True, True),  # its images are causal
        ("Qwen2_5_VL", False, False, True),
    ],
)
def test_attention_without_a_mask_only_where_no_image_sees_itself(on_cpu, monkeypatch, family, image, types, maskless):
    model, inputs = tiny(family), inputs_of(family, image)
    if types and not image:
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    expected = loss_and_gradients(model, inputs)
    masks = []
    attend = attention.sdpa_attention_forward
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *args, **keys: masks.append(1) or attend(*args, **keys)
    )
    halfbyte.patch(model)
    model.get_base_model().base_model.language_model.config._attn_implementation = attention.ATTENTION_NAME
    loss_and_gradients(model, inputs)  # the probe of the head has no images
    masks.clear()
    assert_same(loss_and_gradients(model, inputs), expected)
    assert bool(masks) != maskless


def saved(family: str, folder: Path) -> str:
    tiny(family, adapter=False).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_loading_quantizes_the_language_model_alone(family, tmp_path):
    path = saved(family, tmp_path / "model")
    unquantized = load_model(path, load_in_4bit=False, device="cpu", dtype="float32")
    model = load_model(path, device="cpu", dtype="float32", bnb_4bit_blocksize=32)
    tower_names = tuple(non_text_modules(model))
    assert len(tower_names) == (2 if family == "Gemma3" else 1)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, module in linears.items() if not isinstance(module, QuantizedLinear)} == {
        *(name for name in linears if name.startswith(tower_names)),
        "lm_head",
    }
    frozen = {name for name, p in unquantized.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in unquantized.named_parameters() if name.startswith(tower_names)}
    folder = tmp_path / "quantized"
    model.save_pretrained(folder)
    reloaded = load_model(str(folder), device="cpu", dtype="float32")
    inputs = inputs_of(family, True)
    with torch.no_grad():
        assert torch.equal(reloaded(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("family", MULTIMODAL)
def test_all_linear_is_the_language_models_linears(family):
    model = tiny(family, adapter=False)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=all_linear(model)))
    names = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 2 * 7
    assert all("language_model" in name for name in names)


@pytest.mark.parametrize("name", ["PaliGemma", "Florence2", "PI0"])
def test_models_that_are_no_causal_language_models_are_refused(name, tmp_path):
    config = getattr(transformers, f"{name}Config")()
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=config.model_type):
        load_model_config(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("family", MULTIMODAL)
def test_memory_is_planned_with_the_tower_in_16_bits(family, tmp_path):
    path = saved(family, tmp_path)
    config = RunConfig(model_name_or_path=path, dataset="none", output_dir="out", bnb_4bit_blocksize=32)
    plan = estimate(config, load_model_config(path), device=torch.device("cpu"))
    model = load_model(path, device="cpu", bnb_4bit_blocksize=32)
    stored = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    assert plan.weights == stored
    adapted = add_adapter(model, config)
    assert plan.adapters == sum(p.nbytes for p in adapted.parameters() if p.requires_grad)
