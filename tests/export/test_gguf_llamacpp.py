"""Compared with llama.cpp: the logits of exported files, and the bytes of its own quantizer."""

import ctypes
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.quants import ENCODERS, Type, quantize, row_bytes
from tests.helpers.gguf_models import MODELS, save_model
from tests.helpers.llamacpp import (
    QUANTIZED,
    llama_cpp,
    load,
    quantized_by_llamacpp,
)

pytestmark = pytest.mark.llamacpp


def logits(path, ids, context=512):
    model = load(path, context)
    model.eval(ids)
    return torch.from_numpy(np.array(model.scores[: len(ids)]))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path, name):
    model = save_model(tmp_path / "model", name)
    export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    ids = list(range(40, 80))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    found = logits(tmp_path / "m.gguf", ids, 256)[:, : expected.shape[1]]
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3 * float(expected.abs().max()))


@pytest.fixture(scope="module")
def small(shared, tmp_path_factory):
    """The 40M model: its folder, and its F32 file."""
    path = tmp_path_factory.mktemp("f32") / "m.gguf"
    export_gguf(shared / "models/llama-40m", "f32", path, device="cpu")
    return shared / "models/llama-40m", path


@pytest.mark.slow
def test_200_greedy_tokens_are_those_of_transformers(small):
    folder, path = small
    ids = AutoTokenizer.from_pretrained(folder)("Once upon a time")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 3}
    expected = model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
    generator = load(path).generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
    assert [next(generator) for _ in range(200)] == expected


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


@pytest.mark.parametrize("name", ["llama", "mixtral", "phi3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("mix", QUANTIZED)
def test_every_tensor_gets_the_type_llamacpp_gives_it(tmp_path, mix, name):
    """With 16 layers, so that first, last and every third layer differ; rows of 64 where a fallback is taken."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 256 if name != "gemma2" else 64, "intermediate_size": 256}
    if name == "mixtral":
        sizes["num_local_experts"] = 8
    save_model(tmp_path / "model", name, **sizes)
    export_gguf(tmp_path / "model", "f32", tmp_path / "f32.gguf", device="cpu")
    export_gguf(tmp_path / "model", mix, tmp_path / "m.gguf", device="cpu")
    theirs = quantized_by_llamacpp(tmp_path / "f32.gguf", mix, tmp_path / "theirs.gguf")
    ours = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert ours == {name: tensor.tensor_type for name, tensor in theirs.items()}


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
