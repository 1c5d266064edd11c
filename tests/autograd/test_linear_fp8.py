"""The FP8 linear: its numbers by hand, its histories, and torch._scaled_mm against the emulation."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from halfbyte import notices
from halfbyte.autograd import linear_fp8
from halfbyte.autograd.linear_fp8 import fp8_linear, fp8_matmul, weight_codes
from halfbyte.errors import ModelError
from halfbyte.formats import from_spec
from halfbyte.ops.float8 import E4M3, E5M2, FP8_MAX, quantize_float8
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from halfbyte.tensor import QuantizedTensor

SPECS = ["fp8:row", "fp8:tensor", "fp8:tile", "blockwise4:nf4:64:nested", "int8"]


def scaling(device="cpu", **options):
    state = DelayedScaling([E4M3, E5M2], ScalingOptions(**options), device=device)
    return state, Slot(state, 0), Slot(state, 1)


def rounded(values, dtype, scale):
    """Through FP8 and back."""
    limit = FP8_MAX[dtype]
    return (values * scale).clamp(-limit, limit).to(dtype).float() / scale


def weight_of(spec, dtype=torch.float32, rows=48, columns=64):
    return QuantizedTensor.quantize(torch.randn(rows, columns, dtype=dtype) * 0.05, from_spec(spec))


def step(weight, x, probe, slots, bias=None):
    x = x.detach().clone().requires_grad_()
    y = fp8_linear(x, weight, bias, *slots)
    (y.float() * probe).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("spec", SPECS)
def test_numbers_by_hand(spec):
    """Products of what x, W and dY become in FP8, with the scales of their own amax in a first step."""
    _, *slots = scaling()
    weight, x, probe, bias = weight_of(spec), torch.randn(2, 5, 64), torch.randn(2, 5, 48), torch.randn(48)
    y, dx = step(weight, x, probe, slots, bias)
    codes, scale = weight_codes(weight, torch.float32)
    w8 = codes.float() * (scale.unsqueeze(1) if scale.dim() else scale)
    x8 = rounded(x, E4M3, 448 / x.abs().max())
    torch.testing.assert_close(y, x8 @ w8.t() + bias, rtol=1e-4, atol=1e-4)
    factors = scale if scale.dim() else torch.ones(())
    scaled = probe * factors
    g8 = rounded(scaled, E5M2, 57344 / scaled.abs().max()) / factors
    torch.testing.assert_close(dx, g8 @ w8, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_close_to_the_plain_linear(spec, dtype):
    _, *slots = scaling()
    weight, x, probe = weight_of(spec, dtype), torch.randn(20, 64).to(dtype), torch.randn(20, 48)
    y, dx = step(weight, x, probe, slots)
    plain = weight.dequantize(torch.float32)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    for found, exact, limit in ((y, x.float() @ plain.t(), 0.05), (dx, probe @ plain, 0.1)):
        assert (found.float() - exact).norm() < limit * exact.norm()


def test_stored_fp8_is_multiplied_as_it_is():
    for spec in ("fp8:row", "fp8:tensor"):
        weight = weight_of(spec)
        codes, scale = weight_codes(weight, torch.float32)
        assert codes.data_ptr() == weight.parts["codes"].data_ptr()
        assert scale is weight.parts["scale"]
    plain = torch.randn(48, 64)
    expected = quantize_float8(plain, "row")
    for mine, other in zip(weight_codes(plain, torch.float32), expected, strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_the_second_step_scales_by_the_first():
    state, *slots = scaling()
    weight, x, probe = weight_of("fp8:tensor"), torch.randn(5, 64), torch.randn(5, 48)
    step(weight, x, probe, slots)
    step(weight, 2 * x, 3 * probe, slots)  # a second micro-batch
    amax = torch.stack([2 * x.abs().max(), 3 * probe.abs().max()])
    torch.testing.assert_close(state.history[:, 0], amax)
    state.roll()
    torch.testing.assert_close(state.scale, torch.tensor([448.0, 57344.0]) / amax)
    y, _ = step(weight, 10 * x, probe, slots)  # larger than anything seen: saturates
    w8 = weight.dequantize()
    torch.testing.assert_close(y, rounded(10 * x, E4M3, state.scale[0]) @ w8.t(), rtol=1e-4, atol=1e-4)
    assert (rounded(10 * x, E4M3, state.scale[0]).abs() <= amax[0] * 1.001).all()


def test_a_step_that_is_not_finite_shows_and_keeps_the_scale():
    state, *slots = scaling()
    weight, probe = weight_of("fp8:row"), torch.randn(5, 48)
    step(weight, torch.randn(5, 64), probe, slots)
    state.roll()
    before = state.scale.clone()
    x = torch.randn(5, 64)
    x[2, 3] = float("nan")
    y, _ = step(weight, x, probe, slots)
    assert y[2].isnan().all()
    state.roll()
    assert torch.equal(state.scale[0], before[0])


def test_checkpointing_changes_nothing():
    results = []
    for recompute in (False, True):
        state, *slots = scaling()
        torch.manual_seed(1)
        weight, x = weight_of("fp8:row"), torch.randn(5, 64).requires_grad_()
        body = lambda x, weight=weight, slots=slots: fp8_linear(F.silu(x), weight, None, *slots)  # noqa: E731
        y = checkpoint(body, x, use_reentrant=False) if recompute else body(x)
        y.pow(2).sum().backward()
        results.append((y.detach(), x.grad, state.history.clone()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_nothing_of_x_or_w_is_saved():
    _, *slots = scaling()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        fp8_linear(torch.randn(5, 64, requires_grad=True), weight_of("fp8:row"), None, *slots)
    assert saved == []


def test_bias_gets_its_gradient_and_a_trained_weight_is_refused():
    _, *slots = scaling()
    bias, probe = torch.zeros(48, requires_grad=True), torch.randn(5, 48)
    (fp8_linear(torch.randn(5, 64), weight_of("fp8:row"), bias, *slots) * probe).sum().backward()
    torch.testing.assert_close(bias.grad, probe.sum(0))
    with pytest.raises(ModelError, match="requires a gradient"):
        fp8_linear(torch.randn(5, 64), torch.randn(48, 64, requires_grad=True), None, *slots)


def test_empty_batch_and_autocast():
    state, *slots = scaling()
    assert fp8_linear(torch.empty(0, 64), weight_of("fp8:row"), None, *slots).shape == (0, 48)
    assert not state.history.any()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fp8_linear(torch.randn(3, 64), weight_of("fp8:row"), None, *slots).dtype == torch.bfloat16


def test_emulation_is_said_once():
    notices.forget()
    _, *slots = scaling()
    step(weight_of("fp8:row"), torch.randn(5, 64), torch.randn(5, 48), slots)
    assert "multiplied in 16 or 32 bits" in notices.said()["fp8-product-cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [1, 17, 512])
def test_scaled_mm_equals_the_emulation(spec, rows, monkeypatch):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no FP8 products with scales a row")
    weight = weight_of(spec, torch.bfloat16, 256, 512).cuda()
    x, probe = torch.randn(rows, 512).bfloat16().cuda(), torch.randn(rows, 256).cuda()
    notices.forget()
    found = step(weight, x, probe, scaling("cuda")[1:])
    assert "fp8-product-cuda" not in notices.said()
    monkeypatch.setattr(linear_fp8, "_has_product", lambda *args: False)
    for one, other in zip(found, step(weight, x, probe, scaling("cuda")[1:]), strict=True):
        assert (one.float() - other.float()).norm() < 6e-3 * other.float().norm()  # bf16, and Hopper's partial sums


@pytest.mark.gpu
def test_a_product_is_captured_in_a_graph():
    state, *slots = scaling("cuda")
    weight = weight_of("fp8:row", torch.bfloat16, 256, 512).cuda()
    x, probe = torch.randn(64, 512, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda")
    expected = step(weight, x, probe, slots)
    state.history.zero_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(weight, x, probe, slots)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(weight, x, probe, slots)
    graph.replay()
    for one, other in zip(captured, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_sizes_that_are_no_multiple_of_16_are_multiplied_otherwise():
    a, b = torch.randn(5, 40).to(E4M3).cuda(), torch.randn(24, 40).to(E4M3).cuda()
    one = torch.ones((), device="cuda")
    found = fp8_matmul(a, b, one, one, torch.float32, fast=True)
    torch.testing.assert_close(found, a.float() @ b.float().t(), rtol=2e-3, atol=2e-3)
