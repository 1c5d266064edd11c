"""Modules of the drop-in against bitsandbytes' on the CPU: outputs, gradients, state dicts, copies."""

import copy
import pickle

import bitsandbytes as real
import pytest
import torch

import halfbyte.bitsandbytes as bnb


def pair(name, *sizes, **options):
    torch.manual_seed(0)
    mine = getattr(bnb.nn, name)(*sizes, **options)
    theirs = getattr(real.nn, name)(*sizes, **options)
    for parameter, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        other.data.copy_(parameter.data)
    return mine.to("cpu"), theirs.to("cpu")


def run(layer, x, grad):
    x = x.clone().requires_grad_(True)
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["LinearNF4", "LinearFP4"])
@pytest.mark.parametrize("nested", [False, True])
def test_linear4bit_equals_bitsandbytes(name, nested):
    mine, theirs = pair(name, 67, 33, compress_statistics=nested)
    assert torch.equal(mine.weight.data, theirs.weight.data)
    x, grad = torch.randn(5, 67), torch.randn(5, 33)
    for a, b in zip(run(mine, x, grad), run(theirs, x, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    mine_state, their_state = mine.state_dict(), theirs.state_dict()
    assert mine_state.keys() == their_state.keys()
    for key, value in their_state.items():
        assert torch.equal(mine_state[key], value), key


@pytest.mark.parametrize("threshold", [0.0, 2.0])
@pytest.mark.parametrize("training", [False, True])
def test_linear8bitlt_equals_bitsandbytes_on_fp16_values(threshold, training):
    mine, theirs = pair("Linear8bitLt", 67, 33, has_fp16_weights=False, threshold=threshold)
    mine.train(training), theirs.train(training)
    x, grad = torch.randn(5, 67).half().float(), torch.randn(5, 33)
    for a, b in zip(run(mine, x, grad), run(theirs, x, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)  # bitsandbytes' result is rounded to fp16
    mine_state, their_state = mine.state_dict(), theirs.state_dict()
    assert mine_state.keys() == their_state.keys()
    for key, value in their_state.items():
        assert torch.equal(mine_state[key], value), key


@pytest.mark.parametrize("change", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@pytest.mark.parametrize("name", ["Linear4bit", "Linear8bitLt"])
def test_copies_keep_codes_and_state(name, change):
    options = {"has_fp16_weights": False} if name == "Linear8bitLt" else {}
    layer = getattr(bnb.nn, name)(64, 32, **options).to("cpu")
    other = change(layer)
    assert type(other.weight) is type(layer.weight)
    assert other.weight.data_ptr() != layer.weight.data_ptr()
    x = torch.randn(3, 64)
    assert torch.equal(layer(x), other(x))


def test_unquantized_layers_raise():
    with pytest.raises(ValueError):
        bnb.nn.Linear4bit(64, 32)(torch.randn(2, 64))
    with pytest.raises(RuntimeError):
        bnb.nn.Embedding8bit(8, 64)(torch.tensor([1]))
    with pytest.raises(ValueError):
        bnb.matmul_4bit(torch.randn(2, 5), *bnb.functional.quantize_4bit(torch.randn(8, 64)))


def test_params4bit_view_as_quantized_tensor_shares_memory():
    layer = bnb.nn.LinearNF4(64, 32, bias=False).to("cpu")
    view = layer.weight.quant_state.as_tensor(layer.weight)
    assert view.parts["packed"].data_ptr() == layer.weight.data_ptr()
    assert torch.equal(view.dequantize(), bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state))
