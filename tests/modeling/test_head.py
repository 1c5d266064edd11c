"""causal_lm_loss against the models' own losses: eight families, tied and untied, adapters, packed rows."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

from halfbyte.formats import named
from halfbyte.layers.plain import ColumnDropout
from halfbyte.layers.quantized import QuantizedLinear
from halfbyte.modeling import head
from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.token_rows import attach_row_forwards
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


HEADS = {
    "LoRA": {"target_modules": ["q_proj", "lm_head"], "use_rslora": True},
    "LoRA alone": {"target_modules": ["lm_head"]},
    "LoRA with dropout": {"target_modules": ["q_proj", "lm_head"], "lora_dropout": 0.3},
    "DoRA": {"target_modules": ["lm_head"], "use_dora": True},
    "trained in full": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "single rows": {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [7, 3, 100]}},
    "rows of both ends": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [7, 3, 1]}},
}


def with_adapted_head(family: str, head: str, tied: bool, **keys) -> nn.Module:
    """A model with an adapter that is not zero."""
    model = get_peft_model(tiny(family, tied, **keys), LoraConfig(r=3, **HEADS[head]))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    attach_row_forwards(model)
    return model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_a_trained_head_needs_no_full_logits(head, tied):
    if head == "single rows" and tied:
        pytest.skip("PEFT ties these rows to those of the embedding")
    model, batch = with_adapted_head("Gemma2" if tied else "Cohere", head, tied), padded_batch()
    if "lora_dropout" in HEADS[head]:  # PEFT's forward with masks of `ops.dropout`
        model.get_base_model().get_output_embeddings().lora_dropout["default"] = ColumnDropout(0.3, 0)
    causal_lm_loss(model, batch)  # the probe draws dropout
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients, losses = [], []
    for fused in (True, False):
        torch.manual_seed(5)
        if fused:
            loss_sum, tokens = causal_lm_loss(model, batch)
            losses.append(loss_sum / tokens)
        else:
            losses.append(model(**batch, use_cache=False).loss)
        gradients.append(torch.autograd.grad(losses[-1], list(parameters.values())))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    for name, mine, expected in zip(parameters, *gradients, strict=True):
        assert expected.any(), name
        assert (mine - expected).norm() <= 2e-5 * expected.norm(), name
    assert "full_logits" not in notices.notices_so_far()
    with model.disable_adapter():
        assert_loss(model, batch)


def test_several_adapters_on_the_head():
    model = with_adapted_head("Llama", "LoRA", False)
    model.add_adapter("second", LoraConfig(r=5, target_modules=["lm_head"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    assert_same(model, padded_batch())
    assert "full_logits" not in notices.notices_so_far()


def test_packed_rows_with_an_adapted_head():
    assert_same(with_adapted_head("Llama", "LoRA", True), packed_batch())


@pytest.mark.parametrize("rows", [[3, 4, 5, 6, 7, 8, 9, 10], [0, 3, 4, 5, 6, 7, 8, 9, 10, 13]])
def test_rows_before_untrained_tokens_are_skipped(rows, monkeypatch):
    """Exactly those before trained tokens, or some more, as collators on a GPU add."""
    model, batch, shapes = with_adapted_head("Llama", "LoRA", True), packed_batch(), []
    batch["labels"][0, :4] = batch["labels"][0, 12:] = -100
    loss_of = head.linear_cross_entropy
    monkeypatch.setattr(head, "linear_cross_entropy", lambda x, *a, **k: shapes.append(x.shape) or loss_of(x, *a, **k))
    chosen = batch | {"head_rows": torch.tensor(rows)}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    results = []
    for given in (chosen, batch):
        loss, tokens = causal_lm_loss(model, given)
        results.append([loss, tokens, *torch.autograd.grad(loss, parameters)])
    assert shapes[0][0] == len(rows)
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_a_quantized_head():
    model = tiny("Llama")
    plain = causal_lm_loss(model, padded_batch())
    model.lm_head = QuantizedLinear.from_linear(model.lm_head, named("int8"))
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["lm_head"], init_lora_weights=False))
    assert_same(model, padded_batch())
    assert not torch.equal(causal_lm_loss(model, padded_batch())[0], plain[0])
    assert "full_logits" not in notices.notices_so_far()


def test_other_adapters_of_the_head_use_full_logits():
    config = LoraConfig(r=3, target_modules=["lm_head"], use_dora=True, lora_dropout=0.1)
    model = get_peft_model(tiny("Llama"), config)
    causal_lm_loss(model, padded_batch())
    assert_notice("dropout")
    assert_same(model.eval(), padded_batch())


@pytest.mark.parametrize("adapted", [False, True])
def test_a_head_with_bias(adapted):
    model = tiny("Phi")
    nn.init.normal_(model.lm_head.bias)
    targets = ["q_proj", "lm_head"] if adapted else ["q_proj"]
    assert_same(get_peft_model(model, LoraConfig(r=3, target_modules=targets, init_lora_weights=False)), padded_batch())
    assert "full_logits" not in notices.notices_so_far()


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


def assert_loss(model: nn.Module, batch: dict[str, torch.Tensor]):
    """The loss equals the model's own."""
    loss_sum, tokens = causal_lm_loss(model, batch)
    torch.testing.assert_close(loss_sum / tokens, model(**batch, use_cache=False).loss, rtol=1e-5, atol=0)


def assert_notice(pattern: str):
    import re

    assert re.search(pattern, notices.notices_so_far().get("full_logits", "")), notices.notices_so_far()
