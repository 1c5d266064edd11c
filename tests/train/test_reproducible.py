"""Reproducibility: the result in checks.json, `deterministic: true`, and, on a GPU, bit-equal runs."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from halfbyte.autograd.attention import DIFFERS
from halfbyte.config import RunConfig, load_config
from halfbyte.data.prepare import PreparedData
from halfbyte.modeling.patch import PatchReport
from halfbyte.train.checks import deterministic_algorithms, reproducibility
from halfbyte.train.preflight import planned_lengths
from halfbyte.train.run import train
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.notices import notice, reset_notices

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with a process's first product; torch asks for it

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FUSED = PatchReport("qwen3", Counter({"RoPE": 2}))


def config(**keys):
    return RunConfig(model_name_or_path="m", dataset="d", **keys)


def test_reproducibility():
    assert reproducibility(config(), CPU, None)["equal"]
    assert reproducibility(config(), CUDA, FUSED)["equal"]
    assert reproducibility(config(), CUDA, None)["why"] != reproducibility(config(), CUDA, FUSED)["why"]
    with_experts = PatchReport("qwen3", FUSED.fused, Counter({("experts", "own function"): 2}))
    assert not reproducibility(config(), CUDA, with_experts)["equal"]
    notice(DIFFERS, "two runs may differ: cuDNN")
    assert reproducibility(config(), CUDA, FUSED)["why"].startswith("two runs may differ: cuDNN; deterministic: true")
    assert reproducibility(config(deterministic=True), CUDA, FUSED) == {"equal": True, "why": "deterministic: true"}


def test_deterministic_is_torchs_and_ends_with_the_run(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with deterministic_algorithms(config(), CUDA), deterministic_algorithms(config(deterministic=True), CPU):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic_algorithms(config(deterministic=True), CUDA):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled


def test_an_operation_that_does_not_repeat_is_an_error_that_names_it():
    deterministic = deterministic_algorithms(config(deterministic=True), CUDA)
    with pytest.raises(TrainingError, match="put_") as caught, deterministic:
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert "deterministic: false" in str(caught.value)
    with pytest.raises(RuntimeError, match="size"), deterministic_algorithms(config(deterministic=True), CUDA):
        torch.zeros(3) + torch.zeros(4)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("lengths", "steps", "keys", "planned"),
    [
        ([300, 380, 384], 10, {}, None),  # all are rounded to 384
        ([1100, 1700], 99, {}, set()),
        ([1100, 1700], 100, {}, {1280, 1792}),
        ([1100] * 3 + [1700], 100, {}, {1280}),  # 75 of 100 steps; the other 25 do not repay a plan
        (
            [1100] * 3 + [1700],
            100,
            {"per_device_train_batch_size": 2},
            {1280, 1792},
        ),  # half of all pairs has the longer
        ([1100] * 3 + [1700], 100, {"per_device_train_batch_size": 8}, {1792}),  # all rows in each
        ([1100] * 3 + [1700], 50, {"gradient_accumulation_steps": 2}, {1280}),
        ([600, 1100], 900, {}, {1280}),
        ([600, 1100], 1000, {}, {640, 1280}),
        ([600, 1100], 1000, {"max_length": 700}, {640, 768}),
        ([100, 300], 10, {"packing": True}, None),
        ([100, 300], 10, {"padding_free": True}, None),
    ],
)
def test_lengths_that_amortize_a_plan(lengths, steps, keys, planned):
    from datasets import Dataset

    rows = Dataset.from_dict({"input_ids": [[1] * length for length in lengths]})
    data = PreparedData(rows, None, {})
    job = SimpleNamespace(config=config(**{"max_length": 2048} | keys), data=data, total_steps=steps)
    assert planned_lengths(job) == planned


# --- on a GPU ------------------------------------------------------------------------------------------------------

WORDS = [f"w{index}" for index in range(250)]
KILLED = """
    import json, os, signal, sys
    from halfbyte.config import load_config
    from halfbyte.runs import metrics
    from halfbyte.train.run import train
    append = metrics.MetricsFile.append
    def and_kill(self, record):
        append(self, record)
        if record["kind"] == "train" and record["step"] == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    metrics.MetricsFile.append = and_kill
    train(load_config(None, json.loads(sys.argv[1])), resume=sys.argv[3] == "resume" or None)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A small Qwen3 with random weights and 400 documents of 8 to 300 tokens."""
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, max_position_embeddings=1024, pad_token_id=1))
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    vocabulary = {"<eos>": 0, "<pad>": 1, "<unk>": 2} | {word: index + 3 for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder / "model")
    drawn = random.Random(1)
    rows = [" ".join(drawn.choices(WORDS, k=drawn.randint(8, 300))) for _ in range(400)]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows) + "\n")
    mixture(folder)
    return folder


def mixture(place):
    """The same place with a model of experts."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 256}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen3MoeConfig(**sizes, **experts, **heads, max_position_embeddings=1024, pad_token_id=1)
    shutil.copytree(place / "model", place / "mixture")
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(place / "mixture")


