"""The CUDA kernel of the gated unit without a GPU: its own code, compiled for the CPU against emulated warps."""

import pytest
import torch
from emulated import emulate, needs_compiler
from lora_glu_cases import assert_cast, assert_close_to, case, moved, run_backward, run_forward, slot_of
from parity import poisoned  # noqa: F401

from halfbyte import notices
from halfbyte.ops.float8 import E4M3, E5M2
from halfbyte.ops.lora_glu import lora_glu, lora_glu_backward_

pytest.importorskip("triton")  # whose launcher's arithmetic lora_glu_cuda shares
pytestmark = needs_compiler

RUN = """
extern "C" void run(u32 blocks, u32 threads, u32 bytes, Unit *unit) {
    launch(blocks, threads, bytes, [&] { bytes ? lora_glu(*unit) : finish(*unit); });
}
"""
# Rows, width and ranks; warps and stages; dtype and activation. An end inside a step and a tile, parts of one step and
# of several, strips whose last one is mostly outside.
CASES = [
    ((37, 136, (16, 16, 16)), (4, 2), torch.bfloat16, "silu"),
    ((50, 40, (8, 16, 8)), (4, 3), torch.float16, "gelu_tanh"),
    ((19, 200, (16, 8, 16)), (5, 2), torch.float16, "silu"),
]
cases = pytest.mark.parametrize(("size", "shape", "dtype", "activation"), CASES, ids=str)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("built")


@pytest.fixture
def cuda(monkeypatch, folder):
    from halfbyte.kernels.cuda import lora_glu as lora_glu_cuda

    module = emulate(lora_glu_cuda, monkeypatch, folder, RUN)

    def of(shape):
        blocks = module.Blocks(shape[0], 1, shape[1])
        monkeypatch.setattr(module, "FORWARD", blocks)
        monkeypatch.setattr(module, "BACKWARD", blocks)
        return module

    return of


def back(module, slot=None, columns=None):
    """Its backward, with the reference's parameters."""
    return lambda *arguments: module.backward(*arguments, slot, columns)


@cases
def test_forward(cuda, size, shape, dtype, activation):
    arguments = case(size, dtype, "cpu")
    mine = run_forward(cuda(shape).forward, arguments, activation, None)
    assert_close_to(lora_glu.reference, run_forward, mine, arguments, activation)


@cases
def test_backward(cuda, size, shape, dtype, activation):
    arguments = case(size, dtype, "cpu")
    mine = moved(arguments, torch.clone)
    found, codes = back(cuda(shape))(*mine, activation)
    assert codes is None
    assert_close_to(lora_glu_backward_.reference, run_backward, (*mine[1:3], *found), arguments, activation)


@pytest.mark.parametrize("scale", [16.0, 300.0])  # the second saturates
def test_forward_in_float8(cuda, scale):
    size, shape, dtype, activation = CASES[0]
    arguments, slot, module = case(size, dtype, "cpu"), slot_of(E4M3, scale, "cpu"), cuda(shape)
    hidden, u_down = run_forward(module.forward, arguments, activation, None)
    codes, low_down = run_forward(module.forward, arguments, activation, slot)
    assert torch.equal(low_down, u_down)
    assert_cast(codes, slot, hidden)


@pytest.mark.parametrize("columns", [False, True])
def test_backward_in_float8(cuda, columns):
    size, shape, dtype, activation = CASES[0]
    arguments, slot, module = case(size, dtype, "cpu"), slot_of(E5M2, 100.0, "cpu"), cuda(shape)
    factor = torch.rand(2 * size[1]) if columns else None
    plain = moved(arguments, torch.clone)
    expected, _ = back(module)(*plain, activation)
    found, codes = back(module, slot, factor)(*arguments, activation)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    both = torch.cat(plain[1:3], dim=1).float()
    assert_cast(codes, slot, both if factor is None else both * factor)


def test_what_is_not_a_number_counts_as_infinite(cuda):
    arguments, slot = case((5, 40, (8, 8, 8)), torch.bfloat16, "cpu"), slot_of(E4M3, 16.0, "cpu")
    arguments[1][3, 7] = float("nan")
    run_forward(cuda((4, 2)).forward, arguments, "silu", slot)
    assert slot.newest == float("inf")


def test_without_nvrtc_it_is_triton(cuda, monkeypatch):
    module, arguments = cuda((4, 2)), case((5, 40, (8, 8, 8)), torch.bfloat16, "cpu")

    from halfbyte.dispatch import Unavailable

    def no_nvrtc(*_):
        raise Unavailable("no NVRTC")

    monkeypatch.setattr(module, "cubin", no_nvrtc)
    monkeypatch.setattr(module, "takes", lambda *_: True)
    notices.forget()
    assert run_forward(module.try_forward, arguments, "silu", None) is None
    assert notices.said()["lora-glu-cuda"].startswith("no NVRTC; the gated unit")
    assert module.try_backward(*arguments, "silu", None, None) is None
