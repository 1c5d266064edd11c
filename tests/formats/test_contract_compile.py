"""The format contract under torch.compile and activation checkpointing: equal to eager, no dequantized weight saved."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from tests.helpers.format_contract import linear

SIZE = 96  # SIZE² values in a weight: no activation of these tests is as large


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


class Block(nn.Module):
    """Two linears of one input followed by a third: candidates for common-subexpression elimination."""

    def __init__(self, format, dtype=torch.float32, checkpointed=False):
        super().__init__()
        self.gate, self.up, self.down = (linear(format, SIZE, SIZE, dtype=dtype, seed=seed) for seed in (1, 2, 3))
        self.down.weight = self.up.weight  # tied weights: equal arguments for two calls
        self.checkpointed = checkpointed

    def body(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


class Saved:
    """A compiler backend that counts full-precision weights among the tensors saved for backward."""

    def __init__(self):
        self.weights, self.graphs = 0, 0

    def backend(self, partition):
        return aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward, partition_fn=partition)

    def _forward(self, graph, inputs):
        self.graphs += 1
        placeholders = {node for node in graph.graph.nodes if node.op == "placeholder"}
        for node in graph.graph.output_node().args[0]:
            value = getattr(node, "meta", {}).get("val")
            if node not in placeholders and isinstance(value, torch.Tensor) and value.is_floating_point():
                self.weights += value.numel() >= SIZE * SIZE
        return make_boxed_func(graph.forward)

    def _backward(self, graph, inputs):
        return make_boxed_func(graph.forward)


def step(model, x):
    """Output, gradient of the input, gradients of the biases."""
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.float().pow(2).sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.zero_grad()
    return [y.detach(), x.grad, *(grads[name] for name in sorted(grads))]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def check_compiled(format, dtype=torch.float32, checkpointed=False):
    model, x = Block(format, dtype, checkpointed), torch.randn(3, 5, SIZE, dtype=dtype)
    expected, saved = step(model, x), Saved()
    compiled = torch.compile(model, fullgraph=True, backend=saved.backend(min_cut_rematerialization_partition))
    assert_equal(step(compiled, x), expected)
    assert saved.graphs == 1
    assert saved.weights == 0


@pytest.mark.sampled(7)
def test_compiled_equals_eager_and_saves_no_weight(format):
    """A graph identifies a format by its spec and the order of its parts."""
    check_compiled(format)


@pytest.mark.sampled(6)
def test_compiled_under_autocast(any_format):
    model, x, saved = Block(any_format), torch.randn(5, SIZE), Saved()
    compiled = torch.compile(model, fullgraph=True, backend=saved.backend(min_cut_rematerialization_partition))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = step(model, x), step(compiled, x)
    assert found[0].dtype == torch.bfloat16
    assert_equal(found, expected)
    assert saved.weights == 0


@pytest.mark.sampled(6)
def test_saved_tensor_hooks_see_no_weight_when_compiled(any_format):
    model, seen = torch.compile(Block(any_format), fullgraph=True, backend="aot_eager_decomp_partition"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
        model(torch.randn(5, SIZE, requires_grad=True)).sum()
    assert seen
    assert not [tensor for tensor in seen if tensor.is_floating_point() and tensor.numel() >= SIZE * SIZE]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_format_kernel_runs_without_gradient(any_format, dtype, monkeypatch):
    """Few rows use the format's own kernel and are bit-equal to eager mode."""
    layer, calls, cls = linear(any_format, SIZE, SIZE, dtype=dtype), [], type(any_format)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    multiply = cls.linear
    monkeypatch.setattr(cls, "linear", lambda self, x, *args: calls.append(len(x)) or multiply(self, x, *args))
    with torch.no_grad():
        for rows in (1, 2, 3, 40):
            x = torch.randn(rows, SIZE, dtype=dtype)
            calls.clear()
            found = compiled(x)
            assert calls == [rows]
            assert torch.equal(found, layer(x))


def test_reading_is_compiled(any_format):
    """DoRA's row norms of the weight plus a trained term."""
    layer, term = linear(any_format, SIZE, SIZE), torch.randn(SIZE, SIZE, requires_grad=True)

    def norms(term):
        return (layer.weight + term).norm(dim=1) + layer.weight.dequantize().abs().amax(1)

    assert_equal([torch.compile(norms, fullgraph=True, backend="aot_eager")(term)], [norms(term)])


@pytest.mark.slow
def test_inductor(format):
    model, x = Block(format), torch.randn(5, SIZE)
    assert_equal(step(torch.compile(model, fullgraph=True), x), step(model, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activation_checkpointing(any_format, dtype):
    model, x = Block(any_format, dtype), torch.randn(3, 5, SIZE, dtype=dtype)
    checkpointed = copy.deepcopy(model)
    checkpointed.checkpointed = True
    for one, other in zip(step(checkpointed, x), step(model, x), strict=True):
        assert torch.equal(one, other)
