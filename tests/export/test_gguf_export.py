"""Exporting full models: file contents, refusals, and no partial files."""

import shutil

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.gguf import writer
from halfbyte.gguf.tensors import interleaved
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError, TrainingError
from tests.helpers.gguf_models import MODELS, byte_tokenizer, save_model
from tests.helpers.merge_runs import save_run, tensors

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "base"
    save_model(folder, "llama")
    return folder


def read(path):
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }


def in_file(name, key, value):
    """A weight of the checkpoint as the graph wants its values."""
    if key.endswith("A_log"):
        return -value.exp()
    shifted = name.startswith(("gemma", "qwen3_5", "qwen3_next")) and not key.endswith("linear_attn.norm.weight")
    return value + 1 if shifted and key.endswith("norm.weight") else value


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_value_of_every_family_is_in_the_file(tmp_path, name):
    """The file holds the checkpoint's values in another order, with shifted norms."""
    save_model(tmp_path / "m", name)
    report = export_gguf(tmp_path / "m", "f32", tmp_path / "m.gguf", device="cpu")
    assert report.errors == {"F32": 0.0}
    made = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
    found = {key: value for key, value in read(tmp_path / "m.gguf").items() if key not in made}
    stored = tensors(tmp_path / "m")
    expected = [in_file(name, key, value).flatten() for key, value in stored.items()]
    everything = np.sort(np.concatenate([value.ravel() for value in found.values()]))
    assert np.array_equal(everything, torch.cat(expected).sort().values.numpy())


def test_a_run_is_exported_as_its_merge(tmp_path, llama):
    run = save_run(tmp_path / "run", llama, tokenizer=llama)
    merge(run, tmp_path / "merged", base="dequantized", verify=False)
    report = export_gguf(run, "f32", tmp_path / "run.gguf", device="cpu")
    export_gguf(tmp_path / "merged", "f32", tmp_path / "merged.gguf", device="cpu")
    assert report.merged == "dequantized"
    mine, theirs = read(tmp_path / "run.gguf"), read(tmp_path / "merged.gguf")
    assert mine.keys() == theirs.keys()
    assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_the_adapter_alone_is_the_update(tmp_path, llama):
    run = save_run(
        tmp_path / "run", llama, tokenizer=llama, use_rslora=True, rank_pattern={"q_proj": 2}, lora_alpha=12.0
    )
    path = export_adapter(run, "f32")
    reader = gguf.GGUFReader(path)
    found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in reader.tensors}
    alpha = reader.get_field("adapter.lora.alpha").contents()
    stored = load_file(run / "adapter/adapter_model.safetensors")
    for module_name, name, heads in (("self_attn.q_proj", "attn_q", 4), ("mlp.down_proj", "ffn_down", 0)):
        a, b = (stored[f"base_model.model.model.layers.1.{module_name}.lora_{each}.weight"] for each in "AB")
        expected = 12.0 / a.shape[0] ** 0.5 * b @ a
        mine_a, mine_b = (found[f"blk.1.{name}.weight.lora_{each}"] for each in "ab")
        update = alpha / mine_a.shape[0] * mine_b @ mine_a
        torch.testing.assert_close(update, interleaved(expected, heads) if heads else expected)


def test_what_lora_cannot_apply_is_refused(tmp_path, llama):
    run = save_run(tmp_path / "run", llama, tokenizer=llama, use_dora=True)
    with pytest.raises(CheckpointError, match="DoRA"):
        export_adapter(run, "f16")
    with pytest.raises(ConfigError, match=r"f32, f16.*bf16"):
        export_adapter(run, "q4_0")
    assert not list(run.glob("*.gguf"))


def test_the_command_writes_file_and_modelfile(tmp_path, llama):
    folder = shutil.copytree(llama, tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    done = CliRunner().invoke(app, ["export", str(folder), "--gguf", "Q4_K_M"])
    assert done.exit_code == 0, done.output
    assert "every byte as written" in done.output
    text = (folder / "model-q4_k_m.Modelfile").read_text()
    assert text.startswith("FROM ./model-q4_k_m.gguf\n")
    assert '{{ if eq .Role "user" }}<|user|>\n{{ .Content }}<|end|>\n{{ end }}' in text
    assert text.count("<|assistant|>") == 2
    assert 'PARAMETER stop "</s>"' in text


def test_nothing_is_overwritten_and_no_partial_file_remains(tmp_path, llama, monkeypatch):
    out = tmp_path / "m.gguf"
    out.write_text("mine")
    with pytest.raises(ConfigError):
        export_gguf(llama, "f16", out)
    out.unlink()

    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "_encoded", stop)
    with pytest.raises(KeyboardInterrupt):
        export_gguf(llama, "f16", out)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_before_starting(tmp_path, llama, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(TrainingError, match=r"\d\.\d MiB.* 1 B"):
        export_gguf(llama, "f32", tmp_path / "m.gguf")


def test_changed_bytes_on_disk_are_detected(tmp_path, llama, monkeypatch):
    honest = writer.check_file

    def corrupted(path, *arguments):
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
        return honest(path, *arguments)

    monkeypatch.setattr(writer, "check_file", corrupted)
    with pytest.raises(CheckpointError):
        export_gguf(llama, "q8_0", tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "keys", "what"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("gemma2", {"query_pre_attn_scalar": 99}, "query_pre_attn_scalar"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_what_llamacpp_would_compute_otherwise_is_refused(tmp_path, name, keys, what):
    save_model(tmp_path / "m", name, **keys)
    with pytest.raises(ModelError, match=what):
        export_gguf(tmp_path / "m", "f16", tmp_path / "m.gguf")
