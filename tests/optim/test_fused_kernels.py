"""Compare the optimizers' C kernel with the reference, bit for bit."""

import pytest
import torch

from halfbyte.ops.optimizer import (
    ROUNDINGS,
    RULES,
    TRUSTS,
    Coefficients,
    prepare_step,
    scale_by_trust,
    update_parameters,
)
from halfbyte.ops.optimizer_state import STORAGES, middles
from halfbyte.utils.errors import ModelError
from tests.helpers.kernel_backends import MARKS
from tests.helpers.optimizer_cases import KINDS, coefficients_of, copied, exact_sqrt, make, random_values, tensors

pytestmark = MARKS["cpu"]
kinds = pytest.mark.parametrize(("rule", "storage"), KINDS)


@pytest.fixture(autouse=True, scope="module")
def kernel():
    from halfbyte.kernels.native import optimizer

    return optimizer


@pytest.fixture
def rounded_root(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "sqrt", exact_sqrt)


def unequal(mine, theirs):
    pairs = zip(tensors(mine), tensors(theirs), strict=True)
    return [(name, int((one != other).sum())) for (name, one), (_, other) in pairs if not torch.equal(one, other)]


def run_both(parameters, kernel, steps=2):
    """Return the results of the kernel and of the reference after some steps."""
    mine, theirs = copied(parameters), copied(parameters)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        given = coefficients_of(parameters.rule, len(parameters.weights), step)
        assert kernel.obstacle(*given, mine) is None
        kernel.update_parameters(*given, mine, None)
        update_parameters.reference(*given, theirs, None)
        for i, gradient in enumerate(mine.gradients):
            new = random_values(len(gradient), generator).to(gradient.dtype)
            gradient.copy_(new)
            theirs.gradients[i].copy_(new)
    return mine, theirs


@pytest.mark.sampled(5)
@kinds
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_steps_of_bf16_weights_equal_the_reference(rule, storage, rounding, kernel, rounded_root):
    before = make(rule, storage, rounding, torch.bfloat16, torch.bfloat16)
    mine, theirs = run_both(before, kernel)
    assert not unequal(mine, theirs)
    assert len(unequal(mine, before)) >= len(tensors(mine)) // 2


@pytest.mark.sampled(5)
@kinds
@pytest.mark.parametrize(
    ("dtype", "gradient"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)],
    ids=["fp32", "fp32-bf16", "fp16-fp32"],
)
def test_steps_of_other_dtypes_equal_the_reference(rule, storage, dtype, gradient, kernel, rounded_root):
    assert not unequal(*run_both(make(rule, storage, dtype=dtype, gradient=gradient, sizes=(1, 257, 4097)), kernel))


def test_midpoints_and_their_neighbours_get_the_references_codes(kernel):
    """The coefficients make the first moment the gradient, and the second one its square."""
    stored, ratios = STORAGES["dynamic8"], []
    for signed in (True, False):
        table = stored.ratios(torch.arange(256, dtype=torch.uint8), signed)
        limits = torch.cat([middles(table), table])
        ratios.append(limits if signed else exact_sqrt(limits))
    tiny = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1e-22, 3e-20, 1e-9, -1e-9])
    values = torch.cat([*ratios, tiny])
    up, down = (torch.nextafter(values, torch.tensor(side)) for side in (torch.inf, -torch.inf))
    values = torch.cat([values, up, down]).clamp(-1, 1)
    values = torch.nn.functional.pad(values, (0, -len(values) % (stored.block - 1))).view(-1, stored.block - 1)
    values = torch.nn.functional.pad(values, (1, 0), value=1.0).flatten()  # 1 makes each block's scale 1
    numbers = dict.fromkeys(Coefficients._fields, 0.0) | dict.fromkeys(("scale", "eps", "rest1", "rest2"), 1.0)
    given = torch.tensor([[*numbers.values()]]), torch.ones(1)
    before = make("adamw", "dynamic8", sizes=(len(values),))
    before.gradients = [values]
    mine, theirs = copied(before), copied(before)
    kernel.update_parameters(*given, mine, None)
    update_parameters.reference(*given, theirs, None)
    assert not unequal(mine, theirs)
    assert torch.equal(mine.states[0][0][1], torch.ones(len(values) // stored.block))
    assert len(mine.states[0][0][0].unique()) == 256


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0])
def test_coefficients_equal_the_reference(rule, found_inf, kernel):
    settings = torch.tensor(
        [[0.01, 0.1, 0.9, 0.99, 0.9999, 1e-8, 5.0, 50.0, 70.0], [1e-3, 0.0, 0.95, 0.999, 0.999, 1e-6, 8.0, 0.0, 0.0]],
        dtype=torch.float64,
    )
    groups = torch.tensor([0, 0, 1, 1, 0, 1, 1], dtype=torch.int32)
    mine = [torch.tensor([1.0, 1.0, 1.0, 7.0, 48.0, 1e5, 2.0**23]), torch.empty(7, len(Coefficients._fields))]
    theirs = [each.clone() for each in mine]
    rest = rule, torch.tensor(0.3), None if found_inf is None else torch.tensor(found_inf)
    kernel.prepare_step(settings, groups, *mine, *rest)
    prepare_step.reference(settings, groups, *theirs, *rest)
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1.2e-7, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("trust", "rule", "storage"),
    [(trust, rule, storage) for trust, row in TRUSTS.items() for rule, storage in KINDS if rule in row.rules],
)
def test_trust_ratios_equal_the_reference(trust, rule, storage, kernel):
    """A weight of zeros, a parameter without elements, and NaN in a gradient, which stays in its row."""
    sizes = (1, 257, 4097, 300, 256, 0)
    parameters = [make(rule, storage, sizes=sizes), make(rule, "fp32", gradient=torch.bfloat16, sizes=(700,))]
    parameters[1].rows += len(sizes)
    parameters[0].weights[4].zero_()
    parameters[0].gradients[3][7] = torch.nan
    parameters[0].gradients[1] *= 1e4
    before, _ = coefficients_of(rule, len(sizes) + 1, 3)
    before[:, Coefficients._fields.index("alpha")] = 0.01
    mine, theirs = before.clone(), before.clone()
    assert kernel.trust_obstacle(mine, parameters, trust) is None
    squares = kernel.scale_by_trust(mine, parameters, trust)
    expected = scale_by_trust.reference(theirs, parameters, trust)
    torch.testing.assert_close(squares, expected, rtol=1e-5, atol=0, equal_nan=True)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0, equal_nan=True)
    assert squares.isnan().any(1).nonzero().flatten().tolist() == [int(parameters[0].rows[3])]
    for name in TRUSTS[trust].scales:
        column = Coefficients._fields.index(name)
        assert not torch.equal(mine[:, column], before[:, column])


