"""Experts with adapters: values and gradients against torch's autograd over a loop in fp64, at odd sizes."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.experts import ExpertWeights, experts
from halfbyte.autograd.lora import LoRA
from halfbyte.formats import from_spec
from halfbyte.ops.experts import Unit
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError

SILU, CLAMPED = Unit("silu"), Unit("silu", interleaved=True, limit=0.7, alpha=1.702, offset=1.0)
K, INNER, HIDDEN, RANK = 24, 10, 18, 3


def indices(kind, tokens, count, top_k):
    if kind == "one":
        return torch.zeros(tokens, top_k, dtype=torch.int64) + count - 1
    return (
        torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]) if tokens else torch.zeros(0, top_k).long()
    )


def problem(tokens, count, top_k, kind="drawn", bias=False, dtype=torch.float64, adapters=True):
    torch.manual_seed(tokens + count)
    weights = {"first": torch.randn(count, 2 * INNER, K) / 5, "second": torch.randn(count, HIDDEN, INNER) / 3}
    if bias:
        weights |= {"first_bias": torch.randn(count, 2 * INNER), "second_bias": torch.randn(count, HIDDEN)}
    factors = [torch.randn(*shape) / 3 for shape in (
        (count, RANK, K), (count, 2 * INNER, RANK), (count, RANK, INNER), (count, HIDDEN, RANK),
    )] if adapters else []  # fmt: skip
    leaves = [torch.randn(tokens, K), torch.rand(tokens, top_k), *factors]
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    return {name: weight.to(dtype) for name, weight in weights.items()}, leaves, indices(kind, tokens, count, top_k)


def unit_of(c, unit):
    gate, up = (c[:, ::2], c[:, 1::2]) if unit.interleaved else c.chunk(2, dim=-1)
    if unit.offset == 0:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=unit.limit), up.clamp(-unit.limit, unit.limit)
    return (up + 1) * gate * torch.sigmoid(gate * unit.alpha)


def loop(weights, unit, index, x, routed, a1=None, b1=None, a2=None, b2=None):
    """The definition: a loop over each token's experts."""
    rows = []
    for token in range(x.shape[0]):
        total = torch.zeros(HIDDEN, dtype=x.dtype)
        for j, e in enumerate(index[token].tolist()):
            row = x[token : token + 1]
            c = row @ weights["first"][e].t() + (weights["first_bias"][e] if "first_bias" in weights else 0)
            c = c if a1 is None else c + 1.5 * (row @ a1[e].t()) @ b1[e].t()
            h = unit_of(c, unit)
            y = h @ weights["second"][e].t() + (weights["second_bias"][e] if "second_bias" in weights else 0)
            y = y if a2 is None else y + 0.7 * (h @ a2[e].t()) @ b2[e].t()
            total = total + routed[token, j] * y[0]
        rows.append(total)
    return torch.stack(rows) if rows else x.new_zeros(0, HIDDEN) + 0 * (x.sum() + routed.sum())


def ours(weights, unit, index, x, routed, *factors):
    adapters = (LoRA(*factors[:2], 1.5), LoRA(*factors[2:], 0.7)) if factors else (None, None)
    return experts(x, index, routed, ExpertWeights(**weights, unit=unit), *adapters)


