"""The logits that llama.cpp computes from our files, by the one in cyllama's wheel: nothing is compiled for it."""

import gguf
import numpy as np
import pytest
import torch

from halfbyte.export.gguf_model import export_gguf
from halfbyte.gguf.mixes import MIXES
from halfbyte.gguf.tensors import DeltaNet
from tests.helpers.gguf_models import MODELS, save_model

pytestmark = pytest.mark.llamacpp
llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
IDS, CONTEXT = list(range(40, 80)), 256


class Model(llama_cpp.LlamaModel):
    """cyllama 0.2.18's get_logits_ith asks a model for what only its vocabulary has."""

    @property
    def n_vocab(self):
        return self.get_vocab().n_vocab


def logits(path):
    llama_cpp.llama_backend_init()
    model, keys = Model(str(path), llama_cpp.LlamaModelParams(), verbose=False), llama_cpp.LlamaContextParams()
    keys.n_ctx = keys.n_batch = keys.n_ubatch = CONTEXT
    keys.n_threads = keys.n_threads_batch = 1
    keys.type_k = keys.type_v = 0  # the cache in fp32
    context = llama_cpp.LlamaContext(model, keys, verbose=False)
    batch = llama_cpp.LlamaBatch(n_tokens=CONTEXT, embd=0, n_seq_max=1)
    batch.set_batch(IDS, 0, True)
    context.decode(batch)
    return torch.tensor(np.array([context.get_logits_ith(index) for index in range(len(IDS))]))


def error(folder, name):
    """The largest difference from transformers' logits, over the largest of these."""
    model = save_model(folder / "model", name)
    export_gguf(folder / "model", "f32", folder / "m.gguf", device="cpu")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    return float((logits(folder / "m.gguf")[:, : expected.shape[1]] - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path, name):
    assert error(tmp_path, name) < 5e-3


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_value_heads_in_transformers_order_are_far_off(tmp_path, monkeypatch, name):
    monkeypatch.setattr(DeltaNet, "moves", lambda self, part: False)
    assert error(tmp_path, name) > 0.1


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("mix", ["q3_k_m", "q4_k_s", "q4_k_m"])
def test_every_tensor_of_a_hybrid_gets_the_type_llamacpp_gives_it(tmp_path, mix, name):
    """Values of attention are counted by themselves: a hybrid has few."""
    sizes = {"num_hidden_layers": 16, "hidden_size": 256, "moe_intermediate_size": 256}
    save_model(tmp_path / "m", name, **sizes | {"intermediate_size": 256, "shared_expert_intermediate_size": 256})
    export_gguf(tmp_path / "m", "f32", tmp_path / "f32.gguf", device="cpu")
    export_gguf(tmp_path / "m", mix, tmp_path / "ours.gguf", device="cpu")
    keys = llama_cpp.LlamaModelQuantizeParams()
    keys.ftype, keys.nthread = int(MIXES[mix][1]), 1
    llama_cpp.llama_backend_init()
    llama_cpp.model_quantize(str(tmp_path / "f32.gguf"), str(tmp_path / "theirs.gguf"), keys)
    ours, theirs = (
        {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / f"{who}.gguf").tensors}
        for who in ("ours", "theirs")
    )
    assert ours == theirs
