"""The gated unit with its low-rank products against the reference, on a GPU and in Triton's interpreter."""

import pytest
import torch
from parity import INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

from halfbyte.errors import ModelError
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
