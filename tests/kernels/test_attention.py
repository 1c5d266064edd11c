"""Compare attention and its deterministic backward with references and autograd, on a GPU and in the interpreter."""

import pytest
import torch

from halfbyte.kernels.device import assumed
from halfbyte.ops.attention import Scores, attention, attention_backward, spans
from tests.helpers.parity import DEVICE, INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton import attention as kernels
from tests.helpers.small_devices import compiled_shared_bytes, small

pytestmark = mark

# Document lengths, query heads, key heads, head size, window, softcap, whether there are sinks
CASES = [
    ((7, 50, 1, 33, 64, 10), 4, 2, 16, None, None, False),  # tiles with several documents; one of a single token
    ((100,), 2, 1, 24, None, None, True),  # a head size that is not a power of two
    ((70, 40, 3), 2, 2, 32, 20, 2.0, True),
    ((140,), 2, 1, 16, 70, 3.0, False),  # a window wider than a tile
    ((130, 9), 3, 1, 16, 2, None, True),  # a token attends to one other token and the sink
    ((129,), 2, 2, 16, None, 0.5, True),  # scores far beyond the cap
]
if not INTERPRETED:
    CASES += [((1024, 517, 1, 506), 16, 8, 128, None, None, False), ((1300, 700), 8, 1, 64, 257, None, True)]
    CASES += [((300, 211), 4, 4, 256, None, None, False), ((1300, 700), 8, 4, 256, 512, 50.0, False)]
    CASES += [((1024, 200), 8, 1, 64, 128, None, True), ((400, 333), 4, 2, 192, None, 30.0, True)]
cases = pytest.mark.parametrize(("lengths", "heads", "keys", "width", "window", "softcap", "sunk"), CASES, ids=str)


def documents_of(lengths):
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0), sum(lengths)], dtype=torch.int32)  # the last is empty
    return spans(bounds.to(DEVICE), sum(lengths))


def trees(groups):
    """Documents and prompts of `groups`, each the lengths of a prompt and its answers."""
    columns = [[], [], [], []]  # begin and end of the document, and of the prompt
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


def forward(query, key, value, documents, scores, sinks=None, prompts=None):
    """The result and the logsumexp, in the inputs' dtype."""
    rows, group = torch.arange(len(query), device=query.device), query.shape[1] // key.shape[1]
    first = documents[0].to(query.device)
    seen = (rows <= rows[:, None]) & (rows >= first[:, None])
    if scores.window is not None:
        seen &= rows > rows[:, None] - scores.window
    if prompts is not None:
        opening, closing = (x.to(query.device)[:, None] for x in prompts)
        seen |= (rows >= opening) & (rows < closing)
    k, v = (x.repeat_interleave(group, 1) for x in (key, value))
    products = torch.einsum("qhd,khd->hqk", query, k) * scores.scale
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        products = torch.cat([products, sinks[:, None, None].expand(-1, len(query), 1)], -1)
    weights = products.softmax(-1)[..., : len(query)]
    return torch.einsum("hqk,khd->qhd", weights, v), products.logsumexp(-1)


def gradients(inputs, sinks, dout, documents, scores, prompts=None):
    leaves = [x.detach().requires_grad_() for x in (*inputs, *([] if sinks is None else [sinks]))]
    own = leaves[3] if sinks is not None else None
    return torch.autograd.grad(forward(*leaves[:3], documents, scores, own, prompts)[0], leaves, dout)


def drawn(lengths, heads, keys, width, dtype):
    return [random(sum(lengths), count, width, dtype=dtype) for count in (heads, keys, keys, heads)]


def check(lengths, heads, keys, width, dtype, documents, scores, sunk=False, prompts=None):
    *inputs, dout = drawn(lengths, heads, keys, width, dtype)
    sinks = random(heads, dtype=dtype) if sunk else None
    true_sinks = exact(sinks)
    truth = [exact(x) for x in (*inputs, dout)]
    true_out, true_log = forward(*truth[:3], documents, scores, true_sinks, prompts)
    if prompts is None:
        found, log = kernels.forward(*inputs, documents, scores, sinks)
        assert_as_close_as_torch(found, forward(*inputs, documents, scores, sinks)[0], true_out)
        torch.testing.assert_close(exact(log), true_log, rtol=1e-5, atol=1e-5)
    reference, log = attention.reference(*inputs, documents, scores, sinks, prompts)
    assert (exact(reference) - true_out).norm() <= 4 * torch.finfo(dtype).eps * true_out.norm()
    torch.testing.assert_close(exact(log), true_log, rtol=1e-5, atol=1e-5)
    out, log = true_out.to(dtype).to(DEVICE), true_log.float().to(DEVICE)
    truths = gradients(truth[:3], true_sinks, truth[3], documents, scores, prompts)
    torchs = gradients(inputs, sinks, dout, documents, scores, prompts)
    options = documents, scores, sinks, prompts
    mine = kernels.backward(dout, *inputs, out, log, *options)
    for ours, theirs, true in zip(mine[:3], torchs, truths, strict=False):
        assert_as_close_as_torch(ours, theirs, true)
    reference = attention_backward.reference(dout, *inputs, out, log, *options)
    for ours, true in zip(reference[:3], truths, strict=False):
        assert (exact(ours) - true).norm() <= 4 * torch.finfo(dtype).eps * true.norm()
    assert (mine[3] is None) == (reference[3] is None) == (not sunk)
    if sunk:  # the terms of this sum cancel, and out has been rounded
        terms = (truth[3] * true_out).abs().sum(-1).T * (true_sinks[:, None] - true_log).exp()
        for ours in (mine[3], reference[3]):
            assert ((exact(ours) - truths[3]).abs() <= 4 * torch.finfo(dtype).eps * terms.sum(1)).all()


