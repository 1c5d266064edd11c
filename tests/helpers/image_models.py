"""Tiny models that read images, with transformers' own processors and templates, and rows of pictures."""

import json

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor

from halfbyte.data.image_processor import _without_videos
from halfbyte.modeling.architectures import auto_class
from tests.helpers.gguf_models import SIZES, byte_tokenizer
from tests.helpers.vision_models import MODELS, QWEN, ROPE

# name → class of processors, names of the tokenizer's image tokens, a template's text of an image, processor's options
QWEN_TOKENS = {"": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]}
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
KINDS = {
    "gemma3": (
        "Gemma3Processor",
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 112, "width": 112}},
        {"image_seq_length": 4},
    ),
    "llava": (
        "LlavaProcessor",
        {"image_token": "<image>"},
        "<image>\n",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 112},
            "crop_size": {"height": 112, "width": 112},
        },
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLProcessor",
        QWEN_TOKENS,
        VISION,
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "min_pixels": 56**2, "max_pixels": 112**2},
        {},
    ),
    "qwen3_vl": (
        "Qwen3VLProcessor",
        QWEN_TOKENS,
        VISION,
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "min_pixels": 64**2, "max_pixels": 128**2},
        {},
    ),
}
QWEN3_VL = {
    "text_config": SIZES | {"rope_parameters": ROPE | {"mrope_interleaved": True}, "head_dim": 16},
    "vision_config": {k: v for k, v in QWEN.items() if k not in ("fullatt_block_indexes", "window_size")}
    | {"patch_size": 16, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
}
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def image_tokenizer(name):
    """The byte tokenizer with a model's image tokens and the template of chats."""
    tokens = KINDS[name][1]
    tokenizer = byte_tokenizer()
    names = tokens.get("") or list(tokens.values())
    tokenizer.add_special_tokens({"additional_special_tokens": [*names, "<|im_start|>", "<|im_end|>"]})
    named = {} if "" in tokens else {"extra_special_tokens": tokens}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        bos_token="<s>",
        **named,
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", KINDS[name][2].replace("\n", "{{ '\\n' }}"))
    return tokenizer


def save_image_model(folder, name, dtype=torch.float32):
    """Save a tiny model with its processor into `folder` and return it."""
    torch.manual_seed(1)
    processor, tokens, _, image_keys, keys = KINDS[name]
    tokenizer = image_tokenizer(name)

    def index(token):
        return tokenizer.convert_tokens_to_ids(token)

    family, own = MODELS.get(name, ("Qwen3VL", QWEN3_VL))
    if "" in tokens:
        ids = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
        ids |= {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
        ids = {key: index(token) for key, token in ids.items()}
    else:
        ids = dict.fromkeys(("image_token_id", "image_token_index"), index(tokens["image_token"]))
        ids |= {f"{key}_index": index(token) for key, token in tokens.items() if key != "image_token"}
    config = getattr(transformers, f"{family}Config")(**(own | ids))
    model = auto_class(config).from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():  # norms start at one and biases at zero: make them matter
        parameter.data += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_keys | {"processor_class": processor}))
    (folder / "processor_config.json").write_text(json.dumps(keys | {"processor_class": processor}))
    return model


def load_processor(folder, name):
    """transformers' processor from a folder's files, which without torchvision needs no videos."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = _without_videos(getattr(transformers, KINDS[name][0]))
    parts = [AutoImageProcessor.from_pretrained(folder, backend="pil"), tokenizer]
    parts += [None] * (len(processor.get_attributes()) - 2)
    return processor.from_args_and_dict(parts, processor.get_processor_dict(folder)[0])


def picture(seed, width=90, height=70):
    """A picture of noise, 8-bit RGB."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def write_image_rows(folder, rows=8):
    """`data.jsonl` in `folder` with rows of 0 to 2 images, and the images in `pictures`."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(rows):
        content = [{"type": "text", "text": f"look at {number}: "}]
        for image in range(number % 3):
            name = f"pictures/{number}-{image}.png"
            picture(10 * number + image, 60 + 9 * number, 70).save(folder / name)
            content += [{"type": "image", "image": name}, {"type": "text", "text": " and"}]
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": f"I see {'x' * (number + 1)}."}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"
