"""Consecutive runs in one process: a finished run frees its memory."""

import gc
import weakref

import psutil
import pytest
import torch

from halfbyte.train import run as sft
from halfbyte.train import setup, several
from tests.helpers.run_inputs import VOCABULARY, write_model, write_rows
from tests.helpers.tiny_runs import tiny_llama

RUNS = 10
MIB = 2**20
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "eos_token_id": 0, "bos_token_id": None}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A function that fine-tunes a tiny model in a folder of its own, in little time."""
    folder = tmp_path_factory.mktemp("repeated")
    write_model(folder / "model", tiny_llama(**TOKENS))
    write_model(folder / "larger", tiny_llama(**TOKENS, hidden_size=512, intermediate_size=1024, num_hidden_layers=4))
    write_rows(folder / "rows.jsonl", [20, 60, 100, 40, 150, 90, 30, 70] * 4)
    numbers = iter(range(10_000))

    def run(model="model", **keys):
        small = {"eval_split_size": 4, "per_device_train_batch_size": 2, "max_length": 256, "r": 4}
        small |= {"sample_prompts": 1, "sample_max_new_tokens": 4, "output_dir": str(folder / str(next(numbers)))}
        return sft.finetune(str(folder / model), str(folder / "rows.jsonl"), **small | keys)

    return run


ADAPTERS = {"adapters": [{"name": "a"}, {"name": "b", "lora_alpha": 8}]}


@pytest.mark.parametrize(
    ("keys", "joint"), [({}, False), (ADAPTERS, False), (ADAPTERS, True)], ids=["one", "in turn", "joint"]
)
def test_model_and_trainer_are_gone_when_a_run_returns(start, monkeypatch, keys, joint):
    """Without waiting for Python's next garbage collection, and before the device's cached memory is freed."""
    seen = []
    alive = []

    make = sft.TrainingLoop

    def spy(*, model, **keys):
        loop = make(model=model, **keys)
        # the optimizer is created in training: a parameter represents it
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        frozen = next(model.parameters())
        seen.extend(map(weakref.ref, (loop, model, weights[0], frozen)))
        return loop

    monkeypatch.setattr(sft, "TrainingLoop", spy)
    monkeypatch.setattr(setup, "free_cached_memory", lambda _: alive.append([reference() for reference in seen]))
    if joint:
        monkeypatch.setattr(several, "obstacle", lambda *_: None)
    gc.disable()
    try:
        start(device="cpu", dtype="float32", max_steps=1, warmup_steps=0, **keys)
        assert seen
        assert alive == [[None] * len(seen)]
    finally:
        gc.enable()


@pytest.mark.slow
def test_ten_runs_on_a_cpu_take_the_memory_of_one(start):
    """Within 5%; one model that stayed would be 7%."""
    found = []
    for _ in range(RUNS):
        start("larger", device="cpu", dtype="float32", max_steps=1, warmup_steps=0)
        found.append(psutil.Process().memory_info().rss)
    assert max(found) <= 1.05 * found[0], found


@pytest.mark.gpu
@pytest.mark.parametrize(
    "keys",
    [
        {"max_steps": 20},
        {"max_steps": 8, "activation_checkpointing": "offload"},
        {"max_steps": 20, "use_peft": False, "load_in_4bit": False},
    ],
    ids=["graphs", "offload", "whole"],
)
def test_ten_runs_leave_the_memory_of_one(start, keys):
    """Bytes on the device and pinned within 16 MiB of those after the first run, the process within 5%."""
    found = []
    for _ in range(RUNS):
        start(device="cuda", **keys)
        pinned = torch.cuda.host_memory_stats()
        found.append(
            {
                "allocated": torch.cuda.memory_allocated(),
                "reserved": torch.cuda.memory_reserved(),
                "pinned": pinned.get("allocated_bytes.current", 0),
                "process": psutil.Process().memory_info().rss,
            }
        )
    first = found[0]
    print({name: [after[name] // MIB for after in found] for name in first})
    for after in found[1:]:
        for name in ("allocated", "reserved", "pinned"):
            assert after[name] <= first[name] + 16 * MIB, (name, found)
        assert after["process"] <= 1.05 * first["process"], found
