"""The CUDA kernels of products of up to 64 rows, on a GPU."""

import functools

import gemv4_cases
import gemv_planes_cases
import pytest
import torch
from gemv4_cases import check

from halfbyte.ops.gemv4 import linear_blockwise4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
pytest.importorskip("triton")
BATCHES = (9, 16, 17, 24, 32, 33, 48, 64)


@functools.cache
def arguments(*args):
    return gemv4_cases.arguments(*args, device="cuda")


@pytest.fixture
def gemm():
    from halfbyte.kernels.cuda import gemm4 as gemm_cuda

    return gemm_cuda


def function(blocks=None):
    from halfbyte.kernels.cuda import gemm4 as gemm_cuda

    def run(x, packed, absmax, nested, blocksize, kind, rows, bias, term=None):
        assert gemm_cuda.takes(x, packed, absmax)
        assert gemm_cuda.adds(term)
        return gemm_cuda.product(x, packed, absmax, nested, kind, rows, bias, blocks, term)

    return run


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("batch", BATCHES)
def test_products(gemm, batch, nested, kind):
    """N that ends within a tile; tiles that one block has, and several."""
    for rows, columns in ((130, 256), (1001, 4352), (4096, 14336)):
        weight = arguments(rows, columns, kind, 64, nested)
        for dtype in (torch.bfloat16, torch.float16):
            check(function(), batch, weight, columns, dtype, bias=batch % 2 == 0, rank=batch % 3 * 8)


@pytest.mark.parametrize("batch", BATCHES)
def test_bit_planes(gemm, batch):
    from halfbyte.kernels.cuda import gemv_planes

    for spec in ("kbit:4:nf", "hqq:4:32", "hqq:4:64", "hqq:4:128", "hqq:4:256"):
        for shape in ((130, 256), (1001, 4352), (4096, 14336)):
            weight = gemv_planes_cases.weight_of(spec, *shape, device="cuda")
            for dtype in (torch.bfloat16, torch.float16)[: 1 if "hqq" in spec else 2]:
                gemv_planes_cases.check4(gemv_planes.product4, weight, batch, dtype, bias=batch % 2 == 0)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("stages", [3, 4])
def test_block_shapes(gemm, groups, stages):
    weight = arguments(64 * groups * 20 + 5, 2816)
    for batch in (16, 40, 64):
        check(function(gemm.Blocks(groups, stages)), batch, weight, 2816, torch.float16)


@pytest.mark.parametrize("batch", [17, 64])
def test_two_runs_are_equal(gemm, batch):
    weight = arguments(4096, 4096)
    x = torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16)
    results = [function()(x, *weight, None) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_product_waits_for_its_x_in_a_graph_too(gemm):
    """Kernels that begin early: each product's x is what the one before wrote."""
    weight = arguments(4096, 4096)
    x = torch.randn(32, 4096, device="cuda", dtype=torch.bfloat16)

    def chain(wait):
        y = x
        for _ in range(12):
            y = function()(y, *weight, None)
            if wait:
                torch.cuda.synchronize()
        return y

    late, early = chain(True), chain(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(False)
    for _ in range(3):
        graph.replay()
    assert torch.equal(early, late)
    assert torch.equal(captured, late)


@pytest.mark.large(6)
def test_a_weight_of_more_than_two_to_the_31_bytes(gemm):
    rows, columns = 2**17 + 40, 2**15 + 256
    packed = torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.rand(rows * columns // 64, device="cuda") + 0.1
    x = torch.randn(17, columns, device="cuda", dtype=torch.float16) / 64
    found = gemm.product(x, packed, absmax, None, "nf4", rows, None)
    last = packed[-40 * columns // 2 :], absmax[-40 * columns // 64 :], None, 64, "nf4", 40
    expected = linear_blockwise4.reference(x.float(), *last, None)
    assert (found[:, -40:] - expected).norm() < 2e-3 * expected.norm()


def test_who_multiplies(gemm, monkeypatch):
    """Products of few rows go elsewhere, and what these kernels do not take."""
    taken = []
    monkeypatch.setattr(gemm, "product", lambda x, *_, **__: taken.append(x.shape[0]) or x)
    weight = arguments(64, 512)
    for batch in (1, gemm.FEWEST - 1, gemm.FEWEST, 64, 65):
        linear_blockwise4(torch.randn(batch, 512, device="cuda", dtype=torch.bfloat16), *weight, None)
    assert taken == [gemm.FEWEST, 64]
    x = torch.randn(40, 512, device="cuda", dtype=torch.bfloat16)
    assert gemm.takes(x, *weight[:2])
    assert not gemm.takes(x.float(), *weight[:2])
    assert not gemm.takes(x[:, :384].contiguous(), *weight[:2])
