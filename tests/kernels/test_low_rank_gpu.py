"""An adapter's first product by a cluster of blocks, on a GPU."""

import pytest
import torch
from low_rank_cases import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs a Hopper GPU or newer"
    ),
]
pytest.importorskip("triton")


@pytest.mark.parametrize("batch", [1, 2, 9, 16, 17, 33, 48, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(batch, dtype):
    from halfbyte.kernels.cuda import low_rank

    for columns, rank in ((32, 16), (4096, 48), (14336, 16), (2080, 128)):
        for masked in (False, True):
            check(low_rank.product, batch, columns, rank, dtype, masked, "cuda")


def test_what_the_kernel_does_not_take():
    from halfbyte.ops.low_rank import low_rank_rows

    for batch, columns, rank in ((65, 64, 16), (4, 40, 16), (4, 64, 8)):
        check(low_rank_rows, batch, columns, rank, torch.bfloat16, True, "cuda")


def test_two_runs_are_equal_in_a_graph():
    from halfbyte.ops.low_rank import low_rank_rows

    x, a = (torch.randn(n, 4096, device="cuda", dtype=torch.bfloat16) for n in (32, 48))
    first = low_rank_rows(x, a, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = low_rank_rows(x, a, None)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, first)
