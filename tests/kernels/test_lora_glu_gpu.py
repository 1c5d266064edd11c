"""The gated unit with its low-rank products against the reference, on a GPU and in Triton's interpreter."""

import pytest
import torch
from parity import DEVICE, INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

from halfbyte.errors import ModelError
from halfbyte.ops.float8 import E4M3, E5M2, FP8_MAX
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from halfbyte.ops.glu import ACTIVATIONS
from halfbyte.ops.lora_glu import MAX_RANK_BYTES, Factors
from halfbyte.ops.lora_glu import lora_glu as forward
from halfbyte.ops.lora_glu import lora_glu_backward_ as backward_

pytest.importorskip("triton")
from halfbyte.kernels import lora_glu as kernels

pytestmark = mark

# Rows, width, ranks of gate, up and down: less than a tile, ends inside a tile, ranks apart; several parts, wide ranks.
SIZES = [(13, 37, (1, 2, 3)), (70, 200, (16, 16, 16)), (65, 129, (8, 20, 4))]
if not INTERPRETED:
    SIZES += [(1100, 1032, (16, 16, 16)), (300, 14336, (32, 32, 32)), (257, 640, (64, 64, 64))]
sizes = pytest.mark.parametrize("size", SIZES, ids=str)
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


def case(size, dtype):
    """grad, gate, up, low, v_down, factors; every term as large as the others."""
    if max(size[2]) * dtype.itemsize > MAX_RANK_BYTES:
        pytest.skip("its factors do not fit into shared memory")
    rows, width, (gate, up, down) = size
    grad, base_gate, base_up = (random(rows, width, dtype=dtype) for _ in range(3))
    low, v_down = random(rows, gate + up, dtype=dtype), random(rows, down, dtype=dtype, scale=down**-0.5)
    b_gate, b_up = (random(width, rank, dtype=dtype, scale=rank**-0.5) for rank in (gate, up))
    a_down = random(down, width, dtype=dtype, scale=width**-0.5)
    return grad, base_gate, base_up, low, v_down, Factors(b_gate, b_up, a_down, 1.5, 0.7)


def moved(arguments, change):
    """The same arguments with every tensor changed."""
    *tensors, factors = arguments
    return *map(change, tensors), Factors(*map(change, factors[:3]), *factors[3:])


def rounded(tensor):
    """A copy on the CPU: what the reference, which is torch's arithmetic, is run on in the same dtype."""
    return tensor.cpu().clone()


def run_forward(function, arguments, activation):
    _, gate, up, low, _, factors = arguments
    return function(gate, up, low, factors, activation)


def run_backward(function, arguments, activation):
    grad, gate, up, low, v_down, factors = arguments
    return gate, up, *function(grad, gate, up, low, v_down, factors, activation)


def assert_all_close(mine, torchs, truths):
    for tensor, other, truth in zip(mine, torchs, truths, strict=True):
        assert_as_close_as_torch(tensor.cpu(), other, truth)


@dtypes
@sizes
@activations
def test_forward(size, dtype, activation):
    arguments = case(size, dtype)
    runs = moved(arguments, rounded), moved(arguments, exact)
    torchs, truths = (run_forward(forward.reference, run, activation) for run in runs)
    assert_all_close(run_forward(kernels.lora_glu, arguments, activation), torchs, truths)


@dtypes
@sizes
@activations
def test_backward(size, dtype, activation):
    arguments = case(size, dtype)
    runs = moved(arguments, rounded), moved(arguments, exact)
    torchs, truths = (run_backward(backward_.reference, run, activation) for run in runs)
    versions = arguments[1]._version, arguments[2]._version
    assert_all_close(run_backward(kernels.lora_glu_backward_, arguments, activation), torchs, truths)
    assert (arguments[1]._version, arguments[2]._version) > versions


def test_no_rows():
    arguments = case((0, 24, (4, 4, 4)), torch.float32)
    assert [tuple(t.shape) for t in run_forward(kernels.lora_glu, arguments, "silu")] == [(0, 24), (0, 4)]
    gradients = run_backward(kernels.lora_glu_backward_, arguments, "silu")[3:]
    assert all(bool((gradient == 0).all()) for gradient in gradients)


