"""Greedy answers of tiny models, by transformers' own `generate` and by halfbyte's forward."""

import torch

from halfbyte import generation
from halfbyte.utils import notices

# Heads that the CPU's kernel of all layers takes; elementwise ops round remainders beyond its vectors differently.
WIDTHS = {"hidden_size": 64, "intermediate_size": 192}
SHAPE = WIDTHS | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
PROMPTS = [[5, 9, 17, 33, 2, 71, 8, 90, 44, 3, 21], [7, 64], [50, 51, 52, 53, 54]]


@torch.no_grad()
def transformers_greedy(model, ids, new=20, **keys):
    """Return transformers' greedy continuation of one prompt, which runs to its end."""
    prompt = torch.tensor([ids], device=model.device)
    keys = {"do_sample": False, "max_new_tokens": new, "eos_token_id": None, "pad_token_id": 0} | keys
    output = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **keys)
    return output[0, len(ids) :].tolist()


def halfbyte_greedy(model, prompts=PROMPTS, new=20, **keys):
    """Return halfbyte's greedy continuations; halfbyte's own forward must have computed them."""
    notices.reset_notices()
    answers = generation.generate(model, prompts, max_new_tokens=new, stops=[], **keys)
    assert not any(key.startswith("generation") for key in notices.notices_so_far()), notices.notices_so_far()
    return answers
