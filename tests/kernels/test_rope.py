"""Compare the Triton rotations with their references, on a GPU and in Triton's interpreter."""

import pytest
import torch

from halfbyte.autograd.rope import qk_norm_rope, rope
from halfbyte.ops import rope as reference
from tests.helpers.parity import DEVICE, INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton import rope as kernels

pytestmark = mark

# batch, tokens, query heads, key heads, head size
SHAPES = [(1, 1, 1, 1, 2), (2, 3, 3, 1, 10), (1, 2, 28, 4, 96)]
if not INTERPRETED:
    SHAPES = [(2, 3, 3, 1, 10), (2, 517, 32, 8, 128), (3, 65, 16, 16, 256), (1, 33, 28, 4, 80)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def heads(batch, tokens, count, size, dtype, layout="projection"):
    """[B, H, T, D] as models make it: a transposed projection, a slice of a fused one, or contiguous."""
    if layout == "contiguous":
        return random(batch, count, tokens, size, dtype=dtype)
    if layout == "fused":
        return random(batch, tokens, count + 3, size, dtype=dtype)[:, :, 2:-1].transpose(1, 2)
    return random(batch, tokens, count, size, dtype=dtype).transpose(1, 2)


def q_and_k(shape, dtype, layout="projection"):
    batch, tokens, q_heads, k_heads, size = shape
    return heads(batch, tokens, q_heads, size, dtype, layout), heads(batch, tokens, k_heads, size, dtype, layout)


def angles(batch, tokens, size, dtype):
    """Angles with unequal halves, which no model has: the transpose exchanges the halves."""
    angle = torch.rand(batch, tokens, size) * 6
    return angle.cos().to(dtype).to(DEVICE), angle.sin().to(dtype).to(DEVICE)


def stock_rotate(x, cos, sin):
    """Compute as Hugging Face does: products and sum are rounded; values beyond the width of cos are copied."""
    rotated, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos.unsqueeze(1) + torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
    return torch.cat([rotated, rest], dim=-1)


def clone(*tensors):
    """Copy tensors with the strides of dense ones; otherwise with the layout of a projection."""
    return [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]


@dtypes
@shapes
@pytest.mark.parametrize("layout", ["projection", "fused", "contiguous"])
def test_rope(shape, dtype, layout):
    q, k = q_and_k(shape, dtype, layout)
    cos, sin = angles(shape[0] if layout == "fused" else 1, shape[1], shape[4], dtype)
    before = clone(q, k)
    kernels.rope_(q, k, cos, sin, False)
    truths = [reference.rotate(exact(x), exact(cos), exact(sin)) for x in before]
    for mine, x, truth in zip((q, k), before, truths, strict=True):
        assert_as_close_as_torch(mine, stock_rotate(x, cos, sin), truth)
    grads, seeds = clone(*before), clone(*before)
    kernels.rope_(*grads, cos, sin, True)
    for mine, seed, x in zip(grads, seeds, before, strict=True):
        leaf, true_leaf = x.clone().requires_grad_(), exact(x).requires_grad_()
        stock = torch.autograd.grad(stock_rotate(leaf, cos, sin), leaf, seed)[0]
        truth = torch.autograd.grad(reference.rotate(true_leaf, exact(cos), exact(sin)), true_leaf, exact(seed))[0]
        assert_as_close_as_torch(mine, stock, truth)


@pytest.mark.parametrize(("size", "rotated"), [(12, 8), (96, 72), (80, 2)])
def test_partial_rotary(size, rotated):
    q, k = q_and_k((2, 3, 4, 2, size), torch.float32)
    cos, sin = angles(1, 3, rotated, torch.float32)
    expected = [stock_rotate(x, cos, sin) for x in (q, k)]
    rest = q[..., rotated:].clone()
    kernels.rope_(q, k, cos, sin, False)
    torch.testing.assert_close([q, k], expected)
    assert torch.equal(q[..., rotated:], rest)


def test_layouts_without_a_unit_stride():
    q, k = (random(2, 3, 10, 5).transpose(2, 3) for _ in range(2))
    cos, sin = (table.transpose(1, 2).contiguous().transpose(1, 2) for table in angles(1, 5, 10, torch.float32))
    expected = [stock_rotate(x, cos, sin) for x in (q, k)]
    kernels.rope_(q, k, cos, sin, False)
    torch.testing.assert_close([q, k], expected)


@dtypes
@shapes
@pytest.mark.parametrize("offset", [False, True])
def test_norm_and_rope(shape, dtype, offset):
    q, k = q_and_k(shape, dtype, "fused")
    cos, sin = angles(shape[0], shape[1], shape[4], dtype)
    weights = [random(shape[4], dtype=dtype) for _ in range(2)]
    grads = q_and_k(shape, dtype)

    def stock(x, weight):
        normal = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        normal = (normal * (1.0 + weight.float())).to(dtype) if offset else weight * normal.to(dtype)
        return stock_rotate(normal, cos, sin)

    def truth(x, weight):
        return reference.norm_rotate(x, weight, exact(cos), exact(sin), 1e-6, offset)

    outputs = kernels.qk_norm_rope(q, k, *weights, cos, sin, 1e-6, offset)
    mine, alone = clone(*grads), clone(*grads)
    dws = kernels.qk_norm_rope_backward_(*mine, q, k, *weights, cos, sin, 1e-6, offset, True)
    assert kernels.qk_norm_rope_backward_(*alone, q, k, *weights, cos, sin, 1e-6, offset, False) is None
    for i, (x, weight, grad) in enumerate(zip((q, k), weights, grads, strict=True)):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        true_inputs = exact(x).requires_grad_(), exact(weight).requires_grad_()
        y, true_y = stock(*inputs), truth(*true_inputs)
        stocks = (y.detach(), *torch.autograd.grad(y, inputs, grad))
        truths = (true_y.detach(), *torch.autograd.grad(true_y, true_inputs, exact(grad)))
        for tensor, torchs, true in zip((outputs[i], mine[i], dws[i]), stocks, truths, strict=True):
            assert_as_close_as_torch(tensor, torchs, true)
        assert_as_close_as_torch(alone[i], stocks[1], truths[1])  # another kernel sums a head in another order


@pytest.mark.skipif(INTERPRETED, reason="dispatch follows the device")
@pytest.mark.parametrize("with_norm", [False, True])
def test_through_autograd(with_norm):
    leaves = [random(2, 9, count * 64, dtype=torch.bfloat16) for count in (6, 2)]
    leaves += [random(64, dtype=torch.bfloat16) for _ in range(2)]
    tables = angles(1, 9, 64, torch.bfloat16)

    def step(q, k, q_weight, k_weight, cos, sin):
        q, k = ((x * 1).view(2, 9, -1, 64).transpose(1, 2) for x in (q, k))
        return qk_norm_rope(q, k, q_weight, k_weight, cos, sin) if with_norm else rope(q, k, cos, sin)

    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in leaves]
        outputs = step(*inputs, *(table.to(device, dtype) for table in tables))
        torch.manual_seed(1)
        seeds = [torch.randn(output.shape).to(device, dtype) for output in outputs]
        gradients = torch.autograd.grad(outputs, inputs if with_norm else inputs[:2], seeds)
        results.append([tensor.float().cpu() for tensor in (*outputs, *gradients)])
    for mine, truth in zip(*results, strict=True):
        assert (mine - truth).norm() <= 2e-2 * truth.norm()


@pytest.mark.large(12)
@pytest.mark.skipif(INTERPRETED, reason="gigabytes")
def test_more_than_2_31_elements():
    """With heads first, as in a cache, an offset is head · T · D, and the last head begins past 2^31."""
    tokens = 2**31 // (31 * 128) + 8
    q, k = (torch.zeros(1, 32, tokens, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    cos, sin = (torch.zeros(1, tokens, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    q[:, :, -2:] = random(1, 32, 2, 128, dtype=torch.bfloat16)
    cos[:, -2:], sin[:, -2:] = angles(1, 2, 128, torch.bfloat16)
    small = q[:, :, -2:].clone(), k[:, :, -2:].clone(), cos[:, -2:], sin[:, -2:]
    kernels.rope_(q, k, cos, sin, False)
    kernels.rope_(*small, False)
    assert torch.equal(q[:, :, -2:], small[0])
