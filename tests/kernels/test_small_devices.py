"""Compare kernels with the references on GPUs with 99 and 64 KiB of shared memory, and after a kernel's refusal."""

import pytest
import torch

from halfbyte.formats.float8 import E4M3
from halfbyte.ops import lora_glu as ops
from halfbyte.ops.decode import decode_attention
from halfbyte.utils import notices
from tests.helpers.lora_glu_cases import assert_close_to, case, moved, run_backward, run_forward, slot_of
from tests.helpers.parity import DEVICE, DTYPES, INTERPRETED, dtypes, mark, poisoned, random  # noqa: F401
from tests.helpers.small_devices import compiled_shared_bytes, refuses, small

pytest.importorskip("triton")
from halfbyte.kernels.device import assumed
from halfbyte.kernels.triton import cached_attention
from halfbyte.kernels.triton import lora_glu as kernels

pytestmark = mark
KIB = (99, 64)
RANKS = (17, 33) if INTERPRETED else (4, 15, 16, 24, 32, 48, 64, 65, 128)
SIZES = (256,) if INTERPRETED else (64, 80, 96, 128, 192, 256)
devices = pytest.mark.parametrize("kib", KIB)


@pytest.fixture(autouse=True)
def triton_alone(monkeypatch):
    """Disable the ops' CUDA kernels on a GPU."""
    for op in (ops.lora_glu, ops.lora_glu_backward_):
        rows = [row for row in op.kernels("cuda") if row.name.startswith("triton")]
        monkeypatch.setattr(op, "_added", {"cuda": rows})
        monkeypatch.setattr(op, "_by_device", {})
    notices.reset_notices()


def fits(launcher, kib):
    if not INTERPRETED:
        assert all(found <= kib * 1024 for found in compiled_shared_bytes(launcher))


@devices
@dtypes
@pytest.mark.parametrize("rank", RANKS)
def test_the_gated_unit(rank, dtype, kib, monkeypatch):
    for launcher in (kernels._forward_launcher, kernels._backward_launcher):
        monkeypatch.setattr(launcher, "_compiled", {})
    arguments = case((70, 200, (rank, rank, rank)), dtype, DEVICE)
    with assumed(small(kib, arguments[1])):
        if not kernels.in_one_pass(arguments[1], rank):
            assert rank * dtype.itemsize > 64  # smaller ranks of 16 and 32 bits fit everywhere
            pytest.skip("products of their own")
        before = moved(arguments, torch.clone)
        mine = run_forward(kernels.lora_glu, arguments, "silu")
        assert_close_to(ops.lora_glu.reference, run_forward, mine, before, "silu")
        mine = run_backward(kernels.lora_glu_backward_, arguments, "silu")
        assert_close_to(ops.lora_glu_backward_.reference, run_backward, mine, before, "silu")
    fits(kernels._forward_launcher, kib)
    fits(kernels._backward_launcher, kib)
    assert not notices.notices_so_far()


