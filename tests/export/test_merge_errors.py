"""Impossible merges raise one error that names the cause, and leave nothing under the new name."""

import errno
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from halfbyte.cli.commands import merge_run
from halfbyte.export import merge as merge_module
from halfbyte.export import shards, weights
from halfbyte.export.merge import merge
from halfbyte.utils.errors import CheckpointError, ConfigError, ModelError, TrainingError
from tests.helpers.merge_runs import save_base, save_run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def run(base, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run") / "run", base)


def on_base(run, base):
    """The run, as if it had been trained on another base."""
    file = run / "config.resolved.yaml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("model_name_or_path")]
    file.write_text("\n".join([f"model_name_or_path: {base}", *lines, ""]))
    return run


def fails(run, out, kind, words, **keys):
    with pytest.raises(kind, match=words):
        merge(run, out, **keys)
    assert not out.exists()
    assert not out.parent.exists() or not list(out.parent.iterdir())


def test_an_existing_folder_is_refused_and_untouched(tmp_path, run):
    out = tmp_path / "merged"
    out.mkdir()
    (out / "mine").write_text("keep")
    with pytest.raises(ConfigError):
        merge(run, out)
    assert (out / "mine").read_text() == "keep"
    merge(run, out, overwrite=True, verify=False)
    assert not (out / "mine").exists()
    assert (out / "config.json").exists()


def test_overwriting_never_takes_the_run_or_the_base_with_it(tmp_path, run, base):
    for out in (run, run.parent, base):
        with pytest.raises(ConfigError):
            merge(run, out, overwrite=True)
    assert (run / "adapter" / "adapter_config.json").exists()
    assert (base / "config.json").exists()


def test_an_adapter_of_other_shapes_names_the_tensor(tmp_path, run):
    other = save_base(tmp_path / "other" / "base", intermediate_size=128)
    fails(on_base(run, other), tmp_path / "out" / "merged", CheckpointError, r"gate_proj\S+ has shape \(96, 4\)")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"peft_type": "IA3"}, "ia3_l"),  # its vectors are missing
        ({"bias": "all"}, "bias"),
        ({"init_lora_weights": "pissa"}, "pissa"),
    ],
)
def test_adapters_that_cannot_be_merged_are_named(tmp_path, run, keys, words):
    file = run / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    fails(run, tmp_path / "out" / "merged", CheckpointError, words)


def test_a_missing_base_names_the_searched_paths(tmp_path, run):
    said = r"config\.resolved\.yaml.*moved"
    fails(on_base(run, tmp_path / "moved"), tmp_path / "out" / "merged", ModelError, said)


def test_a_base_that_lost_a_tensor(tmp_path, run, base):
    other = tmp_path / "other" / "base"
    shutil.copytree(base, other)
    name = "model.layers.1.self_attn.o_proj.weight"
    file = other / json.loads((other / "model.safetensors.index.json").read_text())["weight_map"][name]
    kept = load_file(file)
    kept.pop(name)
    save_file(kept, file, metadata={"format": "pt"})
    fails(on_base(run, other), tmp_path / "out" / "merged", CheckpointError, r"lacks \S+o_proj\.weight")
    file.write_bytes(file.read_bytes()[:-100])
    fails(run, tmp_path / "out" / "merged", CheckpointError, "truncated")


def test_full_fine_tuning_has_nothing_to_merge(tmp_path, base):
    run = tmp_path / "run"
    shutil.copytree(base, run / "model")
    with pytest.raises(CheckpointError):
        merge(run, tmp_path / "merged")


def test_an_unfinished_run_and_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError):
        merge(tmp_path / "none", tmp_path / "merged")
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError):
        merge(tmp_path / "run", tmp_path / "merged")


def test_a_full_disk_is_reported_before_and_while_writing(tmp_path, run, monkeypatch):
    out = tmp_path / "out" / "merged"
    out.parent.mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "write_shard", full)
        fails(run, out, TrainingError, "the disk is full")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(merge_module.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    fails(run, out, TrainingError, "no space for")


def test_an_interrupted_merge_leaves_nothing(tmp_path, run, monkeypatch):
    honest, calls = shards._bytes, []

    def interrupted(tensor):
        calls.append(1)
        if len(calls) > 10:
            raise KeyboardInterrupt
        return honest(tensor)

    monkeypatch.setattr(shards, "_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge(run, tmp_path / "merged")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_prints_the_distance_and_rewrites_the_report(tmp_path, run, capsys):
    merge_run(run, None, "auto", True)
    printed = capsys.readouterr().out
    assert "bfloat16:" in printed
    assert "original" in (run / "report.html").read_text()
    assert (run / "merged" / "model.safetensors.index.json").exists()
    with pytest.raises(ConfigError):
        merge_run(run, None, "auto", True)
