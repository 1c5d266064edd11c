"""The FP8 linear: values computed by hand, amax histories, and torch._scaled_mm against the emulation."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from halfbyte.autograd import linear_fp8
from halfbyte.autograd.linear_fp8 import Fp8Gemms, weight_codes
from halfbyte.autograd.lora import LoRA, lora_linear, lora_qkv
from halfbyte.formats import from_spec
from halfbyte.formats.float8 import E4M3, E5M2, FP8_MAX
from halfbyte.ops.float8 import fp8_product
from halfbyte.ops.fp8_scaling import DelayedScaling, ScalingOptions, Slot
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils import notices
from halfbyte.utils.errors import ModelError

SPECS = ["fp8:row", "fp8:tensor", "fp8:tile", "blockwise4:nf4:64:nested", "int8"]


def scaling(device="cpu", **options):
    state = DelayedScaling([E4M3, E5M2], ScalingOptions(**options), device=device)
    return state, Fp8Gemms(Slot(state, 0), Slot(state, 1))


def rounded(values, dtype, scale):
    """Quantize to FP8 and dequantize."""
    limit = FP8_MAX[dtype]
    return (values * scale).clamp(-limit, limit).to(dtype).float() / scale


def weight_of(spec, dtype=torch.float32, rows=48, columns=64):
    return QuantizedTensor.quantize(torch.randn(rows, columns, dtype=dtype) * 0.05, from_spec(spec))


def as_multiplied(recipe, weights):
    """Dequantized FP8 values of the weights."""
    scales = recipe.scales(weights, torch.float32)
    codes = [weight_codes(*pair, torch.float32).float() for pair in zip(weights, scales.inverses, strict=True)]
    return [w * (s.unsqueeze(1) if s.dim() else s) for w, s in zip(codes, scales.scales, strict=True)]


def step(weight, x, probe, recipe, bias=None):
    x = x.detach().clone().requires_grad_()
    y = lora_linear(x, weight, bias, recipe=recipe)
    (y.float() * probe).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("spec", SPECS)
def test_numbers_by_hand(spec):
    """GEMMs of x, W and dY after the FP8 cast with the scales of the first step, their own amax."""
    _, recipe = scaling()
    weight, x, probe, bias = weight_of(spec), torch.randn(2, 5, 64), torch.randn(2, 5, 48), torch.randn(48)
    y, dx = step(weight, x, probe, recipe, bias)
    (scale,) = recipe.scales([weight], torch.float32).scales
    w8 = as_multiplied(recipe, [weight])[0]
    x8 = rounded(x, E4M3, 448 / x.abs().max())
    torch.testing.assert_close(y, x8 @ w8.t() + bias, rtol=1e-4, atol=1e-4)
    factors = scale if scale.dim() else torch.ones(())
    scaled = probe * factors
    g8 = rounded(scaled, E5M2, 57344 / scaled.abs().max()) / factors
    torch.testing.assert_close(dx, g8 @ w8, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("specs", [["blockwise4:nf4:64:nested"] * 3, ["fp8:tensor", "fp8:tensor", "int8"]], ids=str)
def test_several_projections_cast_their_input_and_their_gradients_once(specs):
    state, recipe = scaling()
    weights = [weight_of(spec, rows=rows) for spec, rows in zip(specs, (48, 16, 32), strict=True)]
    x, probes = torch.randn(7, 64, requires_grad=True), [torch.randn(7, rows) for rows in (48, 16, 32)]
    lora = LoRA(torch.randn(4, 64, requires_grad=True), torch.randn(16, 4, requires_grad=True), 0.5)
    outputs = lora_qkv(x, weights, [None] * 3, [None, lora, None], recipe=recipe)
    torch.autograd.backward(outputs, probes)
    scales, values = recipe.scales(weights, torch.float32), as_multiplied(recipe, weights)
    x8 = rounded(x.detach(), E4M3, 448 / x.detach().abs().max())
    term = 0.5 * x.detach() @ lora.a.detach().t() @ lora.b.detach().t()
    for i, (found, w8) in enumerate(zip(outputs, values, strict=True)):
        torch.testing.assert_close(found, x8 @ w8.t() + (term if i == 1 else 0), rtol=1e-4, atol=1e-4)
    factors = torch.ones(96) if scales.factors is None else scales.factors
    assert (scales.factors is None) == (len(set(specs)) == 1)
    scaled = torch.cat(probes, 1) * factors
    g8 = rounded(scaled, E5M2, 57344 / scaled.abs().max()) / factors
    expected = g8 @ torch.cat(values) + 0.5 * probes[1] @ lora.b.detach() @ lora.a.detach()
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.history[:, 0], torch.stack([x.detach().abs().max(), scaled.abs().max()]))
    torch.testing.assert_close(lora.b.grad, 0.5 * probes[1].t() @ (x.detach() @ lora.a.detach().t()))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_close_to_the_plain_linear(spec, dtype):
    _, recipe = scaling()
    weight, x, probe = weight_of(spec, dtype), torch.randn(20, 64).to(dtype), torch.randn(20, 48)
    y, dx = step(weight, x, probe, recipe)
    plain = weight.dequantize(torch.float32)
    assert (y.dtype, dx.dtype) == (dtype, dtype)
    for found, exact, limit in ((y, x.float() @ plain.t(), 0.05), (dx, probe @ plain, 0.1)):
        assert (found.float() - exact).norm() < limit * exact.norm()


def test_stored_fp8_is_multiplied_as_it_is():
    for spec in ("fp8:row", "fp8:tensor"):
        weight = weight_of(spec)
        (scale,) = scaling()[1].scales([weight], torch.float32).scales
        assert weight_codes(weight, scale, torch.float32).data_ptr() == weight.parts["codes"].data_ptr()
        assert scale is weight.parts["scale"]


@pytest.mark.parametrize("spec", [*SPECS, "plain"])
def test_transposed_codes(spec):
    weight = torch.randn(48, 64) if spec == "plain" else weight_of(spec)
    (inverse,) = scaling()[1].scales([weight], torch.float32).inverses
    wide = torch.zeros(64, 100, dtype=torch.uint8).view(E4M3)
    weight_codes(weight, inverse, torch.float32, wide[:, 20:68])
    straight = weight_codes(weight, inverse, torch.float32)
    assert torch.equal(wide.float()[:, 20:68], straight.float().t())
    assert not wide.float()[:, :20].any()
    assert not wide.float()[:, 68:].any()


def test_scales_are_found_once_and_again_for_other_weights():
    recipe, weights = scaling()[1], [weight_of("int8"), weight_of("int8")]
    first = recipe.scales(weights, torch.float32)
    assert recipe.scales(list(weights), torch.float32) is first
    assert recipe.scales([weights[0], weight_of("int8")], torch.float32) is not first


def test_the_second_step_scales_by_the_first():
    state, recipe = scaling()
    weight, x, probe = weight_of("fp8:tensor"), torch.randn(5, 64), torch.randn(5, 48)
    step(weight, x, probe, recipe)
    step(weight, 2 * x, 3 * probe, recipe)  # a second micro-batch
    amax = torch.stack([2 * x.abs().max(), 3 * probe.abs().max()])
    torch.testing.assert_close(state.history[:, 0], amax)
    state.roll()
    torch.testing.assert_close(state.scale, torch.tensor([448.0, 57344.0]) / amax)
    y, _ = step(weight, 10 * x, probe, recipe)  # larger than the amax history: saturates
    w8 = weight.dequantize()
    torch.testing.assert_close(y, rounded(10 * x, E4M3, state.scale[0]) @ w8.t(), rtol=1e-4, atol=1e-4)
    assert (rounded(10 * x, E4M3, state.scale[0]).abs() <= amax[0] * 1.001).all()


def test_a_step_that_is_not_finite_shows_and_keeps_the_scale():
    state, recipe = scaling()
    weight, probe = weight_of("fp8:row"), torch.randn(5, 48)
    step(weight, torch.randn(5, 64), probe, recipe)
    state.roll()
    before = state.scale.clone()
    x = torch.randn(5, 64)
    x[2, 3] = float("nan")
    y, _ = step(weight, x, probe, recipe)
    assert y[2].isnan().all()
    state.roll()
    assert torch.equal(state.scale[0], before[0])


def test_handed_over_input_is_used_once():
    state, recipe = scaling()
    state.settled = [True, True]
    x, other = torch.randn(5, 64), torch.randn(5, 64)
    recipe.hand_over(x, torch.zeros(5, 64, dtype=E4M3))
    assert recipe.slot_of_input(x) is None
    assert recipe.slot_of_input(other) is recipe.x
    assert recipe.slot_of_input(x) is recipe.x


def test_checkpointing_changes_nothing():
    results = []
    for recompute in (False, True):
        state, recipe = scaling()
        torch.manual_seed(1)
        weight, x = weight_of("fp8:row"), torch.randn(5, 64).requires_grad_()
        body = lambda x, weight=weight, recipe=recipe: lora_linear(F.silu(x), weight, None, recipe=recipe)  # noqa: E731
        y = checkpoint(body, x, use_reentrant=False) if recompute else body(x)
        y.pow(2).sum().backward()
        results.append((y.detach(), x.grad, state.history.clone()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_nothing_of_x_or_w_is_saved():
    _, recipe = scaling()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        lora_linear(torch.randn(5, 64, requires_grad=True), weight_of("fp8:row"), None, recipe=recipe)
    assert not sum(tensor.numel() for tensor in saved)


def test_bias_gets_its_gradient_and_a_trained_weight_is_refused():
    _, recipe = scaling()
    bias, probe = torch.zeros(48, requires_grad=True), torch.randn(5, 48)
    (lora_linear(torch.randn(5, 64), weight_of("fp8:row"), bias, recipe=recipe) * probe).sum().backward()
    torch.testing.assert_close(bias.grad, probe.sum(0))
    with pytest.raises(ModelError):
        lora_linear(torch.randn(5, 64), torch.randn(48, 64, requires_grad=True), None, recipe=recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("rows", [1, 17, 512])
def test_scaled_mm_equals_the_emulation(spec, rows, monkeypatch):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("no FP8 products with scales a row")
    weight = weight_of(spec, torch.bfloat16, 256, 512).cuda()
    x, probe = torch.randn(rows, 512).bfloat16().cuda(), torch.randn(rows, 256).cuda()
    notices.reset_notices()
    found = step(weight, x, probe, scaling("cuda")[1])
    assert "fp8-product-cuda" not in notices.notices_so_far()
    monkeypatch.setattr(linear_fp8, "fp8_product", fp8_product.reference)
    for one, other in zip(found, step(weight, x, probe, scaling("cuda")[1]), strict=True):
        assert (one.float() - other.float()).norm() < 6e-3 * other.float().norm()  # bf16, and Hopper's partial sums


@pytest.mark.gpu
def test_a_product_is_captured_in_a_graph():
    state, recipe = scaling("cuda")
    weight = weight_of("fp8:row", torch.bfloat16, 256, 512).cuda()
    x, probe = torch.randn(64, 512, device="cuda").bfloat16(), torch.randn(64, 256, device="cuda")
    expected = step(weight, x, probe, recipe)
    state.history.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(weight, x, probe, recipe)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(weight, x, probe, recipe)
    graph.replay()
    for one, other in zip(captured, expected, strict=True):
        assert torch.equal(one, other)
