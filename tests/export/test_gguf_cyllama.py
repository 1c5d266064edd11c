"""The logits that llama.cpp computes from our files, by the one in cyllama's wheel: nothing is compiled for it."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.gguf.mixes import MIXES
from halfbyte.gguf.tensors import DeltaNet
from halfbyte.utils.errors import ModelError
from tests.helpers.gguf_models import LLAMA3, LONG, MODELS, ORIGINAL, SIZES, THETA, save_model
from tests.helpers.merge_runs import save_run

pytestmark = pytest.mark.llamacpp
llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
KINDS = {
    "linear": THETA | {"rope_type": "linear", "factor": 4.0},
    "yarn": ORIGINAL | {"rope_type": "yarn", "factor": 4.0},
    "llama3": LLAMA3,
    "longrope": LONG,
}
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


def errors(folder, name, **keys):
    """Each position's largest difference from transformers' logits, over the largest of all of these."""
    model = save_model(folder / "model", name, **keys)
    export_gguf(folder / "model", "f32", folder / "m.gguf", device="cpu")
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0]
    return (logits(folder / "m.gguf")[:, : expected.shape[1]] - expected).abs().amax(1) / expected.abs().max()


def error(folder, name, **keys):
    return float(errors(folder, name, **keys).max())


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path, name):
    assert error(tmp_path, name) < 5e-3


def other_configurations():
    """RoPE types, embeddings, biases and widths of each family: name, keys."""
    for name, (family, own) in MODELS.items():
        usual = getattr(transformers, f"{family}Config")(**(SIZES | own)).rope_parameters
        layered = usual.get("full_attention")
        shape = {key: value for key, value in (layered or usual).items() if key not in ("rope_type", "factor")}
        for kind, rope in KINDS.items():
            whole = rope | {key: value for key, value in shape.items() if key.startswith(("partial", "mrope"))}
            keys = {"rope_parameters": usual | {"full_attention": whole} if layered else whole}
            yield f"{name}, {kind}", name, keys | {"max_position_embeddings": 1024}
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
            yield f"{name}, {key}", name, {key: True}
        yield f"{name}, wide heads", name, {"head_dim": 32}


@pytest.mark.parametrize(("name", "keys"), [pytest.param(*each, id=label) for label, *each in other_configurations()])
def test_other_configurations_are_exact_or_refused(tmp_path, name, keys):
    try:
        off = errors(tmp_path, name, **keys)
    except ModelError:
        return  # by export
    except Exception:
        if (tmp_path / "m.gguf").exists():
            raise
        pytest.skip("transformers has no such model")
    assert off.quantile(0.9) < 5e-3  # rounding sends a token of a mixture to another expert now and then


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


@pytest.mark.parametrize("name", ["yarn", "linear", "dynamic", "llama3"])
def test_run_with_rope_scaling_beyond_the_trained_context(tmp_path, name):
    """A run's file and its merged model give the same logits for rows longer than the base was trained on."""
    base = tmp_path / "base"
    save_model(base, "llama", max_position_embeddings=16)
    keys = {"load_in_4bit": False, "dtype": "float32", "max_length": 64, "tokenizer": base}
    run = save_run(tmp_path / "run", base, rope_scaling={"rope_type": name, "factor": 4.0}, **keys)
    merge(run, tmp_path / "merged", verify=False)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.max_position_embeddings == 64
    export_gguf(str(run), "f32", tmp_path / "m.gguf", device="cpu")
    with torch.no_grad():
        expected = merged(torch.tensor([IDS])).logits[0]
    difference = (logits(tmp_path / "m.gguf")[:, : expected.shape[1]] - expected).abs().max()
    assert difference < 0.02 * expected.abs().max()  # the merged model is in bfloat16
