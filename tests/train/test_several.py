"""Several adapters in one run: each ends as a run of its own would, whatever the others do."""

import gc
import json
import math
import weakref

import pytest
import torch
from safetensors.torch import load_file

from halfbyte.config import load_config
from halfbyte.train import preflight, several
from halfbyte.train.loop import TrainingLoop
from halfbyte.train.planning import plan_memory
from halfbyte.train.run import train
from halfbyte.train.several import prepare_adapters
from halfbyte.utils.console import Console
from halfbyte.utils.errors import ConfigError, TrainingError
from tests.helpers.sft_runs import keys

MEASURED = {"time", "seconds", "step_seconds", "tokens_per_second", "memory_bytes"}


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in MEASURED} for line in lines]


def assert_equal_runs(folder, other):
    """Weights, records and the state that a resumed run would continue from are equal, bit for bit."""
    for file in ("adapter/adapter_model.safetensors", "checkpoint-6/adapter_model.safetensors"):
        weights, others = load_file(folder / file), load_file(other / file)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert records(folder) == records(other)


def trained(place, output, **changed):
    return train(load_config(None, keys(place, output, **changed)))


def alone(place, output, **changed):
    train(load_config(None, keys(place, output, **changed)))
    return output


SWEEP = {"learning_rate": [1e-2, 2e-3], "r": [4, 8]}


def test_a_sweep_equals_separate_runs(place, tmp_path):
    """Dropout draws from a stream of each adapter's own, so that it does not differ from a separate run's."""
    result = trained(place, tmp_path / "all", sweep=SWEEP, lora_dropout=0.1)
    names = [f"learning_rate-{rate:g}_r-{rank}" for rate in SWEEP["learning_rate"] for rank in SWEEP["r"]]
    assert list(result.metrics) == names
    for name in (names[0], names[3]):
        rate, rank = result.metrics[name]["keys"].values()
        other = alone(place, tmp_path / name, learning_rate=rate, r=rank, lora_dropout=0.1)
        assert_equal_runs(tmp_path / "all" / "adapters" / name, other)
    assert sum(facts["best"] for facts in result.metrics.values()) == 1


def test_adapters_of_equal_size_share_a_memory_plan(place, tmp_path, monkeypatch):
    """A plan has the ranks of all adapters, so a sweep needs one, and rows that are read in other batches another."""
    plans = []

    def planned(*arguments):
        plans.append(plan_memory(*arguments))
        return plans[-1]

    monkeypatch.setattr(preflight, "plan_memory", planned)

    def totals(**changed):
        plans.clear()
        config = load_config(None, keys(place, tmp_path / "out", **changed))
        runs = prepare_adapters(config, None, Console(quiet=True), writes=False).values()
        return len(plans), {run.plan.total for run in runs}

    count, shared = totals(sweep={"r": [4, 8]})
    assert count == 1
    assert totals(sweep={"gradient_accumulation_steps": [1, 2]})[0] == 2
    monkeypatch.setattr(several, "have_equal_plans", lambda *_: False)
    assert totals(sweep={"r": [4, 8]}) == (2, shared)


