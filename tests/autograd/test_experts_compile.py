"""Experts under torch.compile(fullgraph=True): results equal eager, and no dequantized stack is saved."""

import pytest
import torch

from halfbyte.autograd.experts import ExpertWeights, experts
from halfbyte.autograd.lora import LoRA
from halfbyte.formats import from_spec
from halfbyte.ops.experts import Unit
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError
from tests.helpers.saved_shapes import Saved

E, K, RANK, T, TOP = 4, 64, 4, 9, 2


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("spec", "unit", "adapted"), [
    ("blockwise4:nf4:64:nested", Unit("silu"), True),
    ("blockwise4:nf4:64:nested", Unit("silu"), False),
    ("kbit:3:nf", Unit("silu", True, 0.7, 1.702, 1.0), True),
], ids=["nf4", "frozen", "clamped"])  # fmt: skip
def test_compiled_equals_eager(spec, unit, adapted):
    torch.manual_seed(1)
    inner = 64
    first, second = torch.randn(E, 2 * inner, K) / 8, torch.randn(E, K, inner) / 8
    stacks = [
        torch.nn.Parameter(QuantizedTensor.quantize(w, from_spec(spec).stacked()), False) for w in (first, second)
    ]
    biases = (torch.randn(E, 2 * inner), torch.randn(E, K)) if not unit.plain else (None, None)
    weights = ExpertWeights(*stacks, unit, *biases)
    x, routed = torch.randn(T, K, requires_grad=True), torch.rand(T, TOP, requires_grad=True)
    index = torch.stack([torch.randperm(E)[:TOP] for _ in range(T)])
    sizes = ((E, RANK, K), (E, 2 * inner, RANK), (E, RANK, inner), (E, K, RANK))
    factors = [torch.randn(size, requires_grad=True) for size in sizes] if adapted else []
    seed, saved = torch.randn(T, K), Saved()

    def run(x, routed, *factors):
        loras = (LoRA(*factors[:2], 0.7), LoRA(*factors[2:], 1.3)) if factors else (None, None)
        return experts(x, index, routed, weights, *loras)

    def step(function):
        out = function(x, routed, *factors)
        return [out, *torch.autograd.grad(out, [x, routed, *factors], seed)]

    expected, found = step(run), step(torch.compile(run, fullgraph=True, backend=saved.backend))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    assert saved.graphs == 1
    slots = T * TOP
    kept = {(slots, 2 * inner), (slots, RANK)} | {tuple(size) for size in sizes}
    assert {shape for shape in saved.shapes if len(shape) > 1 and shape[0] != T} <= kept | {(0,)}, saved.shapes


@pytest.mark.parametrize(("unit", "dropout"), [
    (torch.nn.functional.silu, 0.0), (Unit("silu"), 0.1),
])  # fmt: skip
def test_unsupported_options_are_refused_when_compiling(unit, dropout):
    inner = 64
    stacks = torch.randn(E, inner if callable(unit) else 2 * inner, K), torch.randn(E, K, inner)
    weights = ExpertWeights(*stacks, unit)
    lora = LoRA(torch.randn(E, RANK, inner), torch.randn(E, K, RANK), 1.0)
    index = torch.zeros(T, 1, dtype=torch.int64)
    compiled = torch.compile(
        lambda x: experts(x, index, torch.ones(T, 1), weights, None, lora, dropout), fullgraph=True, backend="eager"
    )
    with pytest.raises((ModelError, torch._dynamo.exc.Unsupported)):
        compiled(torch.randn(T, K))
