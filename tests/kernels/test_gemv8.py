"""Check GEMV and small-batch GEMM with 8-bit weights: real sizes on a GPU, small ones in Triton's interpreter."""

import functools
import itertools
from functools import partial

import pytest
import torch

from halfbyte.formats import from_spec
from halfbyte.formats.float8 import linear_float8
from halfbyte.formats.int8 import linear_int8
from tests.helpers import parity
from tests.helpers.parity import DEVICE, DTYPES, INTERPRETED, dtypes, poisoned  # noqa: F401

pytestmark = parity.mark
pytest.importorskip("triton")
SPECS = ("int8", "fp8:tensor", "fp8:row", "fp8:tile")
specs = pytest.mark.parametrize("spec", SPECS)


@pytest.fixture
def kernels():
    from halfbyte.kernels.triton import gemv8

    return gemv8


@functools.lru_cache(1)
def weight_of(spec, shape):
    """A weight's parts and fp64 values; cached because drawing and rounding take longer than the products."""
    weight = torch.randn(shape) * 0.05 * torch.linspace(0.5, 2, shape[0]).unsqueeze(1)
    parts = {name: part.to(DEVICE) for name, part in from_spec(spec).quantize(weight).items()}
    return parts, from_spec(spec).dequantize(parts, shape, torch.float32).double()


def check(run, spec, batch, shape, dtype, bias):
    """Check `run(x, codes, scale, scaling, bias)` up to rounding of the weight and the result to `dtype`."""
    rows, columns = shape
    format_ = from_spec(spec)
    parts, values = weight_of(spec, shape)
    x = torch.randn(batch, columns).to(dtype).to(DEVICE)
    added = torch.randn(rows).to(dtype).to(DEVICE) if bias else None
    found = run(x, *parts.values(), "row" if spec == "int8" else format_.scaling, added)
    assert (found.shape, found.dtype) == ((batch, rows), dtype)
    exact = x.double() @ values.T
    exact = exact if added is None else exact + added.double()
    tolerance = 2e-6 + torch.finfo(dtype).eps
    assert (found.double() - exact).norm() <= tolerance * exact.norm(), (spec, batch, shape, dtype)


@specs
@dtypes
@pytest.mark.parametrize("wide", [128, 256])
def test_gemv(kernels, spec, dtype, wide):
    """Rows that end within a program and a tile, columns that end within a program and a tile."""
    shape = (134, 300) if spec == "fp8:tile" and dtype is torch.float16 and wide == 128 else (6, 300)
    check(partial(kernels.gemv, blocks=kernels.GemvBlocks(4, wide, 1)), spec, 1, shape, dtype, bias=wide == 256)


@specs
@pytest.mark.parametrize("batch", [2, 16])
def test_gemm(kernels, spec, batch):
    """Splits of K, the last of them empty."""
    for dtype in [dtype for dtype in DTYPES if dtype is not torch.float32]:
        blocks = kernels.GemmBlocks(64, 128, 4, 1)
        check(partial(kernels.gemm, blocks=blocks), spec, batch, (150, 300), dtype, bias=batch == 2)


@pytest.mark.skipif(INTERPRETED, reason="many programs")
@specs
@pytest.mark.parametrize("shape", [(4096, 14336), (1024, 4096), (130, 449), (1, 1)], ids=str)
def test_selected_kernel(spec, shape):
    """Check the kernel that dispatch takes; `test_selection` checks which one it is."""

    def run(x, codes, scale, scaling, bias):
        if spec == "int8":
            return linear_int8(x, codes, scale, bias)
        return linear_float8(x, codes, scale, scaling, bias)

    for batch, dtype in itertools.product((1, 2, 3, 4, 5, 8, 17, 33, 64, 65), DTYPES):
        check(run, spec, batch, shape, dtype, bias=batch % 2 == 0)


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
@specs
@pytest.mark.parametrize("batch", [1, 16])
def test_in_a_graph(spec, batch):
    format_, shape = from_spec(spec), (4096, 4096)
    parts = format_.quantize(torch.randn(shape, device="cuda"))
    x = torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16)
    format_.linear(x, parts, shape, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = format_.linear(x, parts, shape, None)
    x.normal_()
    graph.replay()
    assert torch.equal(out, format_.linear(x, parts, shape, None))


@pytest.mark.large(6)
@pytest.mark.skipif(INTERPRETED, reason="4 GiB")
def test_a_weight_of_more_than_two_to_the_31_bytes():
    rows, columns = 2**17 + 40, 2**14 + 100
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device="cuda")
    absmax = torch.rand(rows, device="cuda")
    for batch in (1, 16):
        x = torch.randn(batch, columns, device="cuda", dtype=torch.bfloat16)
        found = linear_int8(x, codes, absmax, None)[:, -40:]
        torch.testing.assert_close(found, linear_int8(x, codes[-40:], absmax[-40:], None), rtol=0.01, atol=0.01)
