"""The CUDA kernel of one row and bit planes, on a GPU."""

import contextlib

import pytest
import torch
from gemv_planes_cases import check_row, row_arguments, weight_of

from halfbyte.dispatch import Unavailable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"
    ),
]
pytest.importorskip("triton")
specs = pytest.mark.parametrize("spec", ["kbit:2:bnf", "kbit:2:fitted", "kbit:3:nf", "kbit:4:fitted", "kbit:5:bnf"])


@pytest.fixture
def row():
    from halfbyte.kernels.cuda import gemv_planes_row

    return gemv_planes_row


@specs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(row, spec, dtype):
    """N that ends within a tile, K that gives some warps more steps than others, or none; several rounds of tiles."""
    for shape in ((16, 512), (130, 512), (1000, 4608), (14336, 4096), (40010, 1024)):
        check_row(row, weight_of(spec, *shape, "cuda"), dtype, bias=shape[0] % 3 == 0)


@specs
@pytest.mark.parametrize("blocks", [(1, 1, 16), (2, 2, 4), (1, 8, 1), (2, 1, 3)], ids=str)
def test_block_shapes(row, spec, blocks):
    shape = row.Blocks(*blocks)
    with contextlib.suppress(Unavailable):  # where one of them takes too much shared memory
        check_row(row, weight_of(spec, 5005, 2560, "cuda"), torch.bfloat16, shape)


@pytest.mark.parametrize("value", [1e-30, 1e30, float("inf"), float("nan")])
def test_extreme_inputs(row, value):
    """One value of x gives what it gives in the exact product; what is not finite stays so, if not the same."""
    weight = weight_of("kbit:2:nf", 64, 1024, "cuda")
    x = torch.zeros(1, 1024, device="cuda", dtype=torch.bfloat16)
    x[0, 77] = value
    found = row.product(x, *row_arguments(weight), None).float()
    exact = x.float() @ weight.format.dequantize(weight.parts, weight.shape, torch.float32).T
    if exact.isfinite().all():
        torch.testing.assert_close(found, exact, rtol=0.01, atol=0)
    else:
        assert not found.isfinite().any()
