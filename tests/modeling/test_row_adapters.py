"""One forward of several adapters: losses and gradients are those of each adapter's own model."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from halfbyte.modeling.head import causal_lm_loss
from halfbyte.modeling.patch import patch, unpatch
from halfbyte.modeling.row_adapters import RowAdapters
from halfbyte.train.several import with_same_tensors
from tests.helpers.patch_models import quantize, tiny

RANKS = (2, 5, 3)


def models(family="Qwen3", quantized=False, levels=None, targets="all-linear", dropout=0.0):
    """A patched base without adapters, and a patched model over its tensors for each rank."""
    torch.manual_seed(0)
    base = tiny(family, adapter=False).double()
    if quantized:
        quantize(base)
    base.requires_grad_(False)
    adapted = []
    for rank in RANKS:
        torch.manual_seed(rank)
        config = LoraConfig(r=rank, lora_alpha=7, target_modules=targets, lora_dropout=dropout)
        model = get_peft_model(with_same_tensors(base), config).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        patch(model.train(), levels)
        adapted.append(model)
    joint = with_same_tensors(base).train()
    patch(joint, levels)
    return joint, adapted


def batch(count, packed=False):
    torch.manual_seed(3)
    tokens = torch.randint(1, 101, (2 * count, 18))
    inputs = {"input_ids": tokens, "labels": tokens.masked_fill(torch.rand(tokens.shape) < 0.3, -100)}
    if packed:
        documents = [(18,), (5, 13), (3, 1, 14)]
        rows = [torch.cat([torch.arange(n) for n in documents[i % 3]]) for i in range(2 * count)]
        inputs["position_ids"] = torch.stack(rows)
    return inputs


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(joint, adapted, active=(0, 1, 2), packed=False):
    inputs = batch(len(active), packed)
    for model in adapted:
        model.zero_grad(set_to_none=True)
    rows = RowAdapters(joint, adapted)
    with rows.active(active):
        losses = rows.losses(inputs)
        sum(losses).backward()
    mine = [gradients(model) for model in adapted]
    for at, number in enumerate(active):
        model = adapted[number]
        model.zero_grad(set_to_none=True)
        own = {key: value[2 * at : 2 * at + 2] for key, value in inputs.items()}
        loss, _ = causal_lm_loss(model, own)
        loss.backward()
        torch.testing.assert_close(losses[at], loss, rtol=1e-6, atol=1e-6)  # the head sums in fp32
        theirs = gradients(model)
        assert mine[number].keys() == theirs.keys()
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[number][name], gradient, rtol=1e-5, atol=1e-7)
    assert all(not mine[number] for number in set(range(len(adapted))) - set(active))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2"])
def test_losses_and_gradients(family):
    compare(*models(family))


def test_quantized_and_packed():
    compare(*models(quantized=True), packed=True)


@pytest.mark.parametrize("level", ["recompute", "recompute_mlp", "checkpoint"])
def test_recomputation(level):
    compare(*models(levels=level))


def test_an_adapter_that_has_ended_leaves_the_batch():
    joint, adapted = models()
    compare(joint, adapted, active=(2, 0))
    compare(joint, adapted, active=(1,))


def test_some_linears_and_the_head():
    compare(*models(targets=["q_proj", "down_proj", "lm_head"]))


def test_every_linear_is_found_before_training():
    joint, adapted = models()
    assert RowAdapters(joint, adapted).unjoinable(torch.arange(4)[None]) is None
    other = copy.deepcopy(adapted)
    unpatched = with_same_tensors(joint)
    unpatch(unpatched)
    assert "own" in RowAdapters(unpatched, other).unjoinable(torch.arange(4)[None])
