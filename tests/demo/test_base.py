"""The demo's base, built with a budget of a few steps from a few texts."""

import json
import math
from dataclasses import replace

import pytest
import torch

from halfbyte.demo import base, corpus
from halfbyte.utils import notices
from halfbyte.utils.errors import TrainingError
from tests.helpers.demo_tiny import TEXTS, TINY


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "gather", lambda seed: TEXTS)
    notices.reset_notices()
    return tmp_path / "cache"


def test_the_chat_template_masks_the_assistants_tokens():
    tokenizer = base.build_tokenizer(TEXTS, TINY)
    turns = [{"role": "user", "content": "Größe?"}, {"role": "assistant", "content": "Return the number."}]
    encoded = tokenizer.apply_chat_template(turns, return_dict=True, return_assistant_tokens_mask=True)
    said = [token for token, mine in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mine]
    assert tokenizer.decode(said) == "Return the number.<|im_end|>"
    assert tokenizer.eos_token_id in said
    assert tokenizer.pad_token_id not in encoded["input_ids"]
    assert tokenizer.decode(tokenizer("naïve\tGröße 漢字\n")["input_ids"]) == "naïve\tGröße 漢字\n"
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nGröße?<|im_end|>\n<|im_start|>assistant\n"


def test_rows_mix_prose_and_exchanges_as_the_recipe_says():
    recipe = replace(TINY, steps=10)
    tokenizer = base.build_tokenizer(TEXTS, recipe)
    rows = base.token_rows(TEXTS, tokenizer, recipe)
    assert (rows.shape, rows.dtype) == ((20, 32), torch.int64)
    start = tokenizer.convert_tokens_to_ids(base.START)
    assert int((rows == start).any(dim=1).sum()) == 10
    assert int((rows == tokenizer.eos_token_id).any(dim=1).sum()) >= 15
    assert torch.equal(rows, base.token_rows(TEXTS, tokenizer, recipe))


def test_training_learns(cache):
    tokenizer = base.build_tokenizer(TEXTS, TINY)
    _, steps, loss = base.pretrain(TEXTS, tokenizer, replace(TINY, steps=60), seconds=600)
    assert steps == 60
    assert loss < math.log(len(tokenizer)) - 2


def test_the_base_loads_and_is_built_once(cache, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = base.base_model(TINY)
    assert path.parent == cache
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.config.tie_word_embeddings
    described = json.loads((path / "recipe.json").read_text())
    assert described["steps_done"] == 2
    assert described["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(base, "pretrain", lambda *_, **__: pytest.fail("built again"))
    assert base.base_model(TINY) == path
    assert notices.notices_so_far() == {}


def test_another_recipe_is_another_base(cache):
    assert base.base_model(TINY) != base.base_model(replace(TINY, seed=1))


def test_the_same_recipe_gives_the_same_weights():
    tokenizer = base.build_tokenizer(TEXTS, TINY)
    one, two = (base.pretrain(TEXTS, tokenizer, TINY, seconds=600)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_a_slow_machine_gets_fewer_steps_and_a_notice(cache):
    recipe = replace(TINY, steps=150)
    path = base.base_model(recipe, seconds=0.0)
    assert json.loads((path / "recipe.json").read_text())["steps_done"] == 50
    assert "50 of 150" in notices.notices_so_far()["demo-base"]


def test_an_interrupted_build_leaves_nothing(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(base, "write_json", full)
    with pytest.raises(TrainingError):
        base.base_model(TINY)
    assert not cache.exists()


@pytest.mark.slow
def test_this_python_has_enough_text():
    texts = corpus.gather()
    assert sum(map(len, texts.prose)) > 1_000_000
    assert len(set(texts.prose)) == len(texts.prose)
    assert any("Beautiful is better than ugly." in text for text in texts.prose)
    assert any('The "with" statement' in text for text in texts.prose)
    assert len(texts.exchanges) > 3000
    assert all(answer.split("`")[1] in question for question, answer in texts.exchanges)
