"""Tiny models that read images, with transformers' own processors and templates, and rows of pictures."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # without torchvision in 5.17, too
from transformers.models.smolvlm import processing_smolvlm

from halfbyte.data.image_processor import _processor_class
from tests.helpers.gguf_models import byte_tokenizer
from tests.helpers.image_families import MODELS_OF_IMAGES

processing_smolvlm.num2words = processing_smolvlm.num2words or str  # it writes numbers of videos in words
NEEDS_TORCHVISION = pytest.mark.skipif(find_spec("torchvision") is None, reason="its processor needs torchvision")
KINDS = ("gemma3", "llava", "qwen2_5_vl", "qwen3_vl")
# Rows of which others run nearly the same code.
ALIKE = (
    *("glm46v", "glm4v_moe", "idefics3", "llava_next", "qwen2_vl", "qwen3_5_moe", "qwen3_vl_moe"),
    *("exaone4_5", "idefics2", "video_llama_3", "vipllava"),
)
# All families, as parameters of a test.
NAMES = [
    pytest.param(name, marks=NEEDS_TORCHVISION)
    if name in ("lfm2_vl", "llama4")
    else pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ())
    for name in MODELS_OF_IMAGES
]
TEMPLATE = """START{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def image_tokenizer(name):
    """The byte tokenizer with a model's image tokens and the template of chats."""
    row = MODELS_OF_IMAGES[name]
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*row.tokens.values(), "<|im_start|>", "<|im_end|>"]})
    named = {key: token for key, token in row.tokens.items() if not key.isdigit()}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        bos_token="<s>",
        **({"extra_special_tokens": named} if named else {}),
    )
    image = row.image.replace("\n", "{{ '\\n' }}")
    tokenizer.chat_template = TEMPLATE.replace("START", row.start).replace("IMAGE", image)
    return tokenizer


def save_image_model(folder, name, dtype=torch.float32):
    """Save a tiny model with its processor into `folder` and return it."""
    torch.manual_seed(1)
    row = MODELS_OF_IMAGES[name]
    tokenizer = image_tokenizer(name)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in row.ids.items()}
    config = getattr(transformers, f"{row.family}Config")(**(row.config | ids))
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    for parameter in model.parameters():  # norms start at one and biases at zero: make them matter
        parameter.data += 0.03 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    named = {"processor_class": row.processor}
    (folder / "preprocessor_config.json").write_text(json.dumps(row.image_keys | named))
    (folder / "processor_config.json").write_text(json.dumps(row.keys | named))
    skip_without_torchvision(folder, name)
    return model


def skip_without_torchvision(folder, name):
    """Skip the test if this version of transformers loads the processor with torchvision only, which is missing."""
    try:
        load_processor(folder, name)
    except (ImportError, ValueError) as error:
        if find_spec("torchvision") is None and "torchvision" in f"{error} {error.__cause__}":
            pytest.skip(f"transformers {transformers.__version__}: the processor of {name} needs torchvision")
        raise


def load_processor(folder, name):
    """transformers' processor from a folder's files, which without torchvision needs no videos."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = _processor_class(
        getattr(transformers, f"{MODELS_OF_IMAGES[name].family}Config")(), MODELS_OF_IMAGES[name].processor
    )
    parts = {"tokenizer": tokenizer, "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil")}
    parts = [parts.get(attribute) for attribute in processor.get_attributes()]
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
