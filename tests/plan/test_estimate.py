"""Memory predictions: static parts against exact counts, a replayed step against a real one, and the policy."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from halfbyte.adapters.lora import add_adapter
from halfbyte.config import RunConfig
from halfbyte.data.batch_shapes import Batches, Shape
from halfbyte.formats import Blockwise4
from halfbyte.layers import Linear4bit
from halfbyte.memory import allocators
from halfbyte.modeling.compute_dtype import compute_autocast, no_input_casts
from halfbyte.ops.experts import multiplies_codes
from halfbyte.optim import OPTIMIZERS, offload
from halfbyte.optim.groups import backward_gradient_bytes
from halfbyte.plan.estimate import GIB, estimate
from halfbyte.plan.ledger import Ledger
from halfbyte.plan.shapes import ModelShapes
from halfbyte.utils import notices
from tests.helpers.planned_steps import transient_bytes

SHAPE = {
    "vocab_size": 515,
    "hidden_size": 64,
    "intermediate_size": 200,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA_8B = transformers.LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def run_config(**keys) -> RunConfig:
    return RunConfig(**{"model_name_or_path": "m", "dataset": "d", "dtype": "float32", "device": "cpu", **keys})


def tiny_config(family: str):
    return getattr(transformers, f"{family}Config")(**SHAPE)


def real_model(config: RunConfig, model_config, checkpointed: bool) -> nn.Module:
    capped = getattr(model_config, "attn_logit_softcapping", None)  # eager, as `loading.load` does: 5.17 takes sdpa
    options = {"attn_implementation": "eager"} if capped else {}
    model = transformers.AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, config.dtype), **options)
    head = model.get_output_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            model.set_submodule(name, Linear4bit.from_linear(module, Blockwise4("nf4", 64, True)))
    model = add_adapter(model, config).train()
    if checkpointed:
        model.get_base_model().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def test_static_parts_are_exact():
    config = run_config(r=4, modules_to_save=["embed_tokens"], rank_pattern={"v_proj": 8})
    plan = estimate(config, tiny_config("Llama"), capacity_bytes=GIB)
    model = transformers.LlamaForCausalLM(tiny_config("Llama"))
    linears = [m for m in model.modules() if type(m) is nn.Linear and m is not model.lm_head]
    stored = sum(
        part.nbytes for m in linears for part in Blockwise4("nf4", 64, True).quantize(m.weight.detach()).values()
    )
    rest = sum(p.nbytes for p in model.parameters()) - sum(m.weight.nbytes for m in linears)
    rest += sum(buffer.nbytes for buffer in model.buffers())
    assert plan.weights == stored + rest
    rank = {"v_proj": 8}
    adapter = sum(
        rank.get(name.rpartition(".")[2], 4) * (m.in_features + m.out_features)
        for name, m in model.named_modules()
        if m in linears
    )
    trained = 4 * (adapter + model.model.embed_tokens.weight.numel())
    assert (plan.adapters, plan.gradients, plan.optimizer) == (trained, trained, 2 * trained)


def test_full_fine_tuning_and_optimizers():
    model = transformers.LlamaForCausalLM(tiny_config("Llama"))
    numel = sum(parameter.numel() for parameter in model.parameters())
    keys = {"use_peft": False, "load_in_4bit": False}
    sizes = {}
    for optim in ("adamw_torch_fused", "adamw_8bit", "sgd"):
        plan = estimate(run_config(optim=optim, **keys), tiny_config("Llama"), capacity_bytes=GIB)
        assert plan.trains_all
        assert plan.adapters == 4 * numel
        sizes[optim] = plan.optimizer
    assert sizes == {
        "adamw_torch_fused": 8 * numel,
        "adamw_8bit": OPTIMIZERS["adamw_8bit"].state_bytes(model, run_config(**keys)),
        "sgd": 0,
    }


@pytest.mark.slow
def test_optimizers_update_in_the_backward_or_from_the_host_only_to_fit(monkeypatch):
    monkeypatch.setattr(offload, "WINDOW", 2**16)
    deep = tiny_config("Llama")
    deep.num_hidden_layers, deep.vocab_size, deep.intermediate_size = 8, 64, 512
    model = transformers.LlamaForCausalLM(deep)
    keys = {"use_peft": False, "load_in_4bit": False, "max_grad_norm": 0, "optim": "adamw"}
    keys |= {"activation_checkpointing": True, "use_kernels": False}  # without kernels there are no CUDA graphs

    def planned(capacity=GIB, device="cuda", **changed):
        return estimate(run_config(**keys | changed), deep, device=device, capacity_bytes=capacity)

    chosen = [{"optim_in_backward": way, "optim_offload": place} for place in ("auto", True) for way in ("auto", True)]
    plans = [planned(**choice) for choice in chosen]
    whole, backward, hosted, both = plans
    assert whole.optimizer_choice == chosen[0]
    assert backward.gradients == backward_gradient_bytes(model) < whole.gradients
    assert backward.optimizer == whole.optimizer
    assert hosted.optimizer == both.optimizer == 2 * 2**16
    assert both.gradients == backward.gradients
    sizes = [plan.total for plan in plans]
    assert sizes == sorted(sizes, reverse=True)
    for choice, capacity in zip(chosen, sizes, strict=True):
        assert planned(capacity).optimizer_choice == choice
    assert not planned(sizes[-1] - 1).fits
    for fixed in ({"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}, {"optim": "adamw_torch_fused"}):
        found = planned(sizes[-1], **fixed).optimizer_choice
        assert found["optim_in_backward"] == "auto"
    assert planned(sizes[-1] - 1).total == sizes[-1]  # nothing fits: the plan that needs least
    fixed = {"optim_in_backward": False, "optim_offload": False}
    assert planned(sizes[-1] - 1, **fixed).optimizer_choice == fixed


@pytest.mark.parametrize(("dtype", "size"), [("auto", 4), ("bfloat16", 2)])
def test_full_fine_tuning_keeps_float32_weights_unless_a_dtype_is_asked_for(dtype, size):
    numel = sum(p.numel() for p in transformers.LlamaForCausalLM(tiny_config("Llama")).parameters())
    config = run_config(use_peft=False, load_in_4bit=False, dtype=dtype)
    plan = estimate(config, tiny_config("Llama"), device="cuda", capacity_bytes=GIB)
    assert (plan.adapters, plan.gradients, plan.optimizer) == (size * numel, size * numel, 2 * size * numel)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("Llama", "float32"), ("Llama", "bfloat16"), ("Qwen3", "bfloat16"), ("Gemma2", "float32")],
)
def test_a_replayed_step_allocates_what_a_real_one_does(family, dtype, checkpointed):
    config = run_config(r=4, dtype=dtype, per_device_train_batch_size=3)
    model_config = tiny_config(family)
    predicted, logits = transient_bytes(config, model_config, Shape(3, 150), "checkpoint" if checkpointed else "keep")

    from halfbyte.autograd.losses import linear_cross_entropy

    model = real_model(config, model_config, checkpointed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    tokens = torch.zeros(3, 150, dtype=torch.long)
    mask = torch.ones_like(tokens)
    mask[0, -1] = 0
    ledger = Ledger()
    ledger.ignore(iter((*model.parameters(), *model.buffers())))
    ledger.ignore(p.grad for p in model.parameters() if p.grad is not None)
    base = model.get_base_model()
    compute_dtype = getattr(torch, dtype)
    with no_input_casts(model, compute_dtype), ledger:
        with compute_autocast(model, compute_dtype):
            hidden = base.model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
            loss = linear_cross_entropy(hidden, base.lm_head.weight, tokens)
        del hidden
        loss.backward()
    # The loss is fused in the real run: compare the other bytes.
    assert ledger.peak <= 1.1 * predicted
    if logits == 0 or not checkpointed:
        assert predicted - logits <= 1.1 * ledger.peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", ["keep", "checkpoint"])
def test_equal_layers_are_planned_from_one_replay(level, monkeypatch):
    """Seven layers planned from a replay of two equal a replay of seven."""
    model_config = transformers.LlamaConfig(**{**SHAPE, "num_hidden_layers": 7})
    config = run_config(r=4, per_device_train_batch_size=2)
    from_two, _ = transient_bytes(config, model_config, Shape(2, 256), level)
    monkeypatch.setattr(ModelShapes, "_uniform", False)
    full, _ = transient_bytes(config, model_config, Shape(2, 256), level)
    assert from_two == pytest.approx(full, rel=0.01)


@pytest.mark.slow
def test_checkpointing_is_chosen_when_activations_do_not_fit():
    config = run_config(r=4, per_device_train_batch_size=4, max_length=128)
    roomy = estimate(config, tiny_config("Llama"), capacity_bytes=4 * GIB)
    assert not roomy.activation_checkpointing
    tight = estimate(config, tiny_config("Llama"), capacity_bytes=roomy.total)
    assert tight.activation_checkpointing
    assert tight.total < roomy.total
    limited = config.model_copy(update={"memory_limit_gib": roomy.total / GIB})
    assert estimate(limited, tiny_config("Llama"), capacity_bytes=4 * GIB).activation_checkpointing
    hopeless = estimate(config, tiny_config("Llama"), capacity_bytes=1000)
    assert not hopeless.fits
    asked = config.model_copy(update={"activation_checkpointing": True})
    assert estimate(asked, tiny_config("Llama"), capacity_bytes=4 * GIB).activation_checkpointing


@pytest.mark.slow
def test_activations_grow_with_batch_size_and_length():
    config = run_config(r=4, max_length=256)
    small, large = (
        estimate(
            config.model_copy(update={"per_device_train_batch_size": rows}), tiny_config("Llama"), capacity_bytes=GIB
        )
        for rows in (2, 8)
    )
    assert large.activations > 2 * small.activations
    shorter = estimate(config, tiny_config("Llama"), capacity_bytes=GIB, batches=Batches.uniform(2, 64))
    assert shorter.total < small.total


KEYS_8B = {"dtype": "auto", "packing": True, "per_device_train_batch_size": 4, "max_length": 2048}


@pytest.mark.slow
def test_fused_8b_as_measured():
    """benchmarks.step on an H200: 34.1 GiB at keep, 9.3 checkpointed."""
    for value, measured in ((False, 34.1), (True, 9.3)):
        config = run_config(**KEYS_8B, activation_checkpointing=value)
        plan = estimate(config, LLAMA_8B, device="cuda", capacity_bytes=139 * GIB)
        assert plan.total / GIB == pytest.approx(measured, rel=0.02)
        assert plan.levels == ("checkpoint" if value else "keep",) * 32


@pytest.fixture(scope="module")
def shapes_8b():
    return ModelShapes(run_config(**KEYS_8B), LLAMA_8B, torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.parametrize(("allocator", "share"), [("expandable_segments:True", 0.96), ("", 0.9)])
def test_auto_fills_a_limit_with_a_mix_of_levels(monkeypatch, shapes_8b, allocator, share):
    monkeypatch.setattr("halfbyte.memory.allocators.available_bytes", lambda: 100 * GIB)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", allocator)
    options = {"device": "cuda", "capacity_bytes": 139 * GIB, "shapes": shapes_8b}
    plan = estimate(run_config(**KEYS_8B, memory_limit_gib=16.0), LLAMA_8B, **options)
    assert (share - 0.1) * 16 * GIB < plan.total <= share * 16 * GIB
    assert len(set(plan.levels)) >= 2
    assert plan.activation_checkpointing
    assert "layers" in plan.reason
    assert " ms" in plan.reason
    roomy = estimate(run_config(**KEYS_8B), LLAMA_8B, **options)
    assert roomy.levels == ("keep",) * 32
    tight = run_config(**KEYS_8B | {"per_device_train_batch_size": 1, "max_length": 8192}, memory_limit_gib=8.0)
    assert estimate(tight, LLAMA_8B, **options).fits  # the bar of 1×8192


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keys", [{"use_kernels": False}, {"peft_type": "vera"}, {"device": "cpu"}])
def test_levels_without_fused_forwards_become_checkpointing(keys):
    config = run_config(**{"device": "cuda", "activation_checkpointing": "offload"} | keys)
    plan = estimate(config, tiny_config("Llama"), capacity_bytes=GIB)
    assert plan.activation_checkpointing
    assert plan.levels == ()
    assert "activation-level" in notices.notices_so_far()


def test_dora_on_quantized_weights_is_replayed_with_its_levels():
    plan = estimate(run_config(device="cuda", use_dora=True, activation_checkpointing="offload"), tiny_config("Llama"))
    assert {*plan.levels} == {"offload"}
    assert "rough_memory" not in notices.notices_so_far()


def test_fused_model_that_cannot_be_replayed_is_estimated_from_widths(monkeypatch):
    def fail(*_):
        raise DataDependentOutputException("item")

    config, model_config = run_config(device="cuda", eval_split_size=0), tiny_config("Llama")
    replayed = estimate(config, model_config)
    monkeypatch.setattr("halfbyte.plan.shapes.replay", fail)
    rough = estimate(config, model_config)
    assert "rough_memory" in notices.notices_so_far()
    assert replayed.total < rough.total < 2 * replayed.total


def test_host_memory_is_the_containers(tmp_path, monkeypatch):
    monkeypatch.setattr(allocators, "CGROUP", tmp_path)
    free = allocators.available_bytes()
    (tmp_path / "memory.current").write_text("1000\n")
    for limit, expected in (("max\n", free), ("5000\n", 4000)):
        (tmp_path / "memory.max").write_text(limit)
        assert allocators.available_bytes() == pytest.approx(expected, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("separation", "longer", "graphs"), [("positions", 1, True), ("bounds", 1, False), ("unpacked", 4 / 3, False)]
)
def test_unpacked_documents_need_more_tokens_and_disable_graphs(monkeypatch, separation, longer, graphs):
    model_config = transformers.StableLmConfig(**SHAPE, max_position_embeddings=600)
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    config = run_config(packing=True, max_length=300, **keys)
    options = {"device": "cuda", "capacity_bytes": GIB}
    monkeypatch.setattr("halfbyte.plan.shapes.isolate_tiny_model", lambda *_, **__: SimpleNamespace(method=separation))
    found = estimate(config, model_config, **options)
    assert found.use_graphs == graphs
    padded = config.model_copy(update={"packing": False, "max_length": round(300 * longer)})
    expected = estimate(padded, model_config, **options)
    masks = 2 * 300**2 * SHAPE["num_hidden_layers"] * 4 * (separation == "positions")  # SDPA's, as numbers to add
    assert found.activations == pytest.approx(expected.activations + masks, rel=0.05)


@pytest.mark.slow
def test_narrow_values_materialize_no_scores_on_a_gpu():
    """SDPA has kernels for them on GPUs; on a CPU, where the plan is made, it materializes scores."""
    config = transformers.DeepseekV3Config(
        vocab_size=515, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32,
    )  # fmt: skip
    scores = [
        estimate(
            run_config(max_length=length, per_device_train_batch_size=1), config, device=device, capacity_bytes=GIB
        ).activations
        for device, length in (("cuda", 1024), ("cuda", 2048), ("cpu", 2048))
    ]
    assert scores[1] < 2.1 * scores[0]
    assert scores[2] > scores[1] + 4 * 2048**2 * 2


@pytest.mark.slow
def test_experts_are_decoded_where_the_device_does_not_multiply_codes(monkeypatch):
    """An existing device is queried; an absent one is assumed to have no such kernels."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=515, hidden_size=256, intermediate_size=256, moe_intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip

    def activations(device):
        keys = {"max_length": 512, "per_device_train_batch_size": 1, "dtype": "bfloat16"}  # experts are the peak
        return estimate(run_config(**keys), config, device=device, capacity_bytes=GIB).activations

    decoded = activations("cuda")
    monkeypatch.setattr(multiplies_codes, "reference", lambda *_: True)
    packed = activations("cuda")
    assert decoded - packed > 0.5 * 8 * 512 * 256 * 2  # of its largest stack


