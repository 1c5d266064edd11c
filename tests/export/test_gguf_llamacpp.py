"""Compared with llama.cpp: the logits of exported files, and the bytes of its own quantizer."""

import ctypes
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from halfbyte.gguf.quants import ENCODERS, Type, quantize, row_bytes
from tests.helpers.llamacpp import llama_cpp, load

pytestmark = pytest.mark.llamacpp


def logits(path, ids, context=512):
    model = load(path, context)
    model.eval(ids)
    return torch.from_numpy(np.array(model.scores[: len(ids)]))


def by_llamacpp(x, type_, importance):
    """ggml's own encoder."""
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib/libggml-base.so"))
    encode = library.ggml_quantize_chunk
    encode.restype, encode.argtypes = ctypes.c_size_t, [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3,
                                                        ctypes.c_void_p]  # fmt: skip
    library.ggml_quantize_init(int(type_))
    out = np.zeros((x.shape[0], row_bytes(x.shape[1], type_)), np.uint8)
    weighed = None if importance is None else importance.ctypes.data
    assert encode(int(type_), x.ctypes.data, out.ctypes.data, 0, *x.shape, weighed) == out.nbytes
    return out


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("type_", ENCODERS, ids=lambda type_: type_.name)
def test_errors_are_within_half_a_percent_of_ggmls_encoder(type_, weighed):
    normal, heavy = torch.randn(256, 1024) * 0.02, torch.distributions.StudentT(3.0).sample((256, 1024)) * 0.02
    importance = torch.rand(1024) ** 4 + 0.01 if weighed else None
    weight = importance.numpy() if weighed else None
    for x in (normal, heavy):
        found = {}
        for who, data in (
            ("ours", quantize(x, type_, importance).numpy()),
            ("theirs", by_llamacpp(x.numpy(), type_, weight)),
        ):
            off = (gguf.quants.dequantize(data, type_) - x.numpy()) ** 2
            found[who] = float(np.sqrt((off * (weight if weighed else 1.0)).sum()))
        assert found["ours"] <= 1.005 * found["theirs"]


def test_q6_k_is_ggmls_own_encoding():
    """Every mix has embeddings and heads in it. Sums in another order move a code in one block of forty."""
    x = torch.randn(256, 1024) * 0.02
    ours, theirs = quantize(x, Type.Q6_K).numpy(), by_llamacpp(x.numpy(), Type.Q6_K, None)
    assert (ours.reshape(-1, 210) == theirs.reshape(-1, 210)).all(1).mean() > 0.95


def texts(shared, folder):
    """20 stories as ids."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (shared / "data/datasets/validation.jsonl").read_text().splitlines()[:40:2]
    return [tokenizer(json.loads(line)["text"][:1200])["input_ids"][:256] for line in lines]


@pytest.mark.parametrize("fixture", ["llama-spm", "llama-bpe", "qwen2", "gpt-2"])
def test_tokens_of_the_fixtures_texts(shared, tmp_path, fixture):
    """47 texts each, with the ids that llama.cpp's own vocabulary files give."""
    from tests.helpers.gguf_vocabulary import fixture_texts, write_vocabulary

    path = write_vocabulary(shared, fixture, tmp_path / "vocab.gguf")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text, ids in fixture_texts(shared, fixture):
        assert model.tokenize(text.encode(), add_bos=False, special=False) == ids, repr(text)
