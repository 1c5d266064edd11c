"""Tiny models of every family that reads images: config, processor, tokens and what a template writes for an image."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.helpers.gguf_models import SIZES
from tests.helpers.vision_models import DEEPSTACK, GLM_TEXT, GLM_TOWER, MIXTURE, MODELS, MROPE, QWEN, ROPE, TOWER

# tokens by their names in transformers' tokenizers, or by numbers, which have none
QWEN_TOKENS = {
    "0": "<|vision_start|>", "1": "<|vision_end|>", "2": "<|image_pad|>", "3": "<|video_pad|>"
}  # fmt: skip
QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
GLM_TOKENS = {
    "0": "<|image|>", "1": "<|video|>", "2": "<|begin_of_image|>", "3": "<|end_of_image|>", "4": "<|begin_of_video|>",
    "5": "<|end_of_video|>",
}  # fmt: skip
GLM_IDS = {
    "image_token_id": "<|image|>", "video_token_id": "<|video|>", "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>", "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
}  # fmt: skip
IMAGE = {"image_token": "<image>"}
IMAGE_IDS = dict.fromkeys(("image_token_index", "image_token_id"), "<image>")


@dataclass(frozen=True)
class ImageModel:
    """A tiny model and its processor.

    Attributes:
        family: beginning of the names of transformers' classes.
        config: keys of its config.
        ids: key of the config → its token.
        processor: transformers' class.
        tokens: name of an image token in the tokenizer (a digit: it has none) → token.
        image: what a template writes for an image.
        image_keys: preprocessor_config.json.
        keys: processor_config.json.
        start: what the template writes before the turns.
    """

    family: str
    config: dict[str, Any]
    ids: dict[str, str]
    processor: str
    tokens: dict[str, str]
    image: str
    image_keys: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    start: str = ""


def by_patches(patch_size: int, name: str = "Qwen2VLImageProcessor") -> dict[str, Any]:
    """A processor whose tokens follow the size."""
    sides = {"min_pixels": (4 * patch_size) ** 2, "max_pixels": (8 * patch_size) ** 2}
    if name != "Qwen2VLImageProcessor":
        sides = {"size": {"shortest_edge": 2 * sides["min_pixels"], "longest_edge": 2 * sides["max_pixels"]}}
    return {"image_processor_type": name, "patch_size": patch_size} | sides


def square(name: str, side: int, **keys: Any) -> dict[str, Any]:
    """A processor of squares."""
    return {"image_processor_type": name, "size": {"height": side, "width": side}} | keys


def two_layers(family: str, config: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A model's name and config, the latter with the two last layers of a hybrid only."""
    text = config["text_config"]
    last = {"num_hidden_layers": 2, "layer_types": text["layer_types"][-2:]} if "layer_types" in text else {}
    return family, {**config, "text_config": text | last}


LLAMA = SIZES | {"model_type": "llama"}
CLIP = TOWER | {"model_type": "clip_vision_model"}
SIGLIP = TOWER | {"model_type": "siglip_vision_model"}
IDEFICS_TOKENS = {str(n): token for n, token in enumerate((
    "<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
))}  # fmt: skip
IDEFICS = {
    "text_config": LLAMA | {"vocab_size": 320}, "scale_factor": 2,
    "vision_config": {key: value for key, value in TOWER.items() if key != "image_size"} | {"image_size": 56},
}  # fmt: skip
IDEFICS_IMAGES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}

