"""Tiny models of every family that `halfbyte.patch` knows, batches for them, and how results are compared."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from halfbyte.formats import Blockwise4
from halfbyte.layers import Linear4bit
from halfbyte.modeling.adapters import all_linear
from halfbyte.modeling.architectures import auto_class
from halfbyte.modeling.head import causal_lm_loss

SHAPE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
PER_LAYER = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 101,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SCALED_QUERIES = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
FAMILIES = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma": {},
    "Gemma2": {"final_logit_softcapping": 0.5, "sliding_window": 8, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma3nText": PER_LAYER
    | {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8, "intermediate_size": [48] * 4},
    "Gemma4Text": PER_LAYER | {"global_head_dim": 16, "use_double_wide_mlp": True},
    "Phi3": {"resid_pdrop": 0.0, "partial_rotary_factor": 0.5},
    "Mixtral": {"num_local_experts": 4, "sliding_window": 8},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Ministral": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Ministral3": {"sliding_window": 8, "rope_parameters": SCALED_QUERIES},
    "SmolLM3": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "SeedOss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
    "Exaone4": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "Cohere2": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.5},
    "Granite": {
        "residual_multiplier": 0.3,
        "embedding_multiplier": 5.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
    },
    "Ernie4_5": {"use_bias": True},
    "Glm": {},
    "Glm4": {},
    "Apertus": {},
    "Arcee": {},
    "Qwen2Moe": MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Glm4Moe": MIXTURE
    | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True},
    "GraniteMoe": MIXTURE
    | {
        "num_local_experts": 4,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 5.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
    },
    "Olmoe": MIXTURE | {"num_experts": 4},
    "Phimoe": MIXTURE | {"num_local_experts": 4},
    "Ernie4_5_Moe": MIXTURE
    | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "MiniMaxM2": MIXTURE | {"num_local_experts": 4},
    "GptOss": MIXTURE
    | {
        "num_local_experts": 4,
        "sliding_window": 8,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "Qwen3_5Text": HYBRID,
    "Qwen3_5MoeText": HYBRID | MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Next": HYBRID | MIXTURE | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Bamba": MAMBA | {"attn_layer_indices": [1]},
    "GraniteMoeHybrid": MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "residual_multiplier": 0.3,
        "embedding_multiplier": 5.0,
        "logits_scaling": 3.0,
        "attention_multiplier": 0.2,
    },
    "Jamba": {
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "num_experts": 4,
    },
    "NemotronH": MIXTURE
    | {
        "layers_block_type": ["mamba", "attention", "mlp", "moe"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 16,
        "n_shared_experts": 1,
    },
}
EXPERTS = (
    "Mixtral", "Qwen3Moe", "Qwen2Moe", "Glm4Moe", "GraniteMoe", "Olmoe", "Phimoe", "Ernie4_5_Moe", "MiniMaxM2",
    "Qwen3_5MoeText", "Qwen3Next", "GptOss", "GraniteMoeHybrid", "Jamba", "NemotronH",
)  # fmt: skip
STATES = ("Bamba", "GraniteMoeHybrid", "Jamba", "NemotronH")  # Mamba layers between those of attention
OWN_LAYERS = ("Gemma3nText", "Gemma4Text", *STATES)  # transformers' forward of the layer around fused parts
HYBRIDS = ("Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next")  # some layers have no attention
IMAGE, PIXELS = 100, 16  # the token that stands for a piece of an image, and pixels along a side
VISION = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
MULTIMODAL = {
    "Gemma3": {
        "text_config": SHAPE | FAMILIES["Gemma3Text"],
        "vision_config": VISION | {"image_size": PIXELS, "num_hidden_layers": 1, "num_attention_heads": 2},
        "mm_tokens_per_image": 4,
        "image_token_index": IMAGE,
        "image_token_id": IMAGE,
    },
    "Qwen2_5_VL": {
        "text_config": SHAPE | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": VISION
        | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [0]},
        "image_token_id": IMAGE,
        "video_token_id": IMAGE - 1,
        "vision_start_token_id": IMAGE - 2,
    },
}


# The text parts of models whose images no row describes.
TEXT_PARTS = {
    "MuseGlimmer": {
        "text_config": SHAPE | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
                                "layer_rope_theta": [10000.0, 0], "output_multiplier": 0.5,
                                "final_logit_softcapping": 2.0},
        "vision_config": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        "out_hidden_size": 64, "projector_hidden_size": 32, "image_token_id": IMAGE, "video_token_id": IMAGE - 1,
    },
}  # fmt: skip


def tiny(family: str, *, adapter: bool = True, shape: dict | None = None, **lora) -> nn.Module:
    """A random model of a family whose norms, biases and adapters all matter."""
    whole = MULTIMODAL | TEXT_PARTS
    keys = whole[family] if family in whole else SHAPE | FAMILIES[family] | (shape or {})
    config = getattr(transformers, f"{family}Config")(**keys)
    # transformers 5.17 would choose SDPA for capped scores, and leave the cap out; 5.23 chooses eager itself.
    capped = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = auto_class(config).from_config(config, **capped)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, **{"target_modules": all_linear(model)} | lora))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
    return model.train()


def quantize(model: nn.Module) -> nn.Module:
    """`model` with its frozen linears in NF4."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and "lora" not in name and name not in ("lm_head", "default"):
                setattr(module, name, Linear4bit.from_linear(child, Blockwise4("nf4", 32, True)))
    return model


