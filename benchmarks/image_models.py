"""Models that read images, with random weights of public shapes, and rows of pictures, for `benchmarks.image_step`.

A folder has config, processor files, a tokenizer of bytes (one token a character) and, where a run loads it, a
checkpoint. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_IDS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
SIGMA = 0.6  # deviation of the logarithms of uneven sizes
SMOOTH = 8  # pixels of a side that one random value of a picture covers


@dataclass(frozen=True)
class ImageShape:
    """A model's public shape, and its processor.

    Attributes:
        family: beginning of the names of transformers' classes.
        processor: transformers' class of its processor.
        config: keys of its config.
        ids: key of the config → token.
        image: what the template writes for an image.
        image_keys: preprocessor_config.json.
        keys: processor_config.json.
        tiny: keys of `text_config` and `vision_config` of the same model for a CPU.
        names: attributes of the tokenizer → token, which the processor reads.
    """

    family: str
    processor: str
    config: dict[str, Any]
    ids: dict[str, str]
    image: str
    image_keys: dict[str, Any]
    tiny: dict[str, dict[str, Any]]
    keys: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def qwen_images(patch_size: int) -> dict[str, Any]:
    """Return Qwen's preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch_size, "min_pixels": 4 * 28 * 28,
        "max_pixels": 16384 * 28 * 28, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip


TINY_TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "num_hidden_layers": 2,
}  # fmt: skip
TINY_TOWER = {"depth": 4, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
TINY_SIGLIP = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
QWEN3_TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "out_hidden_size": 4096, "num_position_embeddings": 2304,
}  # fmt: skip
SHAPES = {
    "qwen2.5-vl-7b": ImageShape(
        "Qwen2_5_VL", "Qwen2_5_VLProcessor",
        {"tie_word_embeddings": False,
         "text_config": {
            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
            "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
            "tie_word_embeddings": False},
         "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
            "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2}},
        QWEN_IDS, QWEN_IMAGE, qwen_images(14),
        {"text_config": TINY_TEXT | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
         "vision_config": TINY_TOWER | {"fullatt_block_indexes": [1, 3]}},
    ),
    "qwen3.5-9b": ImageShape(
        "Qwen3_5", "Qwen3VLProcessor",
        {"tie_word_embeddings": False,
         "text_config": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                                "mrope_section": [11, 11, 10], "mrope_interleaved": True}},
         "vision_config": QWEN3_TOWER},
        QWEN_IDS, QWEN_IMAGE, qwen_images(16),
        {"text_config": TINY_TEXT | {
            "num_hidden_layers": 4, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                                "mrope_section": [3, 3, 2], "mrope_interleaved": True}},
         "vision_config": TINY_TOWER | {"num_position_embeddings": 64}},
    ),
    "qwen3-vl-8b": ImageShape(
        "Qwen3VL", "Qwen3VLProcessor",
        {"tie_word_embeddings": False,
         "text_config": {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
                                "mrope_interleaved": True},
            "tie_word_embeddings": False},
         "vision_config": QWEN3_TOWER | {"deepstack_visual_indexes": [8, 16, 24]}},
        QWEN_IDS, QWEN_IMAGE, qwen_images(16),
        {"text_config": TINY_TEXT | {
            "head_dim": 16, "num_hidden_layers": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
                                "mrope_interleaved": True}},
         "vision_config": TINY_TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]}},
    ),
    "gemma3-4b": ImageShape(
        "Gemma3", "Gemma3Processor",
        {"text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208, "sliding_window": 1024,
            "query_pre_attn_scalar": 256},
         "vision_config": {
            "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
            "patch_size": 14, "image_size": 896},
         "mm_tokens_per_image": 256},
        {"image_token_id": "<image_soft_token>", "image_token_index": "<image_soft_token>",
         "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
        {"text_config": TINY_TEXT | {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 64},
         "vision_config": TINY_SIGLIP},
        {"image_seq_length": 256},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    ),
    "llava-1.5-7b": ImageShape(
        "Llava", "LlavaProcessor",
        {"text_config": {
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064,
            "max_position_embeddings": 4096, "tie_word_embeddings": False},
         "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "patch_size": 14, "image_size": 336, "projection_dim": 768},
         "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "tie_word_embeddings": False},
        {"image_token_id": "<image>", "image_token_index": "<image>"}, "<image>\n",
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 336},
         "crop_size": {"height": 336, "width": 336}},
        {"text_config": TINY_TEXT, "vision_config": TINY_SIGLIP},
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"image_token": "<image>"},
    ),
}  # fmt: skip


