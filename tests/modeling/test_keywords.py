"""Keyword arguments of transformers' forwards: caches by any name, and none that is unknown is ignored."""

import inspect

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from halfbyte.modeling import layer as layer_module
from halfbyte.modeling.layer import check_keywords
from halfbyte.modeling.patch import patch
from halfbyte.modeling.transformers_versions import CACHE_KEYWORDS, given_cache
from halfbyte.utils.errors import ModelError


def tiny():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes)).eval()


@pytest.mark.parametrize("name", CACHE_KEYWORDS)
def test_a_cache_is_known_by_each_of_its_names(name):
    cache = object()
    assert given_cache({"hidden_states": 1, name: cache}) == {name: cache}
    assert given_cache({name: None}) == {}


def test_an_unknown_keyword_is_named():
    module = torch.nn.Linear(1, 1)
    check_keywords(module, {"use_cache": True, "position_ids": torch.zeros(1), "sliding": None})
    with pytest.raises(ModelError) as raised:
        check_keywords(module, {"new_thing": 1})
    assert "new_thing" in raised.value.message
    assert "Linear" in raised.value.message


@pytest.mark.parametrize("level", ["attention", "layer"])
def test_a_fused_forward_raises_on_a_keyword_that_only_the_stock_forward_knows(level, monkeypatch):
    stock = LlamaAttention.forward

    def forward(self, hidden_states, kv_memory=None, **kwargs):
        return stock(self, hidden_states, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    layer_module._reads.cache_clear()
    model = tiny()
    patch(model)
    x, positions = torch.randn(1, 5, 32), torch.arange(5)[None]
    angles = model.model.rotary_emb(x, positions)
    layer = model.model.layers[0]
    called = layer.self_attn if level == "attention" else layer
    called(x, position_embeddings=angles, attention_mask=None, position_ids=positions)
    with pytest.raises(ModelError):
        called(x, position_embeddings=angles, attention_mask=None, position_ids=positions, kv_memory=torch.zeros(1))


def test_a_patched_model_generates_with_a_cache_what_it_generates_without_patch():
    plain, patched = tiny(), tiny()
    patch(patched)
    ids = torch.randint(64, (2, 7))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(ids, **options), patched.generate(ids, **options))
    with torch.no_grad():
        first = patched(ids[:, :5], use_cache=True)
        name = next(name for name in CACHE_KEYWORDS if name in inspect.signature(patched.forward).parameters)
        second = patched(ids[:, 5:], use_cache=True, **{name: getattr(first, name)})
        uncached = plain(ids)
    assert torch.allclose(second.logits, uncached.logits[:, 5:], atol=1e-5)


@pytest.mark.parametrize(
    "keys", [{"foo": 1}, {"ignore_index": 0}, {"ignore_index": -100}, {"ignore_index": 7, "foo": 1}]
)
@pytest.mark.parametrize("activations", [None, "checkpoint"])
def test_keywords_that_transformers_ignores_or_uses_in_the_loss_are_passed_on(keys, activations):
    plain, patched = tiny().train(), tiny().train()
    patch(patched, activations)
    ids = torch.randint(64, (2, 9))
    labels = torch.where(ids % 3 > 0, ids, keys.get("ignore_index", -100))
    losses = [model(input_ids=ids, labels=labels, **keys).loss for model in (plain, patched)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for mine, stock in zip(patched.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, stock.grad)
