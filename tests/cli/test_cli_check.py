"""`check` suggests changes that make a run fit; `init` writes a file that loads and fits."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
import transformers

from halfbyte.cli.check import check_meshes
from halfbyte.cli.init import SHOWN_KEYS, _with_packing, starting_config
from halfbyte.config import SECTIONS, RunConfig, load_config
from halfbyte.data.batch_shapes import Batches
from halfbyte.loading.find import load_model_config
from halfbyte.plan import advice
from halfbyte.plan.estimate import estimate as plan_of
from halfbyte.utils.errors import ConfigError, DataError, ModelError

CAPACITY = 1000


def cost(config: RunConfig, tokens: int) -> int:
    """A stand-in for the memory plan: weights, and activations by tokens."""
    weights = 400 if config.load_in_4bit else 1600
    activations = tokens
    return weights + (activations // 4 if config.activation_checkpointing is True else activations)


DENSE = transformers.LlamaConfig()
MIXTURE = transformers.Qwen3MoeConfig(
    vocab_size=128, hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=128,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (5.0, r"set rank_pattern: {experts\.\w+: 32}, alpha_pattern: {experts\.\w+: 8.0}"),
        (0.0, "set target_parameters: []"),
    ],
)
def test_ranks_of_experts_are_lowered_first(weights, said):
    """At r = 64 the adapters have 7.3 million weights: in fp32, with gradients and AdamW's state, 16 bytes each."""
    keys = {"max_length": 512, "r": 64, "lora_alpha": 16.0, "activation_checkpointing": True, "device": "cpu"}
    config = RunConfig(model_name_or_path="m", dataset="d", **keys)
    bare = plan_of(config.model_copy(update={"target_parameters": []}), MIXTURE, batches=full(config)).total
    limit = (bare + weights * 2**20 * 16) / 2**30
    config = config.model_copy(update={"memory_limit_gib": limit})
    assert advice.what_would_fit(config, MIXTURE, 1000, full) == said


@pytest.fixture
def _stand_in(monkeypatch):
    def estimate(config, model_config, *, batches, **divided):
        return SimpleNamespace(fits=cost(config, batches.largest.tokens) <= CAPACITY)

    monkeypatch.setattr(advice, "estimate", estimate)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"activation_checkpointing": False, "max_length": 1024}, "set activation_checkpointing: true"),
        (
            {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 512},
            "set per_device_train_batch_size: 1, gradient_accumulation_steps: 8",
        ),
        ({"load_in_4bit": False, "max_length": 256}, "set load_in_4bit: true"),
        ({"max_length": 2048}, "set max_length: 512"),
        ({"max_length": 4096, "per_device_train_batch_size": 2}, "set max_length: 256"),
        (
            {"max_length": 2048, "per_device_train_batch_size": 4},
            "no single key is enough; set per_device_train_batch_size: 1, gradient_accumulation_steps: 4, max_length",
        ),
        ({"max_length": 65, "load_in_4bit": False, "use_peft": False}, "no key makes it fit"),
    ],
)
def test_the_first_change_that_fits(keys, said):
    config = RunConfig(**{"model_name_or_path": "m", "dataset": "d", **keys})
    assert advice.what_would_fit(config, DENSE, 1000, full).startswith(said)


@pytest.mark.usefixtures("_stand_in")
def test_a_batch_of_all_rows_shrinks_from_what_the_data_has():
    config = RunConfig(model_name_or_path="m", dataset="d", per_device_train_batch_size=100_000, max_length=100)
    assert (
        advice.what_would_fit(config, DENSE, 60, full)
        == "set per_device_train_batch_size: 3, gradient_accumulation_steps: 33334"
    )


def full(config: RunConfig) -> Batches:
    return Batches.uniform(config.per_device_train_batch_size, config.max_length)


def test_a_wrong_target_module_shows_without_weights(shared):
    keys = {"model_name_or_path": str(shared / "models/llama-40m"), "dataset": "d"}
    config = load_config(None, keys | {"target_modules": ["q_prj"]})
    with pytest.raises(ModelError, match="q_prj"):
        plan_of(config, load_model_config(config.model_name_or_path), device="cpu")
    config.target_modules = ["q_proj"]
    assert plan_of(config, load_model_config(config.model_name_or_path), device="cpu").adapters


@pytest.mark.parametrize(
    ("family", "packing", "comment"),
    [("Llama", True, ""), ("Lfm2", True, "conv, a Lfm2ShortConv"), ("XLNet", False, "XLNetLMHeadModel"),
     ("Blt", False, "# No packing: ")],
)  # fmt: skip
def test_init_asks_whether_packed_documents_see_each_other(family, packing, comment, tmp_path):
    keys = {"layer_types": ["conv", "full_attention"] * 8, "num_hidden_layers": 16} if family == "Lfm2" else {}
    getattr(transformers, f"{family}Config")(**keys).save_pretrained(tmp_path)
    base = load_config(None, {"model_name_or_path": str(tmp_path), "dataset": "d"})
    config, lines = _with_packing(base, load_model_config(str(tmp_path)))
    assert config.packing is packing
    assert bool(lines) is bool(comment)
    assert comment in " ".join(lines)
    assert all(line.startswith("# ") and "\n" not in line for line in lines)


