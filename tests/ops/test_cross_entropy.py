"""Compare the specification of the in-place cross-entropy gradient with autograd in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.ops import ELSEWHERE
from halfbyte.ops.cross_entropy import Objective, cross_entropy_, log_probs_backward_
from halfbyte.utils.errors import ModelError


def truth(logits, labels, objective):
    """Losses, entropies and logsumexps by definition, differentiable; only trained rows count."""
    z = logits.double() * objective.scale
    if objective.softcap is not None:
        z = objective.softcap * torch.tanh(z / objective.softcap)
    z = z / objective.temperature
    trained = labels != objective.ignore_index
    logsumexp = torch.logsumexp(z, -1)
    log_probs = z - logsumexp.unsqueeze(1)
    chosen = log_probs.gather(1, labels.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    smoothing = objective.label_smoothing
    loss = -(1 - smoothing) * chosen - smoothing * log_probs.mean(-1) + objective.z_loss * logsumexp.square()
    return loss * trained, -(log_probs.exp() * log_probs).sum(-1) * trained, chosen * trained, logsumexp * trained


@st.composite
def cases(draw):
    rows, vocabulary = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    ignore_index = draw(st.sampled_from([-100, -1, 0]))
    labels = draw(st.lists(st.sampled_from([ignore_index, *range(vocabulary)]), min_size=rows, max_size=rows))
    objective = Objective(
        scale=draw(st.sampled_from([1.0, 0.3, -2.0])),
        softcap=draw(st.sampled_from([None, 2.0, 30.0])),
        temperature=draw(st.sampled_from([1.0, 0.6])),
        label_smoothing=draw(st.sampled_from([0.0, 0.1])),
        z_loss=draw(st.sampled_from([0.0, 1e-2])),
        ignore_index=ignore_index,
    )
    torch.manual_seed(draw(st.integers(0, 100)))
    return torch.randn(rows, vocabulary) * draw(st.sampled_from([0.1, 5.0])), torch.tensor(labels), objective


@settings(deadline=None, max_examples=20)
@given(cases())
def test_any_shape_objective_and_pattern_of_ignored_rows(case):
    logits, labels, objective = case
    exact = logits.double().requires_grad_()
    loss, entropy, _, logsumexp = truth(exact, labels, objective)
    gradient = torch.autograd.grad(loss.sum(), exact)[0]
    got = cross_entropy_(logits, labels, objective, True, True)
    for mine, true in zip((*got, logits), (loss, logsumexp, entropy, gradient), strict=True):
        torch.testing.assert_close(mine.double(), true.detach(), rtol=2e-5, atol=2e-5)


def test_logits_are_unchanged_without_a_gradient():
    logits = torch.randn(3, 9)
    before = logits.clone()
    cross_entropy_(logits, torch.tensor([0, 1, -100]), Objective(), False, True)
    assert torch.equal(logits, before)


def test_invalid_labels_give_nan_and_ignored_rows_zero():
    logits = torch.randn(4, 9)
    logits[3] = torch.nan
    got = cross_entropy_(logits, torch.tensor([9, -1, 8, -100]), Objective(), True, True)
    assert got.loss.isnan().tolist() == [True, True, False, False]
    assert logits.isnan().all(-1).tolist() == [True, True, False, False]
    assert not logits[3].any()


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), "torch.int32"),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64), r"\[3\]"),
        (torch.zeros(3, 0), torch.zeros(3, dtype=torch.int64), r"\[3, 0\]"),
        (torch.zeros(3, 4), torch.zeros(3), "torch.float32"),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64), r"shape \[2\]"),
    ],
)
def test_invalid_arguments(logits, labels, message):
    with pytest.raises(ModelError, match=message):
        cross_entropy_(logits, labels, Objective(), True, False)


@pytest.mark.parametrize("objective", [Objective(), Objective(scale=0.5, softcap=3.0)], ids=["plain", "capped"])
def test_vocabulary_slices_sum_to_the_full_result(objective):
    """For a label in another slice, the gradient of a row is that of the logsumexp."""
    logits, labels = torch.randn(4, 9) * 3, torch.tensor([1, 8, -100, 4])
    whole = logits.clone()
    _, logsumexp, _ = cross_entropy_(whole, labels, objective, True, False)
    found = []
    for begin, end in ((0, 4), (4, 9)):
        part = logits[:, begin:end].clone()
        local = torch.where((labels >= begin) & (labels < end), labels - begin, ELSEWHERE)
        local[labels == -100] = -100
        log_probs_backward_(part, local, logsumexp, None, -torch.ones(4), None, objective)
        found.append(part)
    torch.testing.assert_close(torch.cat(found, dim=1), whole)
    log_probs_backward_(
        logits, torch.tensor([9, ELSEWHERE - 1, -1, 0]), logsumexp, None, -torch.ones(4), None, objective
    )
    assert logits.isnan().all(-1).tolist() == [True, True, True, False]
