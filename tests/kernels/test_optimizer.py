"""Compare the Triton optimizer step with the reference, on a GPU and in Triton's interpreter."""

import pytest
import torch

from halfbyte.ops.optimizer import ROUNDINGS, TRUSTS, Coefficients, full_weight, scale_by_trust, update_parameters
from halfbyte.ops.optimizer_state import STORAGES
from tests.helpers.optimizer_cases import KINDS, SIZES, coefficients_of, copied, exact_sqrt, make
from tests.helpers.parity import DEVICE, INTERPRETED, mark

pytest.importorskip("triton")
from halfbyte.kernels.triton import optimizer as kernels

pytestmark = mark
# The interpreter truncates where a GPU rounds to bf16.
STORED = [each for each in KINDS if not INTERPRETED or each[1] != "bf16"]
ROUNDED = [each for each in ROUNDINGS if not INTERPRETED or each != "nearest"]
FEW = (1, 257, 4097) if INTERPRETED else SIZES
TIES = 0.0 if INTERPRETED else 1e-4  # share of the codes that may differ, by one: GPUs fuse products and sums


def results(rule, storage, rounding="nearest", dtype=torch.float32, step=3):
    """Parameters after a step of the kernel, on the CPU, and after one of the reference."""
    before = make(rule, storage, rounding, dtype, dtype, FEW)
    mine, theirs = copied(before, DEVICE), copied(before)
    coefficients, steps = coefficients_of(rule, len(FEW), step)
    kernels.update_parameters(coefficients.to(DEVICE), steps.to(DEVICE), mine, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sqrt", exact_sqrt)
        update_parameters.reference(coefficients, steps, theirs, None)
    return copied(mine), theirs


def assert_states_equal(mine, theirs):
    """Check codes of all parameters up to the ties, scales and other states up to roundings of products and sums."""
    storage = STORAGES[mine.storage]
    different = count = 0
    for states, others in zip(mine.states, theirs.states, strict=True):
        for (codes, scales), (expected, wanted) in zip(states, others, strict=True):
            if not storage.block:
                eps = torch.finfo(storage.dtype).eps
                torch.testing.assert_close(codes, expected, rtol=2 * eps, atol=1e-7)
                continue
            torch.testing.assert_close(scales, wanted, rtol=2 * torch.finfo(scales.dtype).eps, atol=1e-12)
            apart = (codes.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
            assert apart.max() <= 1
            different, count = different + int((apart > 0).sum()), count + apart.numel()
    assert different <= TIES * count


@pytest.mark.parametrize(("rule", "storage"), STORED)
def test_states_and_fp32_weights(rule, storage):
    mine, theirs = results(rule, storage)
    assert_states_equal(mine, theirs)
    for weight, expected in zip(mine.weights, theirs.weights, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rounding", ROUNDED)
@pytest.mark.parametrize("storage", ["fp32", "dynamic8"])
def test_bf16_weights(storage, rounding):
    mine, theirs = results("adamw", storage, rounding, torch.bfloat16)
    assert_states_equal(mine, theirs)
    different = count = 0
    for i, (weight, expected) in enumerate(zip(mine.weights, theirs.weights, strict=True)):
        torch.testing.assert_close(weight.float(), expected.float(), rtol=2**-7, atol=1e-7)
        if mine.corrections:
            found, wanted = (full_weight(one.weights[i], one.corrections[i]) for one in (mine, theirs))
            rtol = 2**-15 if rounding == "correction8" else 1e-6
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=1e-7)
        different, count = different + int((weight != expected).sum()), count + len(weight)
    assert different <= 10 * TIES * count


@pytest.mark.parametrize("rule", ["adamw", "ademamix", "lion"])
@pytest.mark.parametrize("step", [1, 100])
def test_coefficients(rule, step):
    expected, steps = coefficients_of(rule, 5, step)
    assert torch.equal(steps, torch.full((5,), float(step)))
    settings = torch.tensor([[0.01, 0.1, 0.9, 0.99, 0.999, 1e-8, 5.0, 50.0, 50.0]], dtype=torch.float64)
    groups, factor = torch.zeros(5, dtype=torch.int32), torch.tensor(0.5)
    found = torch.empty_like(expected), steps - 1
    mine = torch.empty_like(expected, device=DEVICE), (steps - 1).to(DEVICE)
    kernels.reference.prepare_step.reference(settings, groups, found[1], found[0], rule, factor)
    moved = [each.to(DEVICE) for each in (settings, groups)]
    kernels.prepare_step(*moved, mine[1], mine[0], rule, factor.to(DEVICE))
    torch.testing.assert_close(mine[0].cpu(), found[0], rtol=3e-7, atol=0)
    assert torch.equal(mine[1].cpu(), found[1])


TRUSTED = [(trust, rule, storage) for trust, row in TRUSTS.items() for rule, storage in STORED if rule in row.rules]


@pytest.mark.parametrize(("trust", "rule", "storage"), TRUSTED)
def test_trust_ratios(trust, rule, storage):
    """A weight of zeros and one without elements are among the parameters; orders of rows and parameters differ."""
    sizes = (*FEW, 256, 0)
    before = make(rule, storage, sizes=sizes)
    before.weights[-2].zero_()
    if trust == "clip":
        before.gradients[1] *= 1e4  # clipped, if its state is young
    mine, theirs = copied(before, DEVICE), copied(before)
    coefficients, _ = coefficients_of(rule, len(sizes), 3)
    coefficients[:, Coefficients._fields.index("alpha")] = 0.01
    found, expected = coefficients.to(DEVICE, copy=True), coefficients.clone()
    squares = kernels.scale_by_trust(found, [mine], trust)
    torch.testing.assert_close(squares.cpu(), scale_by_trust.reference(expected, [theirs], trust), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=0)
    changed = (expected != coefficients).any(0).nonzero().flatten().tolist()
    assert changed == sorted(Coefficients._fields.index(name) for name in TRUSTS[trust].scales)


@pytest.mark.parametrize("rounding", ["correction8", "correction16"])
def test_trust_ratios_of_full_weights(rounding):
    before = make("adamw", "dynamic8", rounding, torch.bfloat16, torch.bfloat16, (257, 33))
    mine, theirs = copied(before, DEVICE), copied(before)
    (found, _), (expected, _) = (coefficients_of("adamw", 2, 1) for _ in range(2))
    squares = kernels.scale_by_trust(found.to(DEVICE), [mine], "lamb").cpu()
    torch.testing.assert_close(squares, scale_by_trust.reference(expected, [theirs], "lamb"), rtol=1e-5, atol=0)
    full = full_weight(before.weights[0], before.corrections[0]).square().sum()
    torch.testing.assert_close(squares[1, 0], full, rtol=1e-6, atol=0)


def test_a_broken_step_changes_nothing():
    before = make("adamw", "dynamic8", sizes=(257,))
    mine = copied(before, DEVICE)
    given = [each.to(DEVICE) for each in coefficients_of("adamw", 1, 1)]
    kernels.update_parameters(*given, mine, torch.ones((), device=DEVICE))
    assert torch.equal(mine.weights[0].cpu(), before.weights[0])
    kernels.update_parameters(*given, mine, torch.zeros((), device=DEVICE))
    assert not torch.equal(mine.weights[0].cpu(), before.weights[0])


@pytest.mark.parametrize("max_norm", [0.5, 1e6, float("inf")])
def test_gradient_norm_and_clipping_factor(max_norm, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 4)  # 1024 take minutes in the interpreter
    kinds = [make("adamw", "fp32", sizes=FEW), make("adamw", "dynamic8", dtype=torch.bfloat16, sizes=(3, 2049, 0))]
    coefficients = torch.zeros(1)
    mine = [copied(each, DEVICE) for each in kinds]
    found = kernels.gradient_norm(coefficients.to(DEVICE), mine, max_norm).cpu()
    gradients = torch.cat([each.double() for kind in kinds for each in kind.gradients])
    norm = gradients.norm()
    expected = torch.stack([norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)]).float()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    reference = kernels.reference.gradient_norm.reference(coefficients, kinds, max_norm)  # sums in fp32 in one order
    torch.testing.assert_close(reference, expected, rtol=3e-6, atol=0)
    assert (expected[1] < 1) == (max_norm == 0.5)
    assert torch.equal(kernels.gradient_norm(coefficients.to(DEVICE), mine, max_norm).cpu(), found)
    mine[1].gradients[1][-1] = float("nan")
    norm, factor = kernels.gradient_norm(coefficients.to(DEVICE), mine, max_norm).cpu()
    assert norm.isnan()
    assert factor.isnan() == (max_norm != float("inf"))


def test_a_clipped_step_of_all_parameters_is_four_launches(monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    launched = []
    for name in ("_squares", "_norm", "_prepare", "_update"):
        launcher = getattr(kernels, f"{name}_launcher")

        def counted(*arguments, name=name, launcher=launcher):
            launched.append(name)
            launcher(*arguments)

        monkeypatch.setattr(kernels, f"{name}_launcher", counted)
    mine = copied(make("adamw", "fp32", sizes=(1, 257, 4097)), DEVICE)
    coefficients, steps = (each.to(DEVICE) for each in coefficients_of("adamw", 3, 1))
    settings = torch.tensor([[0.01, 0.1, 0.9, 0.99, 0.999, 1e-8, 5.0, 0.0, 0.0]], dtype=torch.float64, device=DEVICE)
    groups = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    _, factor = kernels.gradient_norm(coefficients, [mine], 1.0)
    kernels.prepare_step(settings, groups, steps, coefficients, "adamw", factor)
    kernels.update_parameters(coefficients, steps, mine, None)
    assert launched == ["_squares", "_norm", "_prepare", "_update"]
