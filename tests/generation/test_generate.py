"""Generation beside transformers' own, token by token: families, padding, adapters, caches, sampling, errors."""

import pytest
import torch
from patch_models import FAMILIES, tiny

from halfbyte import generation, notices

PROMPTS = [[5, 9, 17, 33, 2, 71, 8, 90, 44, 3, 21], [7, 64], [50, 51, 52, 53, 54]]


def theirs(model, ids, new):
    """transformers' greedy continuation of one prompt, which runs to its end."""
    prompt = torch.tensor([ids])
    keys = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **keys)
    return found[0, len(ids) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family):
    model = tiny(family).eval()
    if family == "Gemma2":
        model.get_base_model().set_attn_implementation("eager")
    found = generation.generate(model, PROMPTS, max_new_tokens=20, stops=[])
    assert not any(key.startswith("generation") for key in notices.said())
    for ids, mine in zip(PROMPTS, found, strict=True):
        assert mine == theirs(model, ids, 20), family
