"""The C twin of `linear_blockwise4`, and which path a product takes."""

import pytest
import torch
from gemv4_cases import arguments, check

from halfbyte.formats import Blockwise4
from halfbyte.tensor import QuantizedTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def kernel():
    from halfbyte.dispatch import Unavailable

    try:
        from halfbyte.kernels.native import gemv4 as gemv4_cpu
    except Unavailable as error:
        pytest.skip(str(error))
    return gemv4_cpu.linear


@pytest.mark.parametrize("batch", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(37, 320), (5, 64), (3, 100)], ids=str)
def test_products(kernel, batch, shape):
    for kind, blocksize, nested in (("nf4", 64, True), ("fp4", 32, False)):
        weight = arguments(*shape, kind, blocksize, nested, device="cpu")
        for dtype in DTYPES:
            check(kernel, batch, weight, shape[1], dtype, bias=batch % 2 == 1)


def test_two_threads_leave_no_seam(kernel):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check(kernel, 1, arguments(1201, 1024, device="cpu"), 1024, torch.float32)
    finally:
        torch.set_num_threads(before)


def test_strided_inputs(kernel):
    weight = arguments(8, 64, device="cpu")
    x = torch.randn(64, 2).t()
    torch.testing.assert_close(kernel(x, *weight, None), kernel(x.contiguous(), *weight, None), rtol=0, atol=0)


def test_a_product_without_gradient_needs_no_dequantized_weight(monkeypatch):
    weight = QuantizedTensor.quantize(torch.randn(48, 128), Blockwise4("nf4", 64, True))
    x = torch.randn(2, 1, 128)
    expected = torch.nn.functional.linear(x, weight.dequantize())
    wanted = torch.nn.functional.linear(x.clone().requires_grad_(), weight)
    monkeypatch.setattr(Blockwise4, "dequantize", lambda *args: pytest.fail("dequantized"))
    found = torch.nn.functional.linear(x, weight)
    assert found.shape == (2, 1, 48)
    for result in (found, wanted.detach()):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
