"""benchmarks.several_gpus on two gloo ranks with a tiny model: its parts run, and its ratios and losses are right."""

import pytest

from benchmarks import several_gpus, step_model
from tests.helpers.ranks import Ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]
SIZES = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 128, "head_dim": 32, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def measured(mesh, part):
    """Run a part on the tiny model; returns what the main rank has recorded of it."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"EIGHT": "tiny", "ROWS": 1, "TOKENS": 16, "DATA": (("tiny", 1, 16, False),)}.items():
            patched.setattr(several_gpus, name, value)
        for function in (several_gpus.Training.time, several_gpus.Sharded.time):
            patched.setattr(function, "__defaults__", (True, 1, 0))
        patched.setattr(several_gpus._repeated_step, "__defaults__", (1, 0))
        for name, value in SIZES.items():
            patched.setitem(step_model.MODELS["tiny"][1], name, value)
        results = several_gpus.Results(mesh, None)
        several_gpus.PARTS[part](mesh, results)
    return results.found.get(part)


def test_tensor_parallel_step(two):
    (found,), _ = two.run(measured, "tensor")
    assert found["speedup"] == found["alone"]["ms"] / found["together"]["ms"]
    assert max(found["first_step_off"]) < 1e-2


def test_data_ratios(two):
    (found,), _ = two.run(measured, "data")
    ms, both = found["ms"], min(found["ms"]["together"], found["ms"]["together again"])
    assert found["of_alone"] == ms["alone"] / both
    assert found["of_apart"] == min(ms["apart"], ms["apart again"]) / both
    assert 0 < found["of_rates"] <= max(ms["apart"], ms["apart again"]) / both


def test_gathers_count_the_bytes_of_each_pass(two):
    found, _ = two.run(measured, "gathers")
    data, each, half, kept = found
    assert [row["way"] for row in found] == ["data", "each call", "half kept", "all kept"]
    assert each["gathered_gb"] == 2 * half["gathered_gb"] > 0
    assert kept["gathered_gb"] == 0
    losses = [row["losses"][0] for row in found]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert each["of_data"] == data["ms"] / each["ms"]
