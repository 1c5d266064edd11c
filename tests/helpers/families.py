"""Keys of a tiny model of every family that halfbyte knows: the one table, at the sizes that a test asks for."""

from __future__ import annotations

from typing import Any

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
TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SCALED = {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "logits_scaling": 3.0, "attention_multiplier": 0.2}
SCALED_QUERIES = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.3,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 128,
}  # fmt: skip


def families(width: int = 32, mlp: int = 48, expert: int = 16, vocabulary: int = 101) -> dict[str, dict[str, Any]]:
    """Return the keys of each family beside the sizes: name of the config class in transformers → keys.

    Args:
        width: `hidden_size`, of four heads.
        mlp: `intermediate_size` of dense layers.
        expert: `intermediate_size` of an expert.
    """
    head = width // 4
    mixture = {"num_experts_per_tok": 2, "moe_intermediate_size": expert}
    shared = mixture | {"num_experts": 4, "shared_expert_intermediate_size": expert}
    routed = mixture | {"n_routed_experts": 4, "n_shared_experts": 1}
    hybrid = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": head,
        "linear_value_head_dim": head, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    mamba = {
        "mamba_n_heads": 4, "mamba_d_head": 2 * head, "mamba_d_state": head, "mamba_n_groups": 1,
        "mamba_chunk_size": head,
    }  # fmt: skip
    per_layer = {
        "num_hidden_layers": 4, "layer_types": TWO_KINDS["layer_types"] * 2, "sliding_window": 8,
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": vocabulary,
    }  # fmt: skip
    local = mixture | {"num_local_experts": 4}
    return {
        "Llama": {"attention_bias": True, "mlp_bias": True},
        "Mistral": {"sliding_window": 8},
        "Qwen2": {},
        "Qwen3": {},
        "Gemma": {},
        "Gemma2": {"final_logit_softcapping": 0.5, "sliding_window": 8, "attn_logit_softcapping": 2.0},
        "Gemma3Text": TWO_KINDS,
        "Gemma3nText": per_layer
        | {"activation_sparsity_pattern": [0.0] * 4, "laurel_rank": 8, "intermediate_size": [mlp] * 4},
        "Gemma4Text": per_layer | {"global_head_dim": 2 * head, "use_double_wide_mlp": True},
        "Phi3": {"resid_pdrop": 0.0, "partial_rotary_factor": 0.5},
        "Mixtral": {"num_local_experts": 4, "sliding_window": 8},
        "Qwen3Moe": mixture | {"num_experts": 4},
        "Ministral": TWO_KINDS,
        "Ministral3": {"sliding_window": 8, "rope_parameters": SCALED_QUERIES},
        "SmolLM3": {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8},
        "Olmo2": {},
        "Olmo3": TWO_KINDS,
        "SeedOss": {"residual_dropout": 0.0, "attention_dropout": 0.0},
        "Exaone4": TWO_KINDS,
        "Cohere2": TWO_KINDS | {"logit_scale": 0.5},
        "Granite": SCALED,
        "Ernie4_5": {"use_bias": True},
        "Glm": {},
        "Glm4": {},
        "Apertus": {},
        "Arcee": {},
        "Qwen2Moe": shared,
        "Glm4Moe": routed | {"first_k_dense_replace": 1, "use_qk_norm": True},
        "GraniteMoe": local | SCALED,
        "Olmoe": mixture | {"num_experts": 4},
        "Phimoe": local,
        "Ernie4_5_Moe": mixture
        | {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        "MiniMaxM2": local,
        "GptOss": local | {"sliding_window": 8, "max_position_embeddings": 512, "rope_parameters": YARN},
        "Qwen3_5Text": hybrid,
        "Qwen3_5MoeText": hybrid | shared,
        "Qwen3Next": hybrid | shared,
        "Bamba": mamba | {"attn_layer_indices": [1]},
        "GraniteMoeHybrid": mamba
        | SCALED
        | {
            "layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2,
            "shared_intermediate_size": mlp // 2,
        },
        "Jamba": {
            "mamba_d_state": head, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 0, "num_experts": 4,
        },
        "NemotronH": routed
        | {
            "layers_block_type": ["mamba", "attention", "mlp", "moe"], "num_hidden_layers": 4, "mamba_num_heads": 4,
            "mamba_head_dim": 2 * head, "ssm_state_size": head, "n_groups": 1,
            "moe_shared_expert_intermediate_size": expert,
        },
    }  # fmt: skip


FAMILIES = families()
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
    "Qwen3VL": {
        "text_config": SHAPE | {"head_dim": 8, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        "vision_config": VISION
        | {
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
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