@pytest.mark.slow
@pytest.mark.parametrize("hopper", [False, True])
def test_deterministic_attention_backward_is_planned(monkeypatch, hopper):
    """32 heads of 2,048 tokens use cuDNN's on a Hopper: 16 bits per score, half a GiB at a time."""
    monkeypatch.setattr("halfbyte.autograd.attention.is_hopper", lambda _: hopper)
    monkeypatch.setattr("halfbyte.autograd.attention.cudnn", object)
    monkeypatch.setattr("halfbyte.autograd.attention._has_triton", lambda: True)
    config = transformers.LlamaConfig(
        vocab_size=515, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    keys = {"max_length": 2048, "per_device_train_batch_size": 4, "dtype": "bfloat16"}
    found = estimate(run_config(**keys), config, device="cuda", capacity_bytes=8 * GIB)
    assert (found.activations > GIB // 2) == hopper
    assert found.activations < GIB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "checkpointed", "off"), [("sft", True, 0.15), ("sft", False, 0.15), ("dpo", False, 0.1)]
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_measured_on_this_cpu(shared, method, checkpointed, off):
    path = shared / "models" / "llama-40m"
    config = run_config(
        per_device_train_batch_size=4,
        max_length=512,
        activation_checkpointing=checkpointed,
        target_modules="all-linear",
    )
    plan = estimate(config, transformers.AutoConfig.from_pretrained(path), capacity_bytes=64 * GIB)
    script = Path(__file__).parents[1] / "helpers" / "measure_on_cpu.py"
    command = [sys.executable, str(script), str(path), "4", "512", str(int(checkpointed)), method]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    assert plan.total == pytest.approx(measured["growth"], rel=off)


@pytest.mark.slow
def test_padded_rows_are_planned_with_their_mask():
    """Without kernels, padded rows need a mask, and keys and values of all heads: 663 MiB were allocated on an H100 in
    a run of 4×2048 (`tests/train/test_run_memory_gpu.py`)."""
    model_config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=1024, intermediate_size=2816, num_hidden_layers=3, num_attention_heads=16,
        num_key_value_heads=4,
    )  # fmt: skip
    keys = {"dtype": "auto", "load_in_4bit": True, "use_kernels": False, "activation_checkpointing": True}
    keys |= {"r": 16, "target_modules": "all-linear", "max_length": 2048}

    config = run_config(**keys, per_device_train_batch_size=4)
    plan = estimate(config, model_config, device="cuda", capacity_bytes=80 * GIB)
    assert plan.total / 2**20 == pytest.approx(663, rel=0.02)