@pytest.fixture(scope="module")
def tasks(place, tmp_path_factory):
    """The keys of two adapters with a dataset each, of different sizes."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = (place / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "short.jsonl").write_text("".join(lines[:9]))
    (folder / "long.jsonl").write_text("".join(lines[9:]))
    shared = {"max_steps": -1, "save_steps": 1, "save_total_limit": None, "eval_split_size": 0}
    entries = [
        {"name": "short", "dataset": str(folder / "short.jsonl"), "r": 2, "seed": 1, "num_train_epochs": 1.0},
        {"name": "long", "dataset": str(folder / "long.jsonl"), "gradient_accumulation_steps": 1, "lora_alpha": 8.0},
    ]
    return shared, entries


def test_adapters_with_their_own_data_equal_separate_runs(place, tasks, tmp_path):
    """One ends after 3 steps, the other after 8, with other rows, accumulation, ranks and seeds."""
    shared, entries = tasks
    given = {key: value for key, value in keys(place, tmp_path / "all").items() if key != "dataset"}
    train(load_config(None, given | shared | {"adapters": entries}))
    for entry in entries:
        name = entry["name"]
        changes = {key: value for key, value in entry.items() if key != "name"}
        other = alone(place, tmp_path / name, **shared, **changes)
        folder = tmp_path / "all" / "adapters" / name
        weights, others = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (folder, other))
        assert all(torch.equal(weights[key], others[key]) for key in others)
        assert records(folder) == records(other)
    assert [records(tmp_path / "all" / "adapters" / name)[-1]["step"] for name in ("short", "long")] == [3, 8]


class Killed(Exception):
    """Ends a run at once, as a killed process would."""


def test_a_resumed_run_continues_each_adapter_from_its_own_checkpoint(place, tmp_path, monkeypatch):
    """The run dies when one adapter has saved step 4 and the other has not."""
    options = {"sweep": {"r": [4, 8]}, "lora_dropout": 0.1}
    trained(place, tmp_path / "through", **options)
    save = TrainingLoop._save

    def save_or_die(loop, *positional, **named):
        if loop.config.r == 8 and loop.state.global_step == 4:
            raise Killed
        save(loop, *positional, **named)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "_save", save_or_die)
        with pytest.raises(Killed):
            trained(place, tmp_path / "killed", **options)
    newest = {name: max((tmp_path / "killed/adapters" / name).glob("checkpoint-*")).name for name in ("r-4", "r-8")}
    assert newest == {"r-4": "checkpoint-4", "r-8": "checkpoint-2"}
    with pytest.raises(ConfigError):
        trained(place, tmp_path / "killed", **options)
    train(load_config(None, keys(place, tmp_path / "killed", **options)), resume=True)
    for name in ("r-4", "r-8"):
        assert_equal_runs(tmp_path / "killed" / "adapters" / name, tmp_path / "through" / "adapters" / name)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed" / "adapters").rglob("*.safetensors")}
    again = train(load_config(None, keys(place, tmp_path / "killed", **options)), resume=True)
    assert again.metrics["r-8"]["steps"] == 6
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_an_adapter_that_diverges_ends_alone(place, tmp_path, monkeypatch):
    """Its loop and model are freed while the others train."""
    sums = TrainingLoop.sums
    diverged, alive = [], []

    def broken(loop, batch):
        factor = 1.0
        if loop.config.r == 8 and loop.state.global_step == 2:
            factor = math.nan
            diverged.extend((weakref.ref(loop), weakref.ref(loop.model)))
        if loop.state.global_step == 5:
            gc.collect()
            alive.extend(reference() for reference in diverged)
        return {name: value * factor for name, value in sums(loop, batch).items()}

    with monkeypatch.context() as patched:
        patched.setattr(TrainingLoop, "sums", broken)
        with pytest.raises(TrainingError, match="r-8"):
            trained(place, tmp_path / "all", sweep={"r": [4, 8]})
    assert alive[:2] == [None, None]
    assert_equal_runs(tmp_path / "all" / "adapters" / "r-4", alone(place, tmp_path / "alone", r=4))
    compared = json.loads((tmp_path / "all" / "adapters.json").read_text())
    assert "error" in compared["r-8"]
    assert compared["r-4"]["steps"] == 6
    assert not (tmp_path / "all" / "adapters" / "r-8" / "adapter").exists()


def test_the_runs_share_the_frozen_tensors(place, tmp_path, monkeypatch):
    models = []
    steps = TrainingLoop.steps

    def noted(loop, checkpoint=None):
        models.append(loop.model)
        yield from steps(loop, checkpoint)

    monkeypatch.setattr(TrainingLoop, "steps", noted)
    trained(place, tmp_path, sweep={"r": [4, 8]}, max_steps=1)
    first, second = (dict(model.named_parameters()) for model in models)
    factors = {name for name in first if ".lora_" in name}
    assert factors
    assert [name for name in first.keys() - factors if first[name] is not second[name]] == []
    assert [name for name in factors if first[name] is second[name]] == []


def test_each_folder_is_a_run_of_its_own(place, tmp_path):
    """A saved run's own configuration repeats it; the folder of all has one for all."""
    trained(place, tmp_path, sweep={"r": [4, 8]}, max_steps=1)
    folder = tmp_path / "adapters" / "r-8"
    config = load_config(folder / "run.yaml", {"output_dir": str(tmp_path / "again")})
    assert (config.r, config.sweep) == (8, None)
    assert load_config(tmp_path / "run.yaml").sweep == {"r": [4, 8]}
    page = (tmp_path / "report.html").read_text()
    assert "adapters/r-8/report.html" in page
    assert (folder / "report.html").is_file()
