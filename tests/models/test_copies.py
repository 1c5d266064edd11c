"""Adapters cast once a forward: same numbers, never stale, gone after unpatch."""

import pytest
import torch
from patch_models import assert_same, batch, loss_and_gradients, tiny
from peft.tuners.lora import Linear as LoraLinear

import halfbyte
from halfbyte.autograd import lora
from halfbyte.models import attention
from halfbyte.models.copies import COPIES


@pytest.fixture
def model():
    """Frozen weights in bf16, adapters in fp32, as a run has them."""
    torch.manual_seed(3)
    model = tiny("Llama").to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    halfbyte.patch(model.train())
    return model


def test_numbers_are_those_of_casts_in_place(model, monkeypatch):
    inputs = batch()
    loss_and_gradients(model, inputs)  # the first one asks the head how it works, without gradients
    casts = []
    monkeypatch.setattr(lora, "cast", lambda *given, own=lora.cast: casts.append(given) or own(*given))
    found = loss_and_gradients(model, inputs)
    assert not casts
    halfbyte.unpatch(model)
    assert not any(COPIES in module.__dict__ for module in model.modules())
    halfbyte.patch(model)
    monkeypatch.setattr(attention, "refresh_copies", lambda backbone: None)
    assert_same(found, loss_and_gradients(model, inputs), 1e-12)
    assert casts


def test_factors_of_one_input_lie_one_after_another(model):
    loss_and_gradients(model, batch())
    copies = [m.__dict__[COPIES]["default"][0].tensor for m in model.modules() if isinstance(m, LoraLinear)][:3]
    stacked = lora.stack(copies)
    assert stacked.data_ptr() == copies[0].data_ptr()
    assert torch.equal(stacked, torch.cat(copies))
    apart = [copies[0], copies[2]]
    assert torch.equal(lora.stack(apart), torch.cat(apart))


def test_changed_factors_are_cast_again(model):
    inputs = batch()
    loss_and_gradients(model, inputs)
    factor = next(p for name, p in model.named_parameters() if "lora_A" in name)
    (module,) = [m for m in model.modules() if isinstance(m, LoraLinear) and m.lora_A["default"].weight is factor]
    assert halfbyte.models.projections.read_projection(module).lora.cast_to(torch.bfloat16) is not None
    with torch.no_grad():
        factor.mul_(3)
    assert halfbyte.models.projections.read_projection(module).lora.cast_to(torch.bfloat16) is None
    changed = loss_and_gradients(model, inputs)
    copy, _ = halfbyte.models.projections.read_projection(module).lora.cast_to(torch.bfloat16)
    assert torch.equal(copy, factor.to(torch.bfloat16))
    halfbyte.unpatch(model)
    assert_same(loss_and_gradients(model, inputs), changed, 0.1)  # of bf16: without the change it is off by far more


def test_two_forwards_before_one_backward(model):
    inputs, others = batch(), batch()
    separate = [loss_and_gradients(model, one)[1] for one in (inputs, others)]
    model.zero_grad()
    losses = [halfbyte.models.head.causal_lm_loss(model, one) for one in (inputs, others)]
    sum(loss / tokens for loss, tokens in losses).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, separate[0][name] + separate[1][name], rtol=1e-6, atol=1e-6)


def test_no_copies_where_nothing_is_cast_or_differentiated(model):
    with torch.no_grad():
        model(**batch())
    assert not any(COPIES in module.__dict__ for module in model.modules())
    plain = tiny("Llama")
    halfbyte.patch(plain.train())
    loss_and_gradients(plain, batch())
    assert not any(COPIES in m.__dict__ for m in plain.modules() if isinstance(m, LoraLinear))
