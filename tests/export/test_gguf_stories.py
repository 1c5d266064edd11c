"""stories260K, a small real model: every type compared with llama.cpp's own quantizer."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.llama2c import read_model, read_tokenizer
from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.importer import import_gguf
from tests.helpers.llamacpp import QUANTIZED, compare_with_llamacpps_quantizer, load, perplexity

pytestmark = [pytest.mark.llamacpp, pytest.mark.slow]
BEGINNINGS = ("Once upon a time", "Lily and Tom went to the park. They", "The dog", "One day,")


@pytest.fixture(scope="module")
def stories(shared, tmp_path_factory):
    """Its folder, and its F32 file."""
    folder = tmp_path_factory.mktemp("stories") / "stories260K"
    model = read_model(shared / "data/weights/stories260K.bin")
    model.save_pretrained(folder)
    read_tokenizer(shared / "data/weights/tok512.bin", model.config.vocab_size).save_pretrained(folder)
    export_gguf(folder, "f32", folder.parent / "m.gguf", device="cpu")
    return folder, folder.parent / "m.gguf"


def told(shared, folder):
    """20 stories of the model's own kind, as ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (shared / "data/datasets/tinystories/train_slice.txt").read_text()[:30_000]
    stories = re.split(r"(?<!\n)\n(?!\n)", text)[:20]  # paragraphs have a blank line between them
    return [[tokenizer.bos_token_id, *tokenizer(story)["input_ids"]][:256] for story in stories]


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_200_greedy_tokens_are_those_of_transformers(stories, beginning):
    """Ids and text: llama.cpp tokenizes the beginning itself."""
    folder, path = stories
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    other = load(path)
    ids = tokenizer(beginning)["input_ids"]
    assert other.tokenize(beginning.encode(), add_bos=False) == ids
    ids = [tokenizer.bos_token_id, *ids]
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    generator = other.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    found = [next(generator) for _ in range(200)]
    assert found == expected
    text = tokenizer.decode(ids + expected, skip_special_tokens=True)
    assert other.detokenize(ids + found).decode().strip() == text.strip()


def test_texts_get_the_same_ids_in_llamacpp_and_after_import(stories, shared, tmp_path):
    folder, path = stories
    other, back = load(path), AutoTokenizer.from_pretrained(import_gguf(path, tmp_path / "back"))
    own = AutoTokenizer.from_pretrained(folder)
    for row in told(shared, folder):
        text = own.decode(row, skip_special_tokens=True).strip()
        ids = own(text)["input_ids"]
        assert other.tokenize(text.encode(), add_bos=False) == ids
        assert back(text)["input_ids"] == ids


@pytest.mark.parametrize("mix", QUANTIZED)
def test_perplexity_and_weight_error_beside_llamacpps_quantizer(stories, shared, tmp_path, mix):
    folder, path = stories
    compare_with_llamacpps_quantizer(folder, path, told(shared, folder), tmp_path, mix)


@pytest.mark.parametrize("mix", ["f16", "bf16"])
def test_16_bits_are_the_model(stories, shared, tmp_path, mix):
    folder, path = stories
    export_gguf(folder, mix, tmp_path / "m.gguf", device="cpu")
    rows = told(shared, folder)
    assert perplexity(tmp_path / "m.gguf", rows) == pytest.approx(perplexity(path, rows), rel=1e-3)
