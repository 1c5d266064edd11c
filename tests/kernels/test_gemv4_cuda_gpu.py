"""The CUDA kernel of small products, on a GPU: every block shape it may run with, and what surrounds it."""

import functools

import gemv4_cases
import pytest
import torch
from gemv4_cases import check

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
def cuda():
    from halfbyte.kernels.cuda import gemv4 as gemv4_cuda

    return gemv4_cuda


def function(cuda, blocks=None):
    def run(x, packed, absmax, nested, blocksize, kind, rows, bias):
        assert blocksize == cuda.BLOCKSIZE
        assert cuda.takes(x, packed, absmax)
        return cuda.product(x, packed, absmax, nested, kind, rows, bias, blocks)

    return run


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("batch", [1, 3, 8, 9, 16])
def test_products(cuda, batch, nested, kind):
    """N that ends within a tile, K that gives some warps one step more than others, or none."""
    for rows, columns in ((130, 256), (1000, 4352), (4096, 14336)):
        weight = arguments(rows, columns, kind, 64, nested)
        for dtype in DTYPES:
            check(function(cuda), batch, weight, columns, dtype, bias=batch % 2 == 0)


@pytest.mark.parametrize(("rt", "wr", "wk"), [(1, 1, 16), (2, 2, 4), (4, 1, 4), (1, 3, 5), (1, 8, 2), (1, 16, 1)])
def test_block_shapes(cuda, rt, wr, wk):
    """Also several tiles for a group, with fewer slots of the ring than steps."""
    weight = arguments(16 * rt * wr * 140 + 5, 2816)
    for stages in (2, 3):
        check(function(cuda, cuda.Blocks(rt, wr, wk, stages)), 5, weight, 2816, torch.float16)


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_two_runs_are_equal(cuda, batch):
    weight = arguments(4096, 4096)
    x = torch.randn(batch, 4096, device="cuda", dtype=torch.bfloat16)
    results = [function(cuda)(x, *weight, None) for _ in range(20)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_product_waits_for_its_x(cuda):
    """Kernels that begin early: each product's x is what the one before wrote."""
    weights = [arguments(4096, 4096)] * 20
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    early, late = x, x
    for weight in weights:
        early = function(cuda)(early, *weight, None)
    for weight in weights:
        late = function(cuda)(late, *weight, None)
        torch.cuda.synchronize()
    assert torch.equal(early, late)


@pytest.mark.large(6)
def test_a_weight_of_more_than_two_to_the_31_bytes(cuda):
    rows, columns = 2**17 + 40, 2**15 + 256
    packed = torch.randint(0, 256, (rows * columns // 2,), dtype=torch.uint8, device="cuda")
    absmax = torch.rand(rows * columns // 64, device="cuda") + 0.1
    x = torch.randn(1, columns, device="cuda", dtype=torch.float16)
    found = cuda.product(x, packed, absmax, None, "nf4", rows, None)
    last = packed[-40 * columns // 2 :], absmax[-40 * columns // 64 :], None, "nf4", 40, None
    torch.testing.assert_close(found[:, -40:], cuda.product(x, *last), rtol=0, atol=0)
    check(function(cuda), 1, (last[0], last[1], None, 64, "nf4", 40), columns, torch.float16, bias=False)


def test_what_it_does_not_take(cuda):
    weight = arguments(64, 256)
    x = torch.randn(2, 256, device="cuda", dtype=torch.bfloat16)
    assert cuda.takes(x, *weight[:2])
    assert not cuda.takes(x.float(), *weight[:2])
    assert not cuda.takes(x.view(4, 128), *weight[:2])
    assert not cuda.takes(torch.randn(520, device="cuda").bfloat16()[3:515].view(2, 256), *weight[:2])
    assert not cuda.takes(x[:0], *weight[:2])


def test_triton_stands_in_where_it_does_not_compile(cuda, monkeypatch, request):
    from halfbyte import notices
    from halfbyte.dispatch import Unavailable
    from halfbyte.kernels.triton import gemv4

    def refuse(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(cuda, "cubin", refuse)
    monkeypatch.setattr(notices, "_said", {})
    cuda._kernel.cache_clear()
    request.addfinalizer(cuda._kernel.cache_clear)  # it remembers the refusal
    for _ in range(2):
        check(gemv4.linear, 3, arguments(64, 256), 256, torch.bfloat16)
    assert "no NVRTC" in notices.said()["gemv4-cuda"]