@devices
@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_decoding(size, dtype, kib, monkeypatch):
    monkeypatch.setattr(cached_attention._static_launcher, "_compiled", {})
    q = random(2, 4, 1, size, dtype=dtype)
    keys, values = (random(2, 2, 192, size, dtype=dtype) for _ in range(2))
    first, last = torch.tensor([0, 70], dtype=torch.int32, device=DEVICE), torch.tensor([130], device=DEVICE)
    with assumed(small(kib, q)):
        found = cached_attention.attend_static(q, keys, values, first, last, size**-0.5, None, None)
    tensors = (q.float(), keys.float(), values.float(), first, last)
    expected = decode_attention.reference(*tensors, size**-0.5, None, None)
    assert (found.float() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()
    fits(cached_attention._static_launcher, kib)


@dtypes
def test_an_8_bit_cache_where_triton_does_not_convert_it(dtype, monkeypatch):
    """GPUs before Hopper do not convert FP8 in Triton."""
    q = random(2, 4, 1, 64, dtype=dtype)
    keys, values = (random(2, 2, 192, 64).to(torch.float8_e4m3fn) for _ in range(2))
    first, last = torch.tensor([0, 70], dtype=torch.int32, device=DEVICE), torch.tensor([130], device=DEVICE)
    monkeypatch.setattr(cached_attention, "CONVERTS", (99, 0))
    found = cached_attention.attend_static(q, keys, values, first, last, 0.1, None, None)
    expected = decode_attention.reference(q.float(), keys.float(), values.float(), first, last, 0.1, None, None)
    assert (found.float() - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()


def test_refused_kernel_falls_back_to_the_reference(monkeypatch):
    arguments = case((70, 200, (16, 16, 16)), DTYPES[-1], DEVICE)
    for launcher in (kernels._forward_launcher, kernels._backward_launcher):
        refuses(launcher, monkeypatch)
    before = moved(arguments, torch.clone)
    for function, run in ((ops.lora_glu, run_forward), (ops.lora_glu_backward_, run_backward)):
        found = run(function, moved(before, torch.clone), "silu")
        expected = run(function.reference, moved(before, torch.clone), "silu")
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    if INTERPRETED:
        return  # on a CPU the op is the reference
    said = notices.notices_so_far()
    assert len(said) == 2
    assert all("Hardware limit: 232448" in text for text in said.values())
    notices.reset_notices()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
@pytest.mark.parametrize("before", [False, True], ids=["first met in a capture", "met before it"])
def test_a_kernel_refused_in_a_capture_leaves_the_capture_whole(before, monkeypatch):
    _, gate, up, low, _, factors = case((70, 200, (16, 16, 16)), torch.bfloat16, DEVICE)
    expected = ops.lora_glu.reference(gate, up, low, factors, "silu")  # also allocates cuBLAS's workspace
    refuses(kernels._forward_launcher, monkeypatch)
    if before:
        ops.lora_glu(gate, up, low, factors, "silu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.lora_glu(gate, up, low, factors, "silu")
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(notices.notices_so_far()) == 1
    notices.reset_notices()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_kernel_loaded_during_a_capture_runs_or_only_the_capture_fails(monkeypatch):
    """If a kernel cannot be loaded during a capture, only the capture fails, with the error its caller expects."""
    q = random(2, 4, 1, 48, dtype=torch.bfloat16)
    keys = random(2, 2, 192, 48, dtype=torch.bfloat16)
    first, last = torch.zeros(2, dtype=torch.int32, device=DEVICE), torch.tensor([130], device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            found = decode_attention(q, keys, keys, first, last, 0.2, None, None)
        graph.replay()
    except RuntimeError as error:
        print("a capture that met a new kernel failed:", error)
        found = decode_attention(q, keys, keys, first, last, 0.2, None, None)
    expected = decode_attention.reference(q.float(), keys.float(), keys.float(), first, last, 0.2, None, None)
    assert (found.float() - expected).norm() <= 0.02 * expected.norm()
    assert not notices.notices_so_far()


@pytest.mark.skipif(INTERPRETED, reason="needs FP8 conversions")
@devices
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_the_gated_unit_in_float8(rank, kib):
    arguments = case((70, 200, (rank, rank, rank)), torch.bfloat16, DEVICE)
    _, gate, up, low, _, factors = arguments
    with assumed(small(kib, gate)):
        if not kernels.in_one_pass(gate, rank):
            pytest.skip("products of their own")
        codes, low_down = kernels.lora_glu_float8(gate, up, low, factors, "silu", slot_of(E4M3, 16.0, DEVICE))
        hidden, u_down = kernels.lora_glu(gate, up, low, factors, "silu")
    assert torch.equal(low_down, u_down)
    assert torch.equal(codes.float(), (hidden.float() * 16).clamp(-448, 448).to(E4M3).float())
    assert not notices.notices_so_far()
