"""The Triton router against its reference, on a GPU and in Triton's interpreter."""

import pytest
import torch

from halfbyte.ops.router import top_experts as op
from tests.helpers.parity import DEVICE, dtypes, mark, random

pytest.importorskip("triton")
from halfbyte.kernels.triton import cross_entropy

pytestmark = mark


@dtypes
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "columns", "top_k"), [(1, 128, 2048, 8), (3, 5, 40, 2), (8, 256, 96, 4)])
def test_top_experts(tokens, experts, columns, top_k, normalized, dtype):
    torch.manual_seed(tokens)
    x, weight = random(tokens, columns, dtype=dtype), random(experts, columns, dtype=dtype) / columns**0.5
    assert cross_entropy.obstacle(x, weight, top_k, normalized, torch.float32) is None
    logits, scores, index = cross_entropy.top_experts(x, weight, top_k, normalized, torch.float32)
    truth = x.double() @ weight.double().t()
    assert (logits.double() - truth).abs().max() <= 2 * torch.finfo(dtype).eps * truth.abs().max()
    # Of these very logits: rounding may have made some alike, and of those any may be chosen.
    p = logits.double().softmax(-1)
    best = p.topk(top_k).values
    assert torch.allclose(p.gather(1, index), best, rtol=1e-6)
    assert all(len(set(row)) == top_k for row in index.tolist())
    expected = best / best.sum(-1, keepdim=True) if normalized else best
    assert torch.allclose(scores.double(), expected, rtol=1e-5)


def test_equal_ones():
    """All alike: each is chosen once, the first ones first."""
    x = torch.ones(2, 16, device=DEVICE)
    _, scores, index = cross_entropy.top_experts(x, torch.ones(6, 16, device=DEVICE), 4, True, torch.float32)
    assert index.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.allclose(scores, torch.full_like(scores, 0.25))


def test_what_it_does_not_take():
    x, weight = torch.ones(9, 16), torch.ones(6, 16)
    assert "8 tokens" in cross_entropy.obstacle(x, weight, 2, True, torch.float32)
    assert "dtype" in cross_entropy.obstacle(x[:2], weight.half(), 2, True, torch.float32)
    mine, torchs = op(x, weight, 2, True, torch.float32), op.reference(x, weight, 2, True, torch.float32)
    assert all(map(torch.equal, mine, torchs))
