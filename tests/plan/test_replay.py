"""Stand-ins of a replay allocate as the kernels and attention do, and leave no fake tensors in caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

import halfbyte
from halfbyte.adapters.lora import add_adapter
from halfbyte.autograd.tiled_attention import CACHED_BYTES, tiled_attention
from halfbyte.config import RunConfig
from halfbyte.data.batch_shapes import Shape
from halfbyte.formats import named
from halfbyte.formats.blockwise4 import dequantize_blockwise4, quantize_blockwise4
from halfbyte.methods import method_of
from halfbyte.modeling.attention import Implementation
from halfbyte.ops.attention import Scores
from halfbyte.ops.glu import glu, glu_backward_
from halfbyte.ops.norms import rms_norm
from halfbyte.plan.ledger import Ledger, kernels
from halfbyte.plan.replay import AttentionBytes, _Attention, attend
from halfbyte.plan.shapes import ModelShapes
from halfbyte.qat.model import fake_quantize_linears
from tests.helpers.measure_on_cpu import batch_of
from tests.helpers.planned_steps import transient_bytes

FLASH = Implementation("builds no scores", scores=False, mask=False)
SIZES = {
    "vocab_size": 115, "hidden_size": 72, "intermediate_size": 136, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 24, "pad_token_id": 0,
}  # fmt: skip


def saved_bytes(function, *tensors: Tensor) -> int:
    """Bytes of the storages that `function` saves for backward."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = function(*tensors)  # noqa: F841 (alive, so that no storage takes another's place)
    return sum(storages.values())


def test_attention_saves_what_its_kernels_save():
    query, key, value = (torch.randn(3, heads, 37, 24, requires_grad=True) for heads in (6, 2, 2))
    planned = saved_bytes(lambda *x: _Attention.apply(*x, AttentionBytes()), query, key, value)
    capped = saved_bytes(lambda *x: tiled_attention(*x, Scores(0.2, 37, 50.0)), query, key, value)
    flash = saved_bytes(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True), *(
        torch.randn(3, 6, 37, 24, requires_grad=True) for _ in range(3)
    ))  # fmt: skip
    assert planned == capped
    assert planned == flash - 2 * 3 * 4 * 37 * 24 * 4  # which has keys and values for all six heads


@pytest.mark.slow
def test_tiled_attention_stays_within_its_plan():
    """At least half of the plan; halfbyte's own backward needs none of FlashAttention's accumulators."""
    peaks, query = [], torch.empty(1, 8, 1024, 64, dtype=torch.bfloat16)
    for memory in ({"tiles": CACHED_BYTES}, {"own_backward": True}):
        extra = AttentionBytes.of(Implementation("", False, False, **memory), query, query[:, :4], capped=True)
        peaks.append(peak_of(lambda *x, extra=extra: _Attention.apply(*x, extra)))
    for scores in (Scores(0.2, None, 50.0), Scores(0.2, 100)):
        assert 0.5 * peaks[0] <= peak_of(lambda *x, scores=scores: tiled_attention(*x, scores)) <= peaks[0]
    results = 2 * sum(1024 * 64 * heads for heads in (8, 8, 8, 4, 4))  # out and its gradient, dq, dk, dv
    assert peaks[1] == results + 2 * 4 * 8 * 1024


def peak_of(function) -> int:
    tensors = [torch.randn(1, heads, 1024, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 4, 4)]
    ledger = Ledger()
    ledger.ignore(iter(tensors))
    with ledger:
        result = function(*tensors)
        result.backward(torch.ones_like(result))
    return ledger.peak


@pytest.mark.parametrize(
    ("found", "keys", "saved"),
    [
        (FLASH, 6, 0),
        (Implementation("", scores=False, mask=True), 6, 3 * 37 * 37 * 2),
        (Implementation("", scores=False, mask=True), 2, 3 * 37 * (37 + 2 * 4 * 24) * 2),
        (Implementation("", scores=True, mask=False), 6, 3 * 6 * 37 * 37 * (2 * 2 + 4)),
        (Implementation("", scores=False, mask=False, tiles=True), 6, 0),
    ],
)
def test_scores_masks_and_repeated_keys_are_saved(found, keys, saved):
    query = torch.empty(3, 6, 37, 24, dtype=torch.bfloat16)
    extra = AttentionBytes.of(found, query, query[:, :keys], capped=True)
    assert extra.saved == saved
    assert (extra.workspace > 0) == (saved > 0 or found.tiles)


class Attending(nn.Module):
    """Stub of a layer for transformers' attention functions."""

    num_key_value_groups = 2
    config = SimpleNamespace(_halfbyte_planned=Implementation("eager", scores=True, mask=True))


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_scores_are_planned_as_transformers_allocates_them(dtype, softcap):
    """Gemma 2's own eager attention, on a CPU, forward and backward."""
    found = []
    for function in (eager_attention_forward, attend):
        query, key, value = (torch.randn(1, heads, 512, 32, dtype=dtype, requires_grad=True) for heads in (8, 4, 4))
        mask = torch.zeros(1, 1, 512, 512, dtype=dtype)
        ledger = Ledger()
        ledger.ignore(iter((query, key, value, mask)))
        with ledger:
            result = function(Attending(), query, key, value, mask, dropout=0.0, scaling=0.2, softcap=softcap)[0]
            kept = ledger.live
            result.backward(torch.ones_like(result))
        found.append((kept, ledger.peak))
    (kept, peak), (planned, highest) = found
    assert planned == pytest.approx(kept, rel=0.005)  # logsumexp, which materialized scores do not need
    assert peak <= highest <= 1.1 * peak


