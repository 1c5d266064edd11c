"""Tiny models that read images, one for each kind of vision part in GGUF files, for `benchmarks.mmproj_answers`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.image_models import QWEN_IDS, QWEN_IMAGE, ImageShape

MEDIA = "MEDIA"  # llama.cpp's place of an image in `Reader.around`


@dataclass(frozen=True)
class Reader:
    """A tiny model, and the images that llama.cpp and transformers read without scaling.

    Attributes:
        shape: the model and its processor.
        sizes: widths and heights of such images.
        sides: least and most pixels of a side of images of any size.
        around: text of a prompt about an image, `MEDIA` in place of the image and what llama.cpp writes around it.
        batch: rows of a training step.
    """

    shape: ImageShape
    sizes: tuple[tuple[int, int], ...]
    sides: tuple[int, int] = (50, 200)
    around: str = MEDIA
    batch: int = 16


def grids(unit: int, *counts: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Return widths and heights of images with so many tokens of `unit` pixels a side in a row and in a column."""
    return tuple((unit * columns, unit * rows) for columns, rows in counts)


UNEVEN = ((3, 3), (4, 2), (2, 4), (5, 3), (3, 4), (6, 2), (4, 4))
NORMAL = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.28]}
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.1,
}  # fmt: skip
LLAMA = TEXT | {"model_type": "llama"}
MISTRAL = TEXT | {"model_type": "mistral", "head_dim": 16, "rms_norm_eps": 1e-5}
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14,
    "image_size": 56, "initializer_range": 0.1,
}  # fmt: skip
LARGE_TOWER = TOWER | {"image_size": 112}
CLIP = TOWER | {"model_type": "clip_vision_model"}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = TOWER | {"model_type": "pixtral", "image_size": 280}
DEPTH = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "hidden_size": 32, "intermediate_size": 64,
         "initializer_range": 0.1}  # fmt: skip
QWEN_TOWER = DEPTH | {"patch_size": 14, "depth": 4, "fullatt_block_indexes": [1, 3], "window_size": 112}
QWEN3_TOWER = DEPTH | {"patch_size": 16, "num_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
INTERLEAVED = ROPE | {"mrope_interleaved": True, "mrope_section": [3, 3, 2]}
MROPE = TEXT | {"rope_parameters": INTERLEAVED, "head_dim": 16}
DELTA_NET = MROPE | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": [*["linear_attention"] * 3, "full_attention"], "num_hidden_layers": 4,
    "rope_parameters": INTERLEAVED | {"partial_rotary_factor": 1.0},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
           "shared_expert_intermediate_size": 64}  # fmt: skip
GLM_TEXT = TEXT | {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
GLM_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
               "first_k_dense_replace": 1, "head_dim": 16}  # fmt: skip
GLM_TOWER = DEPTH | {"patch_size": 14, "image_size": 112}
GLM_IDS = {
    "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip
GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
IMAGE_IDS = dict.fromkeys(("image_token_index", "image_token_id"), "<image>")
PIXTRAL_IDS = dict.fromkeys(("image_token_index", "image_token_id"), "[IMG]") | {"": "[IMG_BREAK]", " ": "[IMG_END]"}
LLAVA_KEYS = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
CLIP_IMAGES = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56},
               "crop_size": {"height": 56, "width": 56}}  # fmt: skip
PIXTRAL_IMAGES = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 280}, "patch_size": 14}
TILES = {str(number): token for number, token in enumerate((
    "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 3) for column in range(1, 3)),
))}  # fmt: skip
IDEFICS_IMAGES = NORMAL | {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}


def square(kind: str, side: int, **keys: Any) -> dict[str, Any]:
    """Return preprocessor_config.json of images scaled to squares."""
    return {"image_processor_type": kind, "size": {"height": side, "width": side}} | NORMAL | keys