def results(function, leaves, unit, weights, index):
    out = function(weights, unit, index, *leaves)
    torch.manual_seed(0)
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out), materialize_grads=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("unit", "bias"), [(SILU, False), (SILU, True), (CLAMPED, True)], ids=["silu", "bias", "clamped"]
)
@pytest.mark.parametrize(("tokens", "count", "top_k", "kind"), [
    (7, 3, 2, "drawn"), (1, 1, 1, "drawn"), (1, 512, 8, "drawn"), (5, 4, 1, "one"),
    (9, 2, 2, "drawn"), (0, 3, 2, "drawn"),
])  # fmt: skip
def test_against_a_loop(unit, bias, tokens, count, top_k, kind):
    weights, leaves, index = problem(tokens, count, top_k, kind, bias)
    mine, truth = (results(function, leaves, unit, weights, index) for function in (ours, loop))
    for found, expected in zip(mine, truth, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_experts_without_tokens_get_exact_zeros():
    weights, leaves, index = problem(4, 5, 1, "one")
    *_, da1, db1, da2, db2 = results(ours, leaves, SILU, weights, index)
    for gradient in (da1, db1, da2, db2):
        assert not gradient[:-1].any()
        assert gradient[-1].any()


def test_without_adapters_and_for_some_gradients_only():
    weights, leaves, index = problem(6, 3, 2, adapters=False)
    for found, expected in zip(*(results(f, leaves, SILU, weights, index) for f in (ours, loop)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    weights, leaves, index = problem(6, 3, 2)
    truth = results(loop, leaves, SILU, weights, index)
    for wanted in ([2], [3], [4, 5], [1]):
        frozen = [leaf if at in wanted else leaf.detach() for at, leaf in enumerate(leaves)]
        out = ours(weights, SILU, index, *frozen)
        torch.manual_seed(0)
        found = torch.autograd.grad(out, [leaves[at] for at in wanted], torch.randn_like(out))
        for at, gradient in zip(wanted, found, strict=True):
            torch.testing.assert_close(gradient, truth[1 + at], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spec", ["blockwise4:nf4:64:nested", "blockwise4:fp4:64:plain"])
def test_quantized_stacks_equal_their_values(spec):
    torch.manual_seed(0)
    plain = {"first": torch.randn(3, 2 * 64, 64) / 8, "second": torch.randn(3, 64, 64) / 8}
    quantized = {name: QuantizedTensor.quantize(weight, from_spec(spec)) for name, weight in plain.items()}
    values = {name: weight.dequantize() for name, weight in quantized.items()}
    x, routed, index = (
        torch.randn(9, 64, requires_grad=True),
        torch.rand(9, 2, requires_grad=True),
        indices("", 9, 3, 2),
    )
    found = []
    for weights in (quantized, values):
        out = experts(x, index, routed, ExpertWeights(**weights, unit=SILU))
        found.append([out, *torch.autograd.grad(out.square().sum(), [x, routed])])
    for mine, expected in zip(*found, strict=True):
        assert torch.equal(mine, expected)


def test_errors_name_the_argument():
    weights, (x, routed, a1, b1, *_), index = problem(4, 3, 2)
    held = ExpertWeights(**weights, unit=SILU)
    with pytest.raises(ModelError, match=r"top_k_index.*torch\.float64"):
        experts(x, routed, routed, held)
    with pytest.raises(ModelError):
        experts(x, index[:2], routed, held)
    with pytest.raises(ModelError, match=r"A \[3, 24, 3\]"):
        experts(x, index, routed, held, LoRA(a1.mT, b1, 1.0))
    with pytest.raises(ModelError):
        experts(x, index, routed, held, LoRA(a1.to("meta"), b1, 1.0))
    trained = ExpertWeights(weights["first"], weights["second"].requires_grad_(), SILU)
    with pytest.raises(ModelError):
        experts(x, index, routed, trained)
    with torch.no_grad():
        assert torch.equal(experts(x, index, routed, trained), experts(x, index, routed, held))


def test_dropout():
    """Gradients equal finite differences of the values with a fixed seed."""
    weights, leaves, index = problem(5, 3, 2)

    def dropped(seed, dropout, x, routed, a1, b1, a2, b2):
        torch.manual_seed(seed)
        held = ExpertWeights(**weights, unit=SILU)
        return experts(x, index, routed, held, LoRA(a1, b1, 1.5), LoRA(a2, b2, 0.7), dropout)

    out = dropped(3, 0.4, *leaves)
    given = torch.randn_like(out)
    for at, gradient in enumerate(torch.autograd.grad(out, leaves, given)):
        step = 1e-5 * torch.randn_like(leaves[at])
        ends = ([*leaves[:at], leaves[at] + sign * step, *leaves[at + 1 :]] for sign in (1, -1))
        up, down = ((dropped(3, 0.4, *end) * given).sum().detach() for end in ends)
        torch.testing.assert_close((gradient * step).sum(), (up - down) / 2, rtol=1e-6, atol=1e-12)
    whole, mean = ours(weights, SILU, index, *leaves), sum(dropped(seed, 0.1, *leaves) for seed in range(60)) / 60
    assert (mean - whole).norm() < 0.1 * whole.norm()
    assert not torch.allclose(out, whole)


def test_a_unit_that_widens_its_values_does_not_widen_the_products():
    """Autocast computes the square of a ReLU in float32 on GPUs (Nemotron-H); h is cast back to the GEMMs' dtype."""
    weights, leaves, index = problem(9, 3, 2, dtype=torch.bfloat16)
    first, second = LoRA(*leaves[2:4], 1.5), LoRA(*leaves[4:6], 0.7)

    def widened(c):
        return unit_of(c.float(), SILU)

    found = experts(*leaves[:1], index, leaves[1], ExpertWeights(unit=widened, **weights), first, second)
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    plain = experts(*leaves[:1], index, leaves[1], ExpertWeights(unit=SILU, **weights), first, second)
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05)
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.bfloat16 for leaf in leaves)
