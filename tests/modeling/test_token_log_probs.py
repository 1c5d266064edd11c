"""Log-probabilities of selected tokens equal those of the model's full logits."""

import pytest
import torch
from peft import LoraConfig
from torch import nn

from halfbyte.modeling.head import log_probs_at, token_log_probs
from halfbyte.utils import notices
from tests.helpers.families import FAMILIES
from tests.helpers.patch_models import batch, tiny


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("head", ["plain", "biased", "adapted"])
def test_token_log_probs_equal_full_logits(family, head):
    assert "final_logit_softcapping" in FAMILIES["Gemma2"]
    notices.reset_notices()
    model = tiny(family).eval()
    if head == "adapted":
        model.add_adapter("head", LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False))
        model.set_adapter("head")
    if head == "biased":
        model.get_base_model().lm_head.bias = nn.Parameter(torch.randn(101))
    inputs = {"input_ids": batch()["input_ids"]}
    with torch.no_grad():
        logits = model(**inputs).logits
        labels = torch.randint(0, 101, inputs["input_ids"].shape)
        labels[:, ::2] = logits[:, ::2].argmax(-1)
        labels[1, 3:9] = -100
        log_probs, likeliest = token_log_probs(model, inputs, labels)
    labelled = labels != -100
    expected = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)[labelled]
    torch.testing.assert_close(log_probs, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(likeliest, (logits.argmax(-1) == labels)[labelled])
    assert 0 < likeliest.sum() < len(likeliest)
    assert "full_logits" not in notices.notices_so_far()


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("head", ["plain", "biased"])
def test_log_probs_at_positions_and_gradients(family, head):
    """Gradients and entropies at a temperature equal those of full logits."""
    model = tiny(family).train()
    if head == "biased":
        model.get_base_model().lm_head.bias = nn.Parameter(torch.randn(101))
    ids = batch()["input_ids"]
    rows = ids.shape[1]
    at = torch.tensor([3, 1, rows + 2, 0])
    positions = torch.tensor([7, 100, 0, -100])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = torch.tensor([0.5, -2.0, 1.0, 3.0])

    chunked, entropy = log_probs_at(model, {"input_ids": ids}, at, positions, temperature=0.7, entropy=True)
    gradients = torch.autograd.grad((chunked * weights).sum(), trained)
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)[at] / 0.7
    expected = logits.log_softmax(-1).gather(-1, positions.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (positions != -100)
    torch.testing.assert_close(chunked, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy[:3], torch.distributions.Categorical(logits=logits).entropy()[:3].detach())
    for mine, full in zip(gradients, torch.autograd.grad((expected * weights).sum(), trained), strict=True):
        torch.testing.assert_close(mine, full, rtol=1e-4, atol=1e-6)
    assert chunked[3] == 0
