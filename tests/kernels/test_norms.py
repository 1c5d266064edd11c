"""Compare the Triton norms with their references at irregular sizes, on a GPU and in Triton's interpreter."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.norms import add_rms_norm, layer_norm, rms_norm
from halfbyte.formats.float8 import to_float8
from halfbyte.ops import norms as reference
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from tests.helpers.parity import DEVICE, INTERPRETED, assert_as_close_as_torch, dtypes, exact, mark, poisoned, random  # noqa: F401

pytest.importorskip("triton")
from halfbyte.kernels.triton import norms as kernels

pytestmark = mark

SIZES = [(3, 1), (5, 7), (37, 128), (2, 3, 96), (2, 2051)]
if not INTERPRETED:  # every size compiles up to three kernels
    SIZES = [(5, 7), (1100, 128), (2, 3, 896), (700, 4096), (65, 5120), (3, 40000)]


def stock_rms_norm(x, residual, weight, offset):
    """Compute as Hugging Face does: in x's dtype except for the mean, every step rounded."""
    total = x if residual is None else x + residual
    normal = total.float() * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    y = (normal * (1.0 + weight.float())).to(x.dtype) if offset else weight * normal.to(x.dtype)
    return y, total


@dtypes
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize(("offset", "with_residual"), [(True, False), (False, True)])
def test_rms_norm(shape, dtype, offset, with_residual):
    x, grad, grad_total = (random(*shape, dtype=dtype) for _ in range(3))
    residual = random(*shape, dtype=dtype) if with_residual else None
    grad_total = grad_total if with_residual else None
    weight = random(shape[-1], dtype=dtype)
    stock_inputs = [tensor.clone().requires_grad_() for tensor in (x, residual, weight) if tensor is not None]
    stock = stock_rms_norm(stock_inputs[0], stock_inputs[1] if with_residual else None, stock_inputs[-1], offset)
    stock_dx, *_, stock_dw = torch.autograd.grad(
        stock if with_residual else stock[0], stock_inputs, (grad, grad_total) if with_residual else grad
    )
    y, total, rstd = kernels.rms_norm(x, residual, weight, 1e-6, offset)
    assert torch.equal(total, stock[1].detach())
    true_y, true_total, true_rstd = reference.rms_norm.reference(exact(total), None, exact(weight), 1e-6, offset)
    assert_as_close_as_torch(y, stock[0].detach(), true_y)
    torch.testing.assert_close(rstd.double().cpu(), true_rstd, rtol=1e-6, atol=1e-6)
    dx, dw = kernels.rms_norm_backward(grad, total, weight, rstd, offset, grad_total, True)
    true_dx, true_dw = reference.rms_norm_backward.reference(
        exact(grad), true_total, exact(weight), true_rstd, offset, exact(grad_total), True
    )
    assert_as_close_as_torch(dx, stock_dx, true_dx)
    assert_as_close_as_torch(dw, stock_dw, true_dw)
    alone, none = kernels.rms_norm_backward(grad, total, weight, rstd, offset, grad_total, False)
    assert none is None
    assert torch.equal(alone, dx)


@dtypes
@pytest.mark.parametrize("shape", SIZES[-4:], ids=str)
def test_layer_norm(shape, dtype):
    x, grad = random(*shape, dtype=dtype) + 3, random(*shape, dtype=dtype)
    weight, bias = random(shape[-1], dtype=dtype), random(shape[-1], dtype=dtype)
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    stock = F.layer_norm(inputs[0], shape[-1:], *inputs[1:], 1e-5)
    stocks = (stock.detach(), *torch.autograd.grad(stock, inputs, grad))
    y, mean, rstd = kernels.layer_norm(x, weight, bias, 1e-5)
    mine = (y, *kernels.layer_norm_backward(grad, x, weight, mean, rstd, True))
    truth = reference.layer_norm.reference(exact(x), exact(weight), exact(bias), 1e-5)
    gradients = reference.layer_norm_backward.reference(exact(grad), exact(x), exact(weight), *truth[1:], True)
    truths = (truth[0], *gradients)
    for tensor, torchs, true in zip(mine, stocks, truths, strict=True):
        assert_as_close_as_torch(tensor, torchs, true)
    dx, *nothing = kernels.layer_norm_backward(grad, x, weight, mean, rstd, False)
    assert torch.equal(dx, mine[1])
    assert nothing == [None, None]


def test_strides():
    """Rows with gaps are read in place; other layouts are copied first."""
    weight = random(24)
    fused, swapped, transposed = random(2, 5, 40)[..., 8:32], random(5, 3, 24).transpose(0, 1), random(24, 6).T
    for x in (fused, swapped, transposed, random(1, 24).expand(4, 24)):
        y, _, rstd = kernels.rms_norm(x, None, weight, 1e-6, False)
        expected = kernels.rms_norm(x.contiguous(), None, weight, 1e-6, False)
        assert y.is_contiguous()
        assert torch.equal(y, expected[0])
        dx, dw = kernels.rms_norm_backward(x, x, weight, rstd, False, x, True)
        plain = x.contiguous()
        torch.testing.assert_close(
            (dx, dw), kernels.rms_norm_backward(plain, plain, weight, rstd, False, plain, True), rtol=0, atol=0
        )


