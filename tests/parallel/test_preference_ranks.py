"""Preference training on two ranks equals that of one process, with references, z and likelihoods of the full step."""

import json

import pytest

from halfbyte.utils.errors import ConfigError
from tests.helpers.marks import slow_except
from tests.helpers.rank_runs import run, write_place

pytestmark = pytest.mark.dist

ASKED = {
    "dpo": {"method": "dpo", "loss_type": ["sigmoid", "sft"]},
    "dpo of each step": {"method": "dpo", "precompute_ref_log_probs": False},
    "kto": {"method": "kto"},
    "reward": {"method": "reward"},
}
SHARDED = {
    "dpo": {"method": "dpo", "loss_type": ["sigmoid", "sft"]},
    "dpo of each step, weighed": {"method": "dpo", "precompute_ref_log_probs": False, "use_weighting": True},
    "orpo": {"method": "orpo"},
    "kto": {"method": "kto"},
    "reward": {"method": "reward"},
    "prm": {"method": "prm"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = write_place(tmp_path_factory.mktemp("place"))
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    made = [
        {"prompt": row["prompt"] + " what?", "chosen": row["completion"], "rejected": f" no{' 2' * (n % 4)}"}
        for n, row in enumerate(rows)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    steps = [
        {"prompt": row["prompt"], "completions": [row["chosen"], row["rejected"]], "labels": [True, False]}
        for row in made
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(ASKED, ["dpo"]))
def test_two_ranks_equal_one_process(place, two, tmp_path, monkeypatch, name):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    asked = {"dataset": str(place / "pairs.jsonl"), "sample_prompts": 0, **ASKED[name]}
    one = run(None, place, tmp_path / "one", gradient_accumulation_steps=4, **asked)
    both = run(two, place, tmp_path / "two", gradient_accumulation_steps=2, parallel={"data": 2}, **asked)
    both.same_as(one, loss=2e-6, weights=1e-4)
    for mine, theirs in zip(both.trained, one.trained, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-6)
        assert {key for key in mine if "rewards/" in key} == {key for key in theirs if "rewards/" in key}


# `make test` runs KTO, whose loss exchanges the most between processes.
@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(SHARDED, ["kto"]))
def test_two_shards_equal_one_process(place, two, tmp_path, monkeypatch, name):
    """Layers are sharded, and head and embedding by vocabulary, which the log-probabilities' gradients pass."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    rows = "steps" if name == "prm" else "pairs"
    asked = {"dataset": str(place / f"{rows}.jsonl"), "sample_prompts": 0, **SHARDED[name]}
    one = run(None, place, tmp_path / "one", gradient_accumulation_steps=4, **asked)
    both = run(two, place, tmp_path / "two", gradient_accumulation_steps=2, parallel={"shard": 2}, **asked)
    both.same_as(one, loss=2e-6, weights=1e-4)


def test_unsupported_layouts_are_refused(place, tmp_path):
    from halfbyte.config import RunConfig
    from halfbyte.config.resolved import Parallel
    from halfbyte.plan.meshes import check_layout

    config = RunConfig(model_name_or_path="m", dataset="d", method="dpo")
    for axis in ("tensor", "context", "pipeline"):
        with pytest.raises(ConfigError, match="method: dpo") as refused:
            check_layout(Parallel(**{"shard": 2, axis: 2}), config, None)
        assert "{shard:" in refused.value.fix
    sampling = config.model_copy(update={"method": "grpo"})
    with pytest.raises(ConfigError, match="method: grpo"):
        check_layout(Parallel(shard=2), sampling, None)
