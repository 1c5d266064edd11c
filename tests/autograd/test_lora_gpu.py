"""The fused LoRA functions on a GPU: fp32 sums of gradients, CUDA graphs, and one dequantized weight at a time."""

import pytest
import torch

from halfbyte.autograd.lora import LoRA, lora_linear, lora_qkv
from halfbyte.autograd.lora_mlp import lora_mlp
from halfbyte.formats import Blockwise4
from halfbyte.tensor import QuantizedTensor

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, INNER = 512, 1024, 2752


def random(*shape, dtype=torch.bfloat16, scale=1.0):
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def projection(rows, columns, rank=16):
    weight = QuantizedTensor.quantize(random(rows, columns, scale=columns**-0.5), Blockwise4("nf4", 64, True))
    factors = random(rank, columns, dtype=torch.float32, scale=columns**-0.5), random(rows, rank, dtype=torch.float32)
    return weight, LoRA(*(factor.requires_grad_() for factor in factors), 0.5)


def error(found, truth):
    return ((found.double() - truth.double()).norm() / truth.double().norm()).item()


def test_fp32_adapters_get_fp32_sums():
    """Against fp64 on the bf16 inputs; rounding a sum to bf16 would have an error of 1.7e-3."""
    weight, lora = projection(HIDDEN, HIDDEN)
    x, seed = random(TOKENS, HIDDEN), random(TOKENS, HIDDEN)
    found = torch.autograd.grad(lora_linear(x, weight, None, lora), (lora.a, lora.b), seed)
    a, b = lora.a.detach().bfloat16(), lora.b.detach().bfloat16()
    u, v = x @ a.t(), torch.mm(seed, b) * 0.5
    truth = v.double().t() @ x.double(), seed.double().t() @ u.double() * 0.5
    assert [grad.dtype for grad in found] == [torch.float32] * 2
    assert error(found[0], truth[0]) < 1e-3  # v itself may be rounded differently
    assert error(found[1], truth[1]) < 1e-4


def test_a_step_in_a_cuda_graph_equals_eager():
    qkv, mlp = [projection(n, HIDDEN) for n in (1024, 256, 256)], [projection(INNER, HIDDEN) for _ in range(2)]
    mlp.append(projection(HIDDEN, INNER))
    x = random(TOKENS, HIDDEN).requires_grad_()
    factors = [factor for _, lora in (*qkv, *mlp) for factor in (lora.a, lora.b)]

    def step():
        (q_weights, q_loras), (weights, loras) = zip(*qkv, strict=True), zip(*mlp, strict=True)
        q, k, v = lora_qkv(x, q_weights, (None,) * 3, q_loras)
        y = lora_mlp(x, *weights, loras=loras)
        return torch.autograd.grad(q.square().sum() + (k * v).sum() + y.square().sum(), (x, *factors))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():  # the replay must read the current factors
        for tensor in (x, *factors):
            tensor.mul_(0.9)
    graph.replay()
    assert all(error(found, truth) < 5e-3 for found, truth in zip(captured, step(), strict=True))


def test_one_dequantized_weight_at_a_time():
    """The peak memory of backward is dx and one bf16 weight."""
    weights, loras = zip(*(projection(4096, 4096) for _ in range(3)), strict=True)
    x = random(64, 4096).requires_grad_()
    outputs = lora_qkv(x, weights, (None,) * 3, loras)
    seeds = [random(*output.shape) for output in outputs]
    torch.autograd.backward(outputs, seeds)  # cuBLAS allocates a workspace for the backward thread
    outputs = lora_qkv(x, weights, (None,) * 3, loras)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.backward(outputs, seeds)
    assert torch.cuda.max_memory_allocated() - before < 1.2 * 2 * 4096 * 4096


def test_dropout_draws_anew_in_every_replay():
    weight, lora = projection(HIDDEN, HIDDEN)
    x = random(TOKENS, HIDDEN)
    lora_linear(x, weight, None, lora, 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = lora_linear(x, weight, None, lora, 0.5)
    graph.replay()
    first = y.clone()
    graph.replay()
    assert not torch.equal(first, y)
