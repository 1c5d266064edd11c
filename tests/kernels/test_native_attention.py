"""Compare attention in C with its reference: documents, shared prompts, grouped heads, irregular sizes."""

import pytest
import torch

from halfbyte.data.shared_prefix import BranchCollator
from halfbyte.modeling.shared_prefix import Sharing
from halfbyte.ops.attention import Scores, attention, attention_backward, spans
from tests.helpers.kernel_backends import MARKS

pytestmark = MARKS["cpu"]
SCORES = Scores(0.2)
TREES = [[(1, 1, 1)], [(5, 7, 3), (1, 64, 65)], [(64, 64, 128)], [(65, 1, 127, 16, 33), (130, 100, 3)]]


def laid_out(trees, one_row=True):
    """Documents and prompts of tokens laid out as prompts and answers of these sizes."""
    rows = [{"input_ids": [5] * sum(tree), "seq_lengths": list(tree), "answers": [len(tree) - 1]} for tree in trees]
    batch, _ = BranchCollator(0, one_row=one_row)(rows)
    branches = Sharing.of(batch).branches
    return branches.documents, branches.prompts


def drawn(tokens, heads, kv_heads, size, seed=0):
    """q, k, v and a gradient; keys and values are slices of wider rows."""
    made = torch.Generator().manual_seed(seed)
    q, both, grad = (torch.randn(tokens, h, size, generator=made) for h in (heads, 2 * kv_heads, heads))
    return q, both[:, :kv_heads], both[:, kv_heads:], grad


def gradients(given, documents, prompts=None):
    from halfbyte.kernels.native import attention as kernels

    *inputs, grad = given
    out, logsumexp = kernels.forward(*inputs, documents, SCORES, None, prompts)
    return out, logsumexp, *kernels.backward(grad, *inputs, out, logsumexp, documents, SCORES, None, prompts)[:3]


def assert_right(given, documents, prompts=None):
    *inputs, grad = given
    out, logsumexp = attention.reference(*inputs, documents, SCORES, None, prompts)
    rest = documents, SCORES, None, prompts
    wanted = out, logsumexp, *attention_backward.reference(grad, *inputs, out, logsumexp, *rest)[:3]
    for found, true in zip(gradients(given, documents, prompts), wanted, strict=True):
        assert (found - true).norm() <= 4e-6 * true.norm() + 2e-6  # for one token all are 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 1, 16), (4, 4, 48), (3, 1, 128), (2, 2, 256)])
@pytest.mark.parametrize("trees", TREES, ids=str)
def test_answers_that_share_a_prompt(trees, heads, kv_heads, size):
    for one_row in (True, False):
        places = laid_out(trees, one_row)
        assert_right(drawn(len(places[0][0]), heads, kv_heads, size), *places)


@pytest.mark.parametrize("lengths", [[1], [63, 1, 66], [200, 64]], ids=str)
def test_documents(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    assert_right(drawn(sum(lengths), 4, 2, 32), spans(bounds, sum(lengths)))


def test_equal_bits_on_more_threads_and_with_other_answers():
    trees = [(70, 90, 40), (33, 64, 80), (1, 5)]
    places = laid_out(trees)
    given = drawn(len(places[0][0]), 4, 2, 64)
    found = gradients(given, *places)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = gradients(given, *places)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))
    alone = laid_out([(70, 40)])  # the first prompt and its second answer
    own = torch.cat([torch.arange(70), torch.arange(160, 200)])
    assert torch.equal(gradients([x[own] for x in given], *alone)[0], found[0][own])


def test_dispatch_takes_it_where_it_can():
    documents, prompts = laid_out([(5, 7, 3)])
    q, k, v, _ = drawn(15, 2, 1, 16)

    def chosen(q, scores=SCORES, sinks=None):
        return [reason for _, reason in attention.choices("cpu", q, k, v, documents, scores, sinks, prompts)]

    assert chosen(q) == [None]
    assert all(chosen(q.bfloat16()) + chosen(q[..., :8]) + chosen(q, Scores(0.2, 4)) + chosen(q, SCORES, q[0, :, 0]))
