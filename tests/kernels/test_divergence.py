"""Compare the Triton divergence with its reference at irregular sizes, on a GPU and in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.ops import divergence as reference
from halfbyte.ops.cross_entropy import Objective
from halfbyte.ops.linear_head import Needed
from tests.helpers.parity import DEVICE, INTERPRETED, dtypes, exact, mark, poisoned, random  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton import divergence as kernels

pytestmark = mark

SIZES = [(3, 2), (4, 515)] if INTERPRETED else [(1, 2), (5, 7), (37, 515), (65, 32_003), (70, 128_256), (9, 262_144)]
BETAS = (0.0, 0.3, 1.0)
OBJECTIVES = {
    "plain": (Objective(), Objective()),
    "capped": (Objective(scale=0.5, softcap=3.0, temperature=0.7), Objective(scale=1.5, softcap=5.0, temperature=0.7)),
    "one capped": (Objective(temperature=2.0), Objective(softcap=4.0, temperature=2.0)),
}
objectives = pytest.mark.parametrize("objectives", OBJECTIVES.values(), ids=OBJECTIVES)
betas = pytest.mark.parametrize("beta", BETAS)


def example(rows, vocabulary, dtype):
    """Logits of a student and of a teacher close to it."""
    student = random(rows, vocabulary, dtype=dtype, scale=4.0)
    return student, (student.float() + random(rows, vocabulary)).to(dtype)


@dtypes
@objectives
@betas
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_divergence_and_gradient(shape, dtype, objectives, beta):
    student, teacher = example(*shape, dtype)
    truth, kept = exact(student), teacher.clone()
    wanted = reference.divergence_.reference(truth, exact(teacher), objectives, beta, True)
    got = kernels.divergence_(student, teacher, objectives, beta, True)
    # probabilities have fp32 rounding errors, so do their differences; small results err by half a subnormal's step
    info, count = torch.finfo(dtype), truth.numel()
    least = 1e-6 * shape[0] ** 0.5 + info.smallest_normal * info.eps / 2 * count**0.5
    assert (exact(student) - truth).norm() <= (info.eps + 5e-6) * truth.norm() + least
    for mine, true in zip(got, wanted, strict=True):
        torch.testing.assert_close(exact(mine), true, rtol=1e-5, atol=1e-5)
    assert torch.equal(teacher, kept)


@betas
def test_logits_are_unchanged_without_a_gradient(beta):
    student, teacher = example(4, 515, torch.float16)
    kept = student.clone()
    got = kernels.divergence_(student, teacher, OBJECTIVES["plain"], beta, False)
    assert torch.equal(student, kept)
    with_gradient = kernels.divergence_(student, teacher, OBJECTIVES["plain"], beta, True)
    assert all(torch.equal(*pair) for pair in zip(got, with_gradient, strict=True))


@betas
@pytest.mark.parametrize("vocabulary", [515, 17_001] + [151_665] * (not INTERPRETED))
def test_padded_rows_leave_padding_unchanged(vocabulary, beta):
    """Padded logits as `linear_divergence` makes them; also with only the teacher's padded."""
    student, teacher = example(3, vocabulary, torch.float16)
    behind = -(-vocabulary // 16) * 16 - vocabulary
    padded = [F.pad(each, (0, behind), value=torch.nan) for each in (student, teacher)]
    mine, theirs = (each[:, :vocabulary] for each in padded)
    other = student.clone()
    results = [kernels.divergence_(*pair, OBJECTIVES["plain"], beta, True)
               for pair in ((student, teacher), (other, theirs), (mine, theirs))]  # fmt: skip
    for found, gradient in zip(results[1:], (other, mine), strict=True):
        for value, expected in zip(found, results[0], strict=True):  # alignment decides which thread adds what
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, student, rtol=2e-3, atol=1e-6)
    assert all(each[:, vocabulary:].isnan().all() for each in padded)


@betas
def test_tokens_masked_in_both(beta):
    """Tokens masked in both have no probability, divergence or gradient; the others are as without those tokens."""
    student, teacher = example(2, 600, torch.float32)
    for each in (student, teacher):
        each[:, 40:] = -torch.inf
    few = student[:, :40].clone()
    want = kernels.divergence_(few, teacher[:, :40].contiguous(), OBJECTIVES["plain"], beta, True)
    got = kernels.divergence_(student, teacher, OBJECTIVES["plain"], beta, True)
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student[:, :40], few, rtol=1e-4, atol=1e-7)
    assert not student[:, 40:].any()


def test_distant_distributions():
    """Logits whose probabilities underflow; β near an end."""
    student = torch.tensor([[1e4, -1e4, 9999.0, 0.0]], device=DEVICE)
    teacher = torch.tensor([[9998.0, -1e4, 1e4, 50.0]], device=DEVICE)
    for beta in (0.0, 1e-6, 0.5, 1.0):
        mine = student.clone()
        truth = exact(student)
        wanted = reference.divergence_.reference(truth, exact(teacher), OBJECTIVES["plain"], beta, True)
        got = kernels.divergence_(mine, teacher, OBJECTIVES["plain"], beta, True)
        torch.testing.assert_close(exact(got[0]), wanted[0], rtol=1e-2, atol=1e-3)  # fp32 represents 1e4 to 1e-3
        torch.testing.assert_close(exact(mine), truth, rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(INTERPRETED, reason="no graphs in the interpreter")
def test_in_chunks_of_hidden_states():
    """`linear_divergence` on the device, whose op takes the kernel, against fp64."""
    x, w, y, v = random(700, 64), random(5001, 64, scale=0.3), random(700, 48), random(5001, 48, scale=0.3)
    objectives, needed = OBJECTIVES["plain"], Needed(hidden=True, weight=True)
    wanted = reference.linear_divergence(*map(exact, (x, w, y, v)), objectives, 0.3, needed)
    got = reference.linear_divergence(x, w, y, v, objectives, 0.3, needed, chunk=512)
    for mine, true in zip((*got[:2], *got.grads[:2]), (*wanted[:2], *wanted.grads[:2]), strict=True):
        assert (exact(mine) - true).norm() <= 1e-4 * true.norm()
