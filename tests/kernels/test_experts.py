"""Compare the Triton kernels of experts with their references, on a GPU and in Triton's interpreter."""

import pytest
import torch

from halfbyte.formats import from_spec
from halfbyte.ops import experts as ops
from halfbyte.ops.experts import LowRank, StackedWeight, Unit
from tests.helpers.parity import (
    DEVICE,
    INTERPRETED,
    assert_as_close_as_torch,
    assert_within_roundings,
    dtypes,
    exact,
    mark,
    poisoned,  # noqa: F401
    random,
)

pytest.importorskip("triton")
from halfbyte.kernels.triton import experts as kernels
from halfbyte.kernels.triton import grouped

pytestmark = mark

# tokens, experts, k
ROUTES = [(9, 3, 2), (1, 1, 1), (2, 12, 8), (70, 2, 1), (140, 3, 2)] + (
    [] if INTERPRETED else [(1000, 128, 8), (4097, 5, 2)]
)
routes = pytest.mark.parametrize(("tokens", "experts", "top_k"), ROUTES)


def drawn(tokens, experts, top_k):
    torch.manual_seed(tokens)
    return torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]).to(DEVICE)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [*ROUTES, (2, 512, 8)])
@pytest.mark.parametrize("one", [False, True], ids=["drawn", "one"])
def test_route(tokens, experts, top_k, one):
    index = torch.full((tokens, top_k), experts - 1, device=DEVICE) if one else drawn(tokens, experts, top_k)
    mine, truth = kernels.route(index, experts), ops.route.reference(index, experts)
    for found, expected in zip(mine[:3], truth[:3], strict=True):
        assert torch.equal(found, expected)
    expected = []
    for expert, (start, end) in enumerate(zip(truth.offsets[:-1].tolist(), truth.offsets[1:].tolist(), strict=True)):
        expected += [[expert, first] for first in range(start, end, mine.tile_rows)]
    assert len(expected) <= mine.tiles.shape[0]
    assert mine.tiles[: len(expected)].tolist() == expected
    assert (mine.tiles[len(expected) :, 0] == experts).all()


def operands(tokens, experts, top_k, rows, columns, transposed, gather, dtype, rank=3):
    routing = kernels.route(drawn(tokens, experts, top_k), experts)
    depth, width = (rows, columns) if transposed else (columns, rows)
    x = random(tokens if gather else tokens * top_k, depth, dtype=dtype)
    factor = random(experts, *((rank, width) if transposed else (width, rank)), dtype=dtype, scale=0.3)
    low = LowRank(random(tokens * top_k, rank, dtype=dtype), factor, 0.7)
    return x, routing, low, None if transposed else random(experts, width, dtype=dtype)


def on_cpu(routing):
    return ops.Routing(*(part.cpu() for part in routing[:4]), *routing[4:])


def compare(x, stack, routing, *rest, **options):
    """Compare with values dequantized to x's dtype, which the kernel multiplies."""
    values = StackedWeight.plain(stack.values(x.dtype))
    mine = grouped.grouped_product(x, stack, routing, *rest, **options)
    torchs = ops.grouped_product.reference(x, values, routing, *rest)
    low = rest[2]
    if low is not None:
        low = LowRank(exact(low.u), exact(low.factor), low.scale)
    truth = ops.grouped_product.reference(
        exact(x), StackedWeight.plain(exact(values.parts["values"])), on_cpu(routing), *rest[:2], low, exact(rest[3])
    )
    assert_as_close_as_torch(mine, torchs, truth)


@routes
@dtypes
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("gather", [False, True], ids=["rows", "gathered"])
def test_grouped_product_of_plain_values(tokens, experts, top_k, dtype, transposed, gather):
    x, routing, low, bias = operands(tokens, experts, top_k, 37, 70, transposed, gather, dtype)
    stack = StackedWeight.plain(random(experts, 37, 70, dtype=dtype))
    compare(x, stack, routing, gather, transposed, low, bias)
    compare(x, stack, routing, gather, transposed, None, None)


SPECS = ["blockwise4:nf4:64:nested", "blockwise4:fp4:32:plain", "hqq:4:64", "stack:mxfp4"]


@pytest.mark.parametrize(("tokens", "experts", "top_k"), ROUTES[:2] + ROUTES[5:])
@dtypes
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("spec", SPECS)
def test_grouped_product_of_packed_values(tokens, experts, top_k, dtype, transposed, spec):
    x, routing, low, bias = operands(tokens, experts, top_k, 40, 192, transposed, True, dtype)
    format_ = from_spec(spec)
    parts = format_.quantize(random(experts, 40, 192))
    compare(x, StackedWeight(parts, (experts, 40, 192), format_), routing, True, transposed, low, bias)


@pytest.mark.parametrize("tile", [grouped.Tile(64, 64, 4, 2, True), grouped.Tile(128, 64, 4, 1, False)])
def test_other_tiles_give_equal_results(tile):
    x, routing, low, bias = operands(9, 3, 2, 40, 192, False, True, torch.float16)
    format_ = from_spec(SPECS[0])
    stack = StackedWeight(format_.quantize(random(3, 40, 192)), (3, 40, 192), format_)
    compare(x, stack, routing, True, False, low, bias, tile=tile)