def by_size(unit: int, kind: str = "Qwen2VLImageProcessor") -> dict[str, Any]:
    """Return preprocessor_config.json of images with a token for `unit`² pixels, at least 8 as in llama.cpp."""
    limits = {"min_pixels": 8 * unit**2, "max_pixels": 64 * unit**2}
    if kind != "Qwen2VLImageProcessor":  # counts both frames of a patch
        limits = {"size": {"shortest_edge": 16 * unit**2, "longest_edge": 128 * unit**2}}
    return {"image_processor_type": kind, "patch_size": unit // 2} | NORMAL | limits


def qwen3(family: str, text: dict[str, Any], **tower: Any) -> Reader:
    """Return a model with Qwen3-VL's tower."""
    config = {"text_config": text, "vision_config": QWEN3_TOWER | tower}
    shape = ImageShape(family, "Qwen3VLProcessor", config, QWEN_IDS, QWEN_IMAGE, by_size(32), {})
    return Reader(shape, grids(32, *UNEVEN, (8, 8)))


def glm(family: str, text: dict[str, Any], **tower: Any) -> Reader:
    """Return a model with GLM-4.1V's tower."""
    name = family.replace("Moe", "")
    config = {"text_config": text, "vision_config": GLM_TOWER | tower}
    images = by_size(28, f"{name}ImageProcessor")
    return Reader(ImageShape(family, f"{name}Processor", config, GLM_IDS, GLM_IMAGE, images, {}), grids(28, *UNEVEN))


def mistral(text: dict[str, Any]) -> Reader:
    """Return a model with Mistral 3's tower."""
    config = {"text_config": text, "vision_config": PIXTRAL, "spatial_merge_size": 2}
    keys = {"patch_size": 14, "spatial_merge_size": 2}
    shape = ImageShape("Mistral3", "PixtralProcessor", config, PIXTRAL_IDS, "[IMG]", PIXTRAL_IMAGES | NORMAL, {}, keys)
    return Reader(shape, grids(28, *UNEVEN))


def idefics(family: str) -> Reader:
    """Return a model with Idefics 3's tower and tiles."""
    config = {"text_config": LLAMA, "vision_config": TOWER, "scale_factor": 2}
    ids = {"image_token_id": "<image>"} | TILES
    images = {"image_processor_type": f"{family}ImageProcessor"} | IDEFICS_IMAGES
    shape = ImageShape(family, f"{family}Processor", config, ids, "<image>", images, {}, {"image_seq_len": 4})
    return Reader(shape, ((112, 112), (112, 56), (56, 112)))


def llava(tower: dict[str, Any], images: dict[str, Any], keys: dict[str, Any], **config: Any) -> Reader:
    """Return a LLaVA."""
    config = {"text_config": LLAMA, "vision_config": tower} | config
    shape = ImageShape(
        "Llava", "LlavaProcessor", config, IMAGE_IDS, "<image>\n", images, {}, keys, {"image_token": "<image>"}
    )
    return Reader(shape, ((56, 56),), around=f"{MEDIA}\n")


FULL = {"vision_feature_select_strategy": "full"}
READERS = {
    "qwen2_5_vl": Reader(
        ImageShape("Qwen2_5_VL", "Qwen2_5_VLProcessor",
                   {"text_config": TEXT | {"rope_parameters": ROPE}, "vision_config": QWEN_TOWER},
                   QWEN_IDS, QWEN_IMAGE, by_size(28), {}),
        grids(28, *UNEVEN, (8, 3))),
    "qwen3_vl": qwen3("Qwen3VL", MROPE, deepstack_visual_indexes=[0, 1]),
    "qwen3_5": qwen3("Qwen3_5", DELTA_NET),
    "qwen3_5_moe": qwen3("Qwen3_5Moe", DELTA_NET | EXPERTS),
    "gemma3": Reader(
        ImageShape("Gemma3", "Gemma3Processor",
                   {"text_config": TEXT | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64,
                                           "num_hidden_layers": 7},
                    "vision_config": LARGE_TOWER, "mm_tokens_per_image": 16},
                   {"image_token_id": "<image_soft_token>", "image_token_index": "<image_soft_token>",
                    "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
                   "<start_of_image>", square("Gemma3ImageProcessor", 112), {}, {"image_seq_length": 16},
                   {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
                    "image_token": "<image_soft_token>"}),
        ((112, 112),), around=f"\n\n{MEDIA}\n\n"),
    "gemma4": Reader(
        ImageShape("Gemma4", "Gemma4Processor",
                   {"text_config": TEXT | {
                       "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 64,
                       "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
                       "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320,
                       "use_bidirectional_attention": "vision"},
                    "vision_config": {
                       "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
                       "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 256,
                       "initializer_range": 0.1},
                    "audio_config": None},
                   {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
                    "video_token_id": "<|video|>", "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>",
                    "eoa_token_index": "<audio|>"},
                   "<|image|>", {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 16,
                                 "max_soft_tokens": 70, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}, {}, {},
                   {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
                    "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}),
        grids(48, (7, 10), (10, 7), (5, 14), (14, 5)), (150, 600), batch=4),
    "mistral3": mistral(MISTRAL),
    "ministral3": mistral(MISTRAL | {"model_type": "ministral3", "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
    "pixtral": Reader(
        ImageShape("Llava", "PixtralProcessor",
                   {"text_config": MISTRAL, "vision_config": PIXTRAL | {"hidden_act": "silu"},
                    "vision_feature_layer": -1} | FULL,
                   PIXTRAL_IDS, "[IMG]", PIXTRAL_IMAGES | NORMAL, {}, {"patch_size": 14, "spatial_merge_size": 1}),
        grids(14, *UNEVEN), (30, 100)),
    "llava": llava(CLIP, CLIP_IMAGES | NORMAL, LLAVA_KEYS),
    "llava_siglip": llava(SIGLIP, square("SiglipImageProcessor", 56),
                          LLAVA_KEYS | FULL | {"num_additional_image_tokens": 0}, vision_feature_layer=-1, **FULL),
    "internvl": Reader(
        ImageShape("InternVL", "InternVLProcessor",
                   {"text_config": TEXT | {"model_type": "qwen2"}, "image_seq_length": 4,
                    "vision_config": TOWER | {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True}},
                   {"image_token_id": "<IMG_CONTEXT>"}, "<IMG_CONTEXT>\n",
                   square("GotOcr2ImageProcessor", 56, min_patches=1, max_patches=4), {}, {"image_seq_length": 4},
                   {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                    "video_token": "<video>"}),
        ((56, 56), (112, 56), (56, 112), (112, 112), (168, 56)), around=f"{MEDIA}\n"),
    "glm4v": glm("Glm4v", GLM_TEXT),
    "glm46v": glm("Glm46V", GLM_TEXT | {"model_type": "glm4v_text"}, model_type="glm4v_vision"),
    "glm4v_moe": glm("Glm4vMoe", GLM_TEXT | GLM_EXPERTS),
    "lfm2_vl": Reader(
        ImageShape("Lfm2Vl", "Lfm2VlProcessor",
                   {"text_config": TEXT | {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16},
                    "vision_config": {
                        "model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 64,
                        "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16, "num_patches": 256,
                        "vision_use_head": False, "initializer_range": 0.1},
                    "projector_hidden_size": 48},
                   {"image_token_id": "<image>"}, "<image>",
                   {"image_processor_type": "Lfm2VlImageProcessor"} | NORMAL, {}, {},
                   {"image_token": "<image>", "image_start_token": "<|image_start|>",
                    "image_end_token": "<|image_end|>", "image_thumbnail_token": "<|img_thumbnail|>"}),
        grids(32, (8, 8), (9, 8), (8, 10), (11, 6), (7, 10)), (250, 600), batch=4),
    "idefics3": idefics("Idefics3"),
    "smolvlm": idefics("SmolVLM"),
}  # fmt: skip
