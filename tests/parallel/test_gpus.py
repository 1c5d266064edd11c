"""Runs on two GPUs equal the run on one: fused kernels in bfloat16, NCCL, and CUDA graphs with data parallelism."""

import json

import pytest
import torch

from halfbyte.plan import estimate
from tests.helpers.rank_runs import Left, run, trains, write_place
from tests.helpers.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
KEYS = {"device": None, "dtype": "auto", "packing": True, "learning_rate": 1e-3, "max_steps": 12, "save_steps": 6}


@pytest.fixture(scope="module")
def gpus():
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_place(tmp_path_factory.mktemp("place"), rows=160, **SHAPE)


@pytest.fixture(scope="module")
def alone(place, tmp_path_factory):
    output = tmp_path_factory.mktemp("alone") / "out"
    return run(None, place, output, **KEYS | {"device": "cuda:0"}, gradient_accumulation_steps=4)


LAYOUTS = [("data", 2, 1e-3), ("shard", 2, 1e-3), ("tensor", 4, 4e-3), ("pipeline", 4, 1e-3), ("context", 4, 1e-3)]


@pytest.mark.parametrize(("axis", "accumulation", "tolerance"), LAYOUTS)
def test_two_gpus_equal_one(gpus, place, alone, tmp_path, axis, accumulation, tolerance):
    """Partial products are rounded before they are added, which tensor parallelism does in each layer. Under `data`
    nothing is rounded otherwise, until a sum of gradients in another order flips a rounded bit of a factor."""
    layout = {"parallel": {axis: 2}, "gradient_accumulation_steps": accumulation}
    found = run(gpus, place, tmp_path / "out", **KEYS, **layout)
    pairs = [*zip(found.trained, alone.trained, strict=True), *zip(found.evaluated, alone.evaluated, strict=True)]
    far = [(mine["kind"], mine["step"], mine["loss"], theirs["loss"]) for mine, theirs in pairs
           if abs(mine["loss"] / theirs["loss"] - 1) > tolerance]  # fmt: skip
    assert not far
    early = [abs(mine["loss"] / theirs["loss"] - 1) for mine, theirs in pairs if mine["step"] <= 8]
    assert axis != "data" or max(early) <= 1e-6
    assert all(mine.get("trained_tokens") == theirs.get("trained_tokens") for mine, theirs in pairs)
    memory = json.loads((found.folder / "memory.json").read_text())
    assert len(memory["ranks"]) == 2
    assert all(("graph_pool_bytes" in rank) == (axis in ("data", "shard")) for rank in memory["ranks"]), memory
    assert "gathers" not in json.loads((found.folder / "environment.json").read_text())["notices"]
    if axis == "shard":
        each, one = (
            measured["after_load_bytes"] - measured["base_bytes"]  # ranks that ran before have workspaces left
            for measured in (memory["ranks"][0], alone.memory["measured"])
        )
        assert each < 0.75 * one


def captures_more(mesh, place, output, keys):
    """Run with graph capture enabled for more axes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(estimate, "CAPTURED", {"data", "shard", "tensor", "context"})
        trains(mesh, place, output, keys, None)


@pytest.mark.parametrize(("axis", "tolerance"), [("tensor", 4e-3), ("context", 1e-3)])
def test_graph_capture_with_other_axes(gpus, place, alone, tmp_path, axis, tolerance):
    """Runs do not capture these axes; this tests that they could."""
    keys = {"parallel": {axis: 2}, "gradient_accumulation_steps": 4}
    gpus.run(captures_more, place, tmp_path / "out", KEYS | keys)
    found = Left(tmp_path / "out")
    assert all("graph_pool_bytes" in rank for rank in found.memory["ranks"])
    for mine, theirs in zip(found.trained, alone.trained, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=tolerance), mine["step"]


def test_graphs_of_several_widths(gpus, place, tmp_path):
    """Sequences have one document and few widths, which differ between the GPUs; evaluations run in between."""
    texts = [{"prompt": "x" * (n % 7), "completion": f" it is {'1' * (n * 37 % 400)}."} for n in range(160)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    keys = KEYS | {"packing": False, "dataset": str(rows), "max_length": 512, "max_steps": 30, "eval_steps": 10}
    one = run(None, place, tmp_path / "one", **keys | {"device": "cuda:0"}, gradient_accumulation_steps=4)
    two = run(gpus, place, tmp_path / "two", **keys, parallel={"shard": 2}, gradient_accumulation_steps=2)
    assert all("graph_pool_bytes" in rank for rank in two.memory["ranks"])
    for mine, theirs in [*zip(two.trained, one.trained, strict=True), *zip(two.evaluated, one.evaluated, strict=True)]:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3), mine["step"]


def test_resume_on_one_gpu(gpus, place, alone, tmp_path):
    folder = tmp_path / "out"
    run(gpus, place, folder, **KEYS, parallel={"shard": 2}, gradient_accumulation_steps=2)
    for path in (folder / "adapter", folder / "checkpoint-12"):
        path.rename(folder / f"{path.name}.away")
    keys = KEYS | {"device": "cuda:0", "gradient_accumulation_steps": 2}
    again = run(None, place, folder, resume=str(folder / "checkpoint-6"), **keys)
    assert [each["step"] for each in again.trained] == [each["step"] for each in alone.trained]
    assert again.trained[-1]["loss"] == pytest.approx(alone.trained[-1]["loss"], rel=1e-3)
