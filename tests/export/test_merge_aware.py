"""A run with `merge_aware`: the file that merging writes is the trained model, bit for bit."""

import json
import shutil

import pytest
import torch

from halfbyte.adapters.lora import load_adapter
from halfbyte.config import load_config
from halfbyte.export.gguf_adapter import export_adapter
from halfbyte.export.merge import merge
from halfbyte.export.served_adapter import export_served
from halfbyte.generation.run import generate
from halfbyte.layers import QuantizedLinear
from halfbyte.loading.load import load_model
from halfbyte.qat.fake_quantize import merged_weight
from halfbyte.qat.model import MergeAwareLinear, QATLoraLinear, round_merged
from halfbyte.runs.saved import load_saved
from halfbyte.serve.model import load as load_served
from halfbyte.tensor import QuantizedTensor
from halfbyte.train import run as sft
from halfbyte.utils.errors import ConfigError, ModelError, UsageError
from tests.helpers.merge_runs import save_base, save_run

IDS = torch.arange(40)[None]
FORMATS = ["nf4", "kbit:3:bof:searched", "int4", "fp8", "nvfp4", "int8"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    save_base(folder / "model", initializer_range=0.08)
    rows = [{"prompt": f"what is {n} plus {n % 7}?", "completion": f" it is {n + n % 7}."} for n in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS, use_cache=False).logits.float()


def trained(place, run, **keys):
    model = load_model(str(place / "model"), dtype="float32", device="cpu", merge_aware=True, **keys)
    model = load_adapter(model, run / "adapter", str(place / "model"))
    round_merged(model)
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FORMATS)
def test_merged_file_is_the_trained_model(place, tmp_path, name):
    keys = {"quantization": name} if name != "nf4" else {}
    run = save_run(tmp_path / "run", place / "model", dtype="float32", merge_aware=True, scale=0.1, **keys,
                   target_modules=["q_proj", "down_proj"])  # fmt: skip
    model = trained(place, run, **keys)
    report = merge(run, tmp_path / "merged")
    assert report.target == "dequantized"
    assert report.targets["dequantized"].lost == 0
    assert report.targets["dequantized"].trained.max_logit_difference == 0
    merged = load_model(str(tmp_path / "merged"), dtype="float32", device="cpu")
    compared = 0
    for path, module in model.get_base_model().named_modules():
        base = module.base_layer if isinstance(module, QATLoraLinear) else module
        if not isinstance(base, MergeAwareLinear) or path.endswith("base_layer"):
            continue
        stored = merged.get_submodule(path).weight
        expected = base.weight
        if isinstance(module, QATLoraLinear):
            expected = QuantizedTensor.quantize(merged_weight(base.weight, module.active_lora()), base.format)
            assert not torch.equal(expected.dequantize(), base.weight.dequantize())
        assert stored.parts.keys() == expected.parts.keys()
        assert all(torch.equal(stored.parts[part], expected.parts[part]) for part in stored.parts)
        compared += 1
    assert compared == 14
    loaded = load_saved(str(run)).model
    assert torch.equal(logits(merged), logits(loaded))
    (answer,) = generate(loaded, [IDS[0].tolist()], max_new_tokens=1, stops=[])
    assert answer[-1] == int(logits(merged)[0, -1].argmax())
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


def config(place, output, **changed):
    keys = {"model_name_or_path": str(place / "model"), "dataset": str(place / "data.jsonl"), "device": "cpu"}
    keys |= {"output_dir": str(output), "dtype": "float32", "merge_aware": True, "r": 4, "max_length": 64}
    keys |= {"per_device_train_batch_size": 2, "max_steps": 4, "save_steps": 2, "learning_rate": 1e-2}
    keys |= {"sample_prompts": 0, "eval_split_size": 4}
    return load_config(None, keys | changed)


def test_run_learns_resumes_and_serves_what_it_trained(place, tmp_path):
    result = sft.train(config(place, tmp_path / "out", max_steps=6))
    assert result.metrics["eval_loss"] < result.metrics["eval_loss_before"]
    weights = (tmp_path / "out/adapter/adapter_model.safetensors").read_bytes()
    first = config(place, tmp_path / "again", max_steps=6)
    shutil.copytree(tmp_path / "out/checkpoint-4", tmp_path / "again/checkpoint-4")
    sft.train(first, resume=True)
    assert (tmp_path / "again/adapter/adapter_model.safetensors").read_bytes() == weights
    saved = load_saved(str(tmp_path / "out"), ["dtype=float32"]).model
    assert all(type(module) is not MergeAwareLinear for module in saved.modules())
    assert any(isinstance(module, QuantizedLinear) for module in saved.modules())
    result.merge(tmp_path / "merged")
    assert torch.equal(logits(load_model(str(tmp_path / "merged"), dtype="float32", device="cpu")), logits(saved))


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"load_in_4bit": False}, "merge_aware"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_dropout": 0.1}, "lora_dropout"),
        ({"skip_quant_first_layers": 1}, "merge_aware"),
        ({"parallel": {"tensor": 2}}, "merge_aware"),
        ({"method": "sequence_classification", "num_labels": 2}, "merge_aware"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"method": "grpo", "reward_funcs": [{"regex": "a"}]}, "merge_aware"),
    ],
)
def test_contradictions_are_refused(place, tmp_path, changed, key):
    with pytest.raises(ConfigError, match=key):
        config(place, tmp_path, **changed)


def test_adapter_is_not_served_unmerged(place, tmp_path):
    run = save_run(tmp_path / "run", place / "model", dtype="float32", merge_aware=True)
    with pytest.raises(UsageError, match="merge_aware"):
        load_served(str(place / "model"), {"aware": str(run)})
    other = save_run(tmp_path / "other", place / "model", dtype="float32")
    with pytest.raises(UsageError, match="merge_aware"):
        load_served(str(run), {"other": str(other)})
    with pytest.raises(ConfigError, match="merge_aware"):
        export_served(run, tmp_path / "served")
    with pytest.raises(ConfigError, match="merge_aware"):
        export_adapter(run, out=tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="original"):
        merge(run, tmp_path / "merged", base="original")


def test_quantized_checkpoint_is_refused(place, tmp_path):
    run = save_run(tmp_path / "run", place / "model", dtype="float32")
    merge(run, tmp_path / "merged", quantize="nf4", base="original", verify=False)
    with pytest.raises(ModelError, match="merge_aware"):
        load_model(str(tmp_path / "merged"), dtype="float32", device="cpu", merge_aware=True)
