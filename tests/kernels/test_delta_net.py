"""Compare the Triton kernels of a Gated DeltaNet's steps with their references, on a GPU and in the interpreter."""

import pytest
import torch

from halfbyte.ops.delta_net import conv_step_, delta_step_
from tests.helpers.parity import DEVICE, INTERPRETED, dtypes, mark, random

pytest.importorskip("triton")
from halfbyte.kernels.triton import delta_net as kernels

pytestmark = mark

# Key heads, value heads, Dk, Dv.
SHAPES = [(2, 4, 8, 8), (1, 3, 24, 40)] + ([] if INTERPRETED else [(16, 32, 128, 128)])


def inputs(rows, shape, dtype=torch.float32):
    """mixed, a and b of random rows, and the layer's parameters."""
    key_heads, heads, key_size, value_size = shape
    channels = 2 * key_heads * key_size + heads * value_size
    own = random(heads) * 0.5, random(heads) * 0.5
    return (random(rows, channels, dtype=dtype), *(random(rows, heads, dtype=dtype) for _ in range(2)), *own)


@dtypes
@pytest.mark.parametrize(("rows", "channels", "size", "bias"), [(1, 24, 4, False), (3, 300, 3, True)])
def test_convolution(rows, channels, size, bias, dtype):
    x, weight = random(rows, channels, dtype=dtype), random(channels, size, dtype=dtype)
    added = random(channels, dtype=dtype) if bias else None
    states, seats = random(rows + 2, channels, size - 1, dtype=dtype), torch.arange(rows, 0, -1, device=DEVICE)
    mine, theirs = states.clone(), states.clone()
    assert kernels.conv_obstacle(x, weight, added, mine, seats) is None
    found = kernels.conv(x, weight, added, mine, seats)
    expected = conv_step_.reference(x, weight, added, theirs, seats)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(mine, theirs)


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_recurrence(shape, dtype):
    key_heads, heads, key_size, value_size = shape
    arguments = inputs(3, shape, dtype)
    states, seats = random(5, heads, key_size, value_size), torch.tensor([4, 0, 2], device=DEVICE)
    mine, theirs = states.clone(), states.clone()
    assert kernels.delta_obstacle(*arguments, mine, seats, key_heads) is None
    found = kernels.delta(*arguments, mine, seats, key_heads)
    expected = delta_step_.reference(*arguments, theirs, seats, key_heads)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)
    assert torch.equal(mine[[1, 3]], states[[1, 3]])


def test_large_steps():
    """Steps so large that softplus(x) = x, or that a state decays to zero at once."""
    mixed, a, b, a_log, dt_bias = inputs(2, SHAPES[0])
    a, states = a * 0 + torch.tensor([[25.0], [90.0]], device=DEVICE), random(2, 4, 8, 8)
    mine, theirs, seats = states.clone(), states.clone(), torch.arange(2, device=DEVICE)
    found = kernels.delta(mixed, a.contiguous(), b, a_log - 5, dt_bias, mine, seats, 2)
    expected = delta_step_.reference(mixed, a, b, a_log - 5, dt_bias, theirs, seats, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_unsupported_cases():
    arguments, states = inputs(1, SHAPES[0]), random(1, 4, 8, 8)
    seats = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert "fp32" in kernels.delta_obstacle(*arguments, states.double(), seats, 2)
    assert "contiguous" in kernels.delta_obstacle(*arguments, states.mT, seats, 2)
    assert "contiguous" in kernels.conv_obstacle(random(3, 2).T, states, None, states, seats)
    assert "dtype" in kernels.conv_obstacle(arguments[0], states, None, states.half(), seats)
