"""Check Triton's int8 and FP8 kernels bit for bit against their references, on a GPU and in the interpreter."""

import pytest
import torch

from halfbyte.formats import float8 as float8_format
from halfbyte.formats import int8 as int8_reference
from halfbyte.ops import float8 as float8_reference
from tests.helpers.parity import DEVICE, INTERPRETED, dtypes, mark, poisoned, random  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton import float8, int8

pytestmark = mark
SIZES = [(1, 1), (3, 37), (2, 5000)]
if not INTERPRETED:
    SIZES += [(257, 4096), (64, 14336)]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


@dtypes
@sizes
@pytest.mark.parametrize("split", [False, True], ids=["all", "split"])
def test_int8_rows(size, dtype, split):
    x = random(*size, dtype=dtype, scale=3.0)
    x[-1] = 0
    chosen = torch.zeros(size[1], dtype=torch.bool, device=DEVICE)
    chosen[size[1] // 2] = True
    arguments = (chosen, 2.0) if split else (None, 0.0)
    expected = int8_reference.quantize_rows_int8.reference(x.cpu(), chosen.cpu() if split else None, 2.0)
    assert_equal(int8.quantize_rows_int8(x, *arguments), expected)
    wide = torch.cat([x, x], dim=1)[:, : size[1]]  # rows with a gap
    assert_equal(int8.quantize_rows_int8(wide, *arguments), expected)


@dtypes
@sizes
def test_int8_values(size, dtype):
    codes, absmax = int8_reference.quantize_rows_int8.reference(torch.randn(size), None, 0.0)
    found = int8.dequantize_rows_int8(codes.to(DEVICE), absmax.to(DEVICE), dtype)
    assert_equal([found], [int8_reference.dequantize_rows_int8.reference(codes, absmax, dtype)])


@dtypes
@sizes
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_int8_product_scaled(size, dtype, bias):
    product = torch.randint(-(2**20), 2**20, size, dtype=torch.int32)
    arguments = (torch.rand(size[0]), torch.rand(size[1]), torch.randn(size[1]).to(dtype) if bias else None)
    moved = [None if argument is None else argument.to(DEVICE) for argument in arguments]
    found = int8.scale_int8_product(product.to(DEVICE), *moved, dtype)
    assert_equal([found], [int8_reference.scale_int8_product.reference(product, *arguments, dtype)])


def test_nonfinite_values_reach_the_scale():
    for bad in (float("nan"), float("inf")):
        x = random(2, 70)
        x[1, 5] = bad
        assert int8.quantize_rows_int8(x, None, 0.0)[1].isfinite().tolist() == [True, False]


@dtypes
@pytest.mark.parametrize("scaling", ["tensor", "row", "tile"])
@pytest.mark.parametrize("size", [(3,), (3, 37), (130, 260), (2, 129, 5)] if not INTERPRETED else [(3, 37), (2, 9, 5)])
def test_float8_values(size, dtype, scaling):
    codes, scale = float8_format.quantize_float8(torch.randn(size), scaling)
    found = float8.dequantize(codes.to(DEVICE), scale.to(DEVICE), scaling, dtype)
    assert_equal([found], [float8_format.dequantize_float8.reference(codes, scale, scaling, dtype)])


def test_every_code():
    codes = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 127) != 127].view(torch.float8_e4m3fn)
    found = float8.dequantize(codes.to(DEVICE), torch.ones((), device=DEVICE), "tensor", torch.float32)
    assert_equal([found], [codes.float()])


def cast_both(x, factors, scale, dtype):
    """(kernel, reference): codes, inverse scale, newest amax."""
    results = []
    for function, device in ((float8.cast_float8, DEVICE), (float8_reference.cast_float8.reference, "cpu")):
        scale_, target, newest = (torch.tensor(value, device=device) for value in (scale, 1024.0, 0.5))
        column = None if factors is None else factors.to(device)
        parts = x.to(device).split((x.shape[1] + 1) // 2, dim=1)  # rows with gaps, and one scale for both
        codes, inverse = function(scale_, parts, column, target, newest, dtype, scale > 0)
        assert codes.dtype == dtype
        results.append([codes.view(torch.uint8), inverse, newest])
    return results


def castable(size, dtype, fp8):
    """Values that need no rounding in the interpreter, which rounds to FP8 wrongly where the exponent grows."""
    x = random(*size, dtype=dtype, scale=30.0).clamp(-120, 120)
    x[0, 0] = 128.0
    return x.to(fp8).to(dtype) if INTERPRETED else x


@dtypes
@sizes
@pytest.mark.parametrize("scale", [0.0, 32.0])  # 128 · 32 is past E4M3's largest
@pytest.mark.parametrize("columns", [False, True], ids=["plain", "columns"])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_cast(size, dtype, scale, columns, fp8):
    factors = 2.0 ** torch.randint(0, 3, (size[1],)) if columns else None
    assert_equal(*cast_both(castable(size, dtype, fp8), factors, scale, fp8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_float8_cast_of_what_is_not_finite(bad):
    x = random(3, 37)
    x[1, 5] = bad
    found, _ = cast_both(x, None, 0.0, torch.float8_e4m3fn)
    assert not found[2].isfinite()
    assert found[1].item() == 1.0
    if not INTERPRETED:  # the interpreter's casts produce no NaN
        assert found[0].view(torch.float8_e4m3fn).float()[1, 5].isnan() == (bad != bad)


@pytest.mark.parametrize("size", [(3, 70), (130, 5)] + ([] if INTERPRETED else [(144, 272), (1024, 4096)]), ids=str)
def test_float8_transpose(size):
    codes = torch.randn(size).to(torch.float8_e4m3fn)
    found = float8.transpose_float8(codes.to(DEVICE))
    assert found.is_contiguous()
    assert_equal([found.view(torch.uint8)], [codes.view(torch.uint8).t()])
    wide = torch.zeros(size[1], size[0] + 16, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    float8.transpose_float8(codes.to(DEVICE), wide[:, : size[0]])
    assert_equal([wide.view(torch.uint8)[:, : size[0]]], [codes.view(torch.uint8).t()])
    assert not wide[:, size[0] :].float().any()


@pytest.mark.skipif(INTERPRETED, reason="_int_mm of CUDA")
@pytest.mark.parametrize("rows", [1, 16, 17, 300])
@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_int8_linear_equals_the_cpu_and_is_captured(rows, threshold):
    x, weight = torch.randn(rows, 512).bfloat16(), torch.randn(136, 512).bfloat16()
    x[0, 9] = 20.0
    codes, absmax = int8_reference.quantize_rows_int8.reference(weight, None, 0.0)
    expected = int8_reference.int8_linear(x, codes, absmax, None, threshold)
    arguments = (x.cuda(), codes.cuda(), absmax.cuda(), None, threshold)
    found = int8_reference.int8_linear(*arguments)
    outlier = float(x.float().abs().max() * weight.float().abs().max())  # a separately rounded product, may cancel
    close = {"rtol": 1.6e-2, "atol": outlier / 2**9 if threshold else 1e-2}
    torch.testing.assert_close(found.cpu(), expected, **close)
    graph = torch.cuda.CUDAGraph()  # capturing fails if the host synchronizes with the device
    with torch.cuda.graph(graph):
        captured = int8_reference.int8_linear(*arguments)
    graph.replay()
    torch.testing.assert_close(captured, found, **close)  # a graph's outlier product has a fixed width, zero-padded