@pytest.mark.slow
def test_init_writes_a_file_that_loads_and_fits(shared, tmp_path, monkeypatch):
    asked = []

    def estimate(*arguments, **keys):
        asked.append(plan_of(*arguments, **keys))
        return asked[-1]

    monkeypatch.setattr("halfbyte.plan.estimate.estimate", estimate)
    rows = [{"prompt": f"what is {n}?", "completion": "a number. " * 30 * n} for n in range(1, 41)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = starting_config(str(shared / "models/llama-40m"), str(tmp_path / "data.jsonl"))
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    written = [line.split(":")[0] for line in text.splitlines() if not line.startswith("#")]
    assert written == [key for section in SECTIONS for key in section.model_fields if key in SHOWN_KEYS]
    assert plan_of(config, load_model_config(config.model_name_or_path)).fits
    assert len(asked) <= 7
    assert config.max_length <= 2048  # the model's positions


@pytest.mark.slow
def test_init_chooses_a_layout_for_several_gpus(shared, tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.cli.init._devices", lambda: [torch.device("cpu")] * 2)
    rows = [{"prompt": f"what is {n}?", "completion": "a number. " * n} for n in range(1, 41)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = starting_config(str(shared / "models/llama-40m"), str(tmp_path / "data.jsonl"))
    assert "# 2 GPUs, parallel: {data: 2}: the full run fits each GPU" in text
    (tmp_path / "run.yaml").write_text(text)
    config = load_config(tmp_path / "run.yaml")
    assert config.parallel == {"data": 2}
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps * 2 >= 8


def test_init_reads_the_data(shared, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for name in ("empty.jsonl", "nothing.jsonl"):
        with pytest.raises(DataError, match=name):
            starting_config(str(shared / "models/llama-40m"), str(tmp_path / name))


def checked(monkeypatch, capsys, shared, tmp_path, *options, gpus=0, **keys):
    """Return the output of `halfbyte check --gpus` on a machine with `gpus` GPUs."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    rows = [{"prompt": f"what is {n}?", "completion": "a number. " * (n % 9 + 1)} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = {"model_name_or_path": str(shared / "models/llama-40m"), "dataset": str(tmp_path / "data.jsonl")}
    config = load_config(None, named | {"output_dir": str(tmp_path / "out")} | keys)
    check_meshes(config, *options)
    return capsys.readouterr().out


@pytest.mark.slow
def test_check_plans_every_mesh_without_a_gpu(monkeypatch, capsys, shared, tmp_path):
    said = checked(monkeypatch, capsys, shared, tmp_path, 2, 24.0)
    said = said[said.index("2 GPUs, 22.4 GiB ") :]
    assert "RTX 4090" in said.splitlines()[0]
    plans = [line for line in said.splitlines() if line.startswith("{")]  # without lines of waits on a busy machine
    lines = {line.split("}")[0] + "}": line for line in plans}
    assert [*lines][:5] == ["{data: 2}", "{shard: 2}", "{tensor: 2}", "{pipeline: 2}", "{context: 2}"]
    assert all("fits" in line and " per step" in line and "weights" in line for line in plans[:5])
    assert "gathered per step" in lines["{shard: 2}"]
    assert "parallel: {data: 2}:" in said
    assert not (tmp_path / "out").exists()


def test_check_predicts_steps_hours_and_price(monkeypatch, capsys, shared, tmp_path):
    keys = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    said = checked(monkeypatch, capsys, shared, tmp_path, 1, 24.0, 35_000.0, **keys)
    line = next(line for line in said.splitlines() if line.startswith("training:"))
    assert "30 steps" in line  # of 40 rows in windows of 4, three times
    seconds = float(re.search(r"([\d.e-]+) s a step", line)[1])
    assert seconds > 0
    assert float(re.search(r"price ([\d.,]+):", line)[1].replace(",", "")) == pytest.approx(
        30 * seconds * 35_000 / 3600, rel=0.01
    )


@pytest.mark.slow
def test_check_says_which_meshes_cannot_be(monkeypatch, capsys, shared, tmp_path):
    """The model has 8 heads, 4 of them with keys of their own."""
    said = checked(monkeypatch, capsys, shared, tmp_path, 3, 24.0)
    assert "parallel: {tensor: 3}:" in said
    asked = checked(monkeypatch, capsys, shared, tmp_path, 2, 24.0, parallel={"shard": 2})
    assert "parallel: {shard: 2}" in asked


@pytest.mark.parametrize(
    ("options", "keys", "said"),
    [((2, None), {}, "--gpu-memory"),
     ((None, 24.0), {}, "--gpus"),
     ((2, 24.0), {"parallel": {"data": 4}}, "4 GPUs"),
     ((3, 24.0), {"parallel": {"tensor": 3}}, "parallel: {tensor: 3}: ")],
)  # fmt: skip
def test_check_of_meshes_refuses(monkeypatch, capsys, shared, tmp_path, options, keys, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        checked(monkeypatch, capsys, shared, tmp_path, *options, **keys)


def test_more_gpus_than_available_are_refused(monkeypatch):
    from halfbyte.cli import check

    monkeypatch.setattr("halfbyte.runs.inputs.check_paths", lambda config: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    config = RunConfig(model_name_or_path="m", dataset="d", parallel={"data": 2})
    with pytest.raises(ConfigError, match=r"2 GPUs.*1"):
        check.check_run(config)
