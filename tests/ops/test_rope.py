"""Compare RoPE, alone and after q and k norms, with Hugging Face's functions: values, gradients, strides, errors."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from halfbyte.autograd.rope import qk_norm_rope, rope
from halfbyte.utils.errors import ModelError


def angles(batch, tokens, size, dtype=torch.float64):
    """Angles as a model makes them: equal halves, and positions that restart at each packed document."""
    positions = (torch.arange(tokens) % max(tokens - 3, 1)).expand(batch, tokens)[..., None]
    frequencies = 1.0 / 10_000 ** (torch.arange(0, size, 2) / size)
    both = torch.cat([positions * frequencies] * 2, dim=-1)
    return both.cos().to(dtype), both.sin().to(dtype)


def projections(batch=2, tokens=7, q_heads=6, k_heads=2, size=10, dtype=torch.float64):
    q = torch.randn(batch, tokens, q_heads * size).to(dtype).requires_grad_()
    k = torch.randn(batch, tokens, k_heads * size).to(dtype).requires_grad_()
    return q, k


def heads(x, size):
    """[B, T, H·D] → [B, H, T, D], as models do; the multiplication keeps the leaf from being overwritten."""
    return (x * 1).view(*x.shape[:2], -1, size).transpose(1, 2)


def compare(mine, theirs, inputs, **tolerance):
    torch.testing.assert_close(mine, theirs, **tolerance)
    seeds = [torch.randn_like(output) for output in mine]
    got = torch.autograd.grad(mine, inputs, [seed.clone() for seed in seeds])
    torch.testing.assert_close(got, torch.autograd.grad(theirs, inputs, seeds), **tolerance)


@pytest.mark.parametrize("batches_of_angles", [1, 2])
def test_rope(batches_of_angles):
    q, k = projections()
    cos, sin = angles(batches_of_angles, 7, 10)
    theirs = apply_rotary_pos_emb(heads(q, 10), heads(k, 10), cos, sin)
    compare(rope(heads(q, 10), heads(k, 10), cos, sin), theirs, (q, k))


def test_partial_rotary():
    q, k = projections(size=12)
    cos, sin = angles(1, 7, 8)
    theirs = apply_partial_rotary_pos_emb(heads(q, 12), heads(k, 12), cos, sin)
    compare(rope(heads(q, 12), heads(k, 12), cos, sin), theirs, (q, k))


def test_works_in_place_both_ways():
    q, k = (heads(x, 10) for x in projections())
    cos, sin = angles(1, 7, 10)
    rotated = rope(q, k, cos, sin)
    assert [x.data_ptr() for x in rotated] == [q.data_ptr(), k.data_ptr()]
    seeds = [torch.randn_like(x) for x in rotated]
    before = [seed.clone() for seed in seeds]
    torch.autograd.backward(rotated, seeds)
    assert not any(torch.equal(*pair) for pair in zip(seeds, before, strict=True))


def test_gradient_of_a_sum_shares_its_memory():
    """The gradient of `sum` is one expanded number, which must not be written in place."""
    q, k = projections()
    cos, sin = angles(1, 7, 10)
    mine = sum(x.sum() for x in rope(heads(q, 10), heads(k, 10), cos, sin))
    theirs = sum(x.sum() for x in apply_rotary_pos_emb(heads(q, 10), heads(k, 10), cos, sin))
    torch.testing.assert_close(torch.autograd.grad(mine, (q, k)), torch.autograd.grad(theirs, (q, k)))


def test_fused_projection():
    """q, k and v are slices of one projection, as in Phi-3: overwriting q and k must not change v or its history."""
    fused = torch.randn(2, 7, 10 * (6 + 2 + 2), dtype=torch.float64, requires_grad=True)
    cos, sin = angles(1, 7, 10)

    def attention_inputs(rotation):
        product = fused * 1
        q, k, v = product[..., :60], product[..., 60:80], product[..., 80:]
        q, k, v = (x.view(2, 7, -1, 10).transpose(1, 2) for x in (q, k, v))
        return (*rotation(q, k, cos, sin), v)

    compare(attention_inputs(rope), attention_inputs(apply_rotary_pos_emb), (fused,))


@pytest.mark.parametrize(("cls", "offset"), [(Qwen3RMSNorm, False), (Gemma3RMSNorm, True)])
def test_norm_and_rope(cls, offset):
    q, k = projections(dtype=torch.float32)
    cos, sin = angles(1, 7, 10, torch.float32)
    norms = [cls(10, eps=1e-5) for _ in range(2)]
    for norm in norms:
        norm.weight.data.normal_()
    weights = [norm.weight for norm in norms]
    theirs = apply_rotary_pos_emb(norms[0](heads(q, 10)), norms[1](heads(k, 10)), cos, sin)
    mine = qk_norm_rope(heads(q, 10), heads(k, 10), *weights, cos, sin, 1e-5, offset)
    assert [x.stride() for x in mine] == [heads(x, 10).stride() for x in (q, k)]
    compare(mine, theirs, (q, k, *weights), rtol=1e-5, atol=1e-5)


WRONG = {
    "torch.int32": {"q": lambda q: q.int()},
    r"q is \[2, 6, 7\]": {"q": lambda q: q[..., 0]},
    r"k is \[2, 2, 6, 10\]": {"k": lambda k: k[:, :, 1:]},
    "torch.float32": {"k": lambda k: k.float()},
    r"cos is \[1, 6, 10\]": {"cos": lambda cos: cos[:, 1:]},
    "10": {"cos": lambda cos: cos[..., 1:]},
    "rope: sin is": {"sin": lambda sin: sin[..., 2:]},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument(message):
    q, k = (heads(x, 10).detach() for x in projections())
    cos, sin = angles(1, 7, 10)
    arguments = {"q": q, "k": k, "cos": cos, "sin": sin}
    for name, break_ in WRONG[message].items():
        arguments[name] = break_(arguments[name])
    with pytest.raises(ModelError, match=message):
        rope(**arguments)


def test_norms_need_full_heads():
    q, k = (heads(x, 10).detach() for x in projections())
    weight, (cos, sin) = torch.ones(10), angles(1, 7, 8)
    with pytest.raises(ModelError, match=r"8 values.*10"):
        qk_norm_rope(q, k, weight, weight, cos, sin)
    with pytest.raises(ModelError, match=r"k_weight is \[9\]"):
        qk_norm_rope(q, k, weight, weight[1:], *angles(1, 7, 10))


@pytest.mark.slow
@pytest.mark.parametrize("with_norm", [False, True])
def test_compiles_without_graph_breaks(with_norm):
    q, k = projections(dtype=torch.float32)
    cos, sin = angles(1, 7, 10, torch.float32)
    weight = torch.randn(10)

    def step(q, k):
        q, k = heads(q, 10), heads(k, 10)
        return qk_norm_rope(q, k, weight, weight, cos, sin) if with_norm else rope(q, k, cos, sin)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    compare(compiled(q, k), step(q, k), (q, k), rtol=1e-5, atol=1e-5)
