"""Planned memory against measured: a few steps of models of true widths and few layers, random weights, one GPU.

    python -m benchmarks.plan_check [--mixtures] [--json FILE] [NAME ...]

Each case is planned by `halfbyte.plan`, then built, patched and trained for a few steps as a run is, and what torch's
allocator held at most is compared: without CUDA graphs, or with, where that is until all is captured. One line a case,
then a verdict: at most 7% off in all but one of ten, and none under by more than 3%.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import write_result
from benchmarks.step_model import MODELS

GIB = 2**30
STEPS, GRAPHED_STEPS = 3, 6
OFF, UNDER = 0.07, 0.03
DOCUMENT = 700  # tokens of each in packed rows

LLAMA, QWEN = MODELS["llama-3.1-8b"][1], MODELS["qwen3-0.6b"][1]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA | {"num_hidden_layers": 6}),
    "qwen": ("Qwen3", QWEN | {"num_hidden_layers": 12}),
    "gemma2": ("Gemma2", dict(
        hidden_size=2304, intermediate_size=9216, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, vocab_size=256000, query_pre_attn_scalar=256, sliding_window=4096, tie_word_embeddings=True,
    )),
    "mixtral": ("Mixtral", dict(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, num_local_experts=8, num_experts_per_tok=2,
    )),
    "qwen-moe": ("Qwen3Moe", dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=4, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    )),
    "qwen-30b-moe": ("Qwen3Moe", dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=2, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    )),
    "qwen-30b-deep": ("Qwen3Moe", dict(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=6, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
    )),
    "gpt-oss": ("GptOss", dict(num_hidden_layers=2, num_local_experts=32)),
    "olmoe": ("Olmoe", dict(
        hidden_size=2048, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=16, num_key_value_heads=16,
        num_experts=64, num_experts_per_tok=8, vocab_size=50304,
    )),
    "glm-air": ("Glm4Moe", dict(
        hidden_size=4096, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=2,
        num_attention_heads=96, num_key_value_heads=8, head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
        n_shared_experts=1, first_k_dense_replace=1, vocab_size=151552,
    )),
    "deepseek-lite": ("DeepseekV3", dict(
        hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=3,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=1536, n_routed_experts=64, num_experts_per_tok=6,
        n_shared_experts=2, n_group=1, topk_group=1, first_k_dense_replace=1, vocab_size=102400,
    )),
    "granite-moe": ("GraniteMoe", dict(
        hidden_size=1536, intermediate_size=512, num_hidden_layers=4, num_attention_heads=24, num_key_value_heads=8,
        num_local_experts=40, num_experts_per_tok=8, vocab_size=49155, tie_word_embeddings=True,
    )),
    "qwen-vl": ("Qwen2_5_VL", {"text_config": dict(
        hidden_size=2048, intermediate_size=11008, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    ), "vision_config": dict(
        depth=8, hidden_size=1280, intermediate_size=3420, num_heads=16, out_hidden_size=2048
    ), "tie_word_embeddings": True}),
    "gemma3-vl": ("Gemma3", {"text_config": dict(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, vocab_size=262208, sliding_window=1024,
    )}),
}  # fmt: skip

FULL = {"use_peft": False, "load_in_4bit": False}
CASES: dict[str, tuple[str, int, int, dict[str, Any]]] = {  # model, rows, tokens, keys
    "kept, packed": ("llama", 4, 2048, {"packing": True}),
    "checkpoint": ("llama", 4, 2048, {"activation_checkpointing": "checkpoint"}),
    "recompute_mlp, dropout, int8": (
        "llama", 2, 2048,
        {"activation_checkpointing": "recompute_mlp", "lora_dropout": 0.1, "quantization": "int8"},
    ),
    "offload_attention": ("llama", 1, 8192, {"activation_checkpointing": "offload_attention"}),
    "tiled": ("llama", 1, 49152, {"activation_checkpointing": "tiled"}),
    "auto within 4.5 GiB": ("llama", 4, 2048, {"activation_checkpointing": "auto", "memory_limit_gib": 4.5}),
    "fp8-hybrid, packed": ("qwen", 4, 2048, {"recipe": "fp8-hybrid", "packing": True}),
    "DoRA": ("llama", 1, 2048, {"use_dora": True}),
    "full": ("qwen", 4, 2048, FULL),
    "full, recomputed": ("qwen", 4, 2048, FULL | {"activation_checkpointing": True}),
    "QAT, nf4": ("qwen", 4, 2048, {"load_in_4bit": False, "qat_scheme": "nf4"}),
    "QAT, full, int4": ("qwen", 2, 2048, FULL | {"qat_scheme": "int4"}),
    "capped scores": ("gemma2", 2, 4096, {}),
    "Mixtral": ("mixtral", 2, 2048, {}),
    "Mixtral, recomputed": ("mixtral", 2, 2048, {"activation_checkpointing": True, "packing": True}),
    "Qwen3-MoE": ("qwen-moe", 2, 2048, {}),
    "Qwen2.5-VL": ("qwen-vl", 2, 2048, {}),
    "Gemma 3, packed": ("gemma3-vl", 2, 2048, {"packing": True}),
}  # fmt: skip

GRAPHED = "in graphs"  # in the name of a case
MIXTURES: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "Qwen3-30B, packed": ("qwen-30b-moe", 2, 2048, {"packing": True}),
    "Qwen3-30B, checkpointed": ("qwen-30b-moe", 4, 2048, {"activation_checkpointing": True}),
    "Qwen3-30B, in graphs": ("qwen-30b-moe", 1, 2048, {}),
    "Qwen3-30B, attention alone, in graphs": ("qwen-30b-moe", 4, 2048, {"target_parameters": [], "packing": True}),
    "gpt-oss, in graphs": ("gpt-oss", 1, 4096, {}),
    "gpt-oss, checkpointed": ("gpt-oss", 2, 2048, {"activation_checkpointing": True, "packing": True}),
    "OLMoE, experts in 16 bits": ("olmoe", 2, 2048, {"quantization": {"*.experts.*": "16bit", "*": "nf4"}}),
    "GLM-4.5-Air, in graphs": ("glm-air", 1, 2048, {}),
    "DeepSeek-V3, dropout": ("deepseek-lite", 2, 2048, {"lora_dropout": 0.05}),
    "Qwen3-30B, experts in host memory": ("qwen-30b-deep", 4, 2048, {"expert_offload": True}),
    "Qwen3-30B, all that can in host memory": (
        "qwen-30b-deep", 8, 2048,
        {"expert_offload": True, "activation_checkpointing": "offload", "optim": "adamw_8bit"},
    ),
    "Granite-MoE, kbit4, within 6 GiB": (
        "granite-moe", 8, 4096, {"activation_checkpointing": "auto", "memory_limit_gib": 6, "quantization": "kbit4"}
    ),
}  # fmt: skip


def materialized(model: nn.Module, device: torch.device) -> Any:
    """A model from the meta device with random numbers behind its shapes, tied ones once."""
    from halfbyte.tensor import QuantizedTensor

    made: dict[int, Any] = {}

    def random(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point:
            return torch.zeros(tensor.shape, dtype=dtype, device=device)
        if tensor.dim() == 1:
            return torch.ones(tensor.shape, dtype=dtype, device=device)
        return torch.empty(tensor.shape, dtype=dtype, device=device).normal_(std=0.02)

    def filled(tensor: Any) -> Any:
        if isinstance(tensor, QuantizedTensor):
            weight = QuantizedTensor.quantize(random(tensor, tensor.dtype), tensor.format)
            return nn.Parameter(weight, requires_grad=False)
        values = random(tensor, tensor.dtype)
        return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values

    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in stores:
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = filled(tensor)
                tensors[name] = None if tensor is None else made[id(tensor)]
    return model


def batch_of(rows: int, length: int, vocabulary: int, packed: bool, device: torch.device) -> dict[str, Tensor]:
    """Random tokens, all trained; packed rows hold several documents."""
    from halfbyte.modeling.attention import document_bounds

    tokens = torch.randint(3, vocabulary, (rows, length), device=device)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if packed:
        batch["position_ids"] = (torch.arange(length, device=device) % DOCUMENT).expand(rows, -1).contiguous()
        batch |= document_bounds(batch["position_ids"]) or {}  # as the collator gives them: a graph cannot look for them
    return batch


def train(model: Any, plan: Any, config: Any, batch: dict[str, Tensor], dtype: torch.dtype, graphed: bool) -> None:
    """A few steps as a run makes them."""
    from halfbyte.modeling.adapters import compute_autocast, no_input_casts
    from halfbyte.modeling.head import causal_lm_loss
    from halfbyte.modeling.patch import patch
    from halfbyte.modeling.projections import configured_recipe
    from halfbyte.optim import OPTIMIZERS
    from halfbyte.train.graph import GraphedBackward

    def backward(batch: Any) -> Tensor:
        with compute_autocast(model, dtype):
            loss, tokens = causal_lm_loss(model, batch)
        (loss / tokens).backward()
        return loss.detach()

    if plan.activation_checkpointing and not plan.levels:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    with no_input_casts(model, dtype):
        scaling = patch(model, plan.levels or None, configured_recipe(config.precision)).scaling
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = OPTIMIZERS[config.optim].make(model, config)
        graphs = GraphedBackward(backward, trained) if graphed else None
        for step in range(GRAPHED_STEPS if graphed else STEPS):
            if graphs:
                graphs(batch, ready=step > 0)  # after the first the optimizer's state is there
            else:
                backward(batch)
            optimizer.step()
            optimizer.zero_grad()
            if scaling is not None:
                scaling.roll()
        if graphs:
            assert graphs.holds_graphs, "the step was not captured"
            graphs.close()


def measured(name: str, device: torch.device) -> dict[str, Any]:
    """A case's line: bytes planned and measured in GiB, their ratio, seconds it took."""
    import transformers

    from halfbyte.config import RunConfig
    from halfbyte.memory.activations import Batches
    from halfbyte.memory.expert_offload import offload_experts
    from halfbyte.modeling.layer import decoder_layers
    from halfbyte.plan import estimate as planning
    from halfbyte.plan.shapes import ModelShapes

    began = time.perf_counter()
    shape, rows, length, keys = (CASES | MIXTURES)[name]
    graphed = GRAPHED in name
    family, sizes = SHAPES[shape]
    own = {"activation_checkpointing": "keep", "per_device_train_batch_size": rows, "max_length": length}
    config = RunConfig(model_name_or_path=shape, dataset="random", dtype="bfloat16", device=str(device), **own | keys)
    if not config.use_peft:
        config = config.model_copy(update={"dtype": "auto"})
    model_config = getattr(transformers, f"{family}Config")(**sizes, pad_token_id=2)
    planning.may_capture = lambda *_: graphed
    plan = planning.estimate(config, model_config, device=device, batches=Batches.uniform(rows, length))
    planned_in = time.perf_counter() - began
    on_gpu = device.type == "cuda"
    if on_gpu:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    shapes = ModelShapes(config, model_config, device)
    model = materialized(shapes.model, device)
    if plan.offloaded:
        offload_experts([*decoder_layers(model)[1]], plan.offloaded, device)
    loaded = (torch.cuda.memory_allocated() - before) / GIB if on_gpu else 0.0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    batch = batch_of(rows, length, min(shapes.text_config.vocab_size, 30000), config.packing, device)
    train(model.train(), plan, config, batch, shapes.dtype, graphed)
    peak = (torch.cuda.max_memory_allocated() - before) / GIB if on_gpu else float("nan")
    planned = (plan.total - plan.graphs) / GIB  # what runs beside a pool is no part of this peak
    parts = {part: round(size / GIB, 3) for part, size in plan.predicted().items() if size}
    found = {"planned": planned, "measured": peak, "ratio": planned / peak, "loaded": loaded, "planning_s": planned_in,
             "seconds": time.perf_counter() - began}  # fmt: skip
    return {"case": name} | {key: round(value, 3) for key, value in found.items()} | {"parts": parts}


def verdict(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the plan is as good as it has to be."""
    off = [line["case"] for line in lines if abs(line["ratio"] - 1) > OFF]
    under = [line["case"] for line in lines if line["ratio"] < 1 - UNDER]
    return {"cases": len(lines), "off": off, "under": under, "good": not under and len(off) <= len(lines) // 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--mixtures", action="store_true", help="those cases, where none is named")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json")
    given = parser.parse_args()
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    lines, failed = [], []
    for name in given.cases or (MIXTURES if given.mixtures else CASES):
        try:
            lines.append(measured(name, torch.device(given.device)))
            print(json.dumps(lines[-1]), flush=True)
        except Exception as error:
            failed.append(name)
            print(json.dumps({"case": name, "error": f"{type(error).__name__}: {error}"[:600]}), flush=True)
    result = verdict(lines) | {"failed": failed}
    print(json.dumps(result))
    write_result(given.json, {"lines": lines, "verdict": result})


if __name__ == "__main__":
    main()