def image_tokenizer(shape: ImageShape) -> Any:
    """Return a tokenizer of bytes with a shape's image tokens and a template of chats."""
    from transformers import PreTrainedTokenizerFast

    from benchmarks.step_peers import byte_tokenizer

    tokenizer = byte_tokenizer()
    added = [*shape.ids.values(), *shape.names.values(), "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(added))})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<pad>", bos_token="<bos>",
        **({"extra_special_tokens": shape.names} if shape.names else {}),
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", shape.image.replace("\n", "{{ '\\n' }}"))
    return tokenizer


def model_config(shape: ImageShape, layers: int | None, is_tiny: bool, tokenizer: Any) -> Any:
    """Return the config of a shape.

    Args:
        layers: of the language model; default: all.
    """
    import transformers

    keys = dict(shape.config)
    for part, smaller in shape.tiny.items() if is_tiny else ():
        keys[part] = keys[part] | smaller
    if layers:
        keys["text_config"] = keys["text_config"] | {"num_hidden_layers": layers}
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    keys["text_config"] = keys["text_config"] | {key: getattr(tokenizer, key) for key in names}
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in shape.ids.items()}
    config = getattr(transformers, f"{shape.family}Config")(**keys, **ids)
    config.architectures = [f"{shape.family}ForConditionalGeneration"]
    return config


def write_model(folder: Path, shape: ImageShape, layers: int | None, is_tiny: bool, device: str | None) -> None:
    """Write a model's folder.

    Args:
        device: where its random bf16 weights are made; None: the folder has none.
    """
    from transformers import AutoModelForImageTextToText

    tokenizer = image_tokenizer(shape)
    config = model_config(shape, layers, is_tiny, tokenizer)
    if device is not None:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="4GB")
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    named = {"processor_class": shape.processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(shape.image_keys | named))
    (folder / "processor_config.json").write_text(json.dumps(shape.keys | named))


def uneven(count: int, mean: float, seed: int) -> list[int]:
    """Return `count` log-normal numbers around `mean`, between a quarter of it and twice it."""
    factors = np.exp(SIGMA * np.random.default_rng(seed).standard_normal(count))
    return [int(mean * factor) for factor in np.clip(factors, 1 / 4, 2)]


def write_picture(path: Path, width: int, height: int, seed: int) -> None:
    """Write a picture of smooth noise as JPEG."""
    from PIL import Image

    size = max(height // SMOOTH, 1), max(width // SMOOTH, 1), 3
    noise = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(path, quality=90)


def write_image_rows(folder: Path, sizes: Sequence[tuple[int, int]], characters: Sequence[int]) -> Path:
    """Write rows with one picture each to `data.jsonl` in `folder`.

    Args:
        sizes: width and height of the pictures.
        characters: of the rows' texts, half of them the answer.
    """
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, ((width, height), length) in enumerate(zip(sizes, characters, strict=True)):
        name = f"pictures/{number}.jpg"
        write_picture(folder / name, width, height, number)
        question: list[Mapping[str, str]] = [{"type": "image", "image": name}, {"type": "text", "text": text(length)}]
        lines.append(chat(question, length))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def write_text_rows(folder: Path, characters: int, rows: int, image_tokens: int) -> Path:
    """Write rows without pictures whose questions have `image_tokens` more characters to `text.jsonl` in `folder`."""
    row = chat(text(characters + 2 * image_tokens), characters)
    (folder / "text.jsonl").write_text("\n".join([row] * rows))
    return folder / "text.jsonl"


def text(length: int) -> str:
    """Return half as many characters as `length`."""
    return ("the quick brown fox jumps over the lazy dog " * (length // 80 + 1))[: length // 2]


def chat(question: Any, length: int) -> str:
    """Return a row with a question and an answer, as JSON."""
    return json.dumps(
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": text(length)}]}
    )
