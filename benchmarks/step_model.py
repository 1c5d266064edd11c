"""Model shapes, random weights quantized layer by layer on the device, batches and timing, for halfbyte and peers.

Functions import halfbyte when called, because a peer's process may have other versions of its dependencies.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import peak_gib, reset_peak, synchronize, timing_event

WARMUP, STEPS = 4, 10
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("Llama", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=False,
    )),
    "llama-3.2-1b": ("Llama", dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, tie_word_embeddings=True,
    )),
    "qwen3-0.6b": ("Qwen3", dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=32768,
        tie_word_embeddings=True,
    )),
    "qwen3-1.7b": ("Qwen3", dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=True,
    )),
    "qwen3-4b": ("Qwen3", dict(
        hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=True,
    )),
    "qwen3-8b": ("Qwen3", dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=False,
    )),
    "qwen3-14b": ("Qwen3", dict(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=False,
    )),
    "qwen3-30b-a3b": ("Qwen3Moe", dict(
        hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, tie_word_embeddings=False,
    )),
    "qwen3.5-9b": ("Qwen3_5Text", dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16,
        num_key_value_heads=4, head_dim=256, vocab_size=248320, max_position_embeddings=262144,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, tie_word_embeddings=False,
    )),
    "tiny": ("Llama", dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=1024, max_position_embeddings=8192, tie_word_embeddings=False,
    )),
}  # fmt: skip


def model_config(name: str) -> Any:
    """Return the transformers config of a benchmark model."""
    import transformers

    family, keys = MODELS[name]
    return getattr(transformers, f"{family}Config")(**keys, bos_token_id=0, eos_token_id=1, pad_token_id=2)


def empty_model(name: str) -> nn.Module:
    """Build a model on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config(name), dtype=torch.bfloat16).requires_grad_(False)


def random_weight(shape: torch.Size, device: str) -> Tensor:
    """Return a bf16 weight: ones for a norm, else normal with deviation 0.02."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=0.02)


def fill(model: Any, device: str, quantize: Any) -> None:
    """Give a meta model random weights and replace each linear except the head by `quantize(linear)`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                child.weight = nn.Parameter(random_weight(child.weight.shape, device), requires_grad=False)
                setattr(module, name, quantize(child))
                del child.weight  # the list of modules still holds the layer
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(random_weight(parameter.shape, device), requires_grad=False)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)


def build(name: str, device: str, storage: str = "nf4", **keys: Any) -> Any:
    """Build a PeftModel like `halfbyte train`: fp32 LoRA factors of rank 16 on the seven linears, or on all experts.

    storage: format of the frozen weights; nf4 has nested scales.
    keys: of the run's configuration, e.g. use_dora=True.
    """
    from halfbyte.adapters.lora import add_adapter

    return add_adapter(frozen_model(name, device, storage), run_config(name, **keys)).train()


def frozen_model(name: str, device: str, storage: str = "nf4") -> Any:
    """Build the model of `build` without its adapter."""
    from halfbyte.formats import named
    from halfbyte.layers import QuantizedLinear
    from halfbyte.loading.expert_stacks import prepare_stacks
    from halfbyte.modeling.architectures import expert_stacks
    from halfbyte.tensor import QuantizedTensor

    torch.manual_seed(0)
    model = empty_model(name)
    format_ = named(storage)
    for stack_name, module in prepare_stacks(model, dict.fromkeys(expert_stacks(model), format_)).items():
        leaf = stack_name.rpartition(".")[2]
        experts, *shape = module._parameters[leaf].shape
        weights = (random_weight(torch.Size(shape), device) for _ in range(experts))
        stack = QuantizedTensor.quantize_stack(weights, format_, (experts, *shape))
        module._parameters[leaf] = nn.Parameter(stack, requires_grad=False)
    fill(model, device, lambda linear: QuantizedLinear.from_linear(linear, format_))
    return model


def run_config(name: str, **keys: Any) -> Any:
    """Return the configuration of the run that `build` and `levels` imitate."""
    from halfbyte.config import RunConfig

    targets: dict[str, Any] = {"target_modules": TARGETS}
    if "num_experts" in MODELS[name][1]:
        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        targets = {"target_modules": TARGETS[:4], "target_parameters": stacks}
    ours = {"r": RANK, "lora_alpha": RANK, "lora_dropout": 0.0, "packing": True, **targets}
    return RunConfig(model_name_or_path=name, dataset="random", **(ours | keys))


def levels(name: str, rows: int, length: int, policy: str, limit_gib: float | None) -> tuple[str, ...]:
    """Return the activation level of each layer for `policy`: a level, or auto."""
    from halfbyte.plan.estimate import estimate

    shape = {"per_device_train_batch_size": rows, "max_length": length}
    config = run_config(name, **shape, activation_checkpointing=policy, memory_limit_gib=limit_gib)
    plan = estimate(config, model_config(name), device="cuda")
    print(f"{plan.total / 2**30:.2f} GiB planned: {plan.reason}")
    return plan.levels


def random_batch(name: str, rows: int, length: int, device: str) -> dict[str, Tensor]:
    """Return random token ids, all of them labels."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, model_config(name).vocab_size, (rows, length), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens.clone()}


def timed(
    step: Callable[[], Tensor], tokens: int, steps: int = STEPS, *, warmup: int = WARMUP, device: str = "cuda"
) -> dict[str, Any]:
    """Time the first step, then the median of `steps` after a warm-up (0: the first step only). Returns all losses."""
    synchronize(device)
    reset_peak(device)
    began = time.perf_counter()
    losses = [step()]
    synchronize(device)
    first = time.perf_counter() - began
    milliseconds = first * 1e3
    if steps:
        losses += [step() for _ in range(warmup)]
        events = [timing_event(device) for _ in range(steps + 1)]
        synchronize(device)
        events[0].record()
        for event in events[1:]:
            losses.append(step())
            event.record()
        synchronize(device)
        milliseconds = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return {
        "ms": milliseconds,
        "tokens_per_second": tokens / milliseconds * 1e3,
        "first_step_seconds": first,
        **peak_gib(device),
        "losses": [float(loss) for loss in losses],
    }
