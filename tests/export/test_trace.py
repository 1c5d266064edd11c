"""The share of a run's training in every kind of file, and which tool read it."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.cli import main
from halfbyte.export.fit import fit
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.export.served_adapter import export_served
from halfbyte.export.trace import trace
from halfbyte.utils.errors import CheckpointError, ConfigError
from tests.export.test_fit import run_on
from tests.helpers.expert_models import mixture
from tests.helpers.gguf_models import save_model
from tests.helpers.merge_runs import byte_tokenizer, save_base, save_run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("trace") / "base", shard="10MB")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return run_on(base, tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("target", ["original", "dequantized"])
def test_a_merge_names_its_base_and_keeps_the_update(run, tmp_path, target):
    merge(run, tmp_path / "merged", base=target, verify=False)
    (traced,) = trace(run, [tmp_path / "merged"])
    assert target in traced.content
    assert len(traced.tensors) == 14
    assert not traced.missing
    assert all(0.98 < update.share < 1.02 for update in traced.tensors.values())
    assert traced.reader == "transformers"
    if target == "dequantized":
        assert traced.kl < 1e-3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantize", ["nf4", "fp8", "w8a16", "bnb-nf4"])
def test_quantized_merges(run, tmp_path, quantize):
    merge(run, tmp_path / "merged", base="original", quantize=quantize, verify=False)
    (traced,) = trace(run, [tmp_path / "merged"])
    assert abs(traced.retained.share - 1) < 0.02 + 3 * traced.retained.error
    assert traced.kl > 0


def test_a_base_without_the_update_keeps_nothing(run, base):
    (traced,) = trace(run, [base])
    assert abs(traced.retained.share) < 0.01
    assert traced.kl > 0.01


def test_adapters(run, base, tmp_path, capsys):
    served = export_served(run, tmp_path / "served")
    file = export_adapter(run, "f32", tmp_path / "adapter.gguf")
    fitted = fit(run, "16bit", tmp_path / "fitted", rank=24, tokens=1024).path
    own, vllm, lora, other = trace(run, [run / "adapter", served, file, fitted])
    for traced in (own, vllm, lora):
        assert len(traced.tensors) == 14
        assert all(update.share == pytest.approx(1, abs=1e-4) for update in traced.tensors.values())
    assert own.kl == pytest.approx(0, abs=1e-6)
    assert vllm.kl == pytest.approx(0, abs=1e-6)
    assert lora.kl is None
    assert 0 < other.kl < 1
    tensors = load_file(served / "adapter_model.safetensors")
    first = next(name for name in tensors if "lora_A" in name)
    halved = {name: tensor / 2 if name == first else tensor for name, tensor in tensors.items()}
    save_file(halved, served / "adapter_model.safetensors", metadata={"format": "pt"})
    (damaged,) = trace(run, [served])
    assert min(update.share for update in damaged.tensors.values()) == pytest.approx(0.5, abs=1e-4)
    assert damaged.kl > 1e-4
    save_file(
        {name: tensor for name, tensor in tensors.items() if first.partition(".lora")[0] not in name},
        served / "adapter_model.safetensors",
    )
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(run), str(served)])
    assert ended.value.code == 1
    assert first.removeprefix("base_model.model.").partition(".lora")[0] in capsys.readouterr().out


def test_gguf_and_its_modelfile(tmp_path):
    """By llama.cpp where cyllama is installed."""
    save_model(tmp_path / "base", "llama")
    keys = {"load_in_4bit": False, "dtype": "float32", "tokenizer": tmp_path / "base", "text": "", "scale": 0.02}
    run = save_run(tmp_path / "run", tmp_path / "base", **keys)
    report = export_gguf(run, "q8_0", tmp_path / "m.gguf")
    assert abs(report.kept.share - 1) < 0.02 + 3 * report.kept.error
    with pytest.raises(ConfigError, match="is required"):
        export_gguf(run, "q8_0", tmp_path / "lost.gguf", min_update_kept=1.5)
    assert not (tmp_path / "lost.gguf").exists()
    by_file, by_modelfile = trace(run, [report.path, report.modelfile])
    assert by_file.path.samefile(by_modelfile.path)
    assert len(by_file.tensors) >= 14
    assert abs(by_file.retained.share - 1) < 0.02 + 3 * by_file.retained.error
    assert by_file.kl < 0.01
    assert by_file.reader.startswith("llama.cpp") == (find_spec("cyllama") is not None)


def test_experts_are_counted_each(tmp_path):
    mixture("Mixtral", vocab_size=272, eos_token_id=257, bos_token_id=256).save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    run = save_run(tmp_path / "run", tmp_path / "base", load_in_4bit=False)
    merge(run, tmp_path / "merged", verify=False)
    (traced,) = trace(run, [tmp_path / "merged"])
    assert sum(".experts." in name for name in traced.tensors) == 2 * 3 * 3
    assert all(update.share == pytest.approx(1, abs=0.05) for update in traced.tensors.values())


def test_what_cannot_be_traced(run, base, tmp_path):
    with pytest.raises(CheckpointError, match="neither"):
        trace(run, [tmp_path])
    with pytest.raises(CheckpointError):
        trace(base, [base])
    with pytest.raises(ConfigError):
        trace(run, [save_base(tmp_path / "other", hidden_size=32)])
    assert torch.is_grad_enabled()
