"""Compare RMSNorm and LayerNorm with Hugging Face's modules and torch's: values, gradients, saved tensors, errors."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from halfbyte.autograd.norms import add_rms_norm, layer_norm, rms_norm
from halfbyte.utils.errors import ModelError

RMS_NORMS = [(LlamaRMSNorm, False), (Qwen3RMSNorm, False), (GemmaRMSNorm, True), (Gemma3RMSNorm, True)]


def example(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_()


def module(cls, width, dtype=torch.float32, weight_dtype=None):
    norm = cls(width, eps=1e-5)
    norm.weight.data = torch.randn(width).to(weight_dtype or dtype)
    return norm


@pytest.mark.parametrize(("cls", "offset"), RMS_NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_rounds_as_hugging_face(cls, offset, dtype):
    x, norm = example(3, 7, 40, dtype=dtype), module(cls, 40, dtype)
    mine, theirs = rms_norm(x, norm.weight, 1e-5, offset), norm(x)
    assert mine.dtype == theirs.dtype
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("cls", "offset"), RMS_NORMS)
def test_rms_norm_gradients(cls, offset):
    x, norm = example(3, 7, 40), module(cls, 40)
    seed = torch.randn(3, 7, 40)
    mine = torch.autograd.grad(rms_norm(x, norm.weight, 1e-5, offset), (x, norm.weight), seed)
    theirs = torch.autograd.grad(norm(x), (x, norm.weight), seed)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("offset", [False, True])
def test_residual_stream(with_residual, offset):
    x, residual, weight = example(2, 5, 24), example(2, 5, 24) if with_residual else None, example(24)
    inputs = [tensor for tensor in (x, residual, weight) if tensor is not None]
    total = x + residual if with_residual else x
    expected = (rms_norm(total, weight, 1e-6, offset), total)
    mine = add_rms_norm(x, residual, weight, 1e-6, offset)
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    seeds = [torch.randn_like(total), torch.randn_like(total)]
    gradients = torch.autograd.grad(mine, inputs, seeds, retain_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, inputs, seeds), rtol=1e-5, atol=1e-5)
    only_sum = torch.autograd.grad(mine[1], x, seeds[1], retain_graph=True)[0]
    assert torch.equal(only_sum, seeds[1])
    only_norm = torch.autograd.grad(mine[0], x, seeds[0])[0]
    torch.testing.assert_close(only_norm + seeds[1], gradients[0])


def test_layer_norm():
    x, weight, bias = example(3, 5, 24), example(24), example(24)
    mine, theirs = layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (24,), weight, bias, 1e-5)
    torch.testing.assert_close(mine, theirs)
    seed = torch.randn_like(mine)
    inputs = (x, weight, bias)
    gradients = torch.autograd.grad(mine, inputs, seed), torch.autograd.grad(theirs, inputs, seed)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_saves_the_input_and_a_number_a_row():
    x, weight = example(4, 6, 32), example(32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda x: x):
        rms_norm(x, weight)
    assert saved == [(4, 6, 32), (4, 6)]


def test_frozen_weight_gets_no_gradient():
    x, weight = example(4, 6, 32), example(32).detach()
    rms_norm(x, weight).sum().backward()
    assert weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: rms_norm(x.int(), w), "rms_norm:.*torch.int32"),
        (lambda x, w: rms_norm(x, w.int()), "rms_norm:.*torch.int32"),
        (lambda x, w: rms_norm(x, w[:-1]), r"rms_norm: weight is \[7\].*\[8\]"),
        (lambda x, w: rms_norm(x, w.repeat(2)[::2]), None),
        (lambda x, w: add_rms_norm(x, x[:1], w), r"residual is \[1, 8\].*x is \[3, 8\]"),
        (lambda x, w: add_rms_norm(x, x.half(), w), "torch.float16"),
        (lambda x, w: layer_norm(x, w, w[:3]), r"layer_norm: bias is \[3\]"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ModelError, match=message):
        call(torch.randn(3, 8), torch.randn(8))


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    x, residual, weight, bias = example(2, 5, 24), example(2, 5, 24), example(24), example(24)

    def step(x, residual, weight, bias):
        y, total = add_rms_norm(x, residual, weight)
        return rms_norm(y, weight, 1e-6, True) + layer_norm(total, weight, bias)

    inputs = (x, residual, weight, bias)
    eager, compiled = step(*inputs), torch.compile(step, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(
        torch.autograd.grad(compiled.sum(), inputs), torch.autograd.grad(eager.sum(), inputs), rtol=1e-5, atol=1e-5
    )
