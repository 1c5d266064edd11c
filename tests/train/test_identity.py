"""A run resumes on the same inputs, wherever they are, and on no others."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from halfbyte.config import load_config
from halfbyte.reading.tensors import checkpoint_digest
from halfbyte.runs import checkpoints
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError
from tests.helpers.marks import slow_except

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def stopped(place, tmp_path_factory):
    """The folder of a run's inputs, the run's keys, and its checkpoint after step 1."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(place / "model", folder / "model")
    lines = (place / "data.jsonl").read_text().splitlines(keepends=True)
    (folder / "data.jsonl").write_text("".join(lines[:16]))
    (folder / "held_out.jsonl").write_text("".join(lines[16:]))
    (folder / "template.jinja").write_text(TEMPLATE)
    keys = {"model_name_or_path": str(folder / "model"), "dataset": str(folder / "data.jsonl"), "r": 4}
    keys |= {"device": "cpu", "dtype": "float32", "load_in_4bit": False, "max_steps": 2, "save_steps": 1}
    keys |= {"chat_template_path": str(folder / "template.jinja"), "sample_prompts": 0, "save_total_limit": 9}
    train(load_config(None, keys | {"output_dir": str(folder / "first"), "max_steps": 1, "warmup_steps": 0}))
    shutil.copytree(folder / "first/adapter", folder / "adapter")
    keys |= {"adapter_path": str(folder / "adapter"), "eval_dataset": str(folder / "held_out.jsonl")}
    train(load_config(None, keys | {"output_dir": str(folder / "run")}))
    return folder, keys, folder / "run/checkpoint-1"


def moved(folder, key, path, tmp_path):
    """Copy an input to a new path."""
    copy = tmp_path / f"other-{path}"
    (shutil.copytree if (folder / path).is_dir() else shutil.copy)(folder / path, copy)
    return {key: str(copy)}


def resumed(stopped, changed, tmp_path):
    _, keys, checkpoint = stopped
    config = load_config(None, keys | changed | {"output_dir": str(tmp_path / "run")})
    return prepare_run(config, resume=str(checkpoint))


INPUTS = {
    "model_name_or_path": "model", "dataset": "data.jsonl", "eval_dataset": "held_out.jsonl",
    "adapter_path": "adapter", "chat_template_path": "template.jinja",
}  # fmt: skip


@pytest.mark.parametrize("key", slow_except(INPUTS, ["model_name_or_path", "adapter_path"]))
def test_a_moved_input_is_the_same(stopped, tmp_path, key):
    changed = moved(stopped[0], key, INPUTS[key], tmp_path)
    assert resumed(stopped, changed, tmp_path).checkpoint == stopped[2]


def last_weight(path):
    tensors = load_file(path / "model.safetensors")
    largest = max(tensors, key=lambda name: tensors[name].numel())
    tensors[largest].view(-1)[-1] += 1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_json(name, **keys):
    def edit(path):
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | keys))

    return edit


CHANGES = {
    "one weight": ("model_name_or_path", last_weight),
    "the model's config": ("model_name_or_path", edit_json("config.json", rms_norm_eps=1e-3)),
    "its code": ("model_name_or_path", lambda path: (path / "code.py").write_text("")),
    "the tokenizer": ("model_name_or_path", edit_json("tokenizer_config.json", model_max_length=1000)),
    "rows": ("dataset", lambda path: path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))),
    "a row": ("dataset", lambda path: path.write_text(path.read_text().replace("what is 1 ", "what is 2 "))),
    "held-out rows": ("eval_dataset", lambda path: path.write_text(path.read_text().replace("what is", "so is"))),
    "the adapter's alpha": ("adapter_path", edit_json("adapter_config.json", lora_alpha=160)),
    "the template": ("chat_template_path", lambda path: path.write_text(TEMPLATE + " ")),
}


@pytest.mark.parametrize("case", slow_except(CHANGES, ["one weight", "the tokenizer", "a row", "the template"]))
def test_a_changed_input_is_refused(stopped, tmp_path, case):
    key, change = CHANGES[case]
    changed = moved(stopped[0], key, INPUTS[key], tmp_path)
    change(tmp_path / f"other-{INPUTS[key]}")
    with pytest.raises(ConfigError) as found:
        resumed(stopped, changed, tmp_path)
    expected = "chat_template_path" if case == "the tokenizer" else key
    assert found.value.message.startswith(f"{expected}: ")
    assert "{" not in found.value.message


@pytest.mark.parametrize("key", ["adapter_path", "eval_dataset", "chat_template_path"])
def test_a_missing_input_is_refused(stopped, tmp_path, key):
    with pytest.raises(ConfigError) as found:
        resumed(stopped, {key: None}, tmp_path)
    assert found.value.message.startswith(f"{key}: ")


def test_the_name_of_the_adapters_base_is_no_part_of_it(stopped, tmp_path):
    changed = moved(stopped[0], "adapter_path", "adapter", tmp_path)
    edit_json("adapter_config.json", base_model_name_or_path=str(stopped[0] / "model/../model"))(
        tmp_path / "other-adapter"
    )
    assert resumed(stopped, changed, tmp_path).checkpoint == stopped[2]


def test_paths_of_a_checkpoint_without_digests_are_compared(stopped, tmp_path):
    folder, keys, checkpoint = stopped
    copy = shutil.copytree(checkpoint, tmp_path / "checkpoint-1")
    state = json.loads((copy / checkpoints.STATE).read_text())
    for key in checkpoints.MODELS:
        del state["data"][key]
    (copy / checkpoints.STATE).write_text(json.dumps(state))
    config = load_config(None, keys | moved(folder, "dataset", "data.jsonl", tmp_path))
    with pytest.raises(ConfigError, match="dataset: "):
        checkpoints.check_same_run(config, copy)


@pytest.mark.parametrize(("before", "now", "same"), [
    (["a/r.py:f"], ["b/r.py:f"], True),
    (["a/r.py:f"], ["a/r.py:g"], False),
    ([{"model": "a/judge"}], [{"model": {"path": "b/judge"}}], True),
    ([{"regex": "a/b"}], [{"regex": "c/b"}], False),
])  # fmt: skip
def test_reward_functions_are_compared_without_folders(stopped, tmp_path, before, now, same):
    assert (checkpoints._without_folders(before) == checkpoints._without_folders(now)) == same


def test_every_byte_of_a_checkpoint_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.reading.tensors.DIGEST_BLOCK", 1000)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(1000)}, file)
    seen = {checkpoint_digest(tmp_path)}
    content = file.read_bytes()
    for at in (-1, -999, -1001, len(content) // 2):
        changed = bytearray(content)
        changed[at] ^= 1
        file.write_bytes(changed)
        seen.add(checkpoint_digest(tmp_path))
    assert len(seen) == 5
