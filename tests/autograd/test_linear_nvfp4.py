"""The nvfp4 recipe: the effect of each option, cancellation of the transform, unbiased gradients."""

import pytest
import torch
from torch import nn

from halfbyte.autograd.linear_nvfp4 import Nvfp4Gemms, Nvfp4Recipe
from halfbyte.autograd.lora import lora_linear
from halfbyte.formats import named
from halfbyte.formats.nvfp4 import quantize_nvfp4, rotate
from halfbyte.ops.float4 import DOWN, values
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError

PLAIN = {"disable_rht": True, "disable_stochastic_rounding": True}
K, N = 70, 40


def operands(dtype=torch.float32, rows=9):
    generator = torch.Generator().manual_seed(7)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((rows, K), (N, K), (rows, N)))
    return x.to(dtype), (weight * 0.05).to(dtype), grad.to(dtype)


def nvfp4_linear(x, weight, bias=None, *, recipe):
    return lora_linear(x, weight, bias, recipe=Nvfp4Gemms(recipe))


def step(recipe, x, weight, grad, bias=None):
    """Output and gradient of the input, with torch's seed 0."""
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    y = nvfp4_linear(x, weight, bias, recipe=recipe)
    y.backward(grad)
    return y.detach(), x.grad


def in_format(name, values):
    return QuantizedTensor.quantize(values, named(name)).dequantize()


@pytest.mark.parametrize(
    ("options", "activations", "weights"),
    [
        ({}, "nvfp4-1d", "nvfp4"),
        ({"disable_2d_quantization": True}, "nvfp4-1d", "nvfp4-1d"),
        ({"enable_four_over_six": True}, "nvfp4-1d-46", "nvfp4-46"),
        ({"enable_four_over_six": True, "four_over_six_metric": "L1"}, "nvfp4:1d:46l1", "nvfp4:2d:46l1"),
    ],
)
def test_products_are_those_of_the_stored_format(options, activations, weights):
    x, weight, grad = operands()
    y, dx = step(Nvfp4Recipe(**PLAIN, **options), x, weight, grad)
    torch.testing.assert_close(y, in_format(activations, x) @ in_format(weights, weight).t())
    torch.testing.assert_close(dx, in_format(activations, grad) @ in_format(weights, weight.t().contiguous()).t())


def test_only_stochastic_rounding_uses_random_numbers():
    for options, same in (({}, False), ({"disable_stochastic_rounding": True}, True)):
        x, weight, grad = operands()
        x.requires_grad_()
        torch.manual_seed(0)
        grads = [
            torch.autograd.grad(nvfp4_linear(x, weight, recipe=Nvfp4Recipe(**options)), x, grad)[0] for _ in range(2)
        ]
        assert torch.equal(*grads) is same


@pytest.mark.parametrize("options", [{}, {"disable_rht": True}, {"enable_four_over_six": True}], ids=str)
def test_gradients_are_unbiased(options):
    """Equal rows differ only by their random rounding; their mean is the result for the unrounded gradient."""
    recipe, rows = Nvfp4Recipe(**options), 20_000
    _, weight, grad = operands()
    x = torch.zeros(rows, K)
    _, dx = step(recipe, x, weight, grad[:1].expand(rows, N))
    # The operand of dY: the rounded weight with the transform inverted.
    operand = weight.t() if recipe.disable_rht else rotate(weight.t(), recipe.seed)
    codes, scales, factor = quantize_nvfp4(operand, 16, recipe.metric)
    numbers = values(codes, scales, torch.float64) / DOWN
    unrounded = torch.zeros(1, numbers.shape[1])
    unrounded[:, :N] = grad[:1]
    if not recipe.disable_rht:
        unrounded = rotate(unrounded, recipe.seed)
    expected = (unrounded.double() @ numbers.t() * factor.double())[0]
    dx = dx.double()
    assert ((dx.mean(0) - expected).abs() <= 4.5 * dx.std(0) / rows**0.5 + 1e-6).all()
    assert (dx.std(0) > 0).all()


@pytest.mark.parametrize("options", [{}, PLAIN, {"enable_four_over_six": True}], ids=str)
def test_the_product_is_close(options):
    """Rounding to four bits has an error of about 10% per operand; a wrong scale would have more."""
    x, weight, grad = operands(rows=64)
    y, dx = step(Nvfp4Recipe(**options), x, weight, grad)
    assert (y - x @ weight.t()).norm() < 0.2 * (x @ weight.t()).norm()
    assert (dx - grad @ weight).norm() < 0.25 * (grad @ weight).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_operands_are_exact_in_16_bits(dtype):
    weight = torch.randn(64, 160) * 2.0 ** torch.randint(-20, 1, (64, 1))
    codes, scales, _ = quantize_nvfp4(rotate(weight, 0), 1, "MSE")
    assert torch.equal(values(codes, scales, dtype).double(), values(codes, scales, torch.float64))


@pytest.mark.parametrize("name", ["nf4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_stored_format(name, dtype):
    x, weight, grad = operands(dtype)
    bias = torch.randn(N).to(dtype).requires_grad_()
    stored = nn.Parameter(QuantizedTensor.quantize(weight, named(name)), requires_grad=False)
    y, dx = step(Nvfp4Recipe(), x.view(3, 3, K), stored, grad.view(3, 3, N), bias)
    expected = step(Nvfp4Recipe(), x, stored.dequantize(), grad, bias)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    assert torch.equal(y.view(9, N), expected[0])
    assert torch.equal(dx.view(9, K), expected[1])
    torch.testing.assert_close(bias.grad, 2 * grad.sum(0))


def test_nothing_of_the_weight_is_saved():
    x, weight, _ = operands()
    stored, saved = QuantizedTensor.quantize(weight, named("nvfp4")), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        nvfp4_linear(x.requires_grad_(), stored, recipe=Nvfp4Recipe()).sum()
    assert sum(tensor.numel() for tensor in saved) == 0


def test_autocast_and_no_rows():
    x, weight, _ = operands()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nvfp4_linear(x, weight, recipe=Nvfp4Recipe()).dtype == torch.bfloat16
    assert nvfp4_linear(x[:0], weight, recipe=Nvfp4Recipe()).shape == (0, N)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_inf_propagate(bad):
    x, weight, _ = operands()
    x[2, 3] = bad
    assert not torch.isfinite(nvfp4_linear(x, weight, recipe=Nvfp4Recipe())).any()


def test_an_unknown_metric_is_refused():
    with pytest.raises(ModelError, match="four_over_six_metric 'L2'"):
        Nvfp4Recipe(four_over_six_metric="L2")
