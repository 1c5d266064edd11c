"""Experts on a GPU: the layer against a loop in fp64, without synchronization, and in a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F

from halfbyte.autograd.experts import ExpertWeights, experts
from halfbyte.autograd.lora import LoRA
from halfbyte.formats import from_spec
from halfbyte.ops import experts as ops
from halfbyte.ops.experts import Unit
from halfbyte.tensor import QuantizedTensor

pytestmark = pytest.mark.gpu

COUNT, HIDDEN, INNER, TOP_K, RANK = 16, 256, 192, 4, 8
RESULTS = ("out", "dx", "weights", "dA1", "dB1", "dA2", "dB2")


@pytest.fixture(scope="module", params=["blockwise4:nf4:64:nested", "kbit:3:bnf", "nvfp4:2d:plain", "fp8:row"])
def layer(request):
    torch.manual_seed(0)
    format_ = from_spec(request.param).stacked()
    sizes = ((COUNT, 2 * INNER, HIDDEN), (COUNT, HIDDEN, INNER))
    stacks = [QuantizedTensor.quantize(torch.randn(size, device="cuda") / size[2] ** 0.5, format_) for size in sizes]
    shapes = ((COUNT, RANK, HIDDEN), (COUNT, 2 * INNER, RANK), (COUNT, RANK, INNER), (COUNT, HIDDEN, RANK))
    return stacks, [torch.randn(shape, device="cuda") / shape[2] ** 0.5 for shape in shapes]


def drawn(tokens):
    index = torch.rand(tokens, COUNT, device="cuda").topk(TOP_K).indices
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return index, x, torch.rand(tokens, TOP_K, device="cuda"), torch.randn_like(x)


def step(stacks, factors, index, x, routed, grad):
    leaves = [leaf.detach().requires_grad_() for leaf in (x, routed, *factors)]
    x, routed, a1, b1, a2, b2 = leaves
    weights = ExpertWeights(*stacks, Unit("silu"))
    out = experts(x, index, routed, weights, LoRA(a1, b1, 2.0), LoRA(a2, b2, 2.0))
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def loop(stacks, factors, index, x, routed, grad, dtype):
    """A loop over experts in torch operations."""
    first, second = (stack.dequantize(torch.bfloat16).to(dtype) for stack in stacks)
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in (x, routed, *factors)]
    x, routed, a1, b1, a2, b2 = leaves
    out = torch.zeros_like(x)
    for e in range(COUNT):
        token, j = torch.where(index == e)
        rows = x[token]
        gate, up = (rows @ first[e].t() + 2 * (rows @ a1[e].t()) @ b1[e].t()).chunk(2, -1)
        h = F.silu(gate) * up
        y = h @ second[e].t() + 2 * (h @ a2[e].t()) @ b2[e].t()
        out = out.index_add(0, token, y * routed[token, j, None])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


@pytest.mark.parametrize("tokens", [1, 7, 300, 1500])
@pytest.mark.parametrize("decoded_rows", [0, 10**6], ids=["decoded first", "packed"])
def test_against_a_loop(layer, monkeypatch, tokens, decoded_rows):
    """Errors are averaged over enough draws to be comparable.

    The gradient of one token's routing weights has only k numbers. Their rounding errors differ by chance by several
    times between the implementations: on a CPU a sixth of the draws exceed the bound.
    """
    monkeypatch.setattr(ops, "DECODED_ROWS", decoded_rows)
    errors = torch.zeros(len(RESULTS), 2, dtype=torch.float64, device="cuda")  # ours and torch's, squared
    for _ in range(max(1, 32 // tokens)):
        given = drawn(tokens)
        mine, torchs = step(*layer, *given), loop(*layer, *given, torch.bfloat16)
        truth = loop(*layer, *given, torch.float64)
        for at, (*both, true) in enumerate(zip(mine, torchs, truth, strict=True)):
            errors[at] += torch.stack([(tensor.double() - true).square().sum() for tensor in both])
    ours, theirs = errors.sqrt().cpu().unbind(1)
    ratios = dict(zip(RESULTS, (ours / theirs).tolist(), strict=True))
    assert max(ratios.values()) < 1.5, ratios


def test_bit_reproducible_without_synchronization(layer):
    given = drawn(300)
    before = step(*layer, *given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = [step(*layer, *given) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for results in again:
        assert all(map(torch.equal, results, before))


def test_graph_replay_with_other_routing(layer):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        given = drawn(300)
        before = step(*layer, *given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            held = step(*layer, *given)
        graph.replay()
        assert all(map(torch.equal, held, before))
        given[0].copy_(drawn(300)[0])
        graph.replay()
        assert all(map(torch.equal, held, step(*layer, *given)))
        assert not torch.equal(held[0], before[0])
    torch.cuda.current_stream().wait_stream(side)
