"""DoRA in the fused LoRA functions: outputs and every gradient against PEFT's own modules."""

import pytest
import torch
from torch import nn

from halfbyte.autograd import lora_mlp as lora_mlp_module
from halfbyte.autograd.dora import Scale, join
from halfbyte.autograd.linear_nvfp4 import Nvfp4Gemms, Nvfp4Recipe
from halfbyte.autograd.lora import LoRA, lora_linear, lora_qkv
from halfbyte.autograd.lora_mlp import lora_mlp
from halfbyte.autograd.rope import rope
from halfbyte.formats import named
from halfbyte.ops.dora import column_dots, scale_rows
from halfbyte.ops.rope import rotate
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from tests.helpers.peft_modules import MLP, QKV, assert_steps_close, model, seeds_for, step

EXACT = {"atol": 1e-9, "rtol": 1e-9}


def compare(module, x, tolerance=EXACT, **keys):
    seeds = seeds_for(module, x)
    mine = step(module, module.fused, x, seeds, **keys)
    theirs = step(module, module, x, seeds, **keys)
    assert any("magnitude" in name for name in theirs[2])
    assert_steps_close(mine, theirs, **tolerance)


@pytest.fixture
def x():
    return torch.randn(2, 5, 24, dtype=torch.float64)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("in_one_pass", [False, True])
def test_outputs_and_gradients_are_pefts(x, bias, in_one_pass, monkeypatch):
    monkeypatch.setattr(lora_mlp_module, "_in_one_pass", lambda *_: in_one_pass)
    compare(model(dora=True, bias=bias, ranks={"gate": 2, "up": 5, "down": 3}), x)


@pytest.mark.parametrize("targets", [("q",), ("k", "down"), ("v", "gate"), ("up",), ("q", "v", "gate", "up")])
def test_projections_without_an_adapter(x, targets):
    compare(model(dora=True, targets=targets, bias=True), x)


@pytest.mark.parametrize("in_one_pass", [False, True])
@pytest.mark.parametrize("targets", [(*QKV, *MLP), ("q", "v", "up"), ("k", "down")], ids=len)
def test_dropout_is_pefts(x, targets, in_one_pass, monkeypatch):
    """PEFT computes the base's outputs a second time, from the dropped input."""
    if len(targets) == 6:
        monkeypatch.setattr(lora_mlp_module, "_in_one_pass", lambda *_: in_one_pass)
    module = model(dora=True, bias=True, dropout=0.3, targets=targets)
    seeds, steps = seeds_for(module, x), []
    for function in (lambda x: module.fused(x, dropout=0.3), module):
        torch.manual_seed(3)
        steps.append(step(module, function, x, seeds))
    assert_steps_close(*steps, **EXACT)


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_gate_and_up_are_copied_by_ranges_of_rows(x, in_one_pass, monkeypatch):
    monkeypatch.setattr(lora_mlp_module, "_in_one_pass", lambda *_: in_one_pass)
    monkeypatch.setattr(lora_mlp_module, "COPIED_ROWS", 4)  # of 10
    compare(model(dora=True, bias=True, ranks={"gate": 2, "up": 5, "down": 3}), x)


def test_no_gradient_of_the_input(x):
    compare(model(dora=True), x, x_grad=False)


@pytest.mark.parametrize("shape", [(1, 24), (0, 24), (2, 3, 5, 24)], ids=str)
def test_leading_dimensions(shape):
    compare(model(dora=True, bias=True), torch.randn(shape, dtype=torch.float64))