def keys_of(place, output, **keys):
    common = {
        "max_length": 512,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "save_steps": SAVED,
        "learning_rate": 1e-3,
    }
    paths = {
        "model_name_or_path": str(place / keys.pop("model", "model")),
        "dataset": str(place / "data.jsonl"),
        "output_dir": str(output),
    }
    return paths | common | {"sample_prompts": 0} | keys


def start(keys, moment, resume=False):
    """A process that trains until it has recorded this step, and is then killed."""
    arguments = [json.dumps(keys), str(moment), "resume" if resume else "start"]
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def killed(process):
    said = process.communicate(timeout=250)[0]
    assert process.returncode == -signal.SIGKILL, said[-3000:]


def run(keys, resume=None):
    reset_notices()
    train(load_config(None, keys), resume=resume)


def results(output):
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    losses = [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]
    return losses, (output / "adapter" / "adapter_model.safetensors").read_bytes()


STEPS, SAVED = 24, 6  # of a run; between its checkpoints
ALWAYS = {
    "packed": {"packing": True},
    "packed, dropout": {"packing": True, "lora_dropout": 0.05},
    "mixture": {"packing": True, "lora_dropout": 0.05, "model": "mixture"},
}
WHEN_ASKED = {
    "unpacked": {"lora_dropout": 0.05},
    "recomputed": {"packing": True, "lora_dropout": 0.05, "activation_checkpointing": "checkpoint"},
    "offloaded": {"packing": True, "activation_checkpointing": "offload"},
    "several micro-batches": {"packing": True, "gradient_accumulation_steps": 2},
}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ALWAYS, *WHEN_ASKED])
def test_two_runs_and_one_killed_and_resumed_have_equal_bytes(place, tmp_path, name):
    asked = name in WHEN_ASKED or not HOPPER
    keys = (ALWAYS | WHEN_ASKED)[name] | {"deterministic": asked}
    one, two, third = (keys_of(place, tmp_path / folder, **keys) for folder in ("one", "two", "third"))
    moment = random.Random(name).randint(SAVED, STEPS - 2)
    process = start(third, moment)
    run(one)
    run(two)
    killed(process)
    if name == "packed, dropout":  # and once more
        killed(start(third, min(moment + 4, STEPS - 1), resume=True))
    run(third, resume=True)
    expected = results(tmp_path / "one")
    assert [step for step, _ in expected[0]] == list(range(1, STEPS + 1))
    for folder in ("two", "third"):
        losses, weights = results(tmp_path / folder)
        assert losses == expected[0], folder
        assert weights == expected[1], folder
    checked = json.loads((tmp_path / "one" / "checks.json").read_text())["reproducible"]
    assert checked["equal"], checked["why"]
