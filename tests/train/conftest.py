"""What a run needs: a tiny model with its tokenizer, and data."""

import json

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from halfbyte.utils.files import write_text
from tests.helpers.tiny_runs import tiny_llama


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with a tiny Llama and a byte-level tokenizer in `model`, and `data.jsonl` with 24 sums."""
    folder = tmp_path_factory.mktemp("place")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["what is 1 plus 2? it is 3."] * 4, vocab_size=270, special_tokens=["</s>", "<pad>"])
    keys = {"eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **keys).save_pretrained(folder / "model")
    model = tiny_llama(vocab_size=bpe.get_vocab_size(), pad_token_id=1, eos_token_id=0, bos_token_id=None)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    rows = [{"prompt": f"what is {n} plus {n % 7}?", "completion": f" it is {n + n % 7}."} for n in range(24)]
    write_text(folder / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return folder