def test_trained_biases(x):
    module = model(dora=True, bias=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("bias" in name or "lora" in name)
    compare(module, x)


@pytest.mark.parametrize("spec", ["nf4", "kbit3", "int8"])
def test_quantized_weights(spec):
    module, x = model(dora=True, dtype=torch.float32), torch.randn(9, 24)
    stored = {}
    for name in (*QKV, *MLP):
        base = getattr(module, name).base_layer
        stored[name] = QuantizedTensor.quantize(base.weight.detach(), named(spec))
        base.weight = nn.Parameter(stored[name].dequantize(), requires_grad=False)
    seeds = seeds_for(module, x)
    mine = step(module, lambda x: module.fused(x, stored), x, seeds)
    assert_steps_close(mine, step(module, module, x, seeds), atol=2e-5, rtol=2e-5)


def test_outputs_may_be_overwritten(x):
    """RoPE writes to outputs in place; the gradient of the magnitude reads them before."""
    module = model(dora=True)
    weight, bias, lora = module.adapter("q")
    lora_linear(x, weight, bias, lora).sum().backward()
    expected = lora.magnitude.grad.clone()
    lora.magnitude.grad = None
    (lora_linear(x, weight, bias, lora).mul_(2) / 2).sum().backward()
    torch.testing.assert_close(lora.magnitude.grad, expected)


def heads(x):
    """x [B, T, N] as heads of 6 values, [B, H, T, 6]."""
    return x.unflatten(-1, (-1, 6)).transpose(1, 2)


def angles(tokens, width, scale):
    """cos and sin [1, T, width], rounded to 16 bits as a model in bf16 has them, and scaled as by YaRN."""
    frequencies = 10.0 ** -torch.linspace(0, 1, width // 2)
    turns = torch.outer(torch.arange(float(tokens)), frequencies).repeat(1, 2)[None]
    return [(scale * x).bfloat16().double() for x in (turns.cos(), turns.sin())]


def rotated_step(module, x, cos_sin, seeds):
    """q and k after RoPE, and v, from halfbyte's functions."""

    def fused(x):
        weights, biases, loras = zip(*(module.adapter(name) for name in QKV), strict=True)
        q, k, v = lora_qkv(x, weights, biases, loras, uses=("deferred", "deferred", "unchanged"))
        pairs = zip(loras[:2], biases[:2], strict=True)
        scales = [None if lora is None else Scale(lora.magnitude, bias) for lora, bias in pairs]
        return *rope(heads(q), heads(k), *cos_sin, scales), v

    return step(module, fused, x, [seed.clone() for seed in seeds])  # RoPE's backward overwrites gradients


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("targets", [("q", "k", "v"), ("q",), ("k",)], ids=str)
@pytest.mark.parametrize(("width", "scale"), [(6, 1.0), (4, 1.0), (6, 1.3)])
def test_outputs_that_rope_overwrites_have_pefts_gradients(x, targets, bias, width, scale):
    """`width` of the 6 values of a head rotate; YaRN scales the angles."""
    module, cos_sin = model(dora=True, targets=targets, bias=bias, keys=12), angles(x.shape[1], width, scale)

    def pefts(x):
        return rotate(heads(module.q(x)), *cos_sin), rotate(heads(module.k(x)), *cos_sin), module.v(x)

    with torch.no_grad():
        seeds = [torch.randn_like(output) for output in pefts(x)]
    theirs = step(module, pefts, x, seeds)
    assert any("magnitude" in name for name in theirs[2])
    assert_steps_close(rotated_step(module, x, cos_sin, seeds), theirs, **EXACT)


def test_rotating_back_in_16_bits_rounds_once_more():
    """The gradient of a magnitude differs from that of a saved copy by less than its terms' rounding."""
    torch.manual_seed(0)
    module, x = model(dora=True, targets=("q", "k"), keys=12).bfloat16(), torch.randn(4, 512, 24).bfloat16()
    cos_sin, errors = [t.bfloat16() for t in angles(512, 6, 1.0)], {}
    with torch.no_grad():
        seeds = [torch.randn_like(heads(linear(x))) for linear in (module.q, module.k)]
    seeds.append(torch.zeros(4, 512, 11).bfloat16())
    rounded = rotated_step(module, x, cos_sin, seeds)[2]
    weights, biases, loras = zip(*(module.adapter(name) for name in QKV), strict=True)

    def copied(x):
        q, k, v = lora_qkv(x, weights, biases, loras)
        return *rope(heads(q), heads(k), *cos_sin), v

    for name, gradient in step(module, copied, x, seeds)[2].items():
        errors[name] = ((rounded[name] - gradient).norm() / gradient.norm()).item()
    assert 0 < max(errors.values()) < 0.01
    assert all("magnitude" in name for name, error in errors.items() if error)


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_that_join_a_stream_have_pefts_gradients(bias):
    """The gradient of a magnitude is read from the difference of the streams around the sum."""
    module, x = model(dora=True, bias=bias), torch.randn(2, 5, 24, dtype=torch.float64)
    weights, biases, loras = zip(*(module.adapter(name) for name in ("q", *MLP)), strict=True)
    seeds = [torch.randn_like(x)]

    def fused(x):
        q = lora_linear(x, weights[0], biases[0], loras[0], use="deferred")
        x = join(q, 3 * x, Scale(loras[0].magnitude, biases[0]))
        return (join(lora_mlp(x, *weights[1:], biases[1:], loras[1:], use="deferred"), x,
                     Scale(loras[3].magnitude, biases[3])),)  # fmt: skip

    def pefts(x):
        x = module.q(x) + 3 * x
        return (x + module.down(nn.functional.silu(module.gate(x)) * module.up(x)),)

    assert_steps_close(step(module, fused, x, seeds), step(module, pefts, x, seeds), **EXACT)


def test_a_stream_of_a_wider_dtype():
    """Under autocast embeddings may have 32 bits, and the outputs of GEMMs 16."""
    output, stream = torch.randn(3, 5).bfloat16().requires_grad_(), torch.randn(3, 5, requires_grad=True)
    magnitude = torch.rand(5, requires_grad=True)
    total = join(output, stream, Scale(magnitude, None))
    assert torch.equal(total, output + stream)
    total.square().sum().backward()
    assert output.grad.dtype is torch.bfloat16
    torch.testing.assert_close(magnitude.grad, (2 * total * output).sum(0).detach() / magnitude.detach())


def test_a_magnitude_of_zero_has_no_gradient(x):
    module = model(dora=True)
    weight, bias, lora = module.adapter("q")
    with torch.no_grad():
        lora.magnitude[3] = 0
    lora_linear(x, weight, bias, lora).sum().backward()
    assert lora.magnitude.grad[3] == 0
    assert lora.magnitude.grad.isfinite().all()


def test_recomputation_without_the_down_product_still_computes_it(x):
    module = model(dora=True)
    values, biases, loras = zip(*(module.adapter(name) for name in MLP), strict=True)
    full, skipped = (lora_mlp(x, *values, biases, loras, output=output) for output in (True, False))
    torch.testing.assert_close(skipped, full)


def test_recipes_scale_their_outputs(x):
    """With operands that NVFP4 holds exactly, the recipe's results are those of the plain GEMMs."""
    recipe = Nvfp4Gemms(Nvfp4Recipe(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True))
    x = torch.randint(-2, 3, (32, 16)).double().requires_grad_()
    weight = torch.randint(-2, 3, (48, 16)).double()
    a, b = torch.randn(4, 16, dtype=torch.float64), torch.randn(48, 4, dtype=torch.float64)
    magnitude = (torch.rand(48, dtype=torch.float64) + 0.5).requires_grad_()
    lora = LoRA(a, b, 0.5, None, magnitude, weight.square().sum(1))
    results = []
    for gemms in (None, recipe):
        (y,) = lora_qkv(x, (weight,), (None,), (lora,), recipe=gemms)
        results.append((y, *torch.autograd.grad(y.sum(), (x, magnitude))))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1][2], results[0][2], rtol=1e-5, atol=1e-5)
    assert (results[1][1] - results[0][1]).norm() < 0.2 * results[0][1].norm()  # c∘dy is rounded


