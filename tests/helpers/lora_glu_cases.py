"""Cases of the gated unit with its low-rank products, and how results are compared, on a GPU and off it."""

import torch

from halfbyte.ops.float8 import E5M2, FP8_MAX
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from halfbyte.ops.lora_glu import Factors
from tests.helpers.parity import assert_as_close_as_torch, exact


def case(size, dtype, device):
    """grad, gate, up, low, v_down, factors of (rows, width, ranks); every term as large as the others."""
    rows, width, (gate, up, down) = size

    def random(*shape, scale=1.0):
        return (torch.randn(*shape) * scale).to(dtype).to(device)

    grad, base_gate, base_up = (random(rows, width) for _ in range(3))
    low, v_down = random(rows, gate + up), random(rows, down, scale=down**-0.5)
    b_gate, b_up = (random(width, rank, scale=rank**-0.5) for rank in (gate, up))
    a_down = random(down, width, scale=width**-0.5)
    return grad, base_gate, base_up, low, v_down, Factors(b_gate, b_up, a_down, 1.5, 0.7)


def moved(arguments, change):
    """The same arguments with every tensor changed."""
    *tensors, factors = arguments
    return *map(change, tensors), Factors(*map(change, factors[:3]), *factors[3:])


def rounded(tensor):
    """A copy on the CPU: what the reference, which is torch's arithmetic, is run on in the same dtype."""
    return tensor.cpu().clone()


def run_forward(function, arguments, activation, *rest):
    _, gate, up, low, _, factors = arguments
    return function(gate, up, low, factors, activation, *rest)


def run_backward(function, arguments, activation):
    grad, gate, up, low, v_down, factors = arguments
    return gate, up, *function(grad, gate, up, low, v_down, factors, activation)


def assert_close_to(reference, run, mine, arguments, activation):
    """`mine` against what `run` gives of the reference, in the same dtype and in fp64."""
    torchs, truths = (run(reference, moved(arguments, change), activation) for change in (rounded, exact))
    for tensor, other, truth in zip(mine, torchs, truths, strict=True):
        assert_as_close_as_torch(tensor.cpu(), other, truth)


def slot_of(dtype, scale, device):
    """Settled, as after a first step."""
    state = DelayedScaling([dtype], ScalingOptions(), device=device)
    state.scale.fill_(scale)
    state.inverse.fill_(1 / scale)
    state.settled = [True]
    return Slot(state, 0)


def assert_cast(codes, slot, plain, interpreted=False):
    """`codes` are `plain` in FP8, up to the rounding that its own sums leave open."""
    limit = FP8_MAX[slot.dtype]
    values, expected = codes.float().cpu(), (plain.float().cpu() * slot.scale.cpu()).clamp(-limit, limit)
    sound = torch.ones_like(expected, dtype=torch.bool)
    if interpreted:  # by Triton, which rounds to FP8 wrongly where the exponent grows
        sound = codes.view(torch.uint8) & (3 if slot.dtype is E5M2 else 7) != 0
    step = 2.0 ** (-2 if slot.dtype is E5M2 else -3)
    torch.testing.assert_close(values[sound], expected[sound], rtol=step * 0.51, atol=2**-6)
    torch.testing.assert_close(slot.newest.cpu(), plain.float().abs().max().cpu(), rtol=2e-3, atol=0)
