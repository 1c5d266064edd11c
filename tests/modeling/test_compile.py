"""Patched models of every family under torch.compile(fullgraph=True), quantized, with adapters and ignored labels."""

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.layers import Linear4bit
from tests.helpers.families import FAMILIES, HYBRIDS, MULTIMODAL, OWN_LAYERS
from tests.helpers.patch_models import assert_same, batch, loss_and_gradients, quantize, tiny
from tests.helpers.saved_shapes import Saved

LENGTHS = (18, 13, 21, 16)


def step(compiled: nn.Module, model: nn.Module, inputs: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss and gradients of the mean, as `loss_and_gradients` gives them, through `model.forward`."""
    model.zero_grad()
    loss = compiled(**inputs, use_cache=False).loss
    loss.backward()
    tokens = (inputs["labels"][:, 1:] != -100).sum()
    return (loss * tokens).item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ignored(inputs: dict) -> dict:
    inputs["labels"][:, :5] = -100
    return inputs


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


# Routers that draw would draw others, and the backward of transformers' delta rule does not compile. Layers that keep
# transformers' forward are not one graph: `modeling.recurrent` makes forwards for the documents of a batch, Gemma 3n's
# AltUp clamps its weights in place, and Gemma 4 breaks the graph under checkpointing.
COMPILED = [name for name in FAMILIES if name not in ("Phimoe", *HYBRIDS, *OWN_LAYERS)]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in (*COMPILED, *MULTIMODAL) if name != "Llama"]
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": None}


def small(family: str, checkpointing: bool) -> nn.Module:
    """A model of one quantized layer with adapters (multimodal ones have two)."""
    model = quantize(tiny(family, shape=ONE_LAYER))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.get_base_model().disable_input_require_grads()  # for reentrant checkpoints; no compiler takes its hook
    return model


def assert_no_weight(saved: Saved, model: nn.Module) -> None:
    weights = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, Linear4bit)}
    assert weights
    assert saved.shapes
    assert not [shape for shape in saved.shapes if shape in weights or shape[::-1] in weights]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["Llama", *SLOW])
def test_one_graph_that_saves_no_weight(family, checkpointing):
    model, inputs, saved = small(family, checkpointing), ignored(batch()), Saved()
    expected = loss_and_gradients(model, inputs)
    halfbyte.patch(model)
    assert_same(step(torch.compile(model, fullgraph=True, backend=saved.backend), model, inputs), expected)
    assert saved.graphs == 1
    assert_no_weight(saved, model)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", [*COMPILED, *MULTIMODAL])
def test_varying_lengths_recompile_once(family, checkpointing):
    model, saved = small(family, checkpointing), Saved()
    batches = [ignored(batch(length=length)) for length in LENGTHS]
    expected = [loss_and_gradients(model, inputs) for inputs in batches]
    halfbyte.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend=saved.backend)
    for inputs, right in zip(batches, expected, strict=True):
        assert_same(step(compiled, model, inputs), right)
    assert saved.graphs <= 2
    assert_no_weight(saved, model)


@pytest.mark.slow
@pytest.mark.parametrize("family", COMPILED)
def test_packed_documents(family):
    model, inputs = small(family, False), batch(packed=True)
    expected = loss_and_gradients(model, inputs)
    halfbyte.patch(model)
    assert_same(step(torch.compile(model, fullgraph=True, backend="aot_eager"), model, inputs), expected)