@dtypes
@cases
def test_values_and_gradients(lengths, heads, keys, width, window, softcap, sunk, dtype):
    if dtype == torch.float32 and not INTERPRETED:
        pytest.skip("the kernels' products are of 16 bits")
    scores = Scores(0.2, window, softcap)
    check(lengths, heads, keys, width, dtype, documents_of(lengths), scores, sunk)


# A prompt and its answers; query heads, key heads, head size
TREES = [
    ([(5, 3, 4), (20,), (1, 1, 1, 7)], 4, 2, 16),  # all in one tile but the last, and a document without answers
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
    check(lengths, heads, keys, width, dtype, documents, Scores(0.2), prompts=prompts)


def test_strides():
    """Inputs may be [heads, tokens] in memory, or slices of one projection."""
    lengths, documents, scores = (40, 25), documents_of((40, 25)), Scores(0.2)
    *inputs, dout = drawn(lengths, 4, 2, 16, torch.float16)
    out, log = kernels.forward(*inputs, documents, scores)
    expected = kernels.backward(dout, *inputs, out, log, documents, scores)[:3]
    fused = torch.cat(inputs, 1).split((4, 2, 2), 1)
    apart = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (dout, *inputs, out)]
    for tensors in ([dout, *fused, out], apart):
        assert all(map(torch.equal, kernels.forward(*tensors[1:4], documents, scores), (out, log)))
        found = kernels.backward(*tensors, log, documents, scores)[:3]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_documents_do_not_see_each_other():
    """Replacing one document changes no bit of the others, forward and backward."""
    lengths, scores = (70, 30, 61), Scores(0.2, 40, 2.0)
    documents, sinks = documents_of(lengths), random(4)
    *inputs, dout = drawn(lengths, 4, 2, 16, torch.float16)
    runs = []
    for replaced in (False, True):
        if replaced:
            inputs = [x.clone() for x in inputs]
            for x in inputs:
                x[70:100] = random(30, *x.shape[1:], dtype=x.dtype)
        out, log = kernels.forward(*inputs, documents, scores, sinks)
        runs.append((out, *kernels.backward(dout, *inputs, out, log, documents, scores)[:3]))
    for before, after in zip(*runs, strict=True):
        assert torch.equal(before[:70], after[:70])
        assert torch.equal(before[100:], after[100:])
        assert not torch.equal(before[70:100], after[70:100])


@pytest.mark.parametrize("kib", [99, 64])
@pytest.mark.parametrize("width", [64, 128, 256] if not INTERPRETED else [256])
def test_tiles_of_devices_with_less_shared_memory(width, kib, monkeypatch):
    launchers = kernels._forward_launcher, kernels._dq_launcher, kernels._dkdv_launcher
    for launcher in launchers:
        monkeypatch.setattr(launcher, "_compiled", {})
    with assumed(small(kib, random(1))):
        check((70, 61), 2, 1, width, torch.float16, documents_of((70, 61)), Scores(0.05, 40, 2.0), True)
    if not INTERPRETED:
        for launcher in launchers:
            assert all(found <= kib * 1024 for found in compiled_shared_bytes(launcher))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after the other")
@cases
def test_equal_runs_give_equal_bits(lengths, heads, keys, width, window, softcap, sunk):
    *inputs, dout = drawn(lengths, heads, keys, width, torch.bfloat16)
    documents, scores, sinks = documents_of(lengths), Scores(0.2, window, softcap), random(heads) if sunk else None

    def run():
        out, log = attention(*inputs, documents, scores, sinks)
        return out, log, *attention_backward(dout, *inputs, out, log, documents, scores, sinks)[: 3 + sunk]

    first = run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
