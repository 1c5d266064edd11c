"""Invalid inputs of a patched step raise named errors, and unusual valid ones work."""

import pytest
import torch

import halfbyte
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.utils.errors import DataError
from tests.helpers.patch_models import assert_same, batch, loss_and_gradients, tiny


@pytest.fixture(scope="module", params=[False, True], ids=["stock", "patched"])
def model(request):
    model = tiny("Llama")
    if request.param:
        halfbyte.patch(model)
    return model


def changed(**changes) -> dict:
    inputs = batch()
    return {key: value for key, value in (inputs | changes).items() if value is not None}


TOKENS = torch.ones(3, 18, dtype=torch.int64)
WRONG = {
    "labels": changed(labels=None),
    "input_ids.*inputs_embeds": changed(input_ids=None),
    r"input_ids is \[0, 18\]:": changed(input_ids=TOKENS[:0], labels=TOKENS[:0]),
    r"inputs_embeds is \[3, 0, 32\]": changed(input_ids=None, inputs_embeds=torch.ones(3, 0, 32)),
    r"input_ids.*torch.float32 \[3, 18\]": changed(input_ids=TOKENS.float()),
    r"torch.float32 \[3, 18\]": changed(labels=TOKENS.float()),
    r"torch.int64 \[3, 17\].*input_ids \[3, 18\]": changed(labels=TOKENS[:, 1:]),
    "label 101.*101": changed(labels=TOKENS * 101),
    r"position_ids.*torch.float32 \[3, 18\]": changed(position_ids=TOKENS.float()),
    r"position_ids.*torch.int64 \[3, 17\]": changed(position_ids=TOKENS[:, 1:]),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_input(model, message):
    with pytest.raises(DataError, match=message):
        causal_lm_loss(model, WRONG[message])


def test_noncontiguous_inputs(model):
    inputs = batch(packed=True)
    gapped = {key: torch.stack([value, value], dim=-1)[..., 0] for key, value in inputs.items()}
    assert not gapped["labels"].is_contiguous()
    assert_same(loss_and_gradients(model, gapped), loss_and_gradients(model, inputs))


@pytest.mark.parametrize("labels", [torch.full((3, 18), -100), TOKENS[:, :1]], ids=["ignored", "one token"])
def test_nothing_to_train(model, labels):
    model.zero_grad()
    loss, tokens = causal_lm_loss(model, {"input_ids": torch.ones_like(labels), "labels": labels})
    loss.backward()
    assert (loss.item(), tokens.item()) == (0.0, 0)
    assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_documents_of_one_token(model):
    """Packed rows with nothing in them but beginnings: every token sees itself alone, and none is trained."""
    inputs = batch()
    inputs |= {"position_ids": torch.zeros_like(inputs["input_ids"]), "labels": torch.full((3, 18), -100)}
    with torch.no_grad():
        alone = model(input_ids=inputs["input_ids"].reshape(-1, 1), use_cache=False).logits.view(3, 18, -1)
        together = model(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert causal_lm_loss(model, inputs)[0].item() == 0.0
