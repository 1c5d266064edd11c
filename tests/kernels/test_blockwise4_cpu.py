"""The CPU's C kernels: bit-equal to the torch reference at ugly sizes, on one thread and several."""

import pytest
import torch
from cases import check_dequantize, check_quantize, quantized, weight_of

from halfbyte.ops.blockwise4 import dequantize_blockwise4, quantize_blockwise4

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def kernels():
    from halfbyte.dispatch import Unavailable

    try:
        from halfbyte.kernels.native import blockwise4 as blockwise4_cpu
    except Unavailable as error:
        pytest.skip(str(error))
    return blockwise4_cpu


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("blocksize", [32, 64, 512, 4096])
def test_dequantize(kernels, blocksize):
    check_dequantize(kernels.dequantize, DTYPES, [blocksize])


@pytest.mark.parametrize("blocksize", [32, 64, 512, 4096])
def test_quantize(kernels, blocksize):
    check_quantize(kernels.quantize, DTYPES, [blocksize])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("blocksize", [64, 4096])
def test_threads_leave_no_seam(kernels, blocksize):
    counts = (1 << 17, (1 << 18) + 4097)
    check_dequantize(kernels.dequantize, [torch.bfloat16], [blocksize], counts)
    check_quantize(kernels.quantize, [torch.bfloat16], [blocksize], counts)


def test_wide_ranges(kernels):
    """Magnitudes from 1e-44 to 1e38: denormals, and blocks whose scale is below the smallest reciprocal."""
    exponent = torch.rand(4096, 1) * 82 - 44
    weight = (torch.randn(4096, 64).clamp(-3, 3) * 10.0**exponent).view(-1)
    for kind in ("nf4", "fp4"):
        expected, found = quantize_blockwise4.reference(weight, 64, kind), kernels.quantize(weight, 64, kind)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
        for dtype in DTYPES:
            arguments = (*expected, None, 64, kind, weight.numel(), dtype)
            assert torch.equal(kernels.dequantize(*arguments), dequantize_blockwise4.reference(*arguments))


def test_every_rounding_to_16_bits(kernels):
    """Products that fall between two 16-bit values, ties among them, for all 256 nested scales."""
    packed, absmax, nested, *_ = quantized(64 * 256, 64, "nf4", True)
    absmax = torch.arange(256, dtype=torch.uint8)
    for dtype in DTYPES:
        arguments = (packed, absmax, nested, 64, "nf4", 64 * 256, dtype)
        assert torch.equal(kernels.dequantize(*arguments), dequantize_blockwise4.reference(*arguments))


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_scale(kernels, bad):
    for dtype in DTYPES:
        for count in (70, 5001):
            for at in (0, 37, count - 1):
                weight = weight_of(count, dtype)
                weight[at] = bad
                assert not torch.isfinite(kernels.quantize(weight, 64, "nf4")[1]).all()


def test_parts_that_are_not_contiguous(kernels):
    packed, absmax, (second, code, offset), *rest = quantized(64 * 600, 64, "nf4", True)
    expected = kernels.dequantize(packed, absmax, (second, code, offset), *rest, torch.float32)
    strided = [torch.stack([part, part], -1)[..., 0] for part in (packed, absmax, second, code)]
    found = kernels.dequantize(strided[0], strided[1], (strided[2], strided[3], offset), *rest, torch.float32)
    assert torch.equal(found, expected)
    weight = weight_of(64 * 130, torch.float32).view(64, 130)
    for one, other in zip(
        kernels.quantize(weight.t(), 64, "nf4"), kernels.quantize(weight.t().contiguous(), 64, "nf4"), strict=True
    ):
        assert torch.equal(one, other)
