"""Cached engines: what the next call reuses, and when the cache is invalid."""

import gc
import weakref

import pytest
import torch

from halfbyte import generation
from halfbyte.generation import engine
from halfbyte.generation.engine import StaticEngine
from halfbyte.utils import notices
from tests.helpers.decoding import transformers_greedy
from tests.helpers.patch_models import quantize, tiny

PROMPTS = [[5, 9, 17, 33], [7, 64]]


@pytest.fixture
def built(monkeypatch):
    """Sizes of the engines that are made."""
    sizes = []

    class Counted(StaticEngine):
        def __init__(self, model, adapters, slots, cache_dtype):
            sizes.append(slots)
            super().__init__(model, adapters, slots, cache_dtype)

    monkeypatch.setattr(engine, "StaticEngine", Counted)
    return sizes


def greedy(model, prompts=PROMPTS, new=8, **keys):
    return generation.generate(model, prompts, max_new_tokens=new, stops=[], **keys)


def fresh(model, *args, **keys):
    generation.forget(model)
    return greedy(model, *args, **keys)


def test_a_second_call_reuses_the_engine(built):
    model = tiny("Llama").eval()
    first, longer = greedy(model), greedy(model, [[8, 9, 3, 4, 5, 6], [1]])
    assert (len(built), greedy(model)) == (1, first)
    assert longer == fresh(model, [[8, 9, 3, 4, 5, 6], [1]])
    greedy(model, adapter=None)
    greedy(model, PROMPTS[:1])
    assert len(built) == 4  # the base, and one row, have their own


def test_trained_adapters_are_refreshed(built):
    model = tiny("Llama").eval()
    before = greedy(model, new=20)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.5)  # without a trace in its version
    after = greedy(model, new=20)
    assert len(built) == 1
    assert after == fresh(model, new=20) != before


def test_replaced_weights_rebuild_the_engine(built):
    model = tiny("Llama").eval()
    greedy(model)
    mlp = model.get_base_model().model.layers[0].mlp.down_proj.base_layer
    mlp.weight = torch.nn.Parameter(mlp.weight.detach() * 3)
    assert greedy(model) == fresh(model)
    assert len(built) == 3
    model.merge_adapter()
    greedy(model)
    assert len(built) == 3
    assert "merged" in str(notices.notices_so_far())


def quantized(model):
    return quantize(model)


def scaled(model):
    model.model.layers[0].self_attn.scaling *= 3


def rotated(model):
    model.model.rotary_emb.inv_freq.mul_(0.3)


def pruned(model):
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1


def embedded(model):
    model.set_input_embeddings(torch.nn.Embedding(101, 32))


def normed(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 50.0


def activated(model):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


def biased(model):
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-5, 5, 101))


def hooked_norm(model):
    model.model.layers[1].input_layernorm.register_forward_hook(lambda module, args, output: output * 1.5)


def replaced(model):
    forward = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda x: forward(x) * 2


CHANGES = (quantized, scaled, rotated, pruned, embedded, normed, activated, biased, hooked_norm, replaced)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_answers_as_it_is(change):
    model = tiny("Llama", adapter=False).eval()
    rollouts = generation.Rollouts(model)
    keys = {"max_new_tokens": 8, "stops": [], "sampling": generation.Sampling()}
    before = greedy(model)
    assert [completion.ids for completion in rollouts.generate(PROMPTS, **keys)] == before
    change(model)
    right = [transformers_greedy(model, prompt, 8) for prompt in PROMPTS]
    assert greedy(model) == [completion.ids for completion in rollouts.generate(PROMPTS, **keys)] == right
    assert right != before or change is quantized


def test_concurrent_streams_have_separate_engines(built):
    model = tiny("Llama").eval()
    expected = [greedy(model), greedy(model, [[90, 3], [44, 12, 8]])]
    streams = [generation.stream(model, ids, max_new_tokens=8, stops=[]) for ids in (PROMPTS, [[90, 3], [44, 12, 8]])]
    found = [[[], []], [[], []]]
    for _ in range(8):
        for rows, each in zip(found, streams, strict=True):
            for row, token in zip(rows, next(each), strict=True):
                row.append(token)
    assert (found, len(built)) == (expected, 2)


def test_a_closed_stream_caches_its_engine_and_an_error_does_not(built):
    model = tiny("Llama").eval()
    expected = greedy(model)
    next(tokens := generation.stream(model, PROMPTS, max_new_tokens=8, stops=[]))
    tokens.close()
    assert (greedy(model), len(built)) == (expected, 1)
    with pytest.raises(ZeroDivisionError):
        greedy(model, on_token=lambda row, token: 1 / 0)
    assert greedy(model) == expected


def test_engines_are_freed_with_their_model():
    model = tiny("Llama").eval()
    greedy(model)
    gone = weakref.ref(model)
    assert model in engine._engines
    del model
    gc.collect()
    assert gone() is None