def test_a_broken_step_changes_nothing(kernel):
    before = make("adamw", "dynamic8", sizes=(257,))
    mine, given = copied(before), coefficients_of("adamw", 1, 1)
    for found_inf in (1.0, torch.inf, torch.nan):
        kernel.update_parameters(*given, mine, torch.tensor(found_inf))
        assert not unequal(mine, before)
    kernel.update_parameters(*given, mine, torch.tensor(0.0))
    assert unequal(mine, before)


def test_tensors_that_have_moved_are_found(kernel, rounded_root):
    mine, given = make("adamw", "companded8", sizes=(257, 33)), coefficients_of("adamw", 2, 1)
    theirs = copied(mine)
    for _ in range(3):
        kernel.update_parameters(*given, mine, None)
        update_parameters.reference(*given, theirs, None)
        old = mine.weights, mine.gradients
        mine.weights, mine.gradients = ([each.clone() for each in some] for some in old)
        for each in (*old[0], *old[1]):
            each.fill_(torch.nan)
    assert not unequal(mine, theirs)


@pytest.mark.parametrize("storage", ["fp32", "dynamic8"])
def test_result_does_not_depend_on_threads(storage, kernel):
    before, given, found = make("adamw", storage, sizes=(70001, 1, 40000)), coefficients_of("adamw", 3, 1), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            found.append(copied(before))
            kernel.update_parameters(*given, found[-1], None)
    finally:
        torch.set_num_threads(threads)
    assert not unequal(found[0], found[1])
    assert not unequal(found[0], found[2])
    assert unequal(found[0], before)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "dynamic8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_reaches_the_weight_and_no_other(storage, dtype, kernel):
    parameters = make("momentum", storage, dtype=dtype, sizes=(300,))
    parameters.gradients[0][7] = torch.nan
    kernel.update_parameters(*coefficients_of("momentum", 1, 1), parameters, None)
    assert parameters.weights[0].isnan().nonzero().flatten().tolist() == [7]


def test_refused_calls(kernel):
    given = coefficients_of("adamw", 1, 1)
    assert kernel.obstacle(*given, make("adamw", "fp32", dtype=torch.float64, sizes=(5,)))
    assert kernel.obstacle(*given, make("adamw", "fp32", gradient=torch.float64, sizes=(5,)))
    assert kernel.obstacle(*given, make("adamw", "fp32", "stochastic", sizes=(5,)))
    strided = make("adamw", "fp32", sizes=(5,))
    strided.gradients = [torch.randn(5, 2)[:, 0]]
    with pytest.raises(ModelError):
        kernel.update_parameters(*given, strided, None)


def test_dispatch_selects_the_kernel_on_cpus(kernel):
    names = [name for name, reason in update_parameters.choices(
        "cpu", *coefficients_of("adamw", 1, 1), make("adamw", "dynamic8", sizes=(5,)), None
    ) if reason is None]  # fmt: skip
    assert names == ["native.optimizer.update_parameters"]
