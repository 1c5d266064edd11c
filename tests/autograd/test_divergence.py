"""The generalized Jensen-Shannon divergence against TRL's, on logits and on hidden states."""

import pytest
import torch
from torch.autograd import gradcheck
from trl.experimental.gkd import GKDTrainer

from halfbyte.autograd.losses import linear_generalized_jsd
from halfbyte.ops import divergence
from halfbyte.ops.linear_head import Needed
from halfbyte.utils.errors import ModelError

ROWS, VOCABULARY, WIDTH, WIDER = 37, 83, 12, 20
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def drawn(dtype=torch.float32, seed=0):
    """Hidden states and heads of a student and of a wider teacher."""
    made = torch.Generator().manual_seed(seed)
    shapes = (ROWS, WIDTH), (VOCABULARY, WIDTH), (ROWS, WIDER), (VOCABULARY, WIDER)
    x, w, y, v = (torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for shape in shapes)
    return x.requires_grad_(), w.requires_grad_(), y, v


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("beta", BETAS)
def test_equal_to_trl(beta, temperature):
    """Loss and gradients of hidden states and head."""
    x, w, y, v = drawn()
    theirs = GKDTrainer.generalized_jsd_loss(x @ w.T, y @ v.T, beta=beta, temperature=temperature, reduction="sum")
    expected = torch.autograd.grad(theirs, (x, w))
    loss, entropy = linear_generalized_jsd(x, w, y, v, beta=beta, temperature=temperature)
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=0)
    for found, wanted in zip(torch.autograd.grad(3 * loss, (x, w)), expected, strict=True):
        assert (found / 3 - wanted).norm() <= 1e-5 * wanted.norm()
    logits = torch.distributions.Categorical(logits=(x @ w.T) / temperature)
    torch.testing.assert_close(entropy, logits.entropy().sum().detach())


@pytest.mark.slow
@pytest.mark.parametrize("beta", BETAS)
def test_the_gradient_is_the_loss_s(beta):
    x, w, y, v = drawn(torch.float64)
    given = (x[:5].detach().requires_grad_(), w)
    assert gradcheck(lambda x, w: linear_generalized_jsd(x, w, y[:5], v, beta=beta, head=(0.5, 2.0))[0], given)


def test_chunks_equal_one_chunk(monkeypatch):
    x, w, y, v = drawn()
    objectives = (divergence.Objective(), divergence.Objective())
    needed = Needed(hidden=True, weight=True)
    whole, parts = (divergence.linear_divergence(x, w, y, v, objectives, 0.3, needed, chunk=n) for n in (64, 5))
    for one, other in zip((*whole[:2], *whole.grads[:2]), (*parts[:2], *parts.grads[:2]), strict=True):
        torch.testing.assert_close(one, other)


def test_mismatched_models_are_refused():
    x, w, y, v = drawn()
    with pytest.raises(ModelError):
        linear_generalized_jsd(x, w, y, v[:-1], beta=0.5)
    with pytest.raises(ModelError, match=r"beta is 1\.5"):
        linear_generalized_jsd(x, w, y, v, beta=1.5)
    with pytest.raises(ModelError, match="temperature"):
        linear_generalized_jsd(x, w, y, v, beta=0.5, temperature=0.0)
