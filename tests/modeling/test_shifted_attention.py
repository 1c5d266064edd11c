"""Shifted sparse attention: its formula, its isolation of documents, and when it is off."""

import pytest
import torch
import transformers

from halfbyte.modeling.attention import NO_MASK
from halfbyte.modeling.patch import patch
from halfbyte.modeling.shifted_attention import _in_groups, check_shifted_attention, shifted_attention
from halfbyte.ops.attention import group_begins, group_bounds
from halfbyte.utils.errors import ModelError
from tests.helpers.patch_models import tiny

LENGTHS = (23, 1, 6, 20)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]


def paper(query, key, value, group):
    """Algorithm 1 of the paper for all heads of one row, without the leak of its rolled groups: [T, H, D] each.

    The tokens of half of the heads are rolled by half a group and attend within groups; in the group that the roll
    joins, the last and the first tokens of the row do not see each other.
    """
    length, heads, size = query.shape
    parts = []
    for shift, half in ((0, slice(0, heads // 2)), (group // 2, slice(heads // 2, heads))):
        q, k, v = (x[:, half].roll(-shift, 0).unflatten(0, (-1, group)) for x in (query, key, value))
        scores = torch.einsum("gqhd,gkhd->ghqk", q, k) * size**-0.5
        index = torch.arange(length).roll(-shift, 0).view(-1, 1, group)
        seen = (index.transpose(1, 2) >= index) & ((index.transpose(1, 2) - index).abs() < group)
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        parts.append(torch.einsum("ghqk,gkhd->gqhd", scores.softmax(-1), v).flatten(0, 1).roll(shift, 0))
    return torch.cat(parts, 1)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (8, 1), (6, 3)])
def test_values_and_gradients_are_the_papers(heads, key_heads):
    group, length = 6, 24
    tensors = [torch.randn(1, n, length, 8, requires_grad=True) for n in (heads, key_heads, key_heads)]
    mask = torch.empty(NO_MASK, dtype=torch.bool)
    out, _ = _in_groups(group)(torch.nn.Module(), *tensors, mask, position_ids=torch.arange(length)[None])
    query, key, value = tensors
    repeated = [x.repeat_interleave(heads // key_heads, 1) for x in (key, value)]
    expected = paper(*(x[0].transpose(0, 1) for x in (query, *repeated)), group)
    torch.testing.assert_close(out[0], expected)
    seed = torch.randn_like(out)
    gradients = [torch.autograd.grad((x * seed).sum(), tensors) for x in (out, expected[None])]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shift", [0, 3])
def test_groups_begin_with_documents(shift):
    begins = group_begins(POSITIONS, 6, shift)[0].tolist()
    expected, first = [], 0
    for length in LENGTHS:
        borders = [0, *range(shift or 6, length, 6)]
        expected += [first + max(border for border in borders if border <= p) for p in range(length)]
        first += length
    assert begins == expected
    bounds = group_bounds(torch.tensor([begins, begins]), 6, 8)
    starts = sorted({*expected, *(50 + begin for begin in expected)})
    assert bounds[: len(starts)].tolist() == starts
    assert set(bounds[len(starts) :].tolist()) == {100}


def hidden(model, ids, **inputs):
    return model.base_model(input_ids=ids, **inputs).last_hidden_state


@pytest.mark.parametrize("patched", [False, True])
def test_packed_documents_are_separate(patched):
    model = tiny("Llama", adapter=False)
    if patched:
        patch(model)
    ids = torch.randint(1, 100, (1, sum(LENGTHS)))
    with shifted_attention(model, 6), torch.no_grad():
        packed = hidden(model, ids, position_ids=POSITIONS).split(LENGTHS, 1)
        alone = [hidden(model, document) for document in ids.split(LENGTHS, 1)]
    for one, other in zip(packed, alone, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("patched", [False, True])
def test_training_only(patched):
    model = tiny("Llama", adapter=False)
    if patched:
        patch(model)
    ids = torch.randint(1, 100, (2, 30))
    with torch.no_grad():
        full = hidden(model, ids)
        with shifted_attention(model, 6):
            shifted = hidden(model, ids)
            model.eval()
            evaluated = hidden(model, ids)
            model.train()
            torch.testing.assert_close(hidden(model, ids), shifted, rtol=0, atol=0)
    torch.testing.assert_close(evaluated, full)
    assert (shifted - full)[:, 8:].abs().max() > 1e-3
    torch.testing.assert_close(shifted[:, :3], full[:, :3])  # the first half of a group is one in all heads
    torch.testing.assert_close(hidden(model, ids), full)


def test_recomputed_layers_are_the_same():
    model = tiny("Llama")
    ids = torch.randint(1, 100, (2, 30))
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with shifted_attention(model, 6):
            model.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Gemma2", {}),  # capped scores
        ("GptOss", {}),  # sinks
        ("Mistral", {"sliding_window": 16}),
        ("Bamba", {}),  # a recurrence
        ("Llama", {"attention_dropout": 0.1}),
    ],
)
def test_other_attention_is_refused(family, keys):
    config = tiny(family, adapter=False).config
    for key, value in keys.items():
        setattr(config, key, value)
    with pytest.raises(ModelError, match="shift_attn"):
        check_shifted_attention(config, 64)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Olmo2", "Granite", "Phi3", "Mixtral", "Qwen3Moe"])
def test_standard_attention_passes(family):
    check_shifted_attention(tiny(family, adapter=False, shape={"sliding_window": None}).config, 64)


def test_window_of_a_group_or_more_changes_nothing():
    config = transformers.MistralConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, sliding_window=64)
    check_shifted_attention(config, 64)


@pytest.mark.gpu
def test_kernels_compute_what_tiles_do():
    q, k, v = (torch.randn(1, heads, 1024, 64, device="cuda") for heads in (8, 4, 4))
    inputs, results = packed_on_gpu((500, 100, 1, 423)), []
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [x.detach().to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        out, _ = _in_groups(256)(torch.nn.Module(), *tensors, **inputs)
        out.float().square().sum().backward()
        results.append([out.detach().float(), *(x.grad.float() for x in tensors)])
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 0.02 * one.norm()


@pytest.mark.gpu
def test_captured_groups_follow_the_batch():
    tensors = [torch.randn(1, heads, 1024, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 4, 4)]
    attend, inputs = _in_groups(256), packed_on_gpu((500, 100, 1, 423))
    for _ in range(3):
        attend(torch.nn.Module(), *tensors, **inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = attend(torch.nn.Module(), *tensors, **inputs)
    for name, value in packed_on_gpu((1000, 24)).items():
        inputs[name].copy_(value)
    graph.replay()
    expected, _ = attend(torch.nn.Module(), *tensors, **inputs)
    torch.testing.assert_close(captured, expected, rtol=0, atol=0)


def packed_on_gpu(lengths):
    """Inputs of attention for a row of these documents, as the fused step's batches have them."""
    bounds = [*torch.tensor((0, *lengths)).cumsum(0).tolist(), *[sum(lengths)] * (32 - len(lengths))]
    return {
        "attention_mask": torch.empty(NO_MASK, dtype=torch.bool, device="cuda"),
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None].cuda(),
        "cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32, device="cuda"),
    }
