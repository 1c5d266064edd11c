"""Masks of generated conversations with images, in the templates of makers' checkpoints.

What is trained must be what is trained where each image is a word: images change no token of the text around them, and
their own tokens are never trained.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import trl

from halfbyte.config import load_config
from halfbyte.data.prepare import prepare
from halfbyte.loading.tokenizers import load_run_tokenizer
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.image_models import picture, save_image_model

# family → template among TRL's copies, tokens that end its answers
TEMPLATES = {
    "qwen2_5_vl": ("qwen2_5_vl", "<|im_end|>"),
    "qwen3_vl": ("qwen3_vl", "<|im_end|>"),
    "qwen3_5": ("qwen3_5_nothink", "<|im_end|>"),
    "gemma3": ("gemma3", "<end_of_turn>"),
    "gemma4": ("gemma4_v5", "<turn|>"),
    "smolvlm": ("smolvlm", "<end_of_utterance>"),
    "llava_next": ("llava_next", "</s>"),
}
FAST, MANY = 100, 1_430  # conversations of a template
FEW = ("qwen3_5", "smolvlm")  # templates of the fast tests
CASES = [*((name, FAST) for name in FEW), *(pytest.param(name, MANY, marks=pytest.mark.slow) for name in TEMPLATES)]
SIZES = ((60, 70), (90, 70), (120, 60))
PIECES = ("look ", "what is it?", "\n", "<image>", " user: ", "ΣÄ 😀", "[INST] ", "1 + 1", "assistant\n", "</think>")
WORD = "@"  # in place of an image
MARKUP = ("<image>", "<|image_pad|>", "<start_of_image>", "<|image|>")  # placeholders that users type


def generated(draw, at_most=6):
    """A conversation with 0 to 6 images, as turns."""
    left = draw.choice(range(at_most + 1))
    turns = []
    for _ in range(draw.randint(1, 3)):
        parts = []
        for _ in range(draw.randint(1, 4)):
            if left and draw.random() < 0.5:
                left -= 1
                width, height = draw.choice(SIZES)
                parts.append({"type": "image", "image": f"{width}x{height}.png"})
            else:
                text = "".join(draw.choices(PIECES, k=draw.randint(1, 3)))
                text += draw.choice(MARKUP) if draw.random() < 0.1 else ""
                parts.append({"type": "text", "text": f"a{text}b"})
        answer = "".join(draw.choices(PIECES[:-1], k=draw.randint(1, 4)))
        turns += [{"role": "user", "content": parts}, {"role": "assistant", "content": f"so {answer}."}]
    return turns


def as_words(turns):
    """The conversation with a word in place of each image."""

    def word(part):
        return {"type": "text", "text": WORD} if part["type"] == "image" else part

    return [
        {**turn, "content": "".join(word(part)["text"] for part in turn["content"])} if turn["role"] == "user" else turn
        for turn in turns
    ]


def place_of(folder, name):
    template, end = TEMPLATES[name]
    save_image_model(folder / "model", name)
    tokenizer = load_run_tokenizer(configured(folder, "data.jsonl"))
    tokenizer.add_special_tokens({"eos_token": end})
    source = Path(trl.__file__).parent / f"chat_templates/{template}.jinja"
    tokenizer.chat_template = source.read_text()
    tokenizer.save_pretrained(folder / "model")
    for width, height in SIZES:
        picture(1, width, height).save(folder / f"{width}x{height}.png")


def configured(folder, data):
    keys = {"model_name_or_path": str(folder / "model"), "dataset": str(folder / data), "output_dir": "out",
            "max_length": 20_000, "device": "cpu"}  # fmt: skip
    return load_config(None, keys)


def rows_of(folder, name, conversations):
    (folder / name).write_text("\n".join(json.dumps({"messages": turns}) for turns in conversations))
    config = configured(folder, name)
    tokenizer = load_run_tokenizer(config)
    return list(prepare(config, tokenizer).train), tokenizer


@pytest.mark.parametrize(("name", "count"), CASES)
def test_trained_characters_are_those_of_the_text(name, count, tmp_path):
    place_of(tmp_path, name)
    draw = random.Random(count)
    conversations = [generated(draw) for _ in range(count)]
    rows, tokenizer = rows_of(tmp_path, "images.jsonl", conversations)
    words, _ = rows_of(tmp_path, "words.jsonl", map(as_words, conversations))
    assert len(rows) == len(words) == count
    image = tokenizer.convert_tokens_to_ids(MODELS_OF_IMAGES[name].ids["image_token_id"])
    for turns, row, text in zip(conversations, rows, words, strict=True):
        ids, labels = np.array(row["input_ids"]), np.array(row["labels"])
        trained = ids[labels != -100]
        assert image not in trained
        expected = np.array(text["labels"])
        assert tokenizer.decode(trained) == tokenizer.decode(expected[expected != -100])
        assert sum(part["type"] == "image" for turn in turns[::2] for part in turn["content"]) == len(row["images"])
        assert (ids == image).sum() == sum(stored["tokens"] for stored in row["images"])
