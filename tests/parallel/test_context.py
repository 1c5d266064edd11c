"""Rows cut along their tokens on several ranks: losses and gradients of one process's whole rows."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from patch_models import tiny

from halfbyte.models.divided import divided
from halfbyte.models.head import causal_lm_loss
from halfbyte.parallel import ROWS, TOKENS, slice_of, sum_gradients

pytestmark = pytest.mark.dist


def batch(packed, length=26):
    tokens = torch.randint(1, 101, (2, length), generator=torch.Generator().manual_seed(3))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    inputs["labels"][0, : length // 3] = -100
    if packed:
        lengths = [(5, length - 5), (15, 3, 1, length - 19)]
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        inputs["labels"][inputs["position_ids"] == 0] = -100
    return inputs


def step(model, inputs, mesh=None):
    """Sum of the loss, and gradients by name."""
    with divided(model, mesh):
        loss = causal_lm_loss(model, slice_of(inputs, mesh))[0]
        loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = sum_gradients(mesh, list(trained.values()), loss.detach()[None])
    return total.item(), {name: p.grad for name, p in trained.items()}


def case(mesh, family, packed, shape):
    torch.manual_seed(0)
    model, inputs = tiny(family, shape=shape), batch(packed)
    expected = causal_lm_loss(model, inputs)[0]
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    loss, found = step(model, inputs, mesh)
    errors = {n: ((found[n] - g).norm() / g.norm().clamp(min=1e-12)).item() for n, g in gradients.items()}
    return loss, expected.item(), errors


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_x(two, family, packed):
    for loss, expected, errors in two.run(case, family, packed, {}, layout={"context": 2}):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert max(errors.values()) < 1e-5, errors
