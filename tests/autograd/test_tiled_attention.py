"""Tiled attention with softcaps or sinks against attention with all scores: values, gradients, memory."""

import pytest
import torch

from halfbyte.autograd import tiled_attention as tiled
from halfbyte.autograd.tiled_attention import tiled_attention
from halfbyte.ops.attention import Scores
from halfbyte.plan.ledger import Ledger


def reference(query, key, value, scores: Scores, sinks=None, begins=None):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    products = query @ key.mT * scores.scale
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    at = torch.arange(query.shape[2])
    hidden = (at > at[:, None]) | (at <= at[:, None] - (scores.window or len(at)))
    if begins is not None:
        hidden = (hidden | (at < begins[:, :, None]))[:, None]
    products = products.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        products = torch.cat([products, sinks.view(1, -1, 1, 1).expand(*products.shape[:-1], 1)], -1)
    return products.softmax(-1)[..., : len(at)] @ value


def inputs(rows=2, heads=4, groups=2, length=75, width=16, dtype=torch.float64):
    shapes = [(rows, heads, length, width), *[(rows, groups, length, width)] * 2]
    return [torch.randn(shape, dtype=dtype).mul_(3).requires_grad_() for shape in shapes]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 75, 20, 1])
@pytest.mark.parametrize(("softcap", "sunk"), [(5.0, False), (None, True), (5.0, True), (None, False)])
@pytest.mark.parametrize("packed", [False, True])
def test_values_and_gradients(monkeypatch, heads, window, softcap, sunk, packed):
    """Several tiles, the last one shorter. In float64, logsumexp and key gradients are accumulated in fp32."""
    monkeypatch.setattr(tiled, "CACHED_BYTES", 1)
    query, key, value = inputs(heads=heads[0], groups=heads[1])
    begins, longest = None, None
    if packed:
        begins, longest = torch.zeros(2, 75, dtype=torch.int64), 74
        begins[0, 10:], begins[0, 40:], begins[1, 74:] = 10, 40, 74
    sinks = torch.randn(heads[0], dtype=torch.float64).requires_grad_() if sunk else None
    scores = Scores(0.25 if softcap else 0.05, window, softcap)
    expected = reference(query, key, value, scores, sinks, begins)
    found = tiled_attention(query, key, value, scores, sinks, begins, longest)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    grad, leaves = torch.randn_like(expected), [x for x in (query, key, value, sinks) if x is not None]
    for ours, theirs in zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_layouts_as_attention_hands_them_over():
    """q, k and v are views of [B, T, H, D], and so is the gradient."""
    query, key, value = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in inputs())
    leaves = [x.requires_grad_() for x in (query, key, value)]
    grad = torch.randn(2, 75, 4, 16, dtype=torch.float64).transpose(1, 2)
    scores = Scores(0.25, None, 5.0)
    found = torch.autograd.grad(tiled_attention(*leaves, scores), leaves, grad)
    expected = torch.autograd.grad(reference(*leaves, scores), leaves, grad)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_memory_is_linear_in_length(monkeypatch):
    monkeypatch.setattr(tiled, "CACHED_BYTES", 2**16)
    peaks = []
    for length in (512, 1024):
        query, key, value = inputs(rows=1, heads=2, groups=1, length=length, dtype=torch.bfloat16)
        ledger = Ledger()
        ledger.ignore(iter((query, key, value)))
        with ledger:
            tiled_attention(query, key, value, Scores(0.25, None, 50.0)).sum().backward()
        rows = sum(x.nbytes for x in (query, key, value))
        assert ledger.peak <= tiled.TENSORS * max(tiled.CACHED_BYTES, 4 * 2 * length * tiled.SMALLEST_TILE) + 8 * rows
        peaks.append(ledger.peak)
    assert peaks[1] <= 2.2 * peaks[0]
