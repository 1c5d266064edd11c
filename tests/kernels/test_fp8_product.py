"""Compare FP8 products on a GPU with the emulation."""

import pytest
import torch

from halfbyte.formats.float8 import E4M3, E5M2
from halfbyte.ops.float8 import emulated, fp8_product
from halfbyte.utils import notices

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forgotten():
    """Forget logged notices before and after this test."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    notices.reset_notices()


def operands(rows, columns, inner, a_dtype=E4M3, per_row=False):
    a = torch.randn(rows, inner).to(a_dtype).cuda()
    b = torch.randn(columns, inner).to(E4M3).cuda()
    b_scale = torch.rand(columns, device="cuda") if per_row else torch.full((), 0.25, device="cuda")
    return a, b, torch.full((), 0.5, device="cuda"), b_scale


def assert_close(found, arguments):
    """Compare up to a rounding of the result and of Hopper's partial sums."""
    expected = torch.empty(found.shape, device="cuda")
    emulated(*arguments, expected)
    assert (found.float() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("a_dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [(1, 16, 32), (37, 256, 512), (512, 1024, 4096)], ids=str)
def test_the_product(size, a_dtype, fast):
    arguments = operands(*size, a_dtype=a_dtype)
    found = torch.full(size[:2], torch.nan, dtype=torch.bfloat16, device="cuda")
    fp8_product(*arguments, found, fast)
    assert not notices.notices_so_far()
    assert_close(found, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("per_row", [False, True])
def test_every_dtype_of_results_and_scales_of_rows(dtype, per_row):
    if per_row and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no FP8 products with scales a row")
    arguments = operands(64, 256, 512, per_row=per_row)
    found = torch.full((64, 256), torch.nan, dtype=dtype, device="cuda")
    fp8_product(*arguments, found, False)
    assert not notices.notices_so_far()
    assert_close(found, arguments)


def test_sizes_not_divisible_by_16_take_another_product():
    arguments = operands(5, 24, 40)
    found = torch.empty(5, 24, dtype=torch.bfloat16, device="cuda")
    fp8_product(*arguments, found, True)
    assert "16" in notices.notices_so_far()["fp8-product-cuda"]
    assert_close(found, arguments)


def test_it_is_captured_in_a_graph():
    arguments = operands(256, 512, 1024)
    found, expected = (torch.full((256, 512), torch.nan, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fp8_product(*arguments, expected, True)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_product(*arguments, found, True)
    graph.replay()
    assert torch.equal(found, expected)
