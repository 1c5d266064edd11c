"""Tiny random models with a vision tower, of every kind that export knows."""

import json

import torch
import transformers

from halfbyte.modeling.architectures import auto_class
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
    "qwen2_5_vl": ("Qwen2_5_VL", {
        "text_config": SIZES | {"rope_parameters": ROPE}, "vision_config": QWEN, "image_token_id": IMAGE,
        "video_token_id": IMAGE - 1, "vision_start_token_id": IMAGE - 2, "vision_end_token_id": IMAGE - 3,
    }),
}  # fmt: skip
PROCESSOR = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.28]}


def save_vision_model(folder, name, dtype=torch.float32, **keys):
    """Save the model `name` of MODELS into `folder` and return it."""
    torch.manual_seed(1)
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(own | keys))
    model = auto_class(config).from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():  # norms start at one and biases at zero: make them matter
        parameter.data += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model