def test_pointers_that_are_not_aligned():
    weight = random(25)[1:]
    for _ in range(2):  # the second call must not take the kernel compiled for aligned pointers
        x = random(24 * 5 + 1)
        mine = kernels.rms_norm(x[1:].view(5, 24), None, weight, 1e-6, False)[0]
        aligned = kernels.rms_norm(x[1:].view(5, 24).clone(), None, weight.clone(), 1e-6, False)[0]
        torch.testing.assert_close(mine, aligned)


def test_fp32_weight():
    x, weight = random(6, 40, dtype=torch.float16), random(40)
    for offset, dtype in ((False, torch.float32), (True, torch.float16)):
        y, _, _ = kernels.rms_norm(x, None, weight, 1e-6, offset)
        assert y.dtype == dtype
        expected = reference.rms_norm.reference(x, None, weight, 1e-6, offset)[0]
        torch.testing.assert_close(y, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(INTERPRETED, reason="dispatch follows the device")
def test_through_autograd():
    inputs = [random(3, 50, 384, dtype=torch.bfloat16), random(3, 50, 384, dtype=torch.bfloat16)]
    inputs += [random(384, dtype=torch.bfloat16), random(384, dtype=torch.bfloat16)]

    def step(x, residual, weight, bias):
        y, total = add_rms_norm(x, residual, weight)
        return rms_norm(y, weight, 1e-6, True) + layer_norm(total, weight, bias)

    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
        moved = [tensor.to(device, dtype).requires_grad_() for tensor in inputs]
        y = step(*moved)
        gradients = torch.autograd.grad(y, moved, y.detach())
        results.append([tensor.float().cpu() for tensor in (y, *gradients)])
    for mine, truth in zip(*results, strict=True):
        assert (mine - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_in_a_cuda_graph_without_synchronisation():
    x, weight = (random(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((64, 512), (512,)))

    def step():
        return torch.autograd.grad(rms_norm(x, weight).sum(), (x, weight))

    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(*pair) for pair in zip(captured, expected, strict=True))


@pytest.mark.large(18)
@pytest.mark.skipif(INTERPRETED, reason="gigabytes")
def test_more_than_2_31_elements():
    rows = 2**31 // 4096 + 3
    x = torch.empty(rows, 4096, dtype=torch.bfloat16, device=DEVICE).fill_(0.5)
    x[-3:] = random(3, 4096, dtype=torch.bfloat16)
    weight = random(4096, dtype=torch.bfloat16)
    y, _, rstd = kernels.rms_norm(x, None, weight, 1e-6, False)
    small = kernels.rms_norm(x[-3:], None, weight, 1e-6, False)
    assert torch.equal(y[-3:], small[0])
    dx, _ = kernels.rms_norm_backward(y, x, weight, rstd, False, None, False)
    assert torch.equal(dx[-3:], kernels.rms_norm_backward(small[0], x[-3:], weight, small[2], False, None, False)[0])


@dtypes
@pytest.mark.parametrize("residual", [False, True])
def test_norm_in_float8_too(dtype, residual):
    rows, width = (5, 70) if INTERPRETED else (300, 4096)
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=dtype)
    added = random(rows, width, dtype=dtype) if residual else None
    state = DelayedScaling([torch.float8_e4m3fn], ScalingOptions(), device=DEVICE)
    state.scale.fill_(200.0)  # some saturate
    state.inverse.fill_(1 / 200)
    state.settled = [True]
    *found, codes = kernels.rms_norm_float8(x, added, weight, 1e-6, False, Slot(state, 0))
    for one, other in zip(found, kernels.rms_norm(x, added, weight, 1e-6, False), strict=True):
        # Another kernel may sum a row in another order: 1/rms may differ by a last bit or two, and so may each of the
        # two products that follow, which are rounded separately.
        torch.testing.assert_close(one, other, rtol=4 * torch.finfo(one.dtype).eps, atol=0)
    expected = to_float8(found[0].float() * 200.0, torch.float8_e4m3fn).view(torch.uint8)
    # Triton's interpreter rounds to FP8 wrongly where the exponent grows, which leaves no mantissa bits.
    sound = expected & 7 != 0 if INTERPRETED else torch.ones_like(expected, dtype=torch.bool)
    assert torch.equal(codes.view(torch.uint8)[sound], expected[sound])
    assert state.history[0, 0] == found[0].float().abs().max()


@dtypes
@pytest.mark.parametrize(("rows", "width", "first"), [(1, 1, None), (264, 70, None), (1055, 20, 844), (3, 2051, 1)])
def test_sum_rows(rows, width, first, dtype):
    partials = torch.randn(rows, width).to(DEVICE)
    parts = partials.split([rows] if first is None else [first, rows - first])
    mine = kernels.sum_rows(partials, dtype, first)
    assert mine.dtype == dtype
    expected = torch.stack([part.double().sum(0) for part in parts])
    torch.testing.assert_close(mine.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-4)
    assert torch.equal(mine, kernels.sum_rows(partials, dtype, first))
