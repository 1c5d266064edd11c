"""Steps of several adapters as one batch, as on a GPU: the runs are separate ones but for rounding."""

import json
import math
import signal
from types import SimpleNamespace

import pytest
import torch

from halfbyte.adapters.lora import add_adapter
from halfbyte.batch import BOUNDS, LONGEST, joined
from halfbyte.config import load_config
from halfbyte.data.collate import PackedCollator, PaddedCollator
from halfbyte.modeling.patch import patch
from halfbyte.runs.metrics import MetricsFile
from halfbyte.train.joint_steps import JointSteps, MemberStepper, obstacle
from halfbyte.train.loop import TrainingLoop
from halfbyte.train.run import train
from halfbyte.train.several import Together, with_same_tensors
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.notices import notices_so_far
from halfbyte.utils.processes import Stopped, request_on_signals
from tests.helpers.sft_runs import keys
from tests.helpers.tiny_runs import losses, make_loop, rows, run_config, tiny_llama

RUNS = {  # name → rows, and keys in which the runs differ
    "a": (12, {"r": 4}),
    "b": (7, {"r": 2, "learning_rate": 3e-3, "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear"}),
    "c": (9, {"r": 3, "lora_alpha": 5.0, "num_train_epochs": 1.0, "max_grad_norm": 0.1, "seed": 3}),
}


def loop_of(base, folder, count, changes, **keys):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2.0}
    config = run_config(folder, **options | {"lora_dropout": 0.0} | changes | keys)
    torch.manual_seed(config.seed)
    model = add_adapter(with_same_tensors(base), config)
    patch(model)
    loop = make_loop(config.model_copy(update={"use_peft": False}), train=rows(count, seed=count), model=model)
    loop.config = config
    loop.stepper = MemberStepper()
    return loop


def together(folder, **keys):
    base = tiny_llama().requires_grad_(False)
    loops = {name: loop_of(base, folder / name, *run, **keys) for name, run in RUNS.items()}
    joint = with_same_tensors(base).train()
    patch(joint)
    runs = Together(
        {name: loop.steps() for name, loop in loops.items()}, lambda active: JointSteps(joint, active, False)
    )
    return loops, runs.run()


def alone(folder, name, **keys):
    loop = loop_of(tiny_llama().requires_grad_(False), folder / "alone" / name, *RUNS[name], **keys)
    loop.train()
    return loop


def assert_close_runs(loop, other):
    assert len(losses(loop)) == len(losses(other))
    torch.testing.assert_close(losses(loop), losses(other), rtol=1e-4, atol=1e-4)
    weights, others = (dict(each.model.named_parameters()) for each in (loop, other))
    for name, weight in others.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)


def test_runs_of_one_batch_equal_separate_runs(tmp_path):
    loops, results = together(tmp_path)
    assert results == dict.fromkeys(RUNS)
    for name, loop in loops.items():
        assert_close_runs(loop, alone(tmp_path, name))
    assert len({loop.state.global_step for loop in loops.values()}) == 3


def test_an_adapter_that_diverges_ends_alone(tmp_path, monkeypatch):
    """Its rows are NaN in the batch of all."""
    train_step = TrainingLoop.train_step

    def broken(loop, *positional):
        for name, parameter in loop.model.named_parameters():
            if loop.config.r == 2 and loop.state.global_step == 1 and "lora_A" in name:
                parameter.data.fill_(math.nan)
        yield from train_step(loop, *positional)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "train_step", broken)
        loops, results = together(tmp_path)
    assert isinstance(results["b"], TrainingError)
    for name in ("a", "c"):
        assert results[name] is None
        assert_close_runs(loops[name], alone(tmp_path, name))


def test_a_signal_stops_all_after_the_step(tmp_path, monkeypatch):
    compute = JointSteps._compute
    calls = []

    def signalled(joint, batches, steps):
        calls.append(len(batches))
        if len(calls) == 3:
            signal.raise_signal(signal.SIGTERM)
        return compute(joint, batches, steps)

    monkeypatch.setattr(JointSteps, "_compute", signalled)
    with request_on_signals(lambda number: None):
        loops, results = together(tmp_path)
    assert all(isinstance(result, Stopped) for result in results.values())
    for name, loop in loops.items():
        assert (tmp_path / name / f"checkpoint-{loop.state.global_step}").is_dir()


