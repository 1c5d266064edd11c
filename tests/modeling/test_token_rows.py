"""Rows of an embedding that are trained one by one give PEFT's outputs and gradients, without a copy of the weight."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from peft.tuners.trainable_tokens import TrainableTokensLayer

from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.token_rows import active_rows, attach_row_forwards
from tests.helpers.families import SHAPE

ROWS = [7, 3, 0, 100]  # 0 is the padding token


def with_rows(family: str, rows=ROWS, **keys):
    config = getattr(transformers, f"{family}Config")(**SHAPE | keys)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=rows))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter)
    return model


def layers_of(model) -> list:
    return [module for module in model.modules() if isinstance(module, TrainableTokensLayer)]


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])  # Gemma 3 scales its embedding's outputs
def test_an_embedding_gives_pefts_rows(family):
    model = with_rows(family, pad_token_id=0)
    embedding, tokens = model.get_input_embeddings(), torch.tensor([[5, 7, 7, 0, 3], [100, 1, 2, 0, 7]])
    layer = embedding.token_adapter
    delta, upstream = layer.trainable_tokens_delta["default"], torch.randn(2, 5, SHAPE["hidden_size"])
    expected = embedding(tokens)
    (gradient,) = torch.autograd.grad((expected * upstream).sum(), delta)
    attach_row_forwards(model)
    found = embedding(tokens)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * upstream).sum(), delta)[0], gradient)
    with model.disable_adapter():
        assert torch.equal(embedding(tokens), layer.base_layer(tokens))


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_copies_neither_embedding_nor_head(tied, monkeypatch):
    model = with_rows("Llama", {"embed_tokens": ROWS} if tied else {"embed_tokens": ROWS, "lm_head": ROWS},
                      tie_word_embeddings=tied)  # fmt: skip
    attach_row_forwards(model)
    ids = torch.tensor([[5, 7, 7, 0, 3, 9], [100, 1, 2, 0, 7, 50]])
    causal_lm_loss(model, {"input_ids": ids, "labels": ids})  # the probe runs the model's own head
    for layer in layers_of(model):
        monkeypatch.setattr(layer, "get_merged_weights", lambda *_: pytest.fail("the weight was copied"))
    causal_lm_loss(model, {"input_ids": ids, "labels": ids})[0].backward()
    assert all(delta.grad.any() for layer in layers_of(model) for delta in layer.trainable_tokens_delta.values())


def test_rows_of_two_adapters_are_joined():
    model = with_rows("Llama", [7, 3])
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[5])
    model.add_adapter("second", config)
    attach_row_forwards(model)
    layer = model.get_input_embeddings().token_adapter
    layer.set_adapter(["default", "second"])
    rows, tokens = active_rows(layer)
    assert tokens.tolist() == [7, 3, 5]
    assert torch.equal(rows, torch.cat([layer.trainable_tokens_delta[name] for name in ("default", "second")]))
    assert torch.equal(layer(torch.tensor([3, 5])), rows[1:])


def test_unattached_rows_run_pefts_forward():
    model = with_rows("Llama")
    attach_row_forwards(model)
    model.add_adapter("late", LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[9]))
    model.set_adapter("late")
    layer = model.get_input_embeddings().token_adapter
    assert torch.equal(layer(torch.tensor([9, 7])), layer.get_merged_weights(["late"])[[9, 7]])
