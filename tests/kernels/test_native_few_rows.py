"""Check C kernels for few rows of x in every format of 2 to 8 bits against fp64 products of dequantized weights."""

import importlib

import pytest
import torch

from halfbyte.dispatch import Unavailable
from halfbyte.formats import from_spec
from halfbyte.formats.int4 import linear_int4
from halfbyte.utils.notices import notices_so_far

SPECS = [
    *[f"blockwise4:{kind}" for kind in ("nf4:32:nested", "nf4:64:nested", "fp4:64:plain", "nf4:128:plain")],
    *[f"kbit:{options}" for options in ("2:nf", "3:bnf", "3:fitted", "4:nf", "5:fitted")],
    *[f"hqq:{options}" for options in ("2:32", "3:64", "4:256", "5:64:range:float16", "8:32:range:float32")],
    "nvfp4:2d:plain", "nvfp4:1d:46mse", "mxfp4", "int8", "fp8:row", "fp8:tile", "fp8:tensor",
]  # fmt: skip


@pytest.fixture(autouse=True)
def compiled():
    """Fail where the C code does not compile: a product would take the reference."""
    try:
        importlib.import_module("halfbyte.kernels.native.few_rows")
    except Unavailable as error:
        pytest.skip(str(error))
    yield
    assert not any("few_rows" in key for key in notices_so_far()), notices_so_far()


def check(linear, weight, x, bias):
    """Compare with the exact product, and rows with the same rows alone."""
    exact = x.double() @ weight.double().t() + bias
    tolerance = 1e-6 * (x.double().abs() @ weight.double().abs().t()).max()
    y = linear(x)
    assert (y - exact).abs().max() <= tolerance
    assert torch.equal(y, torch.cat([linear(row) for row in x.split(1)]))


# A matrix smaller than a chunk, whole chunks, several segments with a partial one at the end.
@pytest.mark.parametrize("shape", [(5, 32), (19, 96), (17, 512), (9, 2048 + 256)], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_formats(spec, shape):
    format_ = from_spec(spec)
    block = {"blockwise4": getattr(format_, "blocksize", 1), "hqq": getattr(format_, "group", 1)}.get(format_.name, 1)
    if shape[1] % block:
        pytest.skip("rows of partial blocks take the reference")
    parts = format_.quantize(torch.randn(shape) * 0.02)
    weight, bias = format_.dequantize(parts, shape, torch.float32), torch.randn(shape[0])
    for batch in (1, 3, 6):
        x = torch.randn(batch, shape[1])
        check(lambda rows: format_.linear(rows, parts, shape, bias), weight, x, bias)


@pytest.mark.parametrize("spec", ["mxfp4", "nvfp4:1d:plain", "fp8:row"])
def test_every_stored_scale_and_code(spec):
    """Scales of all bytes that can be stored, subnormal ones among them, and all codes of 8 bits."""
    format_, shape = from_spec(spec), (16, 256)
    parts = format_.quantize(torch.randn(shape))
    for name, tensor in parts.items():
        if tensor.dtype == torch.uint8:
            codes = torch.arange(tensor.numel()) % (127 if "nvfp4" in spec or name == "codes" else 200)
            parts[name] = codes.to(torch.uint8).view(tensor.shape)
    x, bias = torch.randn(1, 256), torch.zeros(16)
    check(
        lambda rows: format_.linear(rows, parts, shape, bias), format_.dequantize(parts, shape, torch.float32), x, bias
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(8, 8, 1), (72, 40, 3), (128, 1032, 4)])
def test_int4(inputs, outputs, groups, dtype):
    qweight = torch.randint(-(2**31), 2**31 - 1, (inputs // 8, outputs), dtype=torch.int32)
    qzeros = torch.randint(-(2**31), 2**31 - 1, (groups, outputs // 8), dtype=torch.int32)
    permutation = torch.randperm(inputs)
    for order in (None, torch.stack([permutation, permutation.argsort()]).int()):
        stored = qweight, qzeros, (torch.rand(groups, outputs) * 0.1).to(dtype), None, order, 1
        bias = torch.randn(outputs)
        weight = linear_int4.reference(torch.eye(inputs), *stored, None).t()
        check(lambda rows: linear_int4(rows, *stored, bias), weight, torch.randn(6, inputs), bias)  # noqa: B023


def test_result_does_not_depend_on_threads():
    format_, shape = from_spec("kbit:3:nf"), (1201, 1024)
    parts, x, threads = format_.quantize(torch.randn(shape)), torch.randn(1, 1024), torch.get_num_threads()
    results = []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            results.append(format_.linear(x, parts, shape, None))
        finally:
            torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_half_precision_and_strides():
    format_, shape = from_spec("nvfp4:1d:plain"), (24, 128)
    parts, x = format_.quantize(torch.randn(shape)), torch.randn(128, 2).bfloat16().t()
    y = format_.linear(x, parts, shape, None)
    assert y.dtype is torch.bfloat16
    exact = x.double() @ format_.dequantize(parts, shape, torch.float32).double().t()
    assert (y.double() - exact).norm() <= 4e-3 * exact.norm()
