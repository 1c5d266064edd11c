"""Tiny random models with a vision tower, of every kind that export knows."""

import json

import torch
import transformers
from transformers import AutoModelForImageTextToText

from tests.helpers.gguf_models import SIZES, byte_tokenizer

IMAGE = 271  # placeholder token of an image patch
TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 14,
    "image_size": 112, "initializer_range": 0.15,
}  # fmt: skip
TOKENS = {"image_token_index": IMAGE, "image_token_id": IMAGE}
QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 4, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64,
    "fullatt_block_indexes": [1, 3], "window_size": 112, "initializer_range": 0.15,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
INTERLEAVED = ROPE | {"mrope_interleaved": True, "mrope_section": [3, 3, 2]}  # others: llama.cpp rotates a pair by 0
MROPE = SIZES | {"rope_parameters": INTERLEAVED, "head_dim": 16}
QWEN3_TOWER = {key: value for key, value in QWEN.items() if key not in ("fullatt_block_indexes", "window_size")}
QWEN3_TOWER |= {"patch_size": 16, "num_position_embeddings": 64}
DEEPSTACK = QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]}
DELTA_NET = MROPE | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": [*["linear_attention"] * 3, "full_attention"], "num_hidden_layers": 4,
    "rope_parameters": INTERLEAVED | {"partial_rotary_factor": 1.0},
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
QWEN_IDS = {
    "image_token_id": IMAGE, "video_token_id": IMAGE - 1, "vision_start_token_id": IMAGE - 2,
    "vision_end_token_id": IMAGE - 3,
}  # fmt: skip
GLM_TEXT = SIZES | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
GLM_TOWER = {
    "hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64,
    "image_size": 112, "initializer_range": 0.15,
}  # fmt: skip
GLM_IDS = {
    "image_token_id": IMAGE, "video_token_id": IMAGE - 1, "image_start_token_id": IMAGE - 2,
    "image_end_token_id": IMAGE - 3, "video_start_token_id": IMAGE - 4, "video_end_token_id": IMAGE - 5,
}  # fmt: skip
# name → transformers' class, keys of its config
MODELS = {
    "gemma3": ("Gemma3", TOKENS | {
        "text_config": SIZES | {
            "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16, "num_hidden_layers": 7
        },
        "vision_config": TOWER,
        "mm_tokens_per_image": 4,
    }),
    "llava": ("Llava", TOKENS | {
        "text_config": SIZES | {"model_type": "llama"}, "vision_config": TOWER | {"model_type": "clip_vision_model"},
    }),
    "llava_siglip": ("Llava", TOKENS | {
        "text_config": SIZES | {"model_type": "llama"}, "vision_config": TOWER | {"model_type": "siglip_vision_model"},
        "vision_feature_select_strategy": "full",
    }),
    "qwen2_5_vl": ("Qwen2_5_VL", {
        "text_config": SIZES | {"rope_parameters": ROPE}, "vision_config": QWEN, **QWEN_IDS,
    }),
    "qwen3_vl": ("Qwen3VL", {"text_config": MROPE | {"num_hidden_layers": 3}, "vision_config": DEEPSTACK, **QWEN_IDS}),
    "qwen3_5": ("Qwen3_5", {"text_config": DELTA_NET, "vision_config": QWEN3_TOWER, **QWEN_IDS}),
    "qwen3_5_moe": ("Qwen3_5Moe", {
        "text_config": DELTA_NET | MIXTURE | {"shared_expert_intermediate_size": 48}, "vision_config": QWEN3_TOWER,
        **QWEN_IDS,
    }),
    "mistral3": ("Mistral3", TOKENS | {
        "text_config": SIZES | {"model_type": "mistral", "head_dim": 16, "rms_norm_eps": 1e-5},
        "vision_config": TOWER | {"model_type": "pixtral"}, "spatial_merge_size": 2,
    }),
    "ministral3": ("Mistral3", TOKENS | {
        "text_config": SIZES | {
            "model_type": "ministral3", "head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 16,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1}},
        "vision_config": TOWER | {"model_type": "pixtral"}, "spatial_merge_size": 2,
    }),
    "pixtral": ("Llava", TOKENS | {
        "text_config": SIZES | {"model_type": "mistral", "head_dim": 16},
        "vision_config": TOWER | {"model_type": "pixtral", "hidden_act": "silu"}, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }),
    **{
        name: (family, {
            "text_config": SIZES | {"model_type": "llama"}, "scale_factor": 2, "image_token_id": IMAGE,
            "vision_config": TOWER | {"image_size": 56},
        })
        for name, family in (("idefics3", "Idefics3"), ("smolvlm", "SmolVLM"))
    },
    "internvl": ("InternVL", {
        "text_config": SIZES | {"model_type": "qwen2"}, "image_seq_length": 4, "image_token_id": IMAGE,
        "vision_config": TOWER | {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True},
    }),
    "glm4v": ("Glm4v", GLM_IDS | {"text_config": GLM_TEXT, "vision_config": GLM_TOWER | {"model_type": "glm4v"}}),
    "glm46v": ("Glm46V", GLM_IDS | {"text_config": GLM_TEXT | {"model_type": "glm4v_text"},
                                    "vision_config": GLM_TOWER | {"model_type": "glm4v_vision"}}),
    "glm4v_moe": ("Glm4vMoe", GLM_IDS | {
        "text_config": GLM_TEXT | {
            "num_hidden_layers": 3, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "first_k_dense_replace": 1, "head_dim": 16, "routed_scaling_factor": 1.7},
        "vision_config": GLM_TOWER}),
    "lfm2_vl": ("Lfm2Vl", {
        "text_config": SIZES | {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
        "vision_config": {
            "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "patch_size": 16, "num_patches": 256, "vision_use_head": False,
            "initializer_range": 0.15},
        "projector_hidden_size": 48, "image_token_id": IMAGE,
    }),
    "gemma4": ("Gemma4", {
        "text_config": SIZES | {
            "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 272, "final_logit_softcapping": 30.0,
            "use_bidirectional_attention": "vision"},
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 64,
            "initializer_range": 0.15},
        "audio_config": None, "image_token_id": IMAGE, "boi_token_id": IMAGE - 1, "eoi_token_id": IMAGE - 2,
        "video_token_id": IMAGE - 3, "audio_token_id": IMAGE - 4, "boa_token_id": IMAGE - 5,
        "eoa_token_index": IMAGE - 6,
    }),
}  # fmt: skip
# name → tokens of the images
WORDS = {name: ["[IMG]", "[IMG_BREAK]", "[IMG_END]"] for name in ("mistral3", "ministral3", "pixtral")}
WORDS |= {
    name: ["\n\n", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"] for name in ("idefics3", "smolvlm")
}
LINE_BREAK = 261  # number of [IMG_BREAK] in the saved tokenizer
PROCESSOR = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.28]}


def save_vision_model(folder, name, dtype=torch.float32, **keys):
    """Save the model `name` of MODELS into `folder` and return it."""
    torch.manual_seed(1)
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(own | keys))
    model = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():  # norms start at one and biases at zero: make them matter
        parameter.data += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(WORDS.get(name, []), special_tokens=True)
    tokenizer.save_pretrained(folder)
    size = {"size": {"longest_edge": 56}} if name in ("idefics3", "smolvlm") else {}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | size))
    return model
