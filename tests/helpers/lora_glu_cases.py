"""Cases of the gated unit with its low-rank products, and the comparison of results."""

import torch

from halfbyte.formats.float8 import E5M2, FP8_MAX
from halfbyte.ops.dropout import Dropout
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from halfbyte.ops.lora_glu import Factors
from tests.helpers.parity import assert_as_close_as_torch, exact


def case(size, dtype, device, dropout=0.0):
    """grad, gate, up, low, v_down, factors for (rows, width, ranks); all terms have the same magnitude."""
    rows, width, (gate, up, down) = size

    def random(*shape, scale=1.0):
        return (torch.randn(*shape) * scale).to(dtype).to(device)

    grad, base_gate, base_up = (random(rows, width) for _ in range(3))
    low, v_down = random(rows, gate + up), random(rows, down, scale=down**-0.5)
    b_gate, b_up = (random(width, rank, scale=rank**-0.5) for rank in (gate, up))
    a_down = random(down, width, scale=width**-0.5)
    mask = Dropout(dropout, torch.randint(2**63 - 1, (1,)).to(device), 640) if dropout else None
    return grad, base_gate, base_up, low, v_down, Factors(b_gate, b_up, a_down, 1.5, 0.7, mask)


def moved(arguments, change):
    """Apply `change` to every tensor of the arguments except the seeds of dropout, which follow to its device."""
    *tensors, factors = arguments
    changed = Factors(*map(change, factors[:3]), *factors[3:])
    if factors.dropout is not None:
        seeds = factors.dropout.seeds.to(changed.a_down.device)
        changed = changed._replace(dropout=factors.dropout._replace(seeds=seeds))
    return *map(change, tensors), changed


def rounded(tensor):
    """Copy to the CPU, where the reference runs in torch's arithmetic in the same dtype."""
    return tensor.cpu().clone()


def run_forward(function, arguments, activation, *rest):
    _, gate, up, low, _, factors = arguments
    return function(gate, up, low, factors, activation, *rest)


def run_backward(function, arguments, activation):
    grad, gate, up, low, v_down, factors = arguments
    return gate, up, *function(grad, gate, up, low, v_down, factors, activation)


def assert_close_to(reference, run, mine, arguments, activation):
    """Compare `mine` with the result of `run` on the reference, in the same dtype and in fp64."""
    torchs, truths = (run(reference, moved(arguments, change), activation) for change in (rounded, exact))
    for tensor, other, truth in zip(mine, torchs, truths, strict=True):
        assert_as_close_as_torch(tensor.cpu(), other, truth)


def slot_of(dtype, scale, device):
    """An FP8 slot after its first step, with this scale."""
    state = DelayedScaling([dtype], ScalingOptions(), device=device)
    state.scale.fill_(scale)
    state.inverse.fill_(1 / scale)
    state.settled = [True]
    return Slot(state, 0)


def assert_cast(codes, slot, plain, interpreted=False):
    """Check that `codes` are `plain` in FP8, up to the rounding differences of the kernel's sums."""
    limit = FP8_MAX[slot.dtype]
    values, expected = codes.float().cpu(), (plain.float().cpu() * slot.scale.cpu()).clamp(-limit, limit)
    sound = torch.ones_like(expected, dtype=torch.bool)
    if interpreted:  # Triton's interpreter rounds to FP8 wrongly where the exponent grows
        sound = codes.view(torch.uint8) & (3 if slot.dtype is E5M2 else 7) != 0
    step = 2.0 ** (-2 if slot.dtype is E5M2 else -3)
    torch.testing.assert_close(values[sound], expected[sound], rtol=step * 0.51, atol=2**-6)
    torch.testing.assert_close(slot.newest.cpu(), plain.float().abs().max().cpu(), rtol=2e-3, atol=0)
