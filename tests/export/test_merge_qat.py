"""A run with quantization-aware training, from its configuration to the model it was trained to be stored as."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from halfbyte.config import RunConfig, load_config
from halfbyte.export.merge import merge
from halfbyte.formats import named
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.load import load_model
from halfbyte.modeling.compute_dtype import compute_autocast
from halfbyte.qat.model import round_merged
from halfbyte.runs.saved import load_saved
from halfbyte.train import run as sft
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError
from halfbyte.utils.notices import notices_so_far, reset_notices
from tests.helpers.merge_runs import save_base, save_run

LAYER = "model.layers.1.mlp.down_proj"
IDS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    save_base(folder / "model", initializer_range=0.08)
    rows = [{"prompt": f"what is {n} plus {n % 7}?", "completion": f" it is {n + n % 7}."} for n in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config(place, output, **changed):
    keys = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"), "device": "cpu"}
    keys |= {"output_dir": str(output), "dtype": "float32", "load_in_4bit": False, "qat_scheme": "nf4", "r": 4}
    keys |= {"per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2}
    keys |= {"max_length": 64, "sample_prompts": 0, "sample_max_new_tokens": 2, "eval_split_size": 0.0}
    return load_config(None, keys | changed)


@torch.no_grad()
def logits(model, dtype=torch.float32):
    with compute_autocast(model.eval(), dtype):
        return model(input_ids=IDS, use_cache=False).logits.float()


@pytest.fixture
def trained_logits(monkeypatch):
    """Logits of each model as it was at the end of its training, in evaluation mode."""
    found = []
    save = sft.save_trained

    def record(job, loop, ids):
        found.append(logits(loop.model, job.prepared.machine.compute_dtype))
        return save(job, loop, ids)

    monkeypatch.setattr(sft, "save_trained", record)
    return found


def check_merged(merged, scheme, expected):
    stored = merged.get_submodule(LAYER)
    assert isinstance(stored, QuantizedLinear)
    assert stored.weight.format == named(scheme)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


QAT = {"load_in_4bit": False, "dtype": "float32"}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8", "nvfp4"])
def test_every_scheme_is_merged_to_what_it_computed(place, tmp_path, scheme):
    run = save_run(tmp_path / "run", place / "model", **QAT, qat_scheme=scheme)
    keys = {"load_in_4bit": False, "dtype": "float32", "device": "cpu"}
    trained = PeftModel.from_pretrained(load_model(str(place / "model"), **keys, qat_scheme=scheme), run / "adapter")
    round_merged(trained)
    found = merge(run, tmp_path / "merged").targets["original"]
    assert found.trained == found.exact  # the trained model is the rounded one
    assert found.exact.max_logit_difference <= 1e-5 * found.largest_logit
    assert found.noise.max_logit_difference > 100 * found.exact.max_logit_difference
    check_merged(load_model(str(tmp_path / "merged"), dtype="float32", device="cpu"), scheme, logits(trained))


@pytest.mark.slow
def test_a_model_trained_whole(place, tmp_path, trained_logits):
    result = sft.train(config(place, tmp_path / "out", use_peft=False, learning_rate=1e-3))
    kept = load_file(tmp_path / "out" / "model" / "model.safetensors")
    assert kept[f"{LAYER}.weight"].dtype == torch.float32  # not yet rounded to the base's bf16
    report = result.merge(tmp_path / "merged")
    assert report.quantize == "nf4"
    merged = load_model(str(tmp_path / "merged"), dtype="float32", device="cpu")
    expected = kept[f"{LAYER}.weight"]
    stored = merged.get_submodule(LAYER).weight
    assert torch.equal(
        stored.dequantize(torch.float32),
        named("nf4").dequantize(named("nf4").quantize(expected), expected.shape, torch.float32),
    )
    # embeddings, norms and the head were trained in fp32 and are written in bf16
    torch.testing.assert_close(
        logits(merged), trained_logits[0], rtol=0, atol=2e-2 * float(trained_logits[0].abs().max())
    )
    again = load_saved(str(tmp_path / "out"))
    torch.testing.assert_close(logits(again.model), trained_logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_other_targets_are_merged_with_a_notice(place, tmp_path):
    run = save_run(tmp_path / "run", place / "model", **QAT, qat_scheme="nf4")
    report = merge(run, tmp_path / "merged", quantize="16bit")
    assert report.quantize == "16bit"
    assert "nf4" in notices_so_far()["merge-qat"]
    reset_notices()
    same = merge(run, tmp_path / "bnb", quantize="bnb-nf4").targets["original"]  # another tool's name of the layout
    assert same.exact.max_logit_difference <= 1e-5 * same.largest_logit
    assert "merge-qat" not in notices_so_far()


@pytest.mark.parametrize(
    ("keys", "key", "fix"),
    [
        ({"load_in_4bit": True}, "load_in_4bit", "load_in_4bit: false"),
        ({"load_in_4bit": True, "quantization": "int8"}, "quantization", "quantization: 16bit"),
        ({"recipe": "fp8-hybrid"}, "recipe", "recipe: bf16"),
        ({"lora_dropout": 0.1}, "lora_dropout", "lora_dropout: 0"),
        ({"use_dora": True}, "use_dora", "use_dora: false"),
        ({"bnb_4bit_blocksize": 128}, "bnb_4bit_blocksize", "blockwise4:nf4:128:nested"),
    ],
)
def test_keys_that_contradict_it(place, tmp_path, keys, key, fix):
    with pytest.raises(ConfigError) as raised:
        config(place, tmp_path / "out", **keys)
    assert str(raised.value).startswith(key) or f"{key}:" in str(raised.value)
    assert fix in str(raised.value)


def test_an_unknown_scheme_is_found_before_anything_is_written(place, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    keys = RunConfig(
        model_name_or_path=str(place / "model"), dataset=str(tmp_path / "rows.jsonl"),
        output_dir=str(tmp_path / "out"), load_in_4bit=False, qat_scheme="int5",
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"qat_scheme:.*'int5'"):
        sft.train(keys)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_model_without_a_run_can_be_quantized(place, tmp_path):
    report = merge(place / "model", tmp_path / "merged", quantize="int8")
    assert report.targets["original"].explained
    merged = load_model(str(tmp_path / "merged"), dtype="float32", device="cpu")
    expected = load_model(str(place / "model"), quantization="int8", dtype="float32", device="cpu")
    assert torch.equal(logits(merged), logits(expected))
    with pytest.raises(CheckpointError):
        merge(place / "model", tmp_path / "plain", quantize="16bit")
