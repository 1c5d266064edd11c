"""Resuming: exact after SIGKILL, from whole checkpoints only, and only of the same run."""

import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from halfbyte.config import RunConfig
from halfbyte.runs import checkpoints
from halfbyte.runs.metrics import MetricsFile
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ConfigError, TrainingError
from tests.helpers.tiny_runs import comparable, losses, make_loop, rows, run_config

KEYS = {"num_train_epochs": 3, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "save_steps": 3}

SCENARIOS = {
    "mid-epoch": (5, {}),
    "second-epoch": (8, {}),
    "boundary": (5, {"save_steps": 4, "logging_steps": 5, "adapter_dtype": "bfloat16", "max_steps": 10}),
}

# One process imports (slow) and forks (quick, and safe before any product has started threads).
KILLED = """
    import os, signal, sys
    sys.path.insert(0, {here!r})
    from tests.helpers.tiny_runs import make_loop, rows, run_config

    def run_and_kill(output, step, keys):
        loop = make_loop(run_config(output, **keys), train=rows(20), held_out=rows(3, 9))
        def kill(record):
            if record["kind"] == "train" and record["step"] == step:
                os.kill(os.getpid(), signal.SIGKILL)
        loop.metrics.listeners.append(kill)
        loop.train()

    for name, (step, keys) in {scenarios!r}.items():
        child = os.fork()
        if not child:
            run_and_kill({output!r} + "/" + name, step, {keys!r} | keys)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, name
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Runs of SCENARIOS, each SIGKILLed as soon as its step is recorded."""
    output, here = tmp_path_factory.mktemp("killed"), str(Path(__file__).parents[2])
    code = KILLED.format(here=here, output=str(output), scenarios=SCENARIOS, keys=KEYS)
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return output


def resume(output, **keys):
    config = run_config(output, **KEYS | keys)
    loop = make_loop(config, train=rows(20), held_out=rows(3, 9))
    checkpoint = checkpoints.starting_point(config, True)
    loop.metrics.keep_until(checkpoints.step_of(checkpoint))
    loop.train(checkpoint)
    return loop, checkpoint


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted")
    loop = make_loop(run_config(output, **KEYS), train=rows(20), held_out=rows(3, 9))
    loop.train()
    return loop


# 20 rows, 2 per batch, 3 batches per step: 4 steps an epoch, the last one incomplete; checkpoints after 3, 6, 9, 12.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "resumed_from"), [("mid-epoch", 3), ("second-epoch", 6)])
def test_killed_and_resumed_equals_uninterrupted(killed, uninterrupted, name, resumed_from):
    loop, checkpoint = resume(killed / name)
    assert checkpoint.name == f"checkpoint-{resumed_from}"
    assert len(losses(loop)) == 12
    assert comparable(loop) == comparable(uninterrupted)
    theirs = dict(uninterrupted.model.named_parameters())
    assert all(bool((p == theirs[name]).all()) for name, p in loop.model.named_parameters())


@pytest.mark.slow
def test_resuming_at_an_epoch_boundary_and_inside_a_metrics_window(killed, tmp_path):
    keys = SCENARIOS["boundary"][1]
    whole = make_loop(run_config(tmp_path, **KEYS | keys), train=rows(20), held_out=rows(3, 9))
    whole.train()
    loop, checkpoint = resume(killed / "boundary", **keys)
    assert checkpoint.name == "checkpoint-4"
    assert comparable(loop) == comparable(whole)
    assert {p.dtype for p in loop.model.parameters() if p.requires_grad} == {torch.bfloat16}


def test_a_checkpoint_holds_adapters_and_never_the_base(uninterrupted):
    newest = checkpoints.checkpoints(Path(uninterrupted.config.output_dir))[-1]
    names = {path.name for path in newest.iterdir()}
    assert "adapter_model.safetensors" in names
    assert not {"model.safetensors", "pytorch_model.bin"} & names


def test_save_total_limit_keeps_the_newest(uninterrupted):
    output = Path(uninterrupted.config.output_dir)
    assert [path.name for path in checkpoints.checkpoints(output)] == ["checkpoint-9", "checkpoint-12"]
    assert not list(output.glob(".checkpoint-*"))


def test_a_run_killed_before_it_removed_an_older_checkpoint_does_so_when_resumed(tmp_path):
    keys = {"max_steps": 4, "save_steps": 2, "save_total_limit": 2}
    make_loop(run_config(tmp_path, **keys)).train()
    config = run_config(tmp_path, **keys | {"save_total_limit": 1})
    make_loop(config).train(checkpoints.starting_point(config, True))
    assert [path.name for path in checkpoints.checkpoints(tmp_path)] == ["checkpoint-4"]


# --- failing saves ---------------------------------------------------------------------------------------------------


def test_a_full_disk_while_saving_leaves_earlier_checkpoints_intact(tmp_path):
    """Every file is limited to 8 KiB from step 4 on: safetensors and torch.save fail as on a full disk."""
    loop = make_loop(run_config(tmp_path, max_steps=6, save_steps=2, save_total_limit=None))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_the_disk(record):
        if record["step"] == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))

    loop.metrics.listeners.append(fill_the_disk)
    try:
        with pytest.raises(TrainingError, match="/checkpoint-4:") as failed:
            loop.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "checkpoint-2" in failed.value.fix
    assert [path.name for path in tmp_path.iterdir() if "checkpoint" in path.name] == ["checkpoint-2"]
    loop, checkpoint = make_loop(loop.config), checkpoints.starting_point(loop.config, True)
    loop.train(checkpoint)
    assert loop.state.global_step == 6


