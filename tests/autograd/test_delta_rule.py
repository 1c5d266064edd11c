"""The chunked gated delta rule: values and gradients against the token-by-token equation, and saved tensors."""

import itertools

import pytest
import torch

from halfbyte.autograd.recurrent import delta_rule
from halfbyte.ops import delta_rule as ops


def rows(length, key_heads=2, heads=4, key_size=8, value_size=12, dtype=torch.float64):
    """q, k, v, g and β of two rows."""
    torch.manual_seed(length)
    tensors = [
        torch.randn(2, length, key_heads, key_size, dtype=dtype),
        torch.randn(2, length, key_heads, key_size, dtype=dtype),
        torch.randn(2, length, heads, value_size, dtype=dtype), -torch.rand(2, length, heads, dtype=dtype),
        torch.rand(2, length, heads, dtype=dtype),
    ]  # fmt: skip
    return [x.requires_grad_() for x in tensors]


def naive(query, key, value, decay, beta):
    """The delta rule token by token."""
    group = value.shape[2] // key.shape[2]
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(group, 2) for x in (query * query.shape[-1] ** -0.5, key))
    state, outs = value.new_zeros(len(value), value.shape[2], key.shape[-1], value.shape[-1]), []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        change = beta[:, t].unsqueeze(-1) * (value[:, t] - torch.einsum("dhkv,dhk->dhv", state, key[:, t]))
        state = state + key[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        outs.append(torch.einsum("dhkv,dhk->dhv", state, query[:, t]))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("shape", [(2, 4, 8, 12), (1, 3, 5, 4)])
@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_values_and_gradients(length, shape):
    given = rows(length, *shape)
    out, truth = delta_rule(*given), naive(*given)
    torch.testing.assert_close(out, truth, rtol=1e-10, atol=1e-12)
    upstream = torch.randn_like(truth)
    gradients = zip(torch.autograd.grad(out, given, upstream), torch.autograd.grad(truth, given, upstream), strict=True)
    for mine, expected in gradients:
        torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-10)


def test_some_heads_at_a_time_give_the_same(monkeypatch):
    """Head groups split key heads together with their value heads."""
    given = rows(70, key_heads=3, heads=6)
    whole = delta_rule(*given)
    upstream = torch.randn_like(whole)
    expected = torch.autograd.grad(whole, given, upstream)
    monkeypatch.setattr(ops, "AT_ONCE", 2 * 70 * 2)
    parts = delta_rule(*given)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)
    for mine, other in zip(torch.autograd.grad(parts, given, upstream), expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_saves_only_its_inputs():
    given = rows(40)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        delta_rule(*given).sum().backward()
    assert kept == [x.data_ptr() for x in given]


BOUNDS = [0, 1, 64, 65, 70, 71, 128, 200, 210]


def test_documents_inside_rows():
    """Each document's values and gradients are bit-equal to those of the document alone."""
    given = rows(BOUNDS[-1])
    first = torch.zeros(2, BOUNDS[-1], dtype=torch.bool)
    first[0, BOUNDS[:-1]] = True
    first[1, [0, 100]] = True
    out = delta_rule(*given, first)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, given, upstream)
    for row, bounds in enumerate((BOUNDS, [0, 100, BOUNDS[-1]])):
        for begin, end in itertools.pairwise(bounds):
            own = [x.detach()[row : row + 1, begin:end].clone().requires_grad_() for x in given]
            alone = delta_rule(*own)
            torch.testing.assert_close(out[row : row + 1, begin:end], alone, rtol=1e-10, atol=1e-12)
            gradients = torch.autograd.grad(alone, own, upstream[row : row + 1, begin:end])
            for mine, expected in zip(found, gradients, strict=True):
                torch.testing.assert_close(mine[row : row + 1, begin:end], expected, rtol=1e-8, atol=1e-10)
    changed = [x.detach().clone() for x in given]
    for x in changed:
        x[0, 65:70] -= 3
    again = delta_rule(*changed, first)
    same = torch.ones(BOUNDS[-1], dtype=torch.bool)
    same[65:70] = False
    assert torch.equal(again[0, same], out[0, same])
    assert torch.equal(again[1], out[1])


@pytest.mark.gpu
def test_on_a_gpu():
    """16-bit inputs use TF32 matmuls; fp32 inputs do not."""
    given = [x.detach().bfloat16().cuda() if x.dim() == 4 else x.detach().float().cuda() for x in rows(200)]
    given = [x.requires_grad_() for x in given]
    before = torch.backends.cuda.matmul.allow_tf32
    out = delta_rule(*given)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, given, upstream)
    assert torch.backends.cuda.matmul.allow_tf32 == before
    exact = [x.detach().double().cpu().requires_grad_() for x in given]
    truth = naive(*exact)
    expected = torch.autograd.grad(truth, exact, upstream.double().cpu())
    for mine, other in zip((out, *found), (truth, *expected), strict=True):
        assert (mine.double().cpu() - other).norm() <= 0.01 * other.norm()
