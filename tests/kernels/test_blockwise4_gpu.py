"""The 4-bit kernels on a GPU: bit-equal to the reference, at sizes past 2^31, and to bitsandbytes' kernels."""

import importlib.util

import pytest
import torch
from cases import check_dequantize, check_quantize, quantized, to, weight_of

from halfbyte.formats import Blockwise4
from halfbyte.functional import dequantize_4bit, quantize_4bit
from halfbyte.ops.blockwise4 import dequantize_blockwise4, quantize_blockwise4

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCKSIZES = (32, 64, 128, 512, 4096)


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_dequantize(blocksize):
    check_dequantize(dequantize_blockwise4, DTYPES, [blocksize], device="cuda")


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_quantize(blocksize):
    check_quantize(quantize_blockwise4, DTYPES, [blocksize], device="cuda")


def test_a_million_values_of_wide_range():
    """Magnitudes from 1e-30 to 1e30, where an approximate reciprocal or a flushed denormal would show."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.rand(1 << 14, 1, generator=generator) * 60 - 30
    weight = (torch.randn(1 << 14, 64, generator=generator) * 10**exponent).view(-1)
    for kind in ("nf4", "fp4"):
        expected = quantize_blockwise4.reference(weight, 64, kind)
        found = quantize_blockwise4(weight.cuda(), 64, kind)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
        for dtype in DTYPES:
            arguments = (*expected, None, 64, kind, weight.numel(), dtype)
            values = dequantize_blockwise4(*(to(argument, "cuda") for argument in arguments))
            assert torch.equal(values.cpu(), dequantize_blockwise4.reference(*arguments))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_scale(bad):
    for count in (70, 5000):
        weight = torch.ones(count, device="cuda")
        weight[count - 2] = bad
        assert not torch.isfinite(quantize_blockwise4(weight, 64, "nf4")[1]).all()


def test_format_on_the_gpu_equals_the_cpu_nested_scales_included():
    weight = weight_of(67 * 131, torch.bfloat16).view(67, 131)
    format_ = Blockwise4("nf4", 64, True)
    expected, found = format_.quantize(weight), format_.quantize(weight.cuda())
    assert torch.equal(found["packed"].cpu(), expected["packed"])
    # The mean of the scales is summed in another order; all that follows from it may differ in the last bit.
    torch.testing.assert_close(found["nested_offset"].cpu(), expected["nested_offset"], rtol=1e-6, atol=0)
    torch.testing.assert_close(
        format_.dequantize(found, (67, 131), torch.float32).cpu(),
        format_.dequantize(expected, (67, 131), torch.float32),
        rtol=1e-2,
        atol=1e-6,
    )


@pytest.mark.large(13)
def test_more_than_two_to_the_31_values():
    count = 2**31 + 4096 + 3
    weight = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    ends = (0, 2**31 - 64, 2**31, count - 3)
    for start in ends:
        weight[start : start + 3] = torch.tensor([1.0, -1.0, 0.5], device="cuda")
    packed, absmax = quantize_blockwise4(weight, 64, "fp4")
    del weight
    values = dequantize_blockwise4(packed, absmax, None, 64, "fp4", count, torch.bfloat16)
    for start in ends:
        assert values[start : start + 3].tolist() == [1.0, -1.0, 0.5]
    assert sum(int(torch.count_nonzero(part)) for part in values.split(2**28)) == 3 * len(ends)  # int64 in between


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_values_equal_those_of_bitsandbytes(kind, nested):
    import bitsandbytes.functional as bnb

    for dtype in DTYPES:
        for shape in ((67, 131), (1024, 1024), (9,)):
            weight = weight_of(torch.Size(shape).numel(), dtype, "cuda").view(shape)
            packed, state = bnb.quantize_4bit(weight, compress_statistics=nested, quant_type=kind)
            _, mine = quantize_4bit(weight, compress_statistics=nested, quant_type=kind)
            mine.absmax = state.absmax
            if nested:
                mine.nested_absmax, mine.nested_code, mine.offset = state.state2.absmax, state.state2.code, state.offset
            assert torch.equal(dequantize_4bit(packed, mine), bnb.dequantize_4bit(packed, state)), (dtype, shape)


def test_results_follow_the_current_stream():
    arguments = [to(argument, "cuda") for argument in quantized(16387, 64, "nf4", True)]
    expected = dequantize_blockwise4(*arguments, torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = dequantize_blockwise4(*arguments, torch.bfloat16)
    side.synchronize()
    assert torch.equal(found, expected)
