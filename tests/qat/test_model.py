"""Quantization-aware training of models: rounded weights, gain in loss, refused requests."""

import copy

import pytest
import torch

import halfbyte
from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.formats import named
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.load import load_model
from halfbyte.qat.model import (
    QATLinear,
    QATLoraLinear,
    fake_quantize_linears,
    quantize_trained,
)
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from tests.helpers.expert_models import mixture
from tests.helpers.tiny_runs import VOCABULARY, tiny_llama

LAYER = "model.layers.1.mlp.down_proj"


def config(**keys):
    return RunConfig(**{"model_name_or_path": "tiny", "dataset": "d", "load_in_4bit": False, "r": 4} | keys)


def adapted(scheme="nf4", scale=0.05):
    model = tiny_llama()
    fake_quantize_linears(model, named(scheme))
    model = add_adapter(model, config())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.arange(12)[None]).logits


def test_the_linear_layers_but_not_the_head_compute_rounded():
    plain = tiny_llama()
    model = copy.deepcopy(plain)
    fake_quantize_linears(model, named("nf4"))
    assert isinstance(model.get_submodule(LAYER), QATLinear)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert "format=blockwise4:nf4" in repr(model)
    with torch.no_grad():
        for name, module in plain.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(QuantizedTensor.quantize(module.weight, named("nf4")).dequantize())
    assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("scheme", ["nf4", "int4", "int8", "fp8", "nvfp4"])
def test_adapters_are_merged_before_rounding(scheme):
    model = adapted(scheme)
    expected = logits(model)
    layer = model.get_base_model().get_submodule(LAYER)
    assert isinstance(layer, QATLoraLinear)
    merged = copy.deepcopy(model)
    merged.merge_adapter()  # PEFT adds the adapters to the weights, which are rounded as they are then
    torch.testing.assert_close(logits(merged), expected)
    with model.disable_adapter():
        assert not torch.equal(logits(model), expected)
    quantize_trained(model)
    stored = model.get_base_model().get_submodule(LAYER)
    assert isinstance(stored, QuantizedLinear)
    assert stored.weight.format == named(scheme)
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)  # few rows multiply in another order


def loss_of(model):
    """On sequences to be learned by heart."""
    ids = torch.randint(0, VOCABULARY, (32, 16), generator=torch.Generator().manual_seed(5))
    return model(input_ids=ids, labels=ids).loss


def learn(model, steps, rate):
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def learned():
    model = tiny_llama()
    learn(model, 150, 1e-2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("peft", [pytest.param(False, marks=pytest.mark.slow), True], ids=["full", "lora"])
def test_training_closes_the_gap_that_quantizing_afterwards_leaves(learned, peft):
    """Same weights and number of steps: one model is rounded to 2 bits in every step, the other at the end."""
    every_step, afterwards = copy.deepcopy(learned), copy.deepcopy(learned)
    fake_quantize_linears(every_step, named("kbit:2:nf"))
    if peft:
        every_step, afterwards = add_adapter(every_step, config(r=8)), add_adapter(afterwards, config(r=8))
    learn(every_step, 60, 3e-3)
    learn(afterwards, 60, 3e-3)
    with torch.no_grad():
        unrounded = float(loss_of(afterwards))
        afterwards = afterwards.merge_and_unload() if peft else afterwards
        fake_quantize_linears(afterwards, named("kbit:2:nf"))
        losses = []
        for model in (every_step, afterwards):
            quantize_trained(model)
            losses.append(float(loss_of(model)))
    assert losses[1] - unrounded > 0.5
    assert losses[0] - unrounded < 0.5 * (losses[1] - unrounded), (losses, unrounded)


def test_weights_that_cannot_be_rounded_are_named():
    model = tiny_llama()
    with torch.no_grad():
        model.get_submodule(LAYER).weight[0, 0] = torch.inf
    with pytest.raises(ModelError, match=rf"{LAYER}\.weight: .*NaN"):
        fake_quantize_linears(model, named("int8"))


def test_adapters_that_have_no_merged_weight(tiny_checkpoint):
    model = load_model(str(tiny_checkpoint()), load_in_4bit=False, qat_scheme="nf4", device="cpu")
    with pytest.raises(ModelError):
        add_adapter(model, config(lora_dropout=0.1))
    model = load_model(str(tiny_checkpoint()), load_in_4bit=False, qat_scheme="nf4", device="cpu")
    with pytest.raises(ModelError, match="Dora"):
        add_adapter(model, config(use_dora=True))


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_patched_forwards_leave_its_products_to_it(peft):
    model = adapted() if peft else tiny_llama()
    if not peft:
        fake_quantize_linears(model, named("nf4"))
    ids = torch.arange(12)[None]

    def gradients():
        model.train().zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return [loss, *(p.grad.clone() for p in model.parameters() if p.requires_grad)]

    stock = gradients()
    report = halfbyte.patch(model)
    for gradient, expected in zip(gradients(), stock, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    assert report.fused["RMSNorm"] == 5
    reason = (
        "its weight is rounded with the adapter merged" if peft else "halfbyte's QATLinear has a forward of its own"
    )
    assert report.unfused["q_proj", reason] == 2


def test_experts_that_would_not_be_rounded_are_refused():
    with pytest.raises(ModelError) as refused:
        fake_quantize_linears(mixture("Qwen3Moe"), named("nf4"))
    assert "load_in_4bit" in refused.value.fix
