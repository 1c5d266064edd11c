"""GGUF files as base models: exported weights, config and tokenizer are read back; others are refused by name."""

import json
import shutil
import struct

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.gguf import importer
from halfbyte.gguf.file import GgufFile
from halfbyte.gguf.hyperparameters import llama3_parameters, rope_tensors
from halfbyte.gguf.importer import import_gguf
from halfbyte.gguf.mixes import MIXES
from halfbyte.gguf.tokenizer import read_tokenizer
from halfbyte.gguf.writer import BOUNDS
from halfbyte.loading.load import load_model, load_tokenizer
from halfbyte.runs.saved import load_saved
from halfbyte.tensor import QuantizedTensor
from halfbyte.train.run import finetune
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError, TrainingError
from tests.helpers.gguf_models import LLAMA3, LONG, MODELS, ORIGINAL, THETA, save_model
from tests.helpers.gguf_vocabulary import fixture_texts

SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "layer_types", "num_experts",
    "sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "norm_topk_prob",
    "num_experts_per_tok", "num_local_experts", "moe_intermediate_size", "shared_expert_intermediate_size", "mlp_bias",
    "attention_bias",
)  # fmt: skip
TEXT = "the cat  sat </s>on 12 mats,\n\nthen it's tired <s>ü"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama's folder, and its F32 file."""
    folder = tmp_path_factory.mktemp("llama")
    save_model(folder / "model", "llama")
    export_gguf(folder / "model", "f32", folder / "m.gguf", device="cpu")
    return folder / "model", folder / "m.gguf"


def plain(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not any(info.values())
    return model.eval()


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", MODELS)
def test_an_f32_file_gives_the_model_back(tmp_path, name):
    model = save_model(tmp_path / "model", name)
    export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    found = plain(import_gguf(tmp_path / "m.gguf", tmp_path / "back"))
    ids = torch.arange(40, 140)[None]  # longer than the windows
    with torch.no_grad():
        logits, expected = found(ids).logits, model(ids).logits
    if "A_log" in "".join(model.state_dict()):  # is rounded by the exponential and by the logarithm
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(logits, expected)
    back = found.state_dict()
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items() if value.ndim > 1)
    one, two = model.config.to_dict(), found.config.to_dict()
    same = [key for key in SAME if key in two]  # a mixture may have no dense MLP, and no size of one
    assert {key: two[key] or None for key in same} == {key: one.get(key) or None for key in same}
    own, back = (AutoTokenizer.from_pretrained(tmp_path / each) for each in ("model", "back"))
    assert back(TEXT)["input_ids"] == own(TEXT)["input_ids"]
    assert back.decode(back(TEXT)["input_ids"]) == own.decode(own(TEXT)["input_ids"])
    assert (back.eos_token_id, back.pad_token_id) == (own.eos_token_id, own.pad_token_id)
    assert (found.config.eos_token_id, found.config.pad_token_id) == (own.eos_token_id, own.pad_token_id)


def decoded(path):
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(path).tensors
    }


def assert_holds_what_was_decoded(tmp_path, mix):
    """Exporting `m.gguf`'s import in F32 gives the values of `m.gguf`, rounded to bf16."""
    folder = import_gguf(tmp_path / "m.gguf", tmp_path / "back")
    assert json.loads((folder / "config.json").read_text())["dtype"] == {"f16": "float16"}.get(mix, "bfloat16")
    export_gguf(folder, "f32", tmp_path / "again.gguf", device="cpu")
    expected, found = decoded(tmp_path / "m.gguf"), decoded(tmp_path / "again.gguf")
    assert found.keys() == expected.keys()
    dtype = torch.float16 if mix == "f16" else torch.bfloat16
    for name, value in expected.items():
        if value.ndim == 1:  # norms are rounded, Gemma's without the 1 that the file adds
            torch.testing.assert_close(found[name], value, rtol=2**-8, atol=2**-8)
        else:
            assert torch.equal(found[name], value.to(dtype).float()), name


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "f32"])
def test_every_type_is_decoded(tmp_path, mix):
    model = save_model(tmp_path / "model", "llama", hidden_size=256, intermediate_size=512)
    export_gguf(tmp_path / "model", mix, tmp_path / "m.gguf", device="cpu")
    assert_holds_what_was_decoded(tmp_path, mix)
    exact = model.state_dict()
    for name, value in plain(tmp_path / "back").state_dict().items():
        off = (value.float() - exact[name]).norm() / exact[name].norm()
        assert off <= BOUNDS[MIXES[mix][0]], name


