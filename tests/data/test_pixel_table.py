"""Patches by a table of pixel values have the bits of transformers' processors, and others are left alone."""

import json

import pytest
import torch
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from halfbyte.data.pixel_table import order_levels_first
from tests.helpers.image_families import MODELS_OF_IMAGES
from tests.helpers.image_models import picture

MEAN = {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.28]}


def processor_of(name, folder):
    keys = MODELS_OF_IMAGES[name].image_keys | MEAN
    (folder / "preprocessor_config.json").write_text(json.dumps(keys))
    return AutoImageProcessor.from_pretrained(folder, backend="pil")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "glm4v", "video_llama_3"])
def test_patches_have_equal_bits(name, tmp_path):
    processor, plain = processor_of(name, tmp_path), processor_of(name, tmp_path)
    assert order_levels_first(processor)
    images = [picture(1, 90, 70), picture(2, 333, 57), picture(3, 40, 200)]
    batch, expected = processor(images=images, return_tensors="pt"), plain(images=images, return_tensors="pt")
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[key], value) for key, value in expected.items())
    assert processor.to_dict() == plain.to_dict()


@pytest.mark.parametrize("name", ["gemma3", "llava_next", "internvl"])
def test_other_processors_do_not_change(name, tmp_path):
    processor = processor_of(name, tmp_path)
    of_class = type(processor)
    assert not order_levels_first(processor)
    assert type(processor) is of_class


def test_a_processor_that_does_not_normalize_does_not_change(tmp_path):
    processor = processor_of("qwen3_vl", tmp_path)
    processor.do_normalize = False
    assert not order_levels_first(processor)
