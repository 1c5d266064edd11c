"""The gated unit with its low-rank products against the reference, on a GPU and in Triton's interpreter."""

import pytest
import torch
from lora_glu_cases import assert_cast, assert_close_to, case, moved, run_backward, run_forward, slot_of
from parity import DEVICE, INTERPRETED, dtypes, mark, poisoned  # noqa: F401

from halfbyte.errors import ModelError
from halfbyte.ops.float8 import E4M3, E5M2
from halfbyte.ops.glu import ACTIVATIONS
from halfbyte.ops.lora_glu import lora_glu as forward
from halfbyte.ops.lora_glu import lora_glu_backward_ as backward_

pytest.importorskip("triton")
from halfbyte.kernels.cuda import lora_glu as lora_glu_cuda
from halfbyte.kernels.triton import lora_glu as kernels

pytestmark = mark

# Rows, width, ranks of gate, up and down: less than a tile, ends inside a tile, ranks apart; several parts, wide ranks.
SIZES = [(13, 37, (1, 2, 3)), (70, 200, (16, 16, 16)), (65, 129, (8, 20, 4))]
if not INTERPRETED:
    SIZES += [(1100, 1032, (16, 16, 16)), (300, 14336, (32, 32, 32)), (257, 640, (64, 64, 64))]
    SIZES += [(261, 14336, (16, 8, 16)), (2000, 72, (8, 16, 8))]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.fixture(params=["triton"] if INTERPRETED else ["triton", "cuda"], autouse=True)
def way(request, monkeypatch):
    """Which kernels run, and no others; skips what is not for CUDA's."""
    if request.param == "triton":
        monkeypatch.setattr(lora_glu_cuda, "takes", lambda *arguments: False)
        return
    asked = request.node.callspec.params
    _, width, ranks = asked.get("size", (0, 8, lora_glu_cuda.RANKS))
    fits = width % lora_glu_cuda.LANE_COLUMNS == 0 and set(ranks) <= set(lora_glu_cuda.RANKS)
    known = asked.get("activation", "silu") in lora_glu_cuda.ACTIVATIONS
    if not fits or not known or asked.get("dtype") is torch.float32:
        pytest.skip("Triton's")
    if torch.cuda.get_device_capability() < lora_glu_cuda.CAPABILITY:
        pytest.skip("needs Hopper")
    if "size" in asked:
        monkeypatch.setattr(kernels, "_forward_launcher", None)
        monkeypatch.setattr(kernels, "_backward_launcher", None)


def arguments_of(size, dtype):
    if not kernels.in_one_pass(torch.empty(0, dtype=dtype, device=DEVICE), max(size[2])):
        pytest.skip("its factors do not fit into shared memory")
    return case(size, dtype, DEVICE)


@dtypes
@sizes
@activations
def test_forward(size, dtype, activation):
    arguments = arguments_of(size, dtype)
    before = moved(arguments, torch.clone)
    mine = run_forward(kernels.lora_glu, arguments, activation)
    assert_close_to(forward.reference, run_forward, mine, before, activation)


@dtypes
@sizes
@activations
def test_backward(size, dtype, activation):
    arguments = arguments_of(size, dtype)
    before, versions = moved(arguments, torch.clone), (arguments[1]._version, arguments[2]._version)
    mine = run_backward(kernels.lora_glu_backward_, arguments, activation)
    assert_close_to(backward_.reference, run_backward, mine, before, activation)
    assert (arguments[1]._version, arguments[2]._version) > versions


def test_no_rows():
    arguments = arguments_of((0, 24, (4, 4, 4)), torch.float32)
    assert [tuple(t.shape) for t in run_forward(kernels.lora_glu, arguments, "silu")] == [(0, 24), (0, 4)]
    gradients = run_backward(kernels.lora_glu_backward_, arguments, "silu")[3:]
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_what_does_not_fit_is_named():
    grad, gate, up, low, v_down, factors = arguments_of((6, 24, (4, 4, 4)), torch.float32)
    with pytest.raises(ModelError, match="low is"):
        kernels.lora_glu(gate, up, low[:, 1:], factors, "silu")
    with pytest.raises(ModelError, match="b_up is"):
        kernels.lora_glu(gate, up, low, factors._replace(b_up=factors.b_up.half()), "silu")
    with pytest.raises(ModelError, match="v_down is"):
        kernels.lora_glu_backward_(grad, gate, up, low, v_down[1:], factors, "silu")


@pytest.mark.skipif(INTERPRETED, reason="about the GPU's atomics and caches")
def test_every_run_gives_the_same_bits():
    arguments = arguments_of((1100, 1032, (16, 16, 16)), torch.bfloat16)
    runs = [run_backward(kernels.lora_glu_backward_, moved(arguments, torch.clone), "silu") for _ in range(3)]
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(runs[0], run, strict=True))


few_sizes = pytest.mark.parametrize("size", SIZES[1:2] if INTERPRETED else SIZES, ids=str)


@dtypes
@pytest.mark.parametrize("scale", [16.0, 300.0])  # the second saturates
@few_sizes
def test_forward_in_float8(size, dtype, scale):
    arguments = arguments_of(size, dtype)
    hidden, u_down = run_forward(kernels.lora_glu, arguments, "silu")
    _, gate, up, low, _, factors = arguments
    slot = slot_of(E4M3, scale, DEVICE)
    codes, low_down = kernels.lora_glu_float8(gate, up, low, factors, "silu", slot)
    assert codes.dtype is E4M3
    assert torch.equal(low_down, u_down)
    assert_cast(codes, slot, hidden, INTERPRETED)


@dtypes
@pytest.mark.parametrize("columns", [False, True])
@few_sizes
def test_backward_in_float8(size, dtype, columns):
    arguments = arguments_of(size, dtype)
    grad, gate, up, low, v_down, factors = arguments
    factor = torch.rand(2 * size[1]).to(DEVICE) if columns else None
    slot, before = slot_of(E5M2, 100.0, DEVICE), gate.clone()
    options = (grad, gate, up, low, v_down, factors, "silu", slot, factor)
    found, codes = kernels.lora_glu_backward_float8(*options)
    assert torch.equal(gate, before)
    plain = run_backward(kernels.lora_glu_backward_, arguments, "silu")
    for one, other in zip(found, plain[2:], strict=True):
        assert torch.equal(one, other)
    both = torch.cat(plain[:2], dim=1).float()
    assert_cast(codes, slot, both if factor is None else both * factor, INTERPRETED)
