"""The CUDA kernel of one row and 4-bit weights, on a GPU: every kind of block, and every shape it may run with."""

import functools

import gemv4_cases
import pytest
import torch
from gemv4_cases import check

from halfbyte.ops.gemv4 import linear_blockwise4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs Hopper"
    ),
]
pytest.importorskip("triton")
DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def arguments(*args):
    return gemv4_cases.arguments(*args, device="cuda")


@pytest.fixture
def row():
    from halfbyte.kernels.cuda import gemv4_row

    return gemv4_row


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("blocksize", [32, 64, 128, 256])
def test_products(row, nested, blocksize):
    """N that ends within a tile, K that gives some warps a step more than others, or none; several rounds of tiles."""
    for rows, columns in ((16, 256), (130, 512), (1000, 4352), (17000, 512)):
        weight = arguments(rows, columns, "fp4" if rows == 130 else "nf4", blocksize, nested)
        for batch in (1, 2):
            for dtype in DTYPES:
                check(row.product, batch, weight, columns, dtype, bias=rows % 3 == 0)


@pytest.mark.parametrize("blocksize", [512, 2048, 4096])
def test_large_blocks(row, blocksize):
    """Rows that begin within four blocks, and a number of blocks that four does not divide."""
    for nested in (True, False):
        weight = arguments(131, 4096, "nf4", blocksize, nested)
        check(row.product, 1, weight, 4096, torch.bfloat16)


@pytest.mark.parametrize("blocks", [(1, 1, 16), (2, 2, 4), (1, 8, 1), (2, 1, 14), (1, 3, 5)], ids=str)
def test_block_shapes(row, blocks):
    def function(*args):
        return row.product(*args, row.Blocks(*blocks))

    for batch in (1, 2):
        check(function, batch, arguments(5005, 2816), 2816, torch.float16)


@pytest.mark.parametrize("value", [1e-30, 1e30, float("inf"), float("nan")])
def test_extreme_inputs(row, value):
    """One value of x gives what it gives in the exact product; what is not finite stays so, if not the same."""
    weight = arguments(64, 1024)
    x = torch.zeros(1, 1024, device="cuda", dtype=torch.bfloat16)
    x[0, 77] = value
    found = row.product(x, *weight, None).float()
    exact = linear_blockwise4.reference(x.float(), *weight, None)
    if exact.isfinite().all():
        torch.testing.assert_close(found, exact, rtol=0.01, atol=0)
    else:
        assert not found.isfinite().any()


def test_two_runs_are_equal(row):
    weight = arguments(4096, 4096)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    results = [row.product(x, *weight, None) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_product_waits_for_its_x(row):
    """Kernels that begin early: each product's x is what the one before wrote."""
    weight = arguments(4096, 4096)
    early = late = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        early = row.product(early, *weight, None)
    for _ in range(20):
        late = row.product(late, *weight, None)
        torch.cuda.synchronize()
    assert torch.equal(early, late)


@pytest.mark.large(6)
def test_a_weight_of_more_than_two_to_the_31_bytes(row):
    rows, columns = 2**17 + 40, 2**15 + 256
    packed = torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.rand(rows * columns // 64, device="cuda") + 0.1
    x = torch.randn(1, columns, device="cuda", dtype=torch.float16)
    found = row.product(x, packed, absmax, None, 64, "nf4", rows, None)
    last = packed[-40 * columns // 2 :], absmax[-40 * columns // 64 :], None, 64, "nf4", 40
    torch.testing.assert_close(found[:, -40:], row.product(x, *last, None), rtol=0, atol=0)
    check(row.product, 1, last, columns, torch.float16, bias=False)


def test_what_it_takes(row):
    weight = arguments(64, 256)
    x = torch.randn(3, 256, device="cuda", dtype=torch.bfloat16)
    assert row.try_product(x[:2], *weight, None) is not None
    assert row.try_product(x, *weight, None) is None
    assert row.try_product(x[:1], *arguments(15, 256), None) is None
    assert row.try_product(x[:1].float(), *weight, None) is None
