"""The small-M kernels: on a GPU at real sizes, and in Triton's interpreter at small ones."""

from functools import partial

import gemv4_cases
import parity
import pytest
import torch
from gemv4_cases import check
from parity import DEVICE, INTERPRETED, dtypes

pytestmark = parity.mark
pytest.importorskip("triton")
arguments = partial(gemv4_cases.arguments, device=DEVICE)


@pytest.fixture
def kernels():
    from halfbyte.kernels.triton import gemv4

    return gemv4


@dtypes
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_gemv(kernels, dtype, batch):
    """Rows that end within a program, and a K that ends within a tile."""
    blocks = kernels.GemvBlocks(4, 32, 1)
    for kind, blocksize, nested in (("nf4", 64, True), ("fp4", 32, False)):
        check(partial(kernels.gemv, blocks=blocks), batch, arguments(6, 320, kind, blocksize, nested), 320, dtype)


@pytest.mark.parametrize("batch", [5, 16])
def test_small(kernels, batch):
    """Shares of K, the last of them empty."""
    blocks = kernels.SmallBlocks(64, 16, 4, 1)
    for dtype in [dtype for dtype in parity.DTYPES if dtype is not torch.float32]:
        check(partial(kernels.small, blocks=blocks), batch, arguments(70, 320), 320, dtype)


@pytest.mark.skipif(INTERPRETED, reason="many programs")
@pytest.mark.parametrize("shape", [(4096, 14336), (1024, 4096), (130, 448)])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 17, 33, 64, 65])
def test_what_is_picked(kernels, batch, shape):
    rows, columns = shape
    for kind, blocksize, nested in (("nf4", 64, True), ("fp4", 32, False)):
        weight = arguments(rows, columns, kind, blocksize, nested)
        for dtype in parity.DTYPES:
            check(kernels.linear, batch, weight, columns, dtype, bias=batch % 2 == 0)


@pytest.mark.skipif(INTERPRETED, reason="many programs")
def test_blocks_that_cross_rows_and_long_ones(kernels):
    check(kernels.linear, 3, arguments(64, 100), 100, torch.bfloat16)
    check(kernels.linear, 3, arguments(64, 4096, blocksize=4096), 4096, torch.bfloat16)


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
@pytest.mark.parametrize("batch", [1, 16])
def test_in_a_graph(kernels, batch):
    weight = arguments(4096, 4096)
    x = torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16)
    kernels.linear(x, *weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.linear(x, *weight, None)
    x.normal_()
    graph.replay()
    assert torch.equal(out, kernels.linear(x, *weight, None))