def calls() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Ops and their arguments, with odd sizes."""
    x, y = torch.randn(7, 33), torch.randn(7, 33)
    packed, absmax = quantize_blockwise4(torch.randn(5 * 64), 64, "nf4")
    return {
        "norm": (rms_norm, (x, None, torch.ones(33), 1e-6, False)),
        "norm and sum": (rms_norm, (x, y, torch.ones(33), 1e-6, False)),
        "glu": (glu, (x, y, "silu")),
        "glu in place": (glu_backward_, (torch.randn(7, 33), x, y, "silu", True)),
        "dequantize": (dequantize_blockwise4, (packed, absmax, None, 64, "nf4", 320, torch.bfloat16)),
    }


@pytest.mark.parametrize("name", calls())
def test_ops_allocate_only_their_results(name):
    function, arguments = calls()[name]
    inputs = {x.untyped_storage()._cdata for x in arguments if isinstance(x, Tensor)}
    results = function(*arguments)
    results = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    expected = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in results}
    with FakeTensorMode():
        fakes = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, Tensor) else x for x in arguments
        ]
        ledger = Ledger()
        ledger.ignore(x for x in fakes if isinstance(x, Tensor))
        with ledger, kernels(ledger, "cuda"):
            found = function(*fakes)
        found = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in results]
        assert ledger.peak == sum(size for storage, size in expected.items() if storage not in inputs)


def run_config(**keys: Any) -> RunConfig:
    return RunConfig(model_name_or_path="m", dataset="d", **{"dtype": "float32", "r": 4, "load_in_4bit": False} | keys)


def model_config(layers: int, family: str = "Llama") -> Any:
    return getattr(transformers, f"{family}Config")(**SIZES, num_hidden_layers=layers)


def live_after_forward(config: RunConfig, layers: int, tokens: Tensor) -> int:
    """Bytes between forward and backward of a real, patched model."""
    model = transformers.LlamaForCausalLM(model_config(layers))
    if config.qat_scheme:
        fake_quantize_linears(model, named(config.qat_scheme))
    model = (add_adapter(model, config) if config.use_peft else model).train()
    halfbyte.patch(model)
    ledger = Ledger()
    ledger.ignore(iter((*model.parameters(), *model.buffers(), tokens)))
    base = model.get_base_model() if config.use_peft else model
    with ledger:
        result = base.model(input_ids=tokens, use_cache=False)
        return ledger.live * (result is not None)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "keys",
    [{}, {"use_peft": False}, {"use_dora": True}, {"qat_scheme": "int8"}, {"qat_scheme": "int8", "use_peft": False},
     {"target_modules": ["q_proj", "up_proj"]}],
    ids=["lora", "full", "dora", "qat", "qat full", "two targets"],
)  # fmt: skip
def test_a_replayed_layer_saves_what_a_real_one_does(keys):
    config, tokens = run_config(**keys), torch.randint(1, 115, (2, 67))
    plan = ModelShapes(config, model_config(2), torch.device("cuda"))
    plan.attention = lambda batch: FLASH
    found = [live_after_forward(config, layers, tokens) for layers in (1, 2)]
    assert found[1] - found[0] == pytest.approx(plan.step(Shape(2, 67), ("keep",)).layers[-1].saved, rel=0.05)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("depth", [2, 1, 3])
def test_layers_of_any_number_are_replayed_at_every_level(depth):
    levels = ("keep", "recompute_mlp", "checkpoint")
    plan = ModelShapes(run_config(), model_config(depth), torch.device("cuda"))
    plan.attention = lambda batch: FLASH
    layers = plan.step(Shape(2, 67), levels).layers
    assert [layer.saved for layer in layers[-3:]] == sorted((layer.saved for layer in layers[-3:]), reverse=True)
    assert len({layer.saved for layer in layers[-3:]}) == 3


def test_a_preference_step_stays_within_its_plan():
    """The reference's forward saves nothing, and needs no more than the policy's backward."""
    sizes = SIZES | {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 24}
    asked = {"method": "dpo", "beta": 0.1, "loss_type": "sigmoid", "precompute_ref_log_probs": False, "device": "cpu"}
    config, shape = run_config(**asked, activation_checkpointing=False), Shape(4, 96)
    causal = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4))
    model = add_adapter(causal, config).train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    batch, found = batch_of("dpo", shape.rows, shape.length), {}
    batch |= {name: batch[name] % SIZES["vocab_size"] for name in ("input_ids", "wanted")}
    for kind in ("each step", "kept"):
        ledger = Ledger()
        ledger.ignore(iter((*model.parameters(), *model.buffers(), *batch.values())))
        ledger.ignore(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        with ledger:
            loss = method_of(config).sums(model, batch)["loss"]
            kept = ledger.live
            loss.backward()
        found[kind] = kept, ledger.peak
        batch["reference"] = torch.zeros(len(batch["at"]))
    planned, logits = transient_bytes(config, causal.config, shape, "keep")
    assert found["kept"] == pytest.approx((found["each step"][0], planned - logits), rel=0.1)
    assert found["each step"][1] <= 1.1 * planned
    assert abs(found["each step"][0] - found["kept"][0]) < 0.01 * found["kept"][0]
