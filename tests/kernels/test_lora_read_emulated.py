"""The CUDA kernel of `lora_read` without a GPU: its own code, compiled for the CPU against emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler
from lora_glu_cases import slot_of
from lora_read_cases import SIZES, case, check
from parity import poisoned  # noqa: F401

from halfbyte import notices
from halfbyte.ops.float8 import E4M3, E5M2

pytest.importorskip("triton")  # whose launcher's arithmetic it shares
pytestmark = needs_compiler

RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Read *read) {
    launch(blocks, threads, bytes, [&] { bytes ? lora_read(*read) : finish(*read); });
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def cuda(monkeypatch, folder):
    from halfbyte.kernels.cuda import lora_read

    module = emulate(lora_read, monkeypatch, folder, RUN)
    monkeypatch.setattr(module, "BLOCKS", module.Blocks(4, 1, 2))
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_reads(cuda, size, dtype):
    tensors, factors, scalings, low = case(size, dtype, "cpu")
    found = cuda._run(tensors, factors, scalings, low, None, None)
    check(found, tensors, factors, scalings, low, None, None)


@pytest.mark.parametrize("columns", [False, True])
def test_reads_and_casts(cuda, columns):
    tensors, factors, scalings, low = case(SIZES[1], torch.bfloat16, "cpu")
    slot, factor = slot_of(E5M2, 100.0, "cpu"), torch.rand(sum(SIZES[1][1])) if columns else None
    found = cuda._run(tensors, factors, scalings, low, slot, factor)
    check(found, tensors, factors, scalings, low, slot, factor)


@pytest.mark.parametrize("scale", [16.0, 300.0])  # the second saturates
def test_an_input(cuda, scale):
    """Forward: no gradients, and the factor is Aᵀ."""
    tensors, factors, scalings, _ = case(SIZES[0], torch.bfloat16, "cpu", turned=True)
    slot = slot_of(E4M3, scale, "cpu")
    found = cuda._run(tensors, factors, scalings, None, slot, None)
    check(found, tensors, factors, scalings, None, slot, None)


def test_what_is_not_a_number_counts_as_infinite(cuda):
    tensors, factors, scalings, low = case(SIZES[0], torch.bfloat16, "cpu")
    tensors[0][3, 7] = float("nan")
    slot = slot_of(E5M2, 1.0, "cpu")
    cuda._run(tensors, factors, scalings, low, slot, None)
    assert slot.newest == float("inf")


def test_without_nvrtc_products_are_of_their_own(cuda, monkeypatch):
    tensors, factors, scalings, low = case(SIZES[0], torch.bfloat16, "cpu")

    from halfbyte.dispatch import Unavailable

    def no_nvrtc(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(cuda, "cubin", no_nvrtc)
    monkeypatch.setattr(cuda, "takes", lambda *_: True)
    notices.forget()
    found = cuda.read(tensors[0], [], factors, scalings, low, torch.float32, None, None)
    check(found, tensors, factors, scalings, low, None, None)
    assert notices.said()["lora-read-cuda"].startswith("no NVRTC; adapters' gradients")
