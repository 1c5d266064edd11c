"""Capped scores tile by tile, against all scores at once: values, gradients, memory."""

import pytest
import torch

from halfbyte.autograd import capped_attention as tiled
from halfbyte.autograd.capped_attention import Scores, capped_attention
from halfbyte.plan.ledger import Ledger


def reference(query, key, value, scores: Scores, begins=None):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    products = scores.softcap * torch.tanh(query @ key.mT * scores.scale / scores.softcap)
    at = torch.arange(query.shape[2])
    hidden = (at > at[:, None]) | (at <= at[:, None] - scores.reach)
    if begins is not None:
        hidden = (hidden | (at < begins[:, :, None]))[:, None]
    return products.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def inputs(rows=2, heads=4, groups=2, length=75, width=16, dtype=torch.float64):
    shapes = [(rows, heads, length, width), *[(rows, groups, length, width)] * 2]
    return [torch.randn(shape, dtype=dtype).mul_(3).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("reach", [1000, 75, 20, 1])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients(monkeypatch, heads, reach, packed):
    """Several tiles, the last one shorter. float64: sums of softmax and gradients of keys are fp32 inside."""
    monkeypatch.setattr(tiled, "TILE_BYTES", 1)
    query, key, value = inputs(heads=heads[0], groups=heads[1])
    begins = None
    if packed:
        begins = torch.zeros(2, 75, dtype=torch.int64)
        begins[0, 10:], begins[0, 40:], begins[1, 74:] = 10, 40, 74
    scores = Scores(0.25, 5.0, reach)
    expected = reference(query, key, value, scores, begins)
    found = capped_attention(query, key, value, scores, begins)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    grad = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (query, key, value), grad),
        torch.autograd.grad(expected, (query, key, value), grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_layouts_as_attention_hands_them_over():
    """q, k and v are views of [B, T, H, D], and so is the gradient."""
    query, key, value = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    leaves = [x.requires_grad_() for x in (query, key, value)]
    grad = torch.randn(2, 75, 4, 16, dtype=torch.float64).transpose(1, 2)
    scores = Scores(0.25, 5.0, 75)
    found = torch.autograd.grad(capped_attention(*leaves, scores), leaves, grad)
    expected = torch.autograd.grad(reference(*leaves, scores), leaves, grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_memory_is_linear_in_length(monkeypatch):
    monkeypatch.setattr(tiled, "TILE_BYTES", 2**16)
    peaks = []
    for length in (512, 1024):
        query, key, value = inputs(rows=1, heads=2, groups=1, length=length, dtype=torch.bfloat16)
        ledger = Ledger()
        ledger.ignore(iter((query, key, value)))
        with ledger:
            capped_attention(query, key, value, Scores(0.25, 50.0, length)).sum().backward()
        rows = sum(x.nbytes for x in (query, key, value))
        assert ledger.peak <= tiled.TENSORS * max(tiled.TILE_BYTES, 4 * 2 * length * tiled.SMALLEST_TILE) + 8 * rows
        peaks.append(ledger.peak)
    assert peaks[1] <= 2.2 * peaks[0]
