"""Compare the chunked cross-entropy with torch's on full logits in float64."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.ops.cross_entropy import Objective
from halfbyte.ops.linear_head import Needed, chunk_rows
from halfbyte.ops.losses import linear_cross_entropy_forward
from halfbyte.utils.errors import DataError

BOTH = Needed(hidden=True, weight=True)


def example(rows=37, width=19, vocabulary=53, dtype=torch.float32, ignored=0.3):
    hidden = torch.randn(rows, width).to(dtype)
    weight = torch.randn(vocabulary, width).to(dtype)
    labels = torch.randint(vocabulary, (rows,))
    labels[torch.rand(rows) < ignored] = -100
    return hidden, weight, labels


def summed(*arguments, **keys):
    """Loss and gradients, like those of `full_logits`."""
    rows, grads = linear_cross_entropy_forward(*arguments, **keys)
    return rows.loss.sum(), grads.hidden, grads.weight


def full_logits(hidden, weight, labels, softcap=None, scale=1.0):
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = hidden @ weight.T * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


@pytest.mark.parametrize("chunk", [None, 1, 8, 37, 100])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (3.0, 1.0), (None, 0.25), (2.0, 0.5)])
def test_values_and_gradients(chunk, softcap, scale):
    inputs = example()
    got = summed(*inputs, Objective(scale, softcap), needed=BOTH, chunk=chunk)
    for mine, exact in zip(got, full_logits(*inputs, softcap, scale), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def test_bf16_is_as_close_as_torch_in_bf16():
    hidden, weight, labels = example(rows=65, width=128, vocabulary=301, dtype=torch.bfloat16)
    exact = full_logits(hidden, weight, labels)
    got = summed(hidden, weight, labels, needed=BOTH, chunk=16)
    hidden.requires_grad_(), weight.requires_grad_()
    loss = F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")
    torchs = (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))
    for mine, theirs, truth in zip(got, torchs, exact, strict=True):
        error = (mine.double() - truth).norm() / truth.norm()
        assert error <= (theirs.double() - truth).norm() / truth.norm() + 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_zero_if_all_rows_are_ignored(dtype):
    hidden, weight, labels = example(dtype=dtype)
    loss, grad_hidden, grad_weight = summed(hidden, weight, torch.full_like(labels, -100), needed=BOTH)
    assert loss == 0
    assert not grad_hidden.any()
    assert not grad_weight.any()


def test_weight_gradient_in_slices(monkeypatch):
    import halfbyte.ops.linear_head as linear_head

    inputs = example(dtype=torch.bfloat16)
    expected = summed(*inputs, needed=BOTH)[2]
    monkeypatch.setattr(linear_head, "WEIGHT_SLICE", 16)
    assert torch.equal(summed(*inputs, needed=BOTH)[2], expected)


def test_gradients_only_where_asked():
    inputs = example()
    assert summed(*inputs, needed=Needed())[1:] == (None, None)


@pytest.mark.parametrize("label", [53, 10**6, -1])
def test_label_outside_the_vocabulary(label):
    hidden, weight, labels = example()
    labels[5] = label
    with pytest.raises(DataError, match=f"label {label}.*53"):
        linear_cross_entropy_forward(hidden, weight, labels)


def test_chunk_bounds_the_logits():
    assert chunk_rows(128_256, "cuda", 2) == 512
    assert chunk_rows(128_256, "cuda", 4) == 256
    assert chunk_rows(151_936, "cuda", 2) == 384
    assert chunk_rows(16_384, "cpu") == 512
    assert chunk_rows(10**7, "cuda", 2) == 128


def test_accelerator_path_on_a_cpu(monkeypatch):
    """Run the path without a host synchronisation: equal numbers, and NaN instead of an error."""
    import halfbyte.ops.losses as losses

    inputs = example()
    expected = summed(*inputs, needed=BOTH)
    monkeypatch.setattr(losses, "_is_cpu", lambda tensor: False)
    for mine, reference in zip(summed(*inputs, needed=BOTH), expected, strict=True):
        torch.testing.assert_close(mine, reference)
    hidden, weight, labels = inputs
    hidden[labels == -100] = torch.nan
    for mine, reference in zip(summed(*inputs, needed=BOTH), expected, strict=True):
        torch.testing.assert_close(mine, reference)
    hidden, weight, labels = example()
    labels[3], labels[4] = 53, 52
    loss, grad_hidden, _ = summed(hidden, weight, labels)
    assert loss.isnan()
    assert grad_hidden[3].isnan().all()
    assert grad_hidden[4].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_does_not_synchronize_and_matches(dtype):
    hidden, weight, labels = (tensor.cuda() for tensor in example(700, 256, 32_003, dtype))
    exact = full_logits(hidden, weight, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = summed(hidden, weight, labels, needed=BOTH, chunk=256)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, theirs, truth in zip(got, torch_in_its_own_dtype(hidden, weight, labels), exact, strict=True):
        error, torchs = ((each.double() - truth).norm() / truth.norm() for each in (mine, theirs))
        assert error < torchs + (1e-4 if dtype == torch.float32 else 5e-3)


def torch_in_its_own_dtype(hidden, weight, labels):
    """Loss and gradients by torch with full logits in the inputs' dtype, the measure of a kernel's error."""
    hidden, weight = (tensor.clone().requires_grad_() for tensor in (hidden, weight))
    logits = torch.nn.functional.linear(hidden, weight).float()
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
    loss.backward()
    return loss.detach(), hidden.grad, weight.grad
