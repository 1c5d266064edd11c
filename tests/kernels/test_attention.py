"""The repeatable backward of attention against its reference and autograd, on a GPU and in Triton's interpreter."""

import pytest
import torch
from parity import DEVICE, INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

from halfbyte.ops.attention import attention, attention_backward, spans

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


def trees(groups):
    """Documents and prompts of tokens in `groups`: a prompt and its answers, by their lengths."""
    columns = [[], [], [], []]  # begin, end, and the prompt's
    for prompt, *answers in groups:
        at = len(columns[0])
        parts = [(at, prompt, at + prompt + sum(answers), 0, 0)]
        begin = at + prompt
        for answer in answers:
            parts.append((begin, answer, begin + answer, at, at + prompt))
            begin += answer
        for first, length, *others in parts:
            for column, number in zip(columns, (first, *others), strict=True):
                column += [number] * length
    made = [torch.tensor(column, dtype=torch.int32, device=DEVICE) for column in columns]
    return tuple(made[:2]), tuple(made[2:])


def forward(query, key, value, documents, window, prompts=None):
    """In the inputs' dtype: the result and, in fp32, the logarithm of the sums."""
    rows, group = torch.arange(len(query), device=query.device), query.shape[1] // key.shape[1]
    first = documents[0].to(query.device)
    seen = (rows <= rows[:, None]) & (rows >= first[:, None])
    if window is not None:
        seen &= rows > rows[:, None] - window
    if prompts is not None:
        opening, closing = (x.to(query.device)[:, None] for x in prompts)
        seen |= (rows >= opening) & (rows < closing)
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = (torch.einsum("qhd,khd->hqk", query, k) * 0.2).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def gradients(inputs, dout, documents, window, prompts=None):
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(forward(*leaves, documents, window, prompts)[0], leaves, dout)


def drawn(lengths, heads, keys, width, dtype):
    return [random(sum(lengths), count, width, dtype=dtype) for count in (heads, keys, keys, heads)]


def check(lengths, heads, keys, width, dtype, documents, window=None, prompts=None):
    *inputs, dout = drawn(lengths, heads, keys, width, dtype)
    truth = [exact(x) for x in (*inputs, dout)]
    true_out, true_log = forward(*truth[:3], documents, window, prompts)
    out, log = true_out.to(dtype).to(DEVICE), true_log.float().to(DEVICE)
    truths = gradients(truth[:3], truth[3], documents, window, prompts)
    torchs = gradients(inputs, dout, documents, window, prompts)
    options = documents, 0.2, window, prompts
    mine = kernels.backward(dout, *inputs, out, log, *options)
    for ours, theirs, true in zip(mine, torchs, truths, strict=True):
        assert_as_close_as_torch(ours, theirs, true)
    reference = attention_backward.reference(dout, *inputs, out, log, *options)
    for ours, true in zip(reference, truths, strict=True):
        assert (exact(ours) - true).norm() <= 4 * torch.finfo(dtype).eps * true.norm()
    return inputs, true_out, true_log


@dtypes
@cases
def test_gradients(lengths, heads, keys, width, window, dtype):
    if dtype == torch.float32 and not INTERPRETED:
        pytest.skip("the kernels' products are of 16 bits")
    check(lengths, heads, keys, width, dtype, documents_of(lengths), window)


# A prompt and its answers; heads of queries and of keys, width of a head
TREES = [
    ([(5, 3, 4), (20,), (1, 1, 1, 7)], 4, 2, 16),  # all in one tile but for the last, and a document without answers
    ([(70, 30, 20), (9, 80, 2)], 2, 1, 24),
    ([(3, 2), (140, 60, 1, 70)], 2, 2, 16),  # a prompt of several tiles, its last one shared with an answer
]
if not INTERPRETED:
    # Scores of all heads and pairs of tokens, several in fp32, must fit a test process's share of the GPU's memory.
    TREES += [([(512, 256, 256)] * 2, 8, 2, 128), ([(128, *[128] * 8)] * 2, 8, 2, 128)]
    TREES += [([(700, 3, 190), (1,), (64, 64, 64)], 8, 1, 64)]
trees_of = pytest.mark.parametrize(("groups", "heads", "keys", "width"), TREES, ids=str)


@dtypes
@trees_of
def test_gradients_of_answers_that_share_a_prompt(groups, heads, keys, width, dtype):
    if dtype == torch.float32 and not INTERPRETED:
        pytest.skip("the kernels' products are of 16 bits")
    documents, prompts = trees(groups)
    lengths = [length for group in groups for length in group]
    inputs, out, log = check(lengths, heads, keys, width, dtype, documents, None, prompts)
    found, sums = attention(*(x.float() for x in inputs), documents, 0.2, prompts)
    torch.testing.assert_close(exact(found), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(exact(sums), log, rtol=1e-5, atol=1e-5)


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
