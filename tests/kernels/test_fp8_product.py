"""FP8 products on a GPU, with and without a low-rank term, against the emulation."""

import pytest
import torch

from halfbyte import notices
from halfbyte.dispatch import Unavailable
from halfbyte.ops.float8 import E4M3, E5M2
from halfbyte.ops.fp8_product import Term, emulated, fp8_product

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forgotten():
    """Notices of this test alone."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    notices.forget()


def operands(rows, columns, inner, rank, dtype=torch.bfloat16, a_dtype=E4M3, per_row=False):
    a = torch.randn(rows, inner).to(a_dtype).cuda()
    b = torch.randn(columns, inner).to(E4M3).cuda()
    b_scale = torch.rand(columns, device="cuda") if per_row else torch.full((), 0.25, device="cuda")
    u, factor = torch.randn(rows, rank).to(dtype).cuda(), torch.randn(columns, rank).to(dtype).cuda()
    return (a, b, torch.full((), 0.5, device="cuda"), b_scale), Term(u, factor.t(), 1.5)


def assert_close(found, arguments, term):
    """Up to a rounding of the term, one of the result and Hopper's partial sums."""
    expected = torch.empty(found.shape, device="cuda")
    emulated(*arguments, expected, None)
    if term is not None:
        expected += term.scale * term.u.float() @ term.factor.float()
    assert (found.float() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [(1, 16, 32, 4), (37, 256, 512, 16), (512, 1024, 4096, 48)], ids=str)
def test_a_term_is_added_by_the_product(size, a_dtype, fast):
    arguments, term = operands(*size, a_dtype=a_dtype)
    found = torch.full(size[:2], torch.nan, dtype=torch.bfloat16, device="cuda")
    fp8_product(*arguments, found, fast, term)
    assert not notices.said()
    assert_close(found, arguments, term)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_what_cannot_be_added_to_is_added_to_later(dtype, per_row):
    if per_row and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no FP8 products with scales a row")
    arguments, term = operands(64, 256, 512, 16, dtype, per_row=per_row)
    found = torch.full((64, 256), torch.nan, dtype=dtype, device="cuda")
    fp8_product(*arguments, found, False, term)
    assert not notices.said()
    assert_close(found, arguments, term)


def test_without_cublaslt_terms_are_added_to_finished_products(monkeypatch):
    from halfbyte.kernels.cuda import fp8_product as kernels

    def refuse(*_):
        raise Unavailable("no cuBLASLt")

    monkeypatch.setattr(kernels, "_Plan", refuse)
    kernels._plan.cache_clear()
    arguments, term = operands(64, 256, 512, 16)
    found = torch.full((64, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    fp8_product(*arguments, found, True, term)
    assert "no cuBLASLt" in notices.said()["kernel-cuda.fp8_product.cublaslt"]
    assert_close(found, arguments, term)
    kernels._plan.cache_clear()
    notices.forget()


def test_sizes_that_are_no_multiple_of_16_are_multiplied_otherwise():
    arguments, term = operands(5, 24, 40, 8)
    found = torch.empty(5, 24, dtype=torch.bfloat16, device="cuda")
    fp8_product(*arguments, found, True, term)
    assert "not both multiples of 16" in notices.said()["fp8-product-cuda"]
    assert_close(found, arguments, term)


def test_it_is_captured_in_a_graph():
    arguments, term = operands(256, 512, 1024, 16)
    found, expected = (torch.full((256, 512), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fp8_product(*arguments, expected, True, term)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_product(*arguments, found, True, term)
    graph.replay()
    assert torch.equal(found, expected)
