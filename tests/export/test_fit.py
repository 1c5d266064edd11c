"""An adapter fitted to another base: closer to the trained model in plain PEFT, equal to it where the rank suffices."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from halfbyte.adapters.initial_factors import best_for_inputs, best_for_loss
from halfbyte.cli import main
from halfbyte.export.fit import fit
from halfbyte.export.gguf_model import export_gguf
from halfbyte.export.merge import merge
from halfbyte.runs.saved import load_saved
from halfbyte.utils.errors import CheckpointError, ConfigError, DataError
from tests.helpers.merge_runs import byte_tokenizer, save_base, save_run, train_run

HELD_OUT = "Question 3: how much is 3 times 3? Answer: 9. And of 5 and 8, which is more? Eight."


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("fit") / "base", shard="10MB")


def run_on(base, folder, **keys):
    data = folder / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"text": f"{n} plus {n % 7} is {n + n % 7}, {n * n} is {n}²."}) + "\n" for n in range(60))
    )
    run = save_run(folder / "run", base, **{"dataset": str(data), "max_length": 64, "dtype": "float32"} | keys)
    ids = byte_tokenizer()(HELD_OUT)["input_ids"]
    report = json.loads((run / "data_report.json").read_text())
    report["held_out"] = [{"input_ids": ids, "trained": [True] * len(ids)}]
    (run / "data_report.json").write_text(json.dumps(report))
    return run


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    return run_on(base, tmp_path_factory.mktemp("nf4"))


def log_probs(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([byte_tokenizer()(HELD_OUT)["input_ids"]])).logits.float().log_softmax(-1)


def divergence(run, base, adapter):
    """KL from the live model of the base in plain transformers with the adapter in plain PEFT."""
    expected = log_probs(load_saved(str(run)).model)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    other = log_probs(PeftModel.from_pretrained(plain, adapter))
    return float((expected.exp() * (expected - other)).sum(-1).mean())


def test_plain_peft_is_closer_on_16_bits(run, base, tmp_path):
    report = fit(run, "16bit", tmp_path / "out", rank=24, tokens=1024)
    assert report.after < 0.8 * report.before
    assert divergence(run, base, run / "adapter") == pytest.approx(report.before, rel=1e-2)
    assert divergence(run, base, report.path) == pytest.approx(report.after, rel=1e-2)


def test_a_rank_that_suffices_gives_the_trained_model(run, base, tmp_path):
    report = fit(run, "16bit", tmp_path / "out", rank=64, tokens=4096)
    assert report.after < 1e-3 * report.before
    assert divergence(run, base, report.path) < 1e-3 * divergence(run, base, run / "adapter")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("to", ["fp8", "kbit3", "q4_0", "q8_0"])
def test_other_bases(run, tmp_path, to, capsys):
    main_arguments = ["fit", str(run), "--to", to, "--out", str(tmp_path / "out"), "--tokens", "1024", "--rank", "8"]
    with pytest.raises(SystemExit) as ended:
        main(main_arguments)
    assert ended.value.code == 0
    assert "KL" in capsys.readouterr().out
    assert to in (tmp_path / "out/README.md").read_text()
    assert (tmp_path / "out/adapter-f16.gguf").exists() == to.startswith("q")


def test_halfbyte_loads_a_fitted_adapter_on_its_own_base(base, tmp_path):
    run = run_on(base, tmp_path, load_in_4bit=False)
    report = fit(run, "nf4", tmp_path / "out", rank=8, tokens=1024)
    saved = load_saved(str(report.path), ["dtype=float32"])
    assert [format.partition(":")[0] for _, format in saved.config.storage.formats] == ["blockwise4"]
    expected, other = log_probs(load_saved(str(run)).model), log_probs(saved.model)
    assert float((expected.exp() * (expected - other)).sum(-1).mean()) == pytest.approx(report.after, rel=1e-2)


def test_the_adapter_of_the_head_stays(base, tmp_path):
    run = run_on(base, tmp_path, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"])
    report = fit(run, "16bit", tmp_path / "out", rank=24, tokens=1024)
    assert divergence(run, base, report.path) == pytest.approx(report.after, rel=1e-2)
    assert divergence(run, base, run / "adapter") == pytest.approx(report.before, rel=1e-2)


@pytest.mark.slow
def test_a_base_stored_without_initial_factors(base, tmp_path):
    """The saved adapter of PiSSA has twice the rank, for the original base; so has the fitted one."""
    run = train_run(tmp_path / "run", base, max_steps=4, init_lora_weights="pissa", r=4)
    report = fit(run, "16bit", tokens=1024)
    assert report.path == run / "adapter-16bit"
    assert report.rank == 8
    exact = fit(run, "16bit", tmp_path / "out", rank=64, tokens=4096)
    assert exact.after < 1e-3 * exact.before
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert torch.isfinite(log_probs(PeftModel.from_pretrained(plain, exact.path))).all()


def test_a_gguf_file_and_a_quantized_folder(run, base, tmp_path):
    file = export_gguf(base, "q4_0", tmp_path / "base.gguf").path
    report = fit(run, str(file), tmp_path / "for-file", rank=16, tokens=1024)
    same = fit(run, "q4_0", tmp_path / "for-type", rank=16, tokens=1024)
    assert report.after == pytest.approx(same.after, rel=0.05)  # the file's values are read in bf16
    merge(base, tmp_path / "folder", quantize="w4a16", verify=False)
    report = fit(run, str(tmp_path / "folder"), rank=16, tokens=1024)
    assert report.path == run / "adapter-folder"
    assert report.after < report.before
    saved = json.loads((report.path / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "folder")


def test_a_base_of_another_model_is_named(run, base, tmp_path):
    other = save_base(tmp_path / "other", hidden_size=32)
    with pytest.raises(ConfigError, match="shape"):
        fit(run, str(other))
    tensors = load_file(base / "model.safetensors")
    torch.manual_seed(9)
    for name, tensor in tensors.items():
        tensors[name] = tensor if "norm" in name else torch.randn(tensor.shape).to(tensor.dtype)
    same_shapes = save_base(tmp_path / "same")
    for file in same_shapes.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, same_shapes / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="not the weight"):
        fit(run, str(same_shapes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("to", "keys"),
    [("q9_k", {}), ("awq", {}), ("missing.gguf", {}), ("16bit", {"rank": 2})],
)
def test_options_that_do_not_fit(run, tmp_path, to, keys):
    with pytest.raises(ConfigError, match="--"):
        fit(run, to, tmp_path / "out", **keys)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        fit(run, "16bit", tmp_path / "there")


def test_what_has_no_factors_or_rows(run, base, tmp_path):
    dora = run_on(base, tmp_path, use_dora=True)
    with pytest.raises(CheckpointError, match="DoRA"):
        fit(dora, "16bit", tmp_path / "out")
    with pytest.raises(CheckpointError):
        fit(base, "16bit", tmp_path / "out")
    rows = run_on(base, tmp_path, dataset=str(tmp_path / "moved.jsonl"))
    with pytest.raises(DataError, match="--data"):
        fit(rows, "16bit", tmp_path / "out")


def test_the_weighted_fit_minimizes_the_weighted_error():
    torch.manual_seed(0)
    matrix, x, g = torch.randn(24, 40), torch.randn(400, 40), torch.randn(400, 24) * torch.logspace(-1, 1, 24)
    moment, gradients = x.T @ x, g.T @ g

    def cost(factors):
        error = matrix - factors.b @ factors.a
        return float(torch.trace(gradients @ error @ moment @ error.mT))

    best = cost(best_for_loss(matrix, moment, gradients, 5))
    values, vectors = torch.linalg.eigh(gradients)
    left, right = vectors @ (values.sqrt()[:, None] * vectors.mT), torch.linalg.cholesky(moment)
    exact = float(torch.linalg.svdvals(left @ matrix @ right)[5:].square().sum())
    assert exact <= best < 1.05 * exact  # the damping of the gradients costs a little
    assert best < 0.7 * cost(best_for_inputs(matrix, moment, 5))