MODELS_OF_IMAGES = {
    "gemma3": ImageModel(
        *MODELS["gemma3"],
        {"image_token_id": "<image_soft_token>", "image_token_index": "<image_soft_token>",
         "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        "Gemma3Processor",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>", square("Gemma3ImageProcessor", 112), {"image_seq_length": 4},
    ),
    "llava": ImageModel(
        *MODELS["llava"], IMAGE_IDS, "LlavaProcessor", IMAGE, "<image>\n",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 112},
         "crop_size": {"height": 112, "width": 112}},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "qwen2_5_vl": ImageModel(
        *MODELS["qwen2_5_vl"], QWEN_IDS, "Qwen2_5_VLProcessor", QWEN_TOKENS, VISION, by_patches(14)),
    **{
        name: ImageModel(*two_layers(*MODELS[name]), QWEN_IDS, "Qwen3VLProcessor", QWEN_TOKENS, VISION, by_patches(16))
        for name in ("qwen3_vl", "qwen3_5", "qwen3_5_moe")
    },
    "qwen2_vl": ImageModel(
        "Qwen2VL",
        {"text_config": SIZES | {"rope_parameters": ROPE},
         "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2,
                           "patch_size": 14, "initializer_range": 0.15}},
        QWEN_IDS, "Qwen2VLProcessor", QWEN_TOKENS, VISION, by_patches(14)),
    "qwen3_vl_moe": ImageModel(
        "Qwen3VLMoe", {"text_config": MROPE | MIXTURE, "vision_config": DEEPSTACK}, QWEN_IDS, "Qwen3VLProcessor",
        QWEN_TOKENS, VISION, by_patches(16)),
    "gemma4": ImageModel(
        "Gemma4",
        {"text_config": SIZES | {
            "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4, "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2, "vocab_size": 288,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 288},
         "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
                           "num_attention_heads": 2, "num_key_value_heads": 2, "position_embedding_size": 64,
                           "initializer_range": 0.15},
         "audio_config": None},
        {"image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
         "video_token_id": "<|video|>", "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>",
         "eoa_token_index": "<audio|>"},
        "Gemma4Processor",
        {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "0": "<|video|>",
         "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"},
        "<|image|>",
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 16, "max_soft_tokens": 70},
    ),
    "mistral3": ImageModel(
        *MODELS["mistral3"],
        {"image_token_index": "[IMG]", "image_token_id": "[IMG]"}, "PixtralProcessor",
        {"0": "[IMG]", "1": "[IMG_BREAK]", "2": "[IMG_END]"}, "[IMG]",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
        {"patch_size": 14, "spatial_merge_size": 2},
    ),
    "pixtral": ImageModel(  # a LLaVA with another processor
        *MODELS["pixtral"], {"image_token_index": "[IMG]", "image_token_id": "[IMG]"}, "PixtralProcessor",
        {"0": "[IMG]", "1": "[IMG_BREAK]", "2": "[IMG_END]"}, "[IMG]",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
        {"patch_size": 14, "spatial_merge_size": 1},
    ),
    "llava_next": ImageModel(
        "LlavaNext",
        {"text_config": LLAMA | {"max_position_embeddings": 512}, "vision_config": CLIP,
         "image_grid_pinpoints": [[112, 224], [224, 112]]},
        IMAGE_IDS, "LlavaNextProcessor", IMAGE, "<image>\n",
        {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 112},
         "crop_size": {"height": 112, "width": 112}, "image_grid_pinpoints": [[112, 224], [224, 112]]},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "llava_onevision": ImageModel(
        "LlavaOnevision",
        {"text_config": SIZES | {"model_type": "qwen2"}, "vision_config": SIGLIP | {"vision_use_head": False},
         "image_grid_pinpoints": [[112, 224], [224, 112]]},
        IMAGE_IDS | {"video_token_index": "<video>", "video_token_id": "<video>"}, "LlavaOnevisionProcessor",
        IMAGE | {"video_token": "<video>"}, "<image>\n",
        square("LlavaOnevisionImageProcessor", 112, image_grid_pinpoints=[[112, 224], [224, 112]]),
        {"num_image_tokens": 64, "vision_feature_select_strategy": "full"},
    ),
    "internvl": ImageModel(
        "InternVL",
        {"text_config": SIZES | {"model_type": "qwen2"}, "image_seq_length": 4,
         "vision_config": TOWER | {"image_size": [56, 56], "patch_size": [14, 14]}},
        {"image_token_id": "<IMG_CONTEXT>"}, "InternVLProcessor",
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        "<IMG_CONTEXT>\n", square("GotOcr2ImageProcessor", 56, max_patches=2), {"image_seq_length": 4},
    ),
    "glm4v": ImageModel(
        "Glm4v", {"text_config": GLM_TEXT, "vision_config": GLM_TOWER},
        GLM_IDS, "Glm4vProcessor", GLM_TOKENS, "<|begin_of_image|><|image|><|end_of_image|>",
        by_patches(14, "Glm4vImageProcessor")),
    "glm4v_moe": ImageModel(
        "Glm4vMoe",
        {"text_config": GLM_TEXT | {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
                                    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "head_dim": 16},
         "vision_config": GLM_TOWER},
        GLM_IDS, "Glm4vProcessor", GLM_TOKENS, "<|begin_of_image|><|image|><|end_of_image|>",
        by_patches(14, "Glm4vImageProcessor")),
    "glm46v": ImageModel(
        "Glm46V",
        {"text_config": GLM_TEXT | {"model_type": "glm4v_text"},
         "vision_config": GLM_TOWER | {"model_type": "glm4v_vision"}},
        GLM_IDS, "Glm46VProcessor", GLM_TOKENS, "<|begin_of_image|><|image|><|end_of_image|>",
        by_patches(14, "Glm46VImageProcessor")),
    "idefics3": ImageModel(
        "Idefics3", IDEFICS, {"image_token_id": "<image>"}, "Idefics3Processor", IDEFICS_TOKENS, "<image>",
        {"image_processor_type": "Idefics3ImageProcessor"} | IDEFICS_IMAGES, {"image_seq_len": 4}),
    "smolvlm": ImageModel(
        "SmolVLM", IDEFICS, {"image_token_id": "<image>"}, "SmolVLMProcessor", IDEFICS_TOKENS, "<image>",
        {"image_processor_type": "SmolVLMImageProcessor"} | IDEFICS_IMAGES, {"image_seq_len": 4}),
    "mllama": ImageModel(
        "Mllama",
        {"text_config": SIZES | {"cross_attention_layers": [1], "num_hidden_layers": 3},
         "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
                           "attention_heads": 2, "patch_size": 14, "image_size": 56, "max_num_tiles": 2,
                           "intermediate_layers_indices": [1], "vision_output_dim": 64,
                           "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "initializer_range": 0.15}},
        {"image_token_index": "<|image|>"}, "MllamaProcessor", {"0": "<|image|>", "1": "<|python_tag|>"}, "<|image|>",
        square("MllamaImageProcessor", 56, max_image_tiles=2), start="<s>",
    ),
    # types that no row of `IMAGE_FAMILIES` lists
    "vipllava": ImageModel(
        "VipLlava", {"text_config": LLAMA, "vision_config": CLIP, "vision_feature_layers": [-1, -2]},
        IMAGE_IDS, "LlavaProcessor", IMAGE, "<image>\n",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 112},
         "crop_size": {"height": 112, "width": 112}},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "idefics2": ImageModel(
        "Idefics2",
        {"text_config": SIZES | {"model_type": "mistral", "head_dim": 16},
         "vision_config": {key: value for key, value in TOWER.items() if key != "image_size"} | {"image_size": 112},
         "perceiver_config": {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1,
                              "resampler_n_heads": 2, "resampler_head_dim": 16, "num_key_value_heads": 2}},
        {"image_token_id": "<image>"}, "Idefics2Processor",
        {"0": "<image>", "1": "<fake_token_around_image>", "2": "<end_of_utterance>"}, "<image>",
        {"image_processor_type": "Idefics2ImageProcessor", "size": {"shortest_edge": 56, "longest_edge": 112},
         "do_image_splitting": False},
        {"image_seq_len": 4},
    ),
    "exaone4_5": ImageModel(
        "Exaone4_5_", {"text_config": SIZES | {"model_type": "exaone4"}, "vision_config": QWEN | {
            "num_key_value_heads": 2}},
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}, "Exaone4_5_Processor", QWEN_TOKENS,
        VISION, by_patches(14),
    ),
    "video_llama_3": ImageModel(
        "VideoLlama3",
        {"text_config": SIZES | {"model_type": "qwen2"},
         "vision_config": {key: value for key, value in TOWER.items() if key != "image_size"}},
        {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}, "VideoLlama3Processor", QWEN_TOKENS,
        VISION, {"image_processor_type": "VideoLlama3ImageProcessor", "patch_size": 14, "min_pixels": 56**2,
                 "max_pixels": 112**2},
    ),
    "llama4": ImageModel(
        "Llama4",
        {"text_config": SIZES | {
            "head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 64,
            "dtype": "float32"},
         "vision_config": {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "patch_size": 14,
                           "num_attention_heads": 2, "image_size": 56, "vision_output_dim": 48,
                           "projector_input_dim": 48, "projector_output_dim": 48, "initializer_range": 0.15}},
        {"image_token_index": "<|patch|>", "boi_token_index": "<|image_start|>", "eoi_token_index": "<|image_end|>"},
        "Llama4Processor",
        {str(n): token for n, token in enumerate((
            "<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
            "<|tile_y_separator|>"))},
        "<|image|>", square("Llama4ImageProcessor", 56, max_patches=2), {"patch_size": 14},
    ),
    "lfm2_vl": ImageModel(
        "Lfm2Vl",
        {"text_config": SIZES | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
         "vision_config": {"model_type": "siglip2_vision_model", "hidden_size": 32, "intermediate_size": 48,
                           "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16, "num_patches": 64,
                           "vision_use_head": False},
         "projector_hidden_size": 48},
        {"image_token_id": "<image>"}, "Lfm2VlProcessor",
        IMAGE | {"image_start_token": "<|image_start|>", "image_end_token": "<|image_end|>",
                 "image_thumbnail_token": "<|img_thumbnail|>"},
        "<image>",
        {"image_processor_type": "Lfm2VlImageProcessor", "min_image_tokens": 4, "max_image_tokens": 16,
         "tile_size": 64, "encoder_patch_size": 16, "do_image_splitting": False},
    ),
}  # fmt: skip