def test_half_written_checkpoints_are_never_picked_up(tmp_path):
    config = run_config(tmp_path, max_steps=4, save_steps=2)
    make_loop(config).train()
    (tmp_path / "checkpoint-4" / checkpoints.STATE).unlink()
    (tmp_path / ".checkpoint-6.abc").mkdir()
    assert checkpoints.starting_point(config, True).name == "checkpoint-2"
    with pytest.raises(CheckpointError, match="checkpoint-4"):
        checkpoints.starting_point(config, str(tmp_path / "checkpoint-4"))
    checkpoints.remove_leftovers(tmp_path)
    assert not list(tmp_path.glob(".checkpoint*"))


def test_a_resumed_run_saves_logs_and_evaluates_as_its_config_says_now(tmp_path):
    keys = {"max_steps": 8, "save_steps": 4, "logging_steps": 4, "eval_steps": 4}
    make_loop(run_config(tmp_path, **keys), held_out=rows(3, 9)).train()
    changed = run_config(tmp_path, **keys | {"save_steps": 2, "logging_steps": 1, "eval_steps": 3})
    checkpoint = tmp_path / "checkpoint-4"
    checkpoints.check_same_run(changed, checkpoint)
    checkpoints.rename_newer(tmp_path, checkpoint)
    loop = make_loop(changed, held_out=rows(3, 9))
    loop.metrics.keep_until(4)
    loop.train(checkpoint)
    records = [(record["kind"], record["step"]) for record in loop.metrics.records() if record["step"] > 4]
    assert [step for kind, step in records if kind == "train"] == [5, 6, 7, 8]
    assert [step for kind, step in records if kind == "eval"] == [6, 8]
    assert (tmp_path / "checkpoint-6").is_dir()


# --- where a run may start -------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path):
    config = run_config(tmp_path, max_steps=2, save_steps=1)
    make_loop(config).train()
    return config


def test_an_output_dir_with_another_run_is_refused(finished, tmp_path):
    with pytest.raises(ConfigError, match=r"\(checkpoint-2, metrics.jsonl\)"):
        checkpoints.starting_point(finished, None)
    assert len(MetricsFile(tmp_path / "metrics.jsonl").records()) == 2


def test_resuming_with_other_settings_names_them(finished):
    changed = finished.model_copy(update={"r": 8, "learning_rate": 1e-3, "logging_steps": 9, "save_total_limit": 1})
    with pytest.raises(ConfigError, match=r"learning_rate: 0.01.*0.001 now") as refused:
        checkpoints.starting_point(changed, True)
    assert "8 now" in str(refused.value)
    assert "logging_steps" not in str(refused.value)


def test_resuming_on_other_data_is_refused(finished, tmp_path):
    checkpoint = checkpoints.starting_point(finished, True)
    checkpoints.check_same_inputs({"rows": 12}, checkpoint)
    with pytest.raises(ConfigError, match=r"^dataset: .*12 rows then, 13 now"):
        checkpoints.check_same_inputs({"rows": 13}, checkpoint)


def test_nothing_to_resume(tmp_path):
    config = run_config(tmp_path / "none")
    with pytest.raises(CheckpointError, match="checkpoint-9"):
        checkpoints.starting_point(config, str(tmp_path / "checkpoint-9"))
    assert checkpoints.starting_point(config, True) is None
    assert "step 0" in notices.notices_so_far()["resume_from_start"]
    (tmp_path / "none" / "adapter").mkdir(parents=True)
    with pytest.raises(ConfigError):
        checkpoints.starting_point(config, True)


def test_a_torn_last_line_is_dropped(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        metrics.append({"kind": "eval", "step": step})
    with open(metrics.path, "a") as file:
        file.write('{"kind": "train", "st')
    assert [record["step"] for record in metrics.records()] == [1, 2, 3]
    metrics.keep_until(2)
    metrics.append({"kind": "eval", "step": 3})
    assert metrics.path.read_text().count("\n") == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"kind": "tr\n', "JSON"),
        ("[1]\n", "metrics.jsonl:1"),
        ('{"kind": "eval", "step": 1}\n{"kind": "train", "step": 1, "loss": 2.0}\n', "metrics.jsonl:2"),
        (None, "metrics.jsonl"),
    ],
)
def test_metrics_that_no_run_wrote_are_named(tmp_path, content, said):
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    metrics.path.write_text(content) if content else metrics.path.mkdir()
    with pytest.raises(ConfigError, match=said) as refused:
        metrics.records()
    assert "metrics.jsonl" in refused.value.message
    assert refused.value.fix == "remove it, or choose another output_dir"


def test_paths_of_earlier_runs_are_those_of_the_same_home(monkeypatch, tmp_path):
    """They were kept as they were written; now `~` is filled in."""
    given = {"model_name_or_path": "m", "dataset": ["~/one.jsonl", "two.jsonl"]}
    state = {"config": RunConfig(**given).model_dump(mode="json") | given, "data": {}}
    monkeypatch.setattr("halfbyte.runs.checkpoints.read_state", lambda checkpoint: state)
    checkpoints.check_same_run(RunConfig(**given), tmp_path)
    with pytest.raises(ConfigError, match="dataset: "):
        checkpoints.check_same_run(RunConfig(**given | {"dataset": "~/one.jsonl"}), tmp_path)