def test_out_of_memory_reaches_every_run(tmp_path, monkeypatch):
    def exhausted(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(JointSteps, "_compute", exhausted)
    with pytest.raises(torch.OutOfMemoryError):
        together(tmp_path)


@pytest.mark.parametrize("packing", [False, True], ids=["padding_free", "packing"])
def test_joined_batches_keep_documents_and_ranges(packing):
    """Every document of the joined batch is one of the batches, where its range of rows begins."""
    collator = PackedCollator(0, one_row=not packing, fused=True)
    documents = [rows(5, seed=1), rows(3, seed=2).select(range(2)), rows(4, seed=3)]
    batches = [collator([{**row, "seq_lengths": [3, len(row["input_ids"]) - 3]} for row in each]) for each in documents]
    batch = joined(batches)
    height, width = max(len(each["input_ids"]) for each in batches), max(each["input_ids"].shape[1] for each in batches)
    assert batch["input_ids"].shape == (3 * height, width)
    starts = set(batch[BOUNDS[0]].tolist())
    flat = batch["position_ids"].flatten()
    assert starts - {len(flat)} == set(torch.nonzero(flat == 0).flatten().tolist())
    assert batch[BOUNDS[0]].diff().min() >= 0
    assert int(batch[BOUNDS[0]].diff().max()) <= batch[LONGEST[0]]
    for number, each in enumerate(batches):
        part = batch["labels"][number * height :][: len(each["labels"]), : each["labels"].shape[1]]
        assert torch.equal(part, each["labels"])
    trained = sum(int((each["labels"] >= 0).sum()) for each in batches)
    assert int((batch["labels"] >= 0).sum()) == trained


def test_joined_padded_batches_attend_to_something_in_every_row():
    collator = PaddedCollator(0)
    batch = joined([collator(list(rows(3, seed=1))), collator(list(rows(1, seed=2)))])
    assert batch["input_ids"].shape[0] == 6
    assert bool((batch["attention_mask"].sum(1) > 0).all())
    assert bool((batch["labels"][4:] == -100).all())


@pytest.mark.gpu
def test_a_sweep_on_a_gpu_equals_separate_runs_up_to_rounding(place, tmp_path):
    """Micro-batches of all adapters are one CUDA graph; random rows of uneven lengths, several micro-batches a step."""
    options = {"device": "cuda", "dtype": "bfloat16", "max_steps": 16, "save_steps": 100, "lora_dropout": 0.0}
    sweep = {"learning_rate": [3e-3, 1e-3], "r": [4, 8]}
    result = train(load_config(None, keys(place, tmp_path / "all", **options, sweep=sweep)))
    assert "adapters-in-turn" not in notices_so_far()
    for name, facts in result.metrics.items():
        folder = tmp_path / "all" / "adapters" / name
        train(load_config(None, keys(place, tmp_path / name, **options, **facts["keys"])))
        mine, theirs = (MetricsFile(run / "metrics.jsonl").records() for run in (folder, tmp_path / name))
        for key in ("loss", "learning_rate", "trained_tokens"):
            values, others = ([record[key] for record in each if record["kind"] == "train"] for each in (mine, theirs))
            assert values == pytest.approx(others, rel=2e-2)
        measured = json.loads((folder / "memory.json").read_text())["measured"]
        assert measured["graph_pool_bytes"] > 0


def test_shifted_attention_is_computed_in_turn():
    """The joint step runs a model of its own, whose attention is not shifted."""
    config = load_config(None, {"model_name_or_path": "m", "dataset": "d", "shift_attn": True})
    reason = obstacle(SimpleNamespace(config=config), SimpleNamespace(report=object(), results={}))
    assert reason is not None
    assert "shift_attn" in reason