@routes
@dtypes
@pytest.mark.parametrize("gather", [False, True], ids=["rows", "gathered"])
def test_grouped_outer(tokens, experts, top_k, dtype, gather):
    routing = kernels.route(drawn(tokens, experts, top_k), experts)
    wide, narrow = random(tokens if gather else tokens * top_k, 37, dtype=dtype), random(tokens * top_k, 3, dtype=dtype)
    mine = kernels.grouped_outer(wide, narrow, routing, gather, 0.7, torch.float32)
    truth, absolute = (
        ops.grouped_outer.reference(*factors, on_cpu(routing), gather, 0.7, torch.float64)
        for factors in ((exact(wide), exact(narrow)), (exact(wide).abs(), exact(narrow).abs()))
    )
    counts = routing.offsets.diff()
    # Roundings of the sum; of a product, 0.7 rounded to fp32 and the multiplication by it.
    roundings = counts.cpu()[:, None, None] + 3
    assert_within_roundings(mine, truth, absolute, roundings)
    # For random terms the bound is far larger than the error: roundings add up as a random walk does (Higham and Mary
    # 2019, SIAM Journal on Scientific Computing 41(5)), and partial sums, which are truncated, are such walks as well.
    typical = roundings.sqrt() * torch.finfo(torch.float32).eps * absolute
    assert (exact(mine) - truth).norm() <= typical.norm()
    assert not mine[counts == 0].any()
    assert mine[counts > 0].flatten(1).any(1).all()


@routes
@dtypes
def test_combine(tokens, experts, top_k, dtype):
    routing = kernels.route(drawn(tokens, experts, top_k), experts)
    rows, weights = random(tokens * top_k, 37, dtype=dtype), random(tokens, top_k)
    for given in (weights, None):
        mine = kernels.combine(rows, routing, given)
        truth, absolute = (
            ops.combine.reference(of(exact(rows)), on_cpu(routing), None if given is None else of(exact(given)))
            for of in (torch.Tensor.clone, torch.abs)
        )
        assert_within_roundings(mine, truth, absolute, top_k)  # roundings of a product, and of the sum
        assert torch.equal(mine, kernels.combine(rows, routing, given))


UNITS = [Unit("silu"), Unit("gelu_tanh", interleaved=True), Unit("silu", True, 0.7, 1.702, 1.0)]


@dtypes
@pytest.mark.parametrize("unit", UNITS, ids=["silu", "gelu", "clamped"])
@pytest.mark.parametrize("width", [5, 1100])
def test_unit(unit, dtype, width):
    c, z, weights = random(6, 2 * width, dtype=dtype), random(6, width, dtype=dtype), random(6)
    order = torch.randperm(6).int().to(DEVICE)
    truth = ops.expert_unit.reference(exact(c), unit)
    assert_as_close_as_torch(kernels.expert_unit(c, unit), ops.expert_unit.reference(c, unit), truth)
    given = [(z.clone(), c.clone()), (z.clone(), c.clone()), (exact(z), exact(c))]
    mine = kernels.expert_unit_backward_(*given[0], unit, weights, order)
    torchs = ops.expert_unit_backward_.reference(*given[1], unit, weights, order)
    true = ops.expert_unit_backward_.reference(*given[2], unit, exact(weights), order.cpu())
    for one, other, exactly in zip(*given, strict=True):
        assert_as_close_as_torch(one, other, exactly)
    eps = torch.finfo(dtype).eps  # h is rounded before ⟨z, h⟩ is taken
    torch.testing.assert_close(mine, torchs, rtol=20 * eps, atol=20 * eps)
    torch.testing.assert_close(exact(mine), true, rtol=20 * eps, atol=20 * eps)


@dtypes
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "columns", "top_k"), [(1, 128, 2048, 8), (3, 5, 40, 2), (8, 256, 96, 4)])
def test_top_experts(tokens, experts, columns, top_k, normalized, dtype):
    torch.manual_seed(tokens)
    x, weight = random(tokens, columns, dtype=dtype), random(experts, columns, dtype=dtype) / columns**0.5
    assert kernels.router_obstacle(x, weight, top_k, normalized, torch.float32) is None
    logits, scores, index = kernels.top_experts(x, weight, top_k, normalized, torch.float32)
    truth = x.double() @ weight.double().t()
    assert (logits.double() - truth).abs().max() <= 2 * torch.finfo(dtype).eps * truth.abs().max()
    # The kernel's own logits: rounding may have made some equal, and any of those may be chosen.
    p = logits.double().softmax(-1)
    best = p.topk(top_k).values
    assert torch.allclose(p.gather(1, index), best, rtol=1e-6)
    assert all(len(set(row)) == top_k for row in index.tolist())
    expected = best / best.sum(-1, keepdim=True) if normalized else best
    assert torch.allclose(scores.double(), expected, rtol=1e-5)


def test_router_with_equal_logits():
    """With all logits equal, each expert is chosen once, in order."""
    x = torch.ones(2, 16, device=DEVICE)
    _, scores, index = kernels.top_experts(x, torch.ones(6, 16, device=DEVICE), 4, True, torch.float32)
    assert index.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.allclose(scores, torch.full_like(scores, 0.25))


def test_unsupported_router_cases():
    x, weight = torch.ones(9, 16), torch.ones(6, 16)
    assert "up to 8 tokens" in kernels.router_obstacle(x, weight, 2, True, torch.float32)
    assert "x's dtype" in kernels.router_obstacle(x[:2], weight.half(), 2, True, torch.float32)
    arguments = x, weight, 2, True, torch.float32
    assert all(map(torch.equal, ops.top_experts(*arguments), ops.top_experts.reference(*arguments)))
