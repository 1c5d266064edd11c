"""benchmarks.several_gpus on two gloo ranks with a tiny model: its parts run, and its ratios and losses are right."""

from types import SimpleNamespace

import pytest

from benchmarks import several_gpus, step_model
from halfbyte.modeling.head import causal_lm_loss
from tests.helpers.ranks import Ranks

pytestmark = pytest.mark.dist
SIZES = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128, "head_dim": 32, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def measured(mesh, part, keys):
    """Run a part on the tiny model; returns what the main rank has recorded of it."""
    given = SimpleNamespace(**keys)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"EIGHT": "tiny", "ROWS": 1, "TOKENS": 16, "DATA": (("tiny", 1, 16, False),)}.items():
            patched.setattr(several_gpus, name, value)
        for function in (several_gpus.Training.time, several_gpus.Sharded.time):
            patched.setattr(function, "__defaults__", (True, 1, 0))
        patched.setattr(several_gpus, "levels", lambda *_: ("keep", "checkpoint"))  # a plan takes longer than all parts
        patched.setattr(several_gpus._repeated_step, "__defaults__", (1, 0))
        for name, value in SIZES.items():
            patched.setitem(step_model.MODELS["tiny"][1], name, value)
        results = several_gpus.Results(mesh, None)
        several_gpus.PARTS[part](mesh, results, given)
    return results.found.get(part)


@pytest.mark.parametrize("documents", [0, 3])
def test_context_computes_one_ranks_step(two, documents):
    (found,), none = two.run(measured, "context", {"length": 42, "documents": documents, "steps": 1})
    assert none is None
    assert found["documents"] == (documents or 1)
    assert found["efficiency"] == found["alone"]["ms"] / (2 * found["together"]["ms"])
    loss, norm = found["first_step_off"]
    assert loss < 1e-5
    assert norm < 1e-3


def test_tensor_parallel_step(two):
    (found,), _ = two.run(measured, "tensor", {"steps": 1})
    assert found["speedup"] == found["alone"]["ms"] / found["together"]["ms"]
    assert max(found["first_step_off"]) < 1e-2


def test_offload_compares_with_one_rank(two):
    (found,), _ = two.run(measured, "offload", {"length": 24, "steps": 1})
    assert found["slowdown"] == found["ms"]["together"] / found["ms"]["alone"]
    assert found["length"] == 24


def test_data_ratios(two):
    (found,), _ = two.run(measured, "data", {})
    ms, both = found["ms"], min(found["ms"]["together"], found["ms"]["together again"])
    assert found["of_alone"] == ms["alone"] / both
    assert found["of_apart"] == min(ms["apart"], ms["apart again"]) / both
    assert 0 < found["of_rates"] <= max(ms["apart"], ms["apart again"]) / both


def test_gathers_count_the_bytes_of_each_pass(two):
    found, _ = two.run(measured, "gathers", {})
    data, each, half, kept = found
    assert [row["way"] for row in found] == ["data", "each call", "half kept", "all kept"]
    assert each["gathered_gb"] == 2 * half["gathered_gb"] > 0
    assert kept["gathered_gb"] == 0
    losses = [row["losses"][0] for row in found]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert each["of_data"] == data["ms"] / each["ms"]


def losses_of_sharded_builds(mesh):
    """Return the loss of the model that `build_sharded` builds in this process alone, and of its shards."""
    found = []
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SIZES.items():
            patched.setitem(step_model.MODELS["tiny"][1], name, value)
        batch = step_model.random_batch("tiny", 1, 16, "cpu")
        for each in (several_gpus.alone(mesh), mesh):
            model = several_gpus.build_sharded("tiny", each)
            several_gpus.shard_model(model, each)
            found.append(float(causal_lm_loss(model, batch)[0]))
    return found


def test_sharded_build_computes_the_full_models_loss(two):
    for full, shard in two.run(losses_of_sharded_builds, layout={"shard": 2}):
        assert shard == pytest.approx(full, rel=1e-6)
