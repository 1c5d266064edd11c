"""linear_cross_entropy as a differentiable function: gradients, compile, and what it keeps for backward."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.losses import linear_cross_entropy


def example(batch=3, length=11, width=17, vocabulary=41, dtype=torch.float32):
    hidden = torch.randn(batch, length, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (batch, length))
    labels[torch.rand(batch, length) < 0.3] = -100
    return hidden, weight, labels


def reference(hidden, weight, labels, softcap=None, scale=1.0, shift=True, reduction="sum"):
    logits = (hidden @ weight.T).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 0.5)])
def test_loss_and_gradients(shift, reduction, softcap, scale):
    hidden, weight, labels = example()
    keys = {"softcap": softcap, "scale": scale, "shift": shift, "reduction": reduction}
    mine, theirs = linear_cross_entropy(hidden, weight, labels, **keys), reference(hidden, weight, labels, **keys)
    torch.testing.assert_close(mine, theirs)
    for got, expected in zip(
        torch.autograd.grad(mine * 0.37, (hidden, weight)),
        torch.autograd.grad(theirs * 0.37, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck(softcap):
    hidden, weight, labels = example(2, 5, 4, 7, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, softcap=softcap, scale=0.7), (hidden, weight)
    )


def test_frozen_head_keeps_only_the_gradient_of_hidden():
    hidden, weight, labels = example(4, 64, 32, 5000)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.numel()) or tensor, lambda x: x):
        loss = linear_cross_entropy(hidden, weight.detach(), labels)
    assert sum(saved) == hidden.numel()
    loss.backward()
    assert hidden.grad.any()
    assert weight.grad is None


def test_backward_twice_gives_the_same():
    hidden, weight, labels = example()
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, hidden)[0])


def test_bf16_gradient_is_scaled_in_fp32():
    """1/3 rounded to bf16 would put an error of 0.13% on every entry; rounding the product only averages out."""
    hidden, weight, labels = example(2, 65, 64, 301, torch.bfloat16)
    whole = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), hidden)[0].double()
    third = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels) / 3, hidden)[0].double()
    assert abs((third * whole).sum() / (whole * whole).sum() * 3 - 1) < 2e-4


def test_nothing_trained_and_no_grad():
    hidden, weight, labels = example()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100), reduction="mean")
    assert loss == 0
    assert not torch.autograd.grad(loss, hidden)[0].any()
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, labels).requires_grad


def test_autocast_computes_like_a_linear():
    hidden, weight, labels = example()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = linear_cross_entropy(hidden, weight, labels)
        theirs = reference(hidden, weight, labels)
    torch.testing.assert_close(mine, theirs)
    assert torch.autograd.grad(mine, hidden)[0].dtype == torch.float32


@pytest.mark.parametrize("trained_head", [False, True])
def test_compiles_without_a_graph_break(trained_head):
    hidden, weight, labels = example()
    weight = weight if trained_head else weight.detach()
    inputs = (hidden, weight) if trained_head else (hidden,)

    def step(hidden, weight, labels):
        return linear_cross_entropy(hidden * 2, weight, labels, softcap=5.0, reduction="mean")

    expected = step(hidden, weight, labels)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, labels)
    torch.testing.assert_close(got, expected)
    for mine, eager in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(mine, eager)


def test_operator_is_well_formed():
    from halfbyte.autograd.losses import _linear_cross_entropy

    hidden, weight, labels = example(1, 9, 8, 13)
    torch.library.opcheck(
        _linear_cross_entropy,
        (hidden[0].detach().requires_grad_(), weight, labels[0], 1.0, 5.0, 0.1, 0.01, -100, True, True),
    )
