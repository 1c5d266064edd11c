"""Damaged, renamed and incomplete checkpoints: the damage is named, and no run continues from it."""

import json
import pickle
import shutil
from pathlib import Path

import pytest

from halfbyte.config import load_config
from halfbyte.runs import checkpoints, manifest
from halfbyte.train.run import train
from halfbyte.utils import notices
from halfbyte.utils.errors import CheckpointError, ConfigError
from tests.helpers.tiny_runs import make_loop, run_config

FILES = [
    "adapter_config.json", "adapter_model.safetensors", "halfbyte.json", "optimizer.pt", "rng_state.pth",
    "scheduler.pt", "trainer_state.json",
]  # fmt: skip
STATE, TRAINER_STATE = checkpoints.STATE, checkpoints.TRAINER_STATE


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A run with the checkpoints 1, 2 and 3."""
    folder = tmp_path_factory.mktemp("original")
    make_loop(config_in(folder)).train()
    return folder


@pytest.fixture
def output(original, tmp_path):
    notices.reset_notices()
    return Path(shutil.copytree(original, tmp_path / "out"))


def config_in(folder, **keys):
    return run_config(folder, **{"max_steps": 3, "save_steps": 1, "save_total_limit": None} | keys)


def remove(file):
    file.unlink()


def truncate(file):
    file.write_bytes(file.read_bytes()[:-9])


def flip(file):
    """Flip one bit in the middle: the size is right, and every reader accepts the file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_the_manifest_lists_every_file_and_the_step(output):
    checkpoint = output / "checkpoint-3"
    listed = json.loads((checkpoint / manifest.MANIFEST).read_text())
    assert {*FILES, manifest.MANIFEST} <= {path.name for path in checkpoint.iterdir()}
    assert listed["files"].keys() == {path.name for path in checkpoint.iterdir()} - {manifest.MANIFEST}
    assert all(entry["bytes"] == (checkpoint / name).stat().st_size for name, entry in listed["files"].items())
    assert (listed["step"], listed["format"]) == (3, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("harm", [remove, truncate, flip])
@pytest.mark.parametrize("name", [*FILES, manifest.MANIFEST])
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(output, name, harm):
    harm(output / "checkpoint-3" / name)
    found = checkpoints.starting_point(config_in(output), True)
    assert found.name == "checkpoint-2"
    said = notices.notices_so_far()["damaged_checkpoint"]
    assert f"{output}/checkpoint-3: " in said
    assert name in said or harm is flip  # a changed name in JSON is reported as that
    with pytest.raises(CheckpointError, match=r"resume_from_checkpoint: .*checkpoint-3"):
        checkpoints.starting_point(config_in(output), str(output / "checkpoint-3"))


@pytest.mark.parametrize("name", [STATE, TRAINER_STATE, "optimizer.pt"])
def test_a_run_never_starts_again_over_damaged_checkpoints(output, name):
    for step in (1, 2, 3):
        (output / f"checkpoint-{step}" / name).unlink()
    before = sorted(output.rglob("*"))
    with pytest.raises(CheckpointError, match=rf"\S+checkpoint-3: {name}"):
        checkpoints.starting_point(config_in(output), True)
    (output / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"\(checkpoint-3\)"):
        checkpoints.starting_point(config_in(output), None)
    assert sorted([*output.rglob("*"), output / "metrics.jsonl"]) == before


def test_a_checkpoint_of_a_later_version_is_refused(output):
    path = output / "checkpoint-3" / manifest.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))
    with pytest.raises(CheckpointError, match=r"format 9.*1"):
        checkpoints.starting_point(config_in(output), str(output / "checkpoint-3"))


def test_a_folder_s_name_is_not_believed_over_its_state(output):
    config = config_in(output, max_steps=5)
    (output / "checkpoint-2").rename(output / "checkpoint-9999")
    assert checkpoints.starting_point(config_in(output), True).name == "checkpoint-3"
    shutil.rmtree(output / "checkpoint-3")
    (output / "checkpoint-1").rename(output / "checkpoint-200")
    checkpoint = checkpoints.starting_point(config_in(output), True)
    assert (checkpoint.name, checkpoints.step_of(checkpoint)) == ("checkpoint-9999", 2)
    assert "step 2" in notices.notices_so_far()["renamed_checkpoint"]
    loop = make_loop(config)
    loop.train(checkpoint)
    assert loop.state.global_step == 5
    assert [path.name for path in checkpoints.checkpoints(output)][-3:] == [f"checkpoint-{n}" for n in (3, 4, 5)]


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("PWNED"),))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_is_not_run_and_is_an_error_with_a_name(output, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (output / "checkpoint-3" / name).write_bytes(pickle.dumps(Bomb()))
    (output / "checkpoint-3" / manifest.MANIFEST).unlink()
    manifest.write_manifest(output / "checkpoint-3", 3)
    checkpoint = checkpoints.starting_point(config_in(output), True)
    with pytest.raises(CheckpointError, match=f"checkpoint-3/{name}"):
        make_loop(config_in(output, max_steps=5)).train(checkpoint)
    assert not (tmp_path / "PWNED").exists()


def names(output):
    return sorted(path.name for path in output.iterdir() if "checkpoint" in path.name)


def test_the_checkpoint_saved_after_resuming_from_an_older_one_stays(tmp_path):
    """With 4, 8 and 12 there, 6 would be the oldest but one."""
    make_loop(config_in(tmp_path, max_steps=12, save_steps=4)).train()
    chosen = tmp_path / "checkpoint-4"
    checkpoints.rename_newer(tmp_path, chosen)
    make_loop(config_in(tmp_path, max_steps=6, save_steps=4, save_total_limit=2)).train(chosen)
    assert names(tmp_path) == ["checkpoint-12.set-aside", "checkpoint-4", "checkpoint-6", "checkpoint-8.set-aside"]


@pytest.mark.slow
def test_resuming_from_an_older_checkpoint_keeps_what_it_saves(place, tmp_path):
    keys = {
        "model_name_or_path": str(place / "model"),
        "dataset": str(place / "data.jsonl"),
        "output_dir": str(tmp_path / "out"),
        "device": "cpu",
        "dtype": "float32",
        "max_steps": 6,
        "save_steps": 2,
        "max_length": 64,
        "sample_prompts": 0,
    }
    train(load_config(None, keys | {"save_total_limit": 3}))
    output = tmp_path / "out"
    (output / "checkpoint-6" / "optimizer.pt").unlink()  # a damaged one is in the way as well
    shutil.copytree(output / "checkpoint-4", tmp_path / "checkpoint-4")
    config = load_config(None, keys | {"resume_from_checkpoint": str(output / "checkpoint-2")})
    notices.reset_notices()
    train(config)
    assert names(output) == ["checkpoint-4", "checkpoint-4.set-aside", "checkpoint-6", "checkpoint-6.set-aside"]
    assert "checkpoint-4.set-aside" in notices.notices_so_far()[f"set-aside {output / 'checkpoint-4'}"]
    for path in tmp_path.glob("checkpoint-4/*"):
        assert path.read_bytes() == (output / "checkpoint-4.set-aside" / path.name).read_bytes()
    assert checkpoints.starting_point(config, True).name == "checkpoint-6"
    checkpoints.rename_newer(output, output / "checkpoint-4")
    assert "checkpoint-6.set-aside-2" in names(output)
    again = output / "checkpoint-4.set-aside"  # may be resumed by its path
    assert checkpoints.starting_point(config, str(again)) == again
