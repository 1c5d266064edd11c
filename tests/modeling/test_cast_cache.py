"""Adapters cast once a forward: same numbers, never stale, gone after unpatch."""

import contextlib
import weakref

import pytest
import torch
from peft.tuners.lora import Linear as LoraLinear

import halfbyte
from halfbyte.autograd import lora
from halfbyte.modeling import attention
from halfbyte.modeling.cast_cache import cast_factors, cast_replacements
from halfbyte.modeling.patch_record import RECORD, existing_record
from tests.helpers.patch_models import assert_same, batch, loss_and_gradients, tiny


@pytest.fixture
def model(request):
    """Frozen weights in bf16, adapters in fp32, as a run has them; LoRA, or DoRA for the tests that ask for it."""
    torch.manual_seed(3)
    model = tiny("Llama", use_dora=getattr(request, "param", False)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    halfbyte.patch(model.train())
    return model


BOTH = pytest.mark.parametrize("model", [False, True], indirect=True, ids=["lora", "dora"])


@BOTH
def test_cached_casts_are_bit_equal_to_casts_at_use(model, monkeypatch):
    inputs = batch()
    loss_and_gradients(model, inputs)  # the first one asks the head how it works, without gradients
    casts = []
    monkeypatch.setattr(lora, "cast", lambda *tensors, cast=lora.cast: casts.append(tensors) or cast(*tensors))
    cached = loss_and_gradients(model, inputs)
    assert not casts
    halfbyte.unpatch(model)
    assert not any(RECORD in module.__dict__ for module in model.modules())
    halfbyte.patch(model)
    monkeypatch.setattr(attention, "use_cast_cache", lambda backbone: contextlib.nullcontext())
    assert_same(cached, loss_and_gradients(model, inputs), 1e-12)
    assert casts


def copied(model):
    """Names of the LoRA modules that read copies just now."""
    return [name for name, m in model.named_modules() if isinstance(m, LoraLinear) and cast_factors(m, "default")]


def test_casts_are_read_only_during_a_forward(model):
    seen = []
    model.get_base_model().model.norm.register_forward_pre_hook(lambda *_: seen.append(len(copied(model))))
    loss_and_gradients(model, batch())  # the first forward asks the head how it works, without gradients
    with torch.no_grad():
        model(**batch())
    with pytest.raises(IndexError), torch.no_grad():
        model(input_ids=torch.tensor([[10**6]]))
    assert seen == [0, 14, 14]
    assert not copied(model)


@BOTH
def test_recomputed_layers_read_the_casts(model, monkeypatch):
    halfbyte.unpatch(model)
    for level in ("recompute_mlp", "checkpoint", "tiled"):
        halfbyte.patch(model, level)
        loss_and_gradients(model, batch())
        casts = []
        monkeypatch.setattr(lora, "cast", lambda *tensors, cast=lora.cast: casts.append(tensors) or cast(*tensors))  # noqa: B023
        loss_and_gradients(model, batch())
        assert not casts, level
        monkeypatch.undo()
    assert not copied(model)


def test_casts_of_deleted_adapters_are_dropped(model):
    loss_and_gradients(model, batch())
    factor = weakref.ref(next(p for name, p in model.named_parameters() if "lora_A" in name))
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")
    model.delete_adapter("default")
    loss_and_gradients(model, batch())
    assert factor() is None


def test_no_casts_without_dtype_change_or_gradients(model):
    with torch.no_grad():
        model(**batch())
    assert not any(existing_record(module) and existing_record(module).cast_cache for module in model.modules())
    plain = tiny("Llama")
    halfbyte.patch(plain.train())
    loss_and_gradients(plain, batch())
    assert not any(existing_record(m) for m in plain.modules() if isinstance(m, LoraLinear))


LEVELS = ["keep", "recompute", "checkpoint", "tiled"]
ON_GPU = [pytest.param("cuda", level, marks=pytest.mark.gpu) for level in LEVELS]


def test_frozen_factors_are_cast_and_not_replaced(model):
    """LoRA-FA: the optimizer has B alone, of which a sharded one replaces the values."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    halfbyte.patch(model)
    loss_and_gradients(model, batch())
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(factor) for factor, _ in cast_replacements(model, torch.bfloat16)} == trained
    assert len(existing_record(model.get_base_model().model).cast_cache.factors) == 2 * len(trained)


@pytest.mark.parametrize(("device", "level"), [*(("cpu", level) for level in LEVELS), *ON_GPU])
def test_casts_replace_factors(model, device, level, monkeypatch):
    """Losses and fp32 gradients equal those with fp32 factors; earlier casts are not read."""
    halfbyte.patch(model.to(device), level)
    inputs = {name: value.to(device) for name, value in batch().items()}
    expected = loss_and_gradients(model, inputs)
    pairs = cast_replacements(model, torch.bfloat16)
    assert [factor for factor, _ in pairs] == existing_record(model.get_base_model().model).cast_cache.factors
    for factor, held in pairs:
        factor.data = held.copy_(factor.detach())
        factor.grad_dtype = torch.float32
    casts = []
    monkeypatch.setattr(lora, "cast", lambda *tensors, cast=lora.cast: casts.append(tensors) or cast(*tensors))
    replaced = loss_and_gradients(model, inputs)
    assert not casts
    assert {gradient.dtype for gradient in replaced[1].values()} == {torch.float32}
    assert_same(replaced, expected, 1e-12 if device == "cpu" else 1e-4)  # sums of a GPU may be in another order
    assert not existing_record(model.get_base_model().model).cast_cache.factors
