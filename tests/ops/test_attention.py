"""Compare the reference of attention's backward with autograd, in fp32 on the CPU."""

import pytest
import torch

from halfbyte.ops.attention import Scores, attention_backward, spans


def forward(query, key, value, first, window):
    """[N, H, D] and the logsumexp [H, N]; a token attends to no token before `first`."""
    rows, group = torch.arange(len(query)), query.shape[1] // key.shape[1]
    seen = (rows <= rows[:, None]) & (rows >= first[:, None]) & (rows > rows[:, None] - (window or len(query)))
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (torch.einsum("qhd,khd->hqk", query, k) * 0.3).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def test_spans_skip_empty_documents():
    begins, ends = spans(torch.tensor([0, 2, 2, 5, 6, 6, 6], dtype=torch.int32), 6)
    assert (begins.tolist(), ends.tolist()) == ([0, 0, 2, 2, 2, 5], [2, 2, 5, 5, 5, 6])
    assert begins.dtype == ends.dtype == torch.int32


@pytest.mark.parametrize("window", [None, 3])
def test_documents(window):
    documents = spans(torch.tensor([0, 4, 5, 12, 20], dtype=torch.int32), 20)
    inputs = [torch.randn(20, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    out, log = forward(*inputs, documents[0], window)
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(out, inputs, dout)
    saved = *(x.detach() for x in inputs), out.detach(), log.detach()
    found = attention_backward(dout, *saved, documents, Scores(0.3, window))[:3]
    for mine, true in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-5)
