"""Fake quantization: the forward's bits, and the straight-through gradients against autograd of the composition."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.lora import LoRA
from halfbyte.formats import named
from halfbyte.qat.fake_quantize import fake_quantize, fake_quantized_linear, merged_weight, round_trip
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError

SCHEMES = ["nf4", "int4", "int8", "fp8", "nvfp4", "kbit2"]
ROWS, COLUMNS, RANK = 37, 83, 3


@pytest.fixture(params=SCHEMES)
def format(request):
    return named(request.param)


def weight_of(dtype=torch.float32):
    return torch.randn(ROWS, COLUMNS).to(dtype).requires_grad_()


def lora_of(dtype=torch.float32):
    a, b = torch.randn(RANK, COLUMNS).to(dtype), torch.randn(ROWS, RANK).to(dtype)
    return LoRA(a.requires_grad_(), b.requires_grad_(), 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_forward_is_the_round_trip_and_backward_the_identity(format, dtype):
    weight, grad = weight_of(dtype), torch.randn(ROWS, COLUMNS).to(dtype)
    rounded = fake_quantize(weight, format)
    stored = QuantizedTensor.quantize(weight.detach(), format)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, stored.dequantize(dtype))
    assert not torch.equal(rounded, weight)
    rounded.backward(grad)
    assert torch.equal(weight.grad, grad)


def test_merging_in_fp32_first_gives_the_bits_of_quantizing_16_bit_weights(format):
    """`halfbyte merge` quantizes fp32 values; training must give a 16-bit weight the same codes."""
    weight = weight_of(torch.bfloat16)
    assert torch.equal(
        round_trip(weight, format, torch.bfloat16), round_trip(weight.float(), format, torch.float32).bfloat16()
    )


@pytest.mark.parametrize("adapted", [False, True])
def test_linear_against_autograd_of_the_composition(format, adapted):
    weight, bias, x = weight_of(), torch.randn(ROWS, requires_grad=True), torch.randn(2, 5, COLUMNS, requires_grad=True)
    lora = lora_of() if adapted else None
    trained = [x, weight, bias, *((lora.a, lora.b) if lora else ())]
    result = fake_quantized_linear(x, weight, bias, format, lora)
    merged = weight + (lora.b @ lora.a) * lora.scaling if lora else weight
    expected = F.linear(x, fake_quantize(merged, format), bias)
    assert torch.equal(result, expected)
    grad = torch.randn_like(result)
    theirs = torch.autograd.grad(expected, trained, grad)
    for own, other in zip(torch.autograd.grad(result, trained, grad), theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)


def test_only_trained_tensors_get_gradients_and_no_weight_is_saved():
    weight, lora, x = weight_of().detach(), lora_of(), torch.randn(5, COLUMNS)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = fake_quantized_linear(x, weight, None, named("nf4"), lora)
    assert [each.shape for each in saved] == [x.shape]
    result.sum().backward()
    assert lora.a.grad is not None
    assert lora.b.grad is not None
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        result = fake_quantized_linear(x.requires_grad_(), weight, None, named("nf4"))
    assert not saved  # a frozen weight without an adapter saves nothing
    result.sum().backward()
    torch.testing.assert_close(x.grad, round_trip(weight, named("nf4"), torch.float32).sum(0).expand(5, -1))


def test_autocast_rounds_the_product_and_not_the_weight(format):
    """Under autocast fp32 factors are merged in fp32; the GEMM runs in autocast's dtype."""
    weight, lora, x = weight_of().detach(), lora_of(), torch.randn(5, COLUMNS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = fake_quantized_linear(x, weight, None, format, lora)
        merged = merged_weight(weight, lora)
    assert torch.equal(merged, (lora.b @ lora.a) * lora.scaling + weight)
    assert result.dtype == torch.bfloat16
    expected = F.linear(x.bfloat16(), round_trip(merged, format, torch.bfloat16))
    assert torch.equal(result, expected)
    result.float().sum().backward()
    assert lora.a.grad.dtype == torch.float32


def test_nan_is_refused():
    weight = weight_of().detach()
    weight[3, 4] = torch.nan
    with pytest.raises(ModelError, match="NaN"):
        fake_quantize(weight, named("nf4"))
