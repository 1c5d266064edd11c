"""Check linear products without a gradient, by torch and by oneDNN."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.linear import quantized_linear
from halfbyte.formats import linear, named
from halfbyte.ops import losses
from halfbyte.tensor import QuantizedTensor

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this torch has no such product of oneDNN's",
)


@pytest.fixture
def by_onednn(monkeypatch):
    """Compute float32 products by oneDNN on any processor; returns the list of weights that it multiplied by."""
    monkeypatch.setattr(linear, "onednn_beats_mkl", lambda: True)
    asked, own = [], linear.multiplies_by_onednn
    monkeypatch.setattr(
        linear, "multiplies_by_onednn", lambda x, weight: own(x, weight) and (asked.append(weight.shape) or True)
    )
    return asked


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@needs_onednn
@pytest.mark.parametrize("count", [1, 2, 33, 300])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_by_onednn_are_right(by_onednn, count, transposed):
    x, weight, bias = numbers(count, 384), numbers(300, 384, seed=1), numbers(300, seed=2)
    weight = weight.t().contiguous().t() if transposed else weight
    found = linear.linear(x.unsqueeze(0), weight, bias)[0]
    exact = F.linear(x.double(), weight.double(), bias.double())
    bound = 384 * 2.0**-24 * (x.abs() @ weight.abs().t() + bias.abs())
    assert by_onednn == [(300, 384)]
    assert ((found - exact).abs() <= bound).all()
    into = torch.empty(count, 300)
    torch.testing.assert_close(linear.linear_into(into, x, weight), found - bias, rtol=1e-5, atol=1e-4)


@needs_onednn
@pytest.mark.skipif(torch.__version__ < "2.12", reason="halfbyte multiplies by MKL below torch 2.12")
@pytest.mark.parametrize("inner", [64, 512, 1536])
def test_row_is_bit_equal_in_any_batch(by_onednn, inner):
    """Completions then do not depend on the batch, from two rows on (`generation.paged.LEAST_ROWS`)."""
    x, weight = numbers(300, inner), numbers(1100, inner, seed=1)
    whole = linear.linear_rows(x, weight)
    for count in (2, 3, 4, 5, 31, 64, 257):
        assert torch.equal(linear.linear_rows(x[:count], weight), whole[:count]), count
    assert by_onednn


@needs_onednn
def test_small_weights_and_16_bits_use_torch(by_onednn):
    linear.linear(numbers(500, 64), numbers(16, 64, seed=1))
    linear.linear(numbers(8, 512).bfloat16(), numbers(512, 512, seed=1).bfloat16())
    assert not by_onednn


@needs_onednn
def test_training_uses_onednn(by_onednn):
    """Forward and backward of a frozen weight, and of the loss's head, use oneDNN."""
    weight, x = numbers(512, 256, seed=1), numbers(3, 20, 256).requires_grad_()
    packed = QuantizedTensor.quantize(weight, named("nf4"))
    y = quantized_linear(x, packed)
    y.sum().backward()
    assert by_onednn == [(512, 256), (256, 512)]
    exact = packed.dequantize(torch.float32)
    torch.testing.assert_close(y, x.detach() @ exact.t(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(x.grad, exact.sum(0).expand(3, 20, 256), rtol=1e-5, atol=1e-4)
    hidden, head, labels = numbers(70, 64, seed=2), numbers(1500, 64, seed=3), torch.arange(70)
    found = losses.linear_cross_entropy_forward(hidden, head, labels, chunk=32)
    wanted = hidden.double().requires_grad_()
    loss = F.cross_entropy(wanted @ head.double().t(), labels, reduction="none")
    loss.sum().backward()
    assert set(by_onednn[2:]) == {(1500, 64), (64, 1500)}
    torch.testing.assert_close(found.rows.loss.double(), loss.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.grads.hidden.double(), wanted.grad, rtol=1e-4, atol=1e-5)