@pytest.mark.parametrize(("size", "theta", "factor"), [(128, 500000.0, 8.0), (64, 500000.0, 32.0)])
def test_llama_3s_scaling_is_found_from_its_factors(size, theta, factor):
    """Llama 3.1 8B and 3.2 1B."""
    parameters = {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = type("Config", (), {"head_dim": size, "rope_parameters": parameters})
    factors = rope_tensors(config)["rope_freqs.weight"].double().numpy()
    assert llama3_parameters(factors, theta) | {"rope_theta": theta} == parameters
    with pytest.raises(ModelError, match="rope_freqs"):
        llama3_parameters(factors**2, theta)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fixture", ["llama-spm", "gpt-2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("llama-bpe", "qwen2"))]
)
def test_llamacpps_vocabularies_give_its_ids(shared, fixture):
    tokenizer = read_tokenizer(GgufFile(shared / f"data/gguf/ggml-vocab-{fixture}.gguf"))
    texts = fixture_texts(shared, fixture)
    assert len(texts) > 40
    for text, ids in texts:
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, repr(text)
        if fixture != "llama-spm":  # which drops a leading space
            assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_training_merging_and_generating_on_a_gguf_base(tmp_path, llama):
    rows = [{"prompt": f"what is {n}?", "completion": f" it is {n}."} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base, out = str(llama[1]), tmp_path / "out"
    keys = {"output_dir": str(out), "device": "cpu", "max_steps": 2, "max_length": 64, "r": 4}
    finetune(base, str(tmp_path / "data.jsonl"), **keys)
    saved = load_saved(str(out))
    assert saved.config.model_name_or_path == base
    weight = saved.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj.base_layer").weight
    assert isinstance(weight.data, QuantizedTensor)
    report = merge(out, tmp_path / "merged")
    assert report.targets
    ids = torch.arange(40, 60)[None]
    with torch.no_grad():
        merged, trained = plain(tmp_path / "merged").float()(ids).logits, saved.model(ids).logits.float()
    assert (merged - trained).norm() < 0.05 * trained.norm()
    export_gguf(out, "q8_0", tmp_path / "run.gguf", device="cpu")
    assert load_saved(str(tmp_path / "run.gguf"), ["device=cpu"]).model.config.hidden_size == 64


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", LLAMA3 | {"low_freq_factor": 2.0}),
        ("llama", LLAMA3 | {"low_freq_factor": 3.9, "original_max_position_embeddings": 50}),
        ("llama", LONG),
        ("granite", LLAMA3),
        ("gpt_oss", ORIGINAL | {"rope_type": "yarn", "factor": 4.0, "truncate": True}),
        ("gpt_oss", ORIGINAL | {"rope_type": "yarn", "factor": 4.0, "truncate": False}),
        ("glm4", THETA | {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.5}),
    ],
)
def test_scaled_rope_is_read_back_to_equal_logits(tmp_path, name, rope):
    model = save_model(tmp_path / "model", name, rope_parameters=rope, max_position_embeddings=1024)
    export_gguf(tmp_path / "model", "f32", tmp_path / "m.gguf", device="cpu")
    ids = torch.arange(40, 140)[None]
    with torch.no_grad():
        found = plain(import_gguf(tmp_path / "m.gguf", tmp_path / "back"))(ids).logits
        torch.testing.assert_close(found, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_file_is_unpacked_once_and_again_when_it_changes(tmp_path, llama, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(llama[1].read_bytes())
    load_tokenizer(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(importer, "GgufFile", None)
        load_tokenizer(str(path))
    export_gguf(llama[0], "q8_0", tmp_path / "other.gguf", device="cpu")
    path.write_bytes((tmp_path / "other.gguf").read_bytes())
    load_tokenizer(str(path))
    assert len(list((tmp_path / "cache/gguf").iterdir())) == 2


# --- refusals ---------------------------------------------------------------------------------------------------------


def damaged(llama, out, old, new):
    data = llama[1].read_bytes()
    assert old in data
    out.write_bytes(data.replace(old, new))
    return out


@pytest.mark.parametrize("part", [0.01, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path, llama, part):
    data = llama[1].read_bytes()
    (tmp_path / "m.gguf").write_bytes(data[: int(part * len(data))])
    with pytest.raises(CheckpointError, match="truncated"):
        load_model(str(tmp_path / "m.gguf"))
    assert not (tmp_path / "cache").exists()


def test_missing_extra_and_misshapen_tensors_are_named(tmp_path, llama):
    path = damaged(llama, tmp_path / "a.gguf", b"blk.1.ffn_up.weight", b"blk.1.ffn_no.weight")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight"):
        load_model(str(path))
    tied = damaged(llama, tmp_path / "c.gguf", b"\x0d\0\0\0\0\0\0\0output.weight", b"\x0d\0\0\0\0\0\0\0output.scales")
    with pytest.raises(ModelError, match=r"output\.scales"):
        load_model(str(tied))
    key = b"feed_forward_length" + struct.pack("<I", gguf.GGUFValueType.UINT32)
    path = damaged(llama, tmp_path / "d.gguf", key + struct.pack("<I", 96), key + struct.pack("<I", 97))
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_\w+\.weight"):
        load_model(str(path))


def test_a_type_that_cannot_be_decoded_is_named(tmp_path, llama):
    info = b"blk.0.attn_k.weight" + struct.pack("<IQQ", 2, 64, 32)
    path = damaged(
        llama,
        tmp_path / "m.gguf",
        info + struct.pack("<I", 0),
        info + struct.pack("<I", gguf.GGMLQuantizationType.Q8_1),
    )
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_k\.weight.*Q8_1"):
        load_model(str(path))


def test_a_tokenizer_that_cannot_be_built_is_taken_from_beside_the_file(tmp_path, llama):
    path = damaged(llama, tmp_path / "m.gguf", b"gpt-2", b"gpt-9")
    with pytest.raises(ModelError, match="'gpt-9'") as refused:
        load_tokenizer(str(path))
    assert "tokenizer.json" in refused.value.fix
    own = AutoTokenizer.from_pretrained(llama[0])
    own.save_pretrained(tmp_path)
    assert load_tokenizer(str(path))(TEXT)["input_ids"] == own(TEXT)["input_ids"]
    text = (tmp_path / "tokenizer.json").read_text()
    path = damaged(llama, tmp_path / "n.gguf", b"gpt-2", b"gpt-9")
    (tmp_path / "tokenizer.json").write_text(text.replace('"a": 64', '"z": 64').replace('"z": 89', '"a": 89'))
    with pytest.raises(ModelError, match="token 64 "):
        load_tokenizer(str(path))


def test_missing_space_or_library_is_reported_before_starting(tmp_path, llama, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 9, 1))
        with pytest.raises(TrainingError):
            load_model(str(llama[1]))
    monkeypatch.setitem(__import__("sys").modules, "halfbyte.gguf.importer", None)
    with pytest.raises(ConfigError):
        load_model(str(llama[1]))
    assert not (tmp_path / "cache").exists()
