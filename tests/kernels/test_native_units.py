"""Compare C's gated units, experts' units and the weighted sum of experts' results with their references."""

import pytest
import torch

from halfbyte.ops import experts as ops
from halfbyte.ops.experts import Unit, expert_unit, expert_unit_backward_
from halfbyte.ops.glu import glu, glu_backward_
from tests.helpers.kernel_backends import MARKS

pytestmark = MARKS["cpu"]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
UNITS = [
    Unit("silu"),
    Unit("gelu_tanh", interleaved=True),
    Unit("silu", True, 0.7, 1.702, 1.0),
    Unit("gelu_tanh", False, 0.5),
]
WIDTHS = [1, 5, 16, 40, 1100]  # parts of a vector, whole ones, both


@pytest.fixture(autouse=True, scope="module")
def kernels():
    from halfbyte.kernels.native import experts, glu

    return experts, glu


def close(mine, theirs, exact):
    """Compare with fp64: the error is at most the reference's plus a rounding."""
    eps = torch.finfo(mine.dtype).eps
    error, other = ((each.double() - exact).abs().max() for each in (mine, theirs))
    assert error <= other + 4 * eps * exact.abs().max()


@pytest.mark.sampled(6)
@dtypes
@pytest.mark.parametrize("unit", UNITS, ids=["silu", "gelu", "clamped", "limited"])
@pytest.mark.parametrize("width", WIDTHS)
def test_units_of_experts(kernels, unit, dtype, width):
    torch.manual_seed(width)
    c, z, weights = torch.randn(6, 2 * width).to(dtype), torch.randn(6, width).to(dtype), torch.rand(6)
    order = torch.randperm(6).int()
    assert kernels[1].unit_obstacle(c, unit) is None
    assert kernels[1].unit_obstacle_backward(z, c, unit, weights, order) is None
    close(expert_unit(c, unit), expert_unit.reference(c, unit), expert_unit.reference(c.double(), unit))
    given = [(z.clone(), c.clone()), (z.clone(), c.clone()), (z.double(), c.double())]
    mine = expert_unit_backward_(*given[0], unit, weights, order)
    theirs = expert_unit_backward_.reference(*given[1], unit, weights, order)
    exact = expert_unit_backward_.reference(*given[2], unit, weights.double(), order)
    for found in zip(*given, strict=True):
        close(*found)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=20 * torch.finfo(dtype).eps)
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=20 * width**0.5 * torch.finfo(dtype).eps)


@pytest.mark.sampled(2)
@dtypes
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("need_output", [False, True])
def test_gated_units(kernels, dtype, activation, need_output):
    """Inputs are halves of one projection, or separate tensors."""
    whole, grad = torch.randn(3, 4, 74).to(dtype), torch.randn(3, 4, 37).to(dtype)
    halves, apart = whole.clone().chunk(2, -1), [half.clone() for half in whole.chunk(2, -1)]
    assert kernels[1].obstacle(*halves, activation) is None
    exact = [half.double() for half in whole.chunk(2, -1)]
    truth = glu.reference(*exact, activation)
    close(glu(*halves, activation), glu.reference(*apart, activation), truth)
    assert torch.equal(glu(*halves, activation), glu(*apart, activation))
    mine, theirs, exactly = grad.clone(), grad.clone(), grad.double()
    glu_backward_(mine, *halves, activation, need_output)
    glu_backward_.reference(theirs, *apart, activation, need_output)
    glu_backward_.reference(exactly, *exact, activation, need_output)
    for found in zip((mine, *halves), (theirs, *apart), (exactly, *exact), strict=True):
        close(*found)
    assert torch.equal(mine, grad) != need_output
    assert (halves[0]._version, mine._version) == (2, int(need_output))  # both views share the version counter


def test_rows_do_not_depend_on_threads_or_on_each_other(kernels):
    c = torch.randn(200, 600).bfloat16()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = expert_unit(c, Unit("silu"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(two[70:71], expert_unit(c[70:71].clone(), Unit("silu")))


@dtypes
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(9, 3, 2), (1, 1, 1), (70, 12, 8)])
def test_combine(kernels, tokens, experts, top_k, dtype):
    torch.manual_seed(tokens)
    routing = ops.route(torch.rand(tokens, experts).topk(top_k).indices, experts)
    rows, weights = torch.randn(tokens * top_k, 37).to(dtype), torch.rand(tokens, top_k)
    assert kernels[0].obstacle(rows, routing, weights) is None
    for given in (weights, weights.to(dtype), None):
        exact = ops.combine.reference(rows.double(), routing, None if given is None else given.double())
        close(ops.combine(rows, routing, given), ops.combine.reference(rows, routing, given), exact)


@dtypes
@pytest.mark.parametrize("spec", ["blockwise4:nf4:64:nested", "kbit:3:nf", "int8"])
def test_products_of_a_few_rows(dtype, spec):
    """Products of each matrix's format: native kernels, or the reference."""
    from halfbyte.formats import from_spec
    from halfbyte.kernels.native import grouped
    from halfbyte.ops.experts import LowRank, StackedWeight

    torch.manual_seed(2)
    format_, shape = from_spec(spec).stacked(), (5, 48, 128)
    parts = format_.quantize_stack(list(torch.randn(shape) / 11), shape)
    stack = StackedWeight(parts, shape, format_)
    routing = ops.route(torch.tensor([[0, 3], [3, 1], [3, 0]]), 5)
    x, bias = torch.randn(3, 128).to(dtype), torch.randn(5, 48).to(dtype)
    low = LowRank(torch.randn(6, 8).to(dtype), torch.randn(5, 48, 8).to(dtype), 0.7)
    assert grouped.obstacle(x, stack, routing, True, False, low, bias) is None
    assert grouped.obstacle(x, stack, routing, True, True) is not None
    found = ops.grouped_product(x, stack, routing, True, False, low, bias)
    exact = StackedWeight.plain(stack.values(torch.float32).double())
    lows = LowRank(low.u.double(), low.factor.double(), low.scale)
    truth = ops.grouped_product.reference(x.double(), exact, routing, True, False, lows, bias.double())
    assert (found.double() - truth).abs().max() <= 8 * torch.finfo(dtype).eps * truth.abs().max()
    rows = ops.route(torch.zeros(30, 1, dtype=torch.int64), 5)
    assert "4 rows" in grouped.obstacle(torch.randn(30, 128), stack, rows, True)
