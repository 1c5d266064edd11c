"""Compare the Triton kernels of the Muon step with the reference, on a GPU and in Triton's interpreter."""

import copy

import pytest
import torch

from halfbyte.ops.muon import apply_directions, dequantize_momentum, directions, quantize_momentum
from halfbyte.ops.optimizer import Parameters
from tests.helpers.parity import DEVICE, INTERPRETED, mark

pytest.importorskip("triton")
from halfbyte.kernels.triton import muon as kernels

pytestmark = mark
SHAPES = [(1, 1), (33, 17), (64, 32), (3, 8, 86), (41, 100)]
ROUNDED = (torch.float32,) if INTERPRETED else (torch.float32, torch.bfloat16)  # the interpreter truncates to bf16


def make(shape, bits, weight=torch.float32, gradient=torch.float32, count=3):
    generator = torch.Generator().manual_seed(len(shape) + bits)

    def drawn():
        return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator).pow(6)

    momenta = [drawn() for _ in range(count)]
    states = [[(momentum, None)] for momentum in momenta]
    if bits == 8:
        stored = [quantize_momentum(momentum[None]) for momentum in momenta]
        states = [[(codes[0], scales[0])] for codes, scales in stored]
    weights, gradients = [drawn().to(weight) for _ in range(count)], [drawn().to(gradient) for _ in range(count)]
    rows = torch.arange(count, dtype=torch.int32)
    return Parameters("muon", f"{bits} bits", "nearest", rows, weights, gradients, states)


def copied(parameters, device="cpu"):
    found = copy.copy(parameters)
    found.launch = {}
    found.weights, found.gradients = (
        [each.to(device, copy=True) for each in tensors] for tensors in (parameters.weights, parameters.gradients)
    )
    found.states = [
        [tuple(part if part is None else part.to(device, copy=True) for part in pair) for pair in state]
        for state in parameters.states
    ]
    return found


def assert_momenta_close(mine, theirs):
    for [[codes, scales]], [[expected, wanted]] in zip(mine.states, theirs.states, strict=True):
        if scales is None:
            torch.testing.assert_close(codes.cpu(), expected, rtol=1e-6, atol=1e-7)
            continue
        torch.testing.assert_close(scales.cpu(), wanted, rtol=1e-6, atol=0)
        apart = (codes.cpu().int() - expected.int()).abs()
        assert apart.max() <= 1  # a tie, after sums that are rounded differently
        assert (apart > 0).sum() <= 1e-3 * apart.numel() + 1


@pytest.mark.parametrize("out", ROUNDED)
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("nesterov", "scaled"), [(True, False), (False, True)])
@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_directions_and_momenta(shape, bits, nesterov, scaled, gradient, out):
    before = make(shape, bits, gradient=gradient)
    mine, theirs = copied(before, DEVICE), copied(before)
    found, expected = (torch.full((3, *shape), torch.nan, dtype=out) for _ in range(2))
    found = found.to(DEVICE)
    scale = torch.tensor(8.0) if scaled else None
    given = (0.9, nesterov, None if scale is None else scale.to(DEVICE), torch.zeros((), device=DEVICE))
    assert kernels._obstacle(found, mine) is None
    kernels.directions(found, mine, *given)
    directions.reference(expected, theirs, 0.9, nesterov, scale)
    rtol = 1e-5 if out == torch.float32 else 2**-7
    torch.testing.assert_close(found.cpu(), expected, rtol=rtol, atol=1e-7)
    assert_momenta_close(mine, theirs)
    for [mean], [old] in zip(mine.states, before.states, strict=True):
        assert not torch.equal(mean[bits == 8].cpu(), old[bits == 8])  # scales of 8-bit momenta


