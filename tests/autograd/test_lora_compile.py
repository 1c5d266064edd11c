"""The fused LoRA functions under torch.compile(fullgraph=True): equal to eager, no dequantized weight saved."""

import pytest
import torch

from halfbyte.formats import Blockwise4
from halfbyte.tensor import QuantizedTensor
from tests.helpers.peft_modules import MLP, QKV, assert_steps_close, model, seeds_for, step
from tests.helpers.saved_shapes import Saved

HIDDEN, INNER = 64, 96
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def quantized(**keys):
    """A model with adapters, and its weights as NF4 parameters."""
    module = model(8, dtype=torch.float32, hidden=HIDDEN, inner=INNER, **keys)
    packed = {}
    for name in (*QKV, *MLP):
        weight = QuantizedTensor.quantize(module.adapter(name)[0], Blockwise4("nf4", 64, True))
        packed[name] = torch.nn.Parameter(weight, requires_grad=False)
    return module, packed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("targets", [(*QKV, *MLP), ("q", "v", "down")], ids=len)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_compiled_equals_eager_and_saves_no_weight(targets, autocast):
    (module, packed), x, saved = quantized(targets=targets), torch.randn(2, 5, HIDDEN), Saved()
    seeds = seeds_for(module, x)
    compiled = torch.compile(lambda x: module.fused(x, packed), fullgraph=True, backend=saved.backend)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = step(module, lambda x: module.fused(x, packed), x, seeds)
        found = step(module, compiled, x, seeds)
    assert_steps_close(found, expected, **({"atol": 0.15, "rtol": 0.03} if autocast else CLOSE))
    weights = [(name.shape[0], name.shape[1]) for name in packed.values()]
    assert saved.graphs == 1
    assert saved.shapes
    assert not [shape for shape in saved.shapes if shape in weights or shape[::-1] in weights]


@pytest.mark.slow
def test_lengths_recompile_once():
    module, packed = quantized()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: module.fused(x, packed), fullgraph=True, backend=counter)
    for length in (5, 7, 9, 12):
        x = torch.randn(2, length, HIDDEN)
        seeds = seeds_for(module, x)
        expected = step(module, lambda x: module.fused(x, packed), x, seeds)
        assert_steps_close(step(module, compiled, x, seeds), expected, **CLOSE)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_inductor():
    (module, packed), x = quantized(), torch.randn(2, 5, HIDDEN)
    seeds = seeds_for(module, x)
    compiled = torch.compile(lambda x: module.fused(x, packed), fullgraph=True)
    expected = step(module, lambda x: module.fused(x, packed), x, seeds)
    assert_steps_close(step(module, compiled, x, seeds), expected, **CLOSE)