def test_what_does_not_fit_is_named():
    grad, gate, up, low, v_down, factors = case((6, 24, (4, 4, 4)), torch.float32)
    with pytest.raises(ModelError, match="low is"):
        kernels.lora_glu(gate, up, low[:, 1:], factors, "silu")
    with pytest.raises(ModelError, match="b_up is"):
        kernels.lora_glu(gate, up, low, factors._replace(b_up=factors.b_up.half()), "silu")
    with pytest.raises(ModelError, match="v_down is"):
        kernels.lora_glu_backward_(grad, gate, up, low, v_down[1:], factors, "silu")


@pytest.mark.skipif(INTERPRETED, reason="about the GPU's atomics and caches")
def test_every_run_gives_the_same_bits():
    arguments = case((1100, 1032, (16, 16, 16)), torch.bfloat16)
    runs = [run_backward(kernels.lora_glu_backward_, moved(arguments, torch.clone), "silu") for _ in range(3)]
    assert all(torch.equal(*pair) for run in runs[1:] for pair in zip(runs[0], run, strict=True))


def slot_of(dtype, scale):
    """Settled, as after a first step."""
    state = DelayedScaling([dtype], ScalingOptions(), device=DEVICE)
    state.scale.fill_(scale)
    state.inverse.fill_(1 / scale)
    state.settled = [True]
    return Slot(state, 0)


def assert_cast(codes, slot, plain):
    """`codes` are `plain` in FP8, up to the rounding that its own sums leave open."""
    limit = FP8_MAX[slot.dtype]
    values, expected = codes.float().cpu(), (plain.float().cpu() * slot.scale.cpu()).clamp(-limit, limit)
    sound = torch.ones_like(expected, dtype=torch.bool)
    if INTERPRETED:  # which rounds to FP8 wrongly where the exponent grows
        sound = codes.view(torch.uint8) & (3 if slot.dtype is E5M2 else 7) != 0
    step = 2.0 ** (-2 if slot.dtype is E5M2 else -3)
    torch.testing.assert_close(values[sound], expected[sound], rtol=step * 0.51, atol=2**-6)
    torch.testing.assert_close(slot.newest.cpu(), plain.float().abs().max().cpu(), rtol=2e-3, atol=0)


few_sizes = pytest.mark.parametrize("size", SIZES[1:2] if INTERPRETED else SIZES, ids=str)


@dtypes
@pytest.mark.parametrize("scale", [16.0, 300.0])  # the second saturates
@few_sizes
def test_forward_in_float8(size, dtype, scale):
    arguments = case(size, dtype)
    hidden, u_down = run_forward(kernels.lora_glu, arguments, "silu")
    _, gate, up, low, _, factors = arguments
    slot = slot_of(E4M3, scale)
    codes, low_down = kernels.lora_glu_float8(gate, up, low, factors, "silu", slot)
    assert codes.dtype is E4M3
    assert torch.equal(low_down, u_down)
    assert_cast(codes, slot, hidden)


@dtypes
@pytest.mark.parametrize("columns", [False, True])
@few_sizes
def test_backward_in_float8(size, dtype, columns):
    arguments = case(size, dtype)
    grad, gate, up, low, v_down, factors = arguments
    factor = torch.rand(2 * size[1]).to(DEVICE) if columns else None
    slot, before = slot_of(E5M2, 100.0), gate.clone()
    options = (grad, gate, up, low, v_down, factors, "silu", slot, factor)
    found, codes = kernels.lora_glu_backward_float8(*options)
    assert torch.equal(gate, before)
    plain = run_backward(kernels.lora_glu_backward_, arguments, "silu")
    for one, other in zip(found, plain[2:], strict=True):
        assert torch.equal(one, other)
    both = torch.cat(plain[:2], dim=1).float()
    assert_cast(codes, slot, both if factor is None else both * factor)