def test_torch_compile(x):
    module = model(dora=True, bias=True)
    expected = step(module, module, x, seeds := seeds_for(module, x))
    compiled = torch.compile(module.fused, backend="aot_eager", fullgraph=True)
    assert_steps_close(step(module, compiled, x, seeds), expected, **EXACT)


def test_wrong_magnitudes_are_refused(x):
    module = model(dora=True)
    weight, bias, lora = module.adapter("q")
    with pytest.raises(ModelError):
        lora_linear(x, weight, bias, LoRA(lora.a, lora.b, 1.0, None, lora.magnitude[:-1], lora.squares))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (255, 129), (1000, 2048), (8192, 1024)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sums_of_products_over_rows(shape, dtype):
    a, b = (torch.randn(*shape, device="cuda", dtype=dtype) for _ in range(2))
    torch.testing.assert_close(column_dots(a, b), column_dots.reference(a, b), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(column_dots(a[::2], b[::2]), column_dots.reference(a[::2], b[::2]), rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 1), (255, 129), (1000, 2048), (777, 14336)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_are_scaled_bit_for_bit(shape, dtype):
    matrix, by = torch.randn(*shape, device="cuda", dtype=dtype), torch.randn(shape[0], device="cuda")
    expected = scale_rows.reference(matrix, by, torch.empty_like(matrix))
    assert torch.equal(scale_rows(matrix, by, torch.full_like(matrix, torch.nan)), expected)
    assert torch.equal(scale_rows(matrix, by, matrix), expected)
