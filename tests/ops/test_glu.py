"""Compare SwiGLU and GeGLU with Hugging Face's activations: values, gradients, and in-place changes of inputs."""

import pytest
import torch
from transformers.activations import ACT2FN

from halfbyte.autograd.lora_mlp import glu
from halfbyte.ops.glu import glu_backward_
from halfbyte.utils.errors import ModelError

HUGGING_FACE = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}


def example(*shape, dtype=torch.float64):
    return torch.randn(2, *shape).mul(3).to(dtype)


@pytest.mark.parametrize("activation", HUGGING_FACE)
def test_values_and_gradients(activation):
    gate, up = example(3, 5, 11)
    hf_gate, hf_up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    gate, up = gate.requires_grad_(), up.requires_grad_()
    theirs = ACT2FN[HUGGING_FACE[activation]](hf_gate) * hf_up
    mine = glu(gate * 1, up * 1, activation)
    torch.testing.assert_close(mine, theirs)
    seed = torch.randn_like(mine)
    torch.testing.assert_close(
        torch.autograd.grad(mine, (gate, up), seed), torch.autograd.grad(theirs, (hf_gate, hf_up), seed)
    )


def test_halves_of_a_fused_projection():
    fused = torch.randn(2, 5, 22, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.silu(fused[..., :11]) * fused[..., 11:]
    seed = torch.randn_like(expected)
    truth = torch.autograd.grad(expected, fused, seed)[0]
    mine = glu(*(fused * 1).chunk(2, dim=-1))
    assert mine.is_contiguous()
    torch.testing.assert_close(torch.autograd.grad(mine, fused, seed)[0], truth)


@pytest.mark.parametrize("activation", HUGGING_FACE)
def test_backward_leaves_gradients_and_output_in_its_arguments(activation):
    gate, up = example(4, 9)
    truth_gate, truth_up = gate.clone().requires_grad_(), up.clone().requires_grad_()
    output = ACT2FN[HUGGING_FACE[activation]](truth_gate) * truth_up
    grad = torch.randn_like(output)
    truth = torch.autograd.grad(output, (truth_gate, truth_up), grad)
    assert glu_backward_(grad, gate, up, activation, True) is None
    torch.testing.assert_close((gate, up, grad), (*truth, output.detach()))


def test_gradient_is_untouched_unless_the_output_is_asked_for():
    (gate, up), grad = example(4, 9), torch.randn(4, 9, dtype=torch.float64)
    before = grad.clone()
    glu_backward_(grad, gate, up, "silu", False)
    assert torch.equal(grad, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: glu(x.int(), x.int()), "torch.int32"),
        (lambda x: glu(x, x[:, :3]), r"\[2, 3\].*gate is \[2, 8\]"),
        (lambda x: glu(x, x.half()), "torch.float16.*torch.float32"),
        (lambda x: glu(x, x, "relu"), "(?s)'relu'.*gelu_tanh"),
        (lambda x: glu_backward_(x[0], x, x, "silu", False), "glu_backward:"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ModelError, match=message):
        call(torch.randn(2, 8))


def test_compiles_without_graph_breaks():
    gate, up = example(4, 9).requires_grad_()
    step = lambda gate, up: glu(gate * 2, up * 2, "gelu_tanh").sum()  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(compiled(gate, up), (gate, up)), torch.autograd.grad(step(gate, up), (gate, up))
    )
