"""The repeatable backward of attention against its reference and autograd, on a GPU and in Triton's interpreter."""

import pytest
import torch
from parity import DEVICE, INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

from halfbyte.ops.attention import attention_backward, spans

pytest.importorskip("triton")
from halfbyte.kernels.triton import attention as kernels

pytestmark = mark

# Lengths of documents, heads of queries and of keys, width of a head, window
CASES = [
    ((7, 50, 1, 33, 64, 10), 4, 2, 16, None),  # tiles with several documents; one of a single token
    ((100,), 2, 1, 24, None),  # a width that is no power of two
    ((70, 40, 3), 2, 2, 32, 20),
    ((140,), 2, 1, 16, 70),  # a window wider than a tile
]
if not INTERPRETED:
    CASES += [((1024, 517, 1, 506), 16, 8, 128, None), ((1300, 700), 8, 1, 64, 257), ((300, 211), 4, 4, 256, None)]
cases = pytest.mark.parametrize(("lengths", "heads", "keys", "width", "window"), CASES, ids=str)


def documents_of(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0), sum(lengths)], dtype=torch.int32)  # a last one of none
    return spans(bounds.to(DEVICE), sum(lengths))


def forward(query, key, value, documents, window):
    """In the inputs' dtype: the result and, in fp32, the logarithm of the sums."""
    rows, group = torch.arange(len(query), device=query.device), query.shape[1] // key.shape[1]
    first = documents[0].to(query.device)
    seen = (rows <= rows[:, None]) & (rows >= first[:, None])
    if window is not None:
        seen &= rows > rows[:, None] - window
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (torch.einsum("qhd,khd->hqk", query, k) * 0.2).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def gradients(inputs, dout, documents, window):
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(forward(*leaves, documents, window)[0], leaves, dout)


def drawn(lengths, heads, keys, width, dtype):
    return [random(sum(lengths), count, width, dtype=dtype) for count in (heads, keys, keys, heads)]


@dtypes
@cases
def test_gradients(lengths, heads, keys, width, window, dtype):
    if dtype == torch.float32 and not INTERPRETED:
        pytest.skip("the kernels' products are of 16 bits")
    *inputs, dout = drawn(lengths, heads, keys, width, dtype)
    documents = documents_of(lengths)
    truth = [exact(x) for x in (*inputs, dout)]
    true_out, true_log = forward(*truth[:3], documents, window)
    out, log = true_out.to(dtype).to(DEVICE), true_log.float().to(DEVICE)
    truths = gradients(truth[:3], truth[3], documents, window)
    torchs = gradients(inputs, dout, documents, window)
    mine = kernels.backward(dout, *inputs, out, log, documents, 0.2, window)
    for ours, theirs, true in zip(mine, torchs, truths, strict=True):
        assert_as_close_as_torch(ours, theirs, true)
    reference = attention_backward.reference(dout, *inputs, out, log, documents, 0.2, window)
    for ours, true in zip(reference, truths, strict=True):
        assert (exact(ours) - true).norm() <= 4 * torch.finfo(dtype).eps * true.norm()


def test_strides():
    """Heads before tokens, as a model may hold them, or parts of one projection."""
    lengths, documents = (40, 25), documents_of((40, 25))
    *inputs, dout = drawn(lengths, 4, 2, 16, torch.float16)
    out, log = forward(*inputs, documents, None)
    expected = kernels.backward(dout, *inputs, out.contiguous(), log.float(), documents, 0.2, None)
    fused = torch.cat(inputs, 1).split((4, 2, 2), 1)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (dout, *inputs, out)]
    for tensors in ([dout, *fused, out.contiguous()], apart):
        found = kernels.backward(*tensors, log.float(), documents, 0.2, None)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
@cases
def test_equal_runs_give_equal_bits(lengths, heads, keys, width, window):
    *inputs, dout = drawn(lengths, heads, keys, width, torch.bfloat16)
    documents = documents_of(lengths)
    out, log = forward(*inputs, documents, window)
    first = attention_backward(dout, *inputs, out.contiguous(), log.float(), documents, 0.2, window)
    for _ in range(20):
        again = attention_backward(dout, *inputs, out.contiguous(), log.float(), documents, 0.2, window)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
