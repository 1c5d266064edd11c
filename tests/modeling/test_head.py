"""causal_lm_loss against the models' own losses: eight families, tied and untied, adapters, packed rows."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from halfbyte.modeling.head import causal_lm_loss
from halfbyte.utils import notices
from tests.helpers.families import SHAPE

FAMILIES = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"final_logit_softcapping": 0.5, "sliding_window": 8},
    "Gemma3Text": {"final_logit_softcapping": 0.7, "sliding_window": 8},
    "Phi3": {},
    "Cohere": {"logit_scale": 0.0625},
    "Granite": {"logits_scaling": 8.0},
}


def tiny(family: str, tied: bool = False, **keys) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        **{**SHAPE, "use_cache": True, **FAMILIES.get(family, {}), "tie_word_embeddings": tied, **keys}
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # logits large enough that a softcap and a scale matter
        model.get_output_embeddings().weight.mul_(20)
    return model.train()


def with_adapter(model: nn.Module, **keys) -> nn.Module:
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **keys))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def padded_batch(rows=3, length=13) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 101, (rows, length))
    labels = tokens.clone()
    labels[:, :4] = -100
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    labels[1, 9:] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def packed_batch(length=14, first=6) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 101, (1, length))
    labels = tokens.clone()
    labels[0, 0] = labels[0, first] = -100
    positions = torch.cat([torch.arange(first), torch.arange(length - first)]).unsqueeze(0)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions}


def assert_same(model: nn.Module, batch: dict[str, torch.Tensor], rtol=1e-5, **keys):
    """Loss, token count and every trained gradient equal those of the model's own loss."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss_sum, tokens = causal_lm_loss(model, batch)
    assert tokens == (batch["labels"][:, 1:] != -100).sum()
    gradients = torch.autograd.grad(loss_sum / tokens, list(parameters.values()))
    expected = model(**batch, use_cache=False).loss  # with a cache, transformers does not isolate packed documents
    torch.testing.assert_close(loss_sum / tokens, expected, rtol=rtol, atol=0)
    for name, mine, expected_gradient in zip(
        parameters, gradients, torch.autograd.grad(expected, list(parameters.values())), strict=True
    ):
        assert (mine - expected_gradient).norm() <= rtol * expected_gradient.norm() + 1e-9, name


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_adapters(family, tied):
    model = with_adapter(tiny(family, tied))
    assert_same(model, padded_batch())
    assert_same(model, packed_batch())
    assert "full_logits" not in notices.notices_so_far()


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
@pytest.mark.parametrize("tied", [True, False])
def test_full_fine_tuning_trains_the_head(family, tied):
    assert_same(tiny(family, tied), padded_batch())
    assert "full_logits" not in notices.notices_so_far()


def test_full_logits_are_never_made(monkeypatch):
    model = with_adapter(tiny("Llama"))
    batch = padded_batch()
    causal_lm_loss(model, batch)
    head = model.get_base_model().get_output_embeddings()
    monkeypatch.setattr(head, "forward", lambda *_: pytest.fail("the head was called"))
    causal_lm_loss(model, batch)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"modules_to_save": ["lm_head"]}, "ModulesToSaveWrapper, not a plain linear"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lora.*Linear, not a plain linear"),
    ],
)
def test_trained_head_uses_full_logits(keys, reason):
    model = get_peft_model(tiny("Llama"), LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **keys}))
    assert_same(model, padded_batch())
    assert_notice(reason)


def test_a_head_with_bias():
    assert_same(with_adapter(tiny("Phi")), padded_batch())
    assert_notice("has a bias")


def test_an_unknown_change_of_the_logits():
    class Louder(transformers.LlamaForCausalLM):
        def forward(self, *args, labels=None, **keys):
            output = super().forward(*args, **keys)
            output.logits = output.logits * 1.5
            if labels is not None:
                output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
            return output

    model = Louder(transformers.LlamaConfig(**SHAPE))
    assert_same(model, padded_batch())
    assert_notice("changes its logits")


def test_router_losses_are_included():
    model = tiny("Mixtral", num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
    assert_same(model, padded_batch())
    assert_notice("router")


def assert_notice(pattern: str):
    import re

    assert re.search(pattern, notices.notices_so_far().get("full_logits", "")), notices.notices_so_far()
