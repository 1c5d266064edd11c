"""`lora_read` on a GPU against the reference."""

import pytest
import torch
from lora_glu_cases import slot_of
from lora_read_cases import SIZES, case, check
from parity import poisoned  # noqa: F401

from halfbyte import notices
from halfbyte.ops.float8 import E4M3, E5M2
from halfbyte.ops.lora_read import lora_read

pytest.importorskip("triton")
from halfbyte.kernels.cuda import lora_read as kernels

pytestmark = pytest.mark.gpu

LARGE = [(2000, (4096, 1024, 1024), (16, 16, 16)), (1111, (4096,), (16,)), (700, (1000, 14336), (0, 8))]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The CUDA kernel, and nothing in its place."""
    if torch.cuda.get_device_capability() < kernels.CAPABILITY:
        pytest.skip("needs Hopper")
    notices.forget()
    takes = kernels.takes
    monkeypatch.setattr(kernels, "takes", lambda *given: takes(*given) or pytest.fail("not taken"))
    yield
    assert not notices.said()


def run(tensors, factors, scalings, low, slot=None, columns=None):
    found = lora_read(tensors[0], tensors[1:], factors, scalings, low, torch.float32, slot, columns)
    check(found, tensors, factors, scalings, low, slot, columns)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
def test_reads(size, dtype):
    run(*case(size, dtype, "cuda"))


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
def test_reads_and_casts(size, columns):
    factor = torch.rand(sum(size[1]), device="cuda") if columns else None
    run(*case(size, torch.bfloat16, "cuda"), slot_of(E5M2, 100.0, "cuda"), factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [SIZES[0], LARGE[1]], ids=str)
def test_an_input(size, dtype):
    tensors, factors, scalings, _ = case(size, dtype, "cuda", turned=True)
    run(tensors, factors, scalings, None, slot_of(E4M3, 16.0, "cuda"))


def test_every_run_gives_the_same_bits():
    arguments = case(LARGE[0], torch.bfloat16, "cuda")
    first, second = run(*arguments), run(*arguments)
    assert torch.equal(first.low, second.low)
    assert all(map(torch.equal, first.gradients, second.gradients))