@pytest.mark.parametrize("weight", ROUNDED)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights(shape, weight):
    before = make(shape, 32, weight)
    mine, theirs = copied(before, DEVICE), copied(before)
    found = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    lr = torch.tensor(0.03)
    kernels.apply_directions(found.to(DEVICE), mine, lr.to(DEVICE), 0.2, 1.7, torch.zeros((), device=DEVICE))
    apply_directions.reference(found, theirs, lr, 0.2, 1.7)
    rtol = 1e-5 if weight == torch.float32 else 2**-7
    for one, other, old in zip(mine.weights, theirs.weights, before.weights, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=rtol, atol=1e-6)
        assert not torch.equal(one.cpu(), old)


@pytest.mark.parametrize("bits", [8, 32])
def test_a_broken_step_changes_nothing(bits):
    before = make((33, 70), bits)
    mine, broken = copied(before, DEVICE), torch.ones((), device=DEVICE)
    out = torch.full((3, 33, 70), torch.nan, device=DEVICE)
    kernels.directions(out, mine, 0.9, True, None, broken)
    kernels.apply_directions(out, mine, torch.tensor(0.1, device=DEVICE), 0.1, 1.0, broken)
    for one, other in zip(mine.weights, before.weights, strict=True):
        assert torch.equal(one.cpu(), other)
    for [[codes, _]], [[expected, _]] in zip(mine.states, before.states, strict=True):
        assert torch.equal(codes.cpu(), expected)


def test_new_gradients_are_read_at_their_new_addresses():
    mine, theirs = copied(make((5, 7), 32), DEVICE), copied(make((5, 7), 32))
    for step in range(3):
        gradients = [torch.randn(5, 7, generator=torch.Generator().manual_seed(step)) for _ in range(3)]
        theirs.gradients, mine.gradients = gradients, [each.to(DEVICE) for each in gradients]
        mine.version += 1
        found, expected = torch.empty(3, 5, 7, device=DEVICE), torch.empty(3, 5, 7)
        kernels.directions(found, mine, 0.5, False)
        directions.reference(expected, theirs, 0.5, False)
        torch.testing.assert_close(found.cpu(), expected)


def test_strided_and_wide_tensors_are_refused():
    parameters = make((4, 6), 32)
    parameters.weights[1] = torch.randn(6, 4).mT
    assert kernels._obstacle(torch.empty(3, 4, 6), parameters) is not None
    assert kernels._obstacle(torch.empty(3, 4, 6), make((4, 6), 32, torch.float64)) is not None


def test_a_round_trip_of_8_bits_is_exact_for_its_own_codes():
    codes, scales = make((41, 100), 8).states[0][0]
    again, _ = quantize_momentum(dequantize_momentum(codes[None], scales[None]))
    assert torch.equal(again[0], codes)


@pytest.mark.parametrize("bits", [8, 32])
def test_the_optimizer_follows_the_reference(bits, monkeypatch):
    """New and reused gradient tensors, a matrix without a gradient in some steps, stacks, splits and a moved weight."""
    from halfbyte.optim import muon

    found = []
    for on_kernels in (True, False):
        for op in (directions, apply_directions):
            monkeypatch.setattr(muon, op.reference.__name__, op.on("cuda") if on_kernels else op.reference)
        monkeypatch.setattr(muon, "product_dtype", lambda tensor: torch.float32)
        device = DEVICE if on_kernels else "cpu"
        generator = torch.Generator().manual_seed(1)
        shapes = [(33, 70), (33, 70), (70, 33), (2, 24, 10)]
        given = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
        optimizer = muon.Muon(given, 0.03, momentum_bits=bits, splits={given[2]: [30, 40]})
        for step in range(5):
            for number, parameter in enumerate(given):
                new = torch.randn(parameter.shape, generator=generator).to(device)
                if step % 2 and parameter.grad is not None:
                    parameter.grad.copy_(new)
                else:
                    parameter.grad = None if (number, step) == (1, 2) else new
            if step == 3:
                given[0].data = given[0].data.clone()
            optimizer.step()
        found.append([parameter.detach().cpu() for parameter in given])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 if bits == 32 else 1e-3)
