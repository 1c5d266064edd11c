"""Adapters for ranges of rows: outputs and gradients are those of a call for each range."""

import math

import pytest
import torch

from halfbyte.autograd.lora import LoRA, RowLoRA, lora_linear, lora_qkv
from halfbyte.autograd.lora_mlp import lora_mlp
from halfbyte.formats import Blockwise4
from halfbyte.tensor import QuantizedTensor
from halfbyte.utils.errors import ModelError

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")

K, N, INNER = 24, 40, 32
SCALINGS, RANKS = (2.0, 0.3, 1.0), (4, 1, 7)
EXACT = {"atol": 1e-10, "rtol": 1e-10}


def normal(*shape, seed, grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(grad)


def adapters(inputs, outputs, seed):
    return [
        LoRA(normal(r, inputs, seed=seed + i, grad=True), normal(outputs, r, seed=seed + 9 + i, grad=True), s)
        for i, (r, s) in enumerate(zip(RANKS, SCALINGS, strict=True))
    ]


def gradients(outputs, leaves):
    seeds = [normal(*output.shape, seed=77 + i) for i, output in enumerate(outputs)]
    return torch.autograd.grad(outputs, leaves, seeds)


def compare(function, sizes, rows=(3, 5, K), with_adapter=None):
    """`function` takes x and an adapter for each (inputs, outputs) of `sizes`, and returns its outputs."""
    with_adapter = with_adapter or [True] * len(sizes)
    of_projections = [
        adapters(*size, seed=100 * at) if on else None
        for at, (size, on) in enumerate(zip(sizes, with_adapter, strict=True))
    ]
    leaves = [factor for members in of_projections if members for lora in members for factor in (lora.a, lora.b)]
    x = normal(*rows, seed=5, grad=True)
    mine = function(x, [None if members is None else RowLoRA(tuple(members)) for members in of_projections])
    parts = [
        function(x[i : i + 1], [None if members is None else members[i] for members in of_projections])
        for i in range(len(RANKS))
    ]
    theirs = [torch.cat(outputs) for outputs in zip(*parts, strict=True)]
    torch.testing.assert_close(mine, tuple(theirs), **EXACT)
    torch.testing.assert_close(gradients(mine, [x, *leaves]), gradients(theirs, [x, *leaves]), **EXACT)


@pytest.mark.parametrize("with_adapter", [(True, True, True), (True, False, True), (False, False, True)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_projections_of_one_input(with_adapter, bias):
    sizes = [(K, N), (K, 8), (K, 8)]
    weights = [normal(n, k, seed=200 + at) for at, (k, n) in enumerate(sizes)]
    biases = [normal(n, seed=300 + at) if bias else None for at, (_, n) in enumerate(sizes)]
    compare(lambda x, loras: lora_qkv(x, weights, biases, loras), sizes, with_adapter=with_adapter)


def test_an_input_without_leading_dimension_has_a_row_each():
    weight = normal(N, K, seed=4)
    compare(lambda x, loras: (lora_linear(x, weight, None, loras[0]),), [(K, N)], rows=(3, K))


def test_a_gated_mlp():
    sizes = [(K, INNER), (K, INNER), (INNER, K)]
    weights = [normal(n, k, seed=200 + at) for at, (k, n) in enumerate(sizes)]
    compare(lambda x, loras: (lora_mlp(x, *weights, (None,) * 3, loras),), sizes)


def test_quantized_weights():
    sizes = [(64, 96), (64, 32)]
    stored = [
        QuantizedTensor.quantize(normal(n, k, seed=at).float(), Blockwise4("nf4", 32, True))
        for at, (k, n) in enumerate(sizes)
    ]
    compare(lambda x, loras: lora_qkv(x, stored, (None, None), loras), sizes, rows=(3, 5, 64))


def test_nan_stays_in_its_range():
    weight, members = normal(N, K, seed=4), adapters(K, N, seed=0)
    x = normal(3, 5, K, seed=5)
    x[1] = math.nan
    leaves = [factor for lora in members for factor in (lora.a, lora.b)]
    grads = gradients([lora_linear(x, weight, None, RowLoRA(tuple(members)))], leaves)
    finite = [bool(grad.isfinite().all()) for grad in grads]
    assert finite == [True, True, False, False, True, True]


def test_dropout_is_refused():
    with pytest.raises(ModelError, match="dropout"):
        lora_linear(
            normal(3, K, seed=1), normal(N, K, seed=2), None, RowLoRA(tuple(adapters(K, N, seed=0))), dropout=0.1
        )


def test_rows_that_cannot_be_divided_are_refused():
    with pytest.raises(ModelError, match="rows"):
        lora_linear(normal(2, 5, K, seed=1), normal(N, K, seed=2), None, RowLoRA(tuple(adapters(K, N, seed=0))))