def batch(packed: bool = False, length: int = 18) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 101, (3, length))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    if packed:
        lengths = [(length,), (5, length - 5), (3, 1, length - 4)]
        inputs["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
        inputs["labels"][inputs["position_ids"] == 0] = -100
    return inputs


def of_stock(model: nn.Module, inputs: dict) -> dict:
    """`inputs` as transformers' own forward needs them to keep documents apart, where it forgets positions in masks."""
    config = model.config
    if "position_ids" not in inputs or config.model_type != "gpt_oss":
        return inputs
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    places = {"inputs_embeds": embeds, "position_ids": inputs["position_ids"]}
    places |= {"config": config, "attention_mask": None, "past_key_values": None}
    masks = {
        "full_attention": create_causal_mask(**places),
        "sliding_attention": create_sliding_window_causal_mask(**places),
    }
    return inputs | {"attention_mask": masks}


def with_image(family: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`inputs` with an image of four tokens in each row, at places that differ."""
    rows = len(inputs["input_ids"])
    inputs = {key: value.clone() for key, value in inputs.items()}
    types = torch.zeros_like(inputs["input_ids"])
    for row in range(rows):
        types[row, row + 3 : row + 7] = 1
    inputs["input_ids"].clamp_(max=IMAGE - 3)[types == 1] = IMAGE
    inputs["labels"][types == 1] = -100
    if family == "Gemma3":
        return inputs | {"token_type_ids": types, "pixel_values": torch.randn(rows, 3, PIXELS, PIXELS)}
    patches = (PIXELS // VISION["patch_size"]) ** 2
    pixels = torch.randn(rows * patches, 3 * 2 * VISION["patch_size"] ** 2)
    grid = torch.tensor([[1, 4, 4]]).repeat(rows, 1)
    return inputs | {"mm_token_type_ids": types, "pixel_values": pixels, "image_grid_thw": grid}


def loop_over_documents(
    query, key, value, bounds_q, bounds_k, longest_q, longest_k, *, window_size, scale, enable_gqa, softcap=0.0
):
    """Replace variable-length attention by a loop over documents, on a CPU."""
    assert torch.equal(bounds_q, bounds_k)
    assert longest_q == longest_k == int(bounds_q.diff().max())
    outputs = []
    for begin, end in zip(bounds_q[:-1].tolist(), bounds_q[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1) for x in (query, key, value))
        ages = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        mask = (ages >= 0) & (ages <= (window_size[0] if window_size[0] >= 0 else end))
        if softcap:
            k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
            scores = softcap * torch.tanh(q @ k.mT * scale / softcap)
            out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=scale, enable_gqa=enable_gqa)[0]
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)


def loss_and_gradients(model: nn.Module, inputs: dict) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss, tokens = causal_lm_loss(model, inputs)
    (loss / tokens).backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: tuple, expected: tuple, tolerance: float = 1e-5) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < tolerance, f"{name}: {error:.2e}"
