"""The folder of a run, its fixes and its numbers, as a newcomer meets them: one run, then the next command."""

import json
import os
import re
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.cli.model_facts import model_facts
from halfbyte.config import load_config
from halfbyte.config.section import respelled
from halfbyte.gguf.graph import checked_family
from halfbyte.methods import METHODS, method_of
from halfbyte.plan.cards import usable_bytes
from halfbyte.report.run import read_run
from halfbyte.runs.checkpoints import can_resume
from halfbyte.runs.inputs import check_output, free_output_dir
from halfbyte.train.run import finetune
from halfbyte.utils.environment import environment
from halfbyte.utils.errors import ConfigError, ModelError
from tests.helpers.run_inputs import VOCABULARY, write_model, write_rows
from tests.helpers.tiny_runs import tiny_llama

GIVEN = {"max_length": 64, "packing": True, "sample_prompts": 0, "warmup_steps": 0, "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, data and the finished run `out`."""
    place = tmp_path_factory.mktemp("place")
    write_model(place / "model", tiny_llama(vocab_size=VOCABULARY))
    write_rows(place / "data.jsonl", [40] * 12)
    before = Path.cwd()
    os.chdir(place)
    try:
        result = finetune("model", "data.jsonl", output_dir="out", **GIVEN)
    finally:
        os.chdir(before)
    return place, result


@pytest.fixture(autouse=True)
def _in_place(place, monkeypatch):
    monkeypatch.chdir(place[0])


def config(**keys):
    return load_config(None, {"model_name_or_path": "model", "dataset": "data.jsonl", **GIVEN, **keys})


def halfbyte(*words):
    return CliRunner().invoke(app, list(words), obj=list(words))


def test_run_yaml_holds_the_given_keys_and_no_others():
    text = Path("out/run.yaml").read_text()
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert keys == {"model_name_or_path", "dataset", "output_dir", *GIVEN}


def test_one_final_loss(place):
    run, loss = read_run("out"), place[1].metrics["loss"]
    assert loss == run.final_loss
    assert len(run.last_steps) < len(run.train) or len(run.train) == 1
    assert format(loss, run.numbers.trained[0].format) in Path("out/README.md").read_text()


def test_check_needs_no_output_folder():
    Path("file").write_text("")
    Path("model-like").mkdir(exist_ok=True)
    Path("model-like/config.json").write_text("{}")
    Path("dangling").unlink(missing_ok=True)
    Path("dangling").symlink_to("nowhere")
    keys = [f"{key}={json.dumps(value)}" for key, value in GIVEN.items()]
    taken = ("out", "file", "file/below", "model-like", "dangling", "/proc/x", "new")
    for name in taken:
        with pytest.raises(ConfigError, match="output_dir") if name != "new" else pytest.MonkeyPatch.context():
            check_output(config(output_dir=name))
    for name in ("out", "/proc/x"):
        assert halfbyte("check", "model", "data.jsonl", f"output_dir={name}", *keys).exit_code == 0
    planned = halfbyte("check", "model", "data.jsonl", "--gpus", "1", "--gpu-memory", "24", *keys)
    assert planned.exit_code == 0
    assert f"{usable_bytes(24) / 2**30:.1f} GiB" in planned.stdout


def test_resume_is_proposed_only_where_it_works():
    assert can_resume(config(output_dir="out"))
    for changed in ({"learning_rate": 1e-3}, {"r": 4}, {"max_length": 32}, {"output_dir": "nowhere"}):
        other = config(**{"output_dir": "out", **changed})
        assert not can_resume(other)
        if other.output_dir == "out":
            with pytest.raises(ConfigError) as error:
                check_output(other)
            assert "--resume" not in error.value.fix
    assert halfbyte("train", "out/run.yaml", "--resume").exit_code == 0


def test_init_names_a_free_folder(tmp_path):
    assert free_output_dir(config(output_dir="out")) == "out-2"
    assert free_output_dir(config(output_dir="fresh")) == "fresh"
    for folder in (".", str(Path.cwd())):  # read as data
        name = free_output_dir(config(dataset=folder))
        assert not Path(name).resolve().is_relative_to(Path.cwd())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        assert free_output_dir(config(output_dir="out")) == "out"


@pytest.mark.slow
def test_init_and_check_plan_the_same_run():
    made = halfbyte("init", "model", "data.jsonl")
    Path("made.yaml").write_text(made.stdout)
    planned = re.search(r"machine: (\S+) (\w+) of", made.stdout)
    checked = halfbyte("check", "made.yaml")
    assert checked.exit_code == 0, checked.output
    total = re.search(r"predicted (\S+) (\w+)", checked.stdout)
    assert total[2] == planned[2]
    assert float(total[1]) == pytest.approx(float(planned[1]), rel=0.05)


@pytest.mark.slow
def test_a_rate_of_0_in_every_step_ends_at_once():
    for steps, warmup in ((1, 1), (1, 0.5), (2, 0.99), (1, 0.03)):
        keys = GIVEN | {"max_steps": steps, "warmup_steps": warmup}
        words = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        result = halfbyte("train", "model", "data.jsonl", f"output_dir=never-{warmup}", *words)
        assert (result.exit_code == 1) == (warmup in (1, 0.5))
    assert halfbyte("check", "model", "data.jsonl", *words[:-2], "max_steps=1", "warmup_steps=0").exit_code == 0


def test_a_fix_proposes_no_other_algorithm():
    for name in ("ppo", "ipo", "tpo", "gspo", "drpo", "nash_md", "online_dpo", "xpo", "raft"):
        assert respelled(name, METHODS) == ""
    assert respelled("gpro", METHODS) == "grpo"
    with pytest.raises(ConfigError) as error:
        method_of(config(method="dapo"))
    assert "loss_type: dapo" in error.value.fix


def test_kernels_of_a_cpu_are_on_if_there_is_a_compiler(monkeypatch):
    monkeypatch.setenv("CC", "python3")
    assert environment("cpu")["kernels"]["enabled"]
    monkeypatch.setenv("CC", "no-such-compiler -x")
    assert not environment("cpu")["kernels"]["enabled"]


@pytest.mark.parametrize("name", ["Llama", "Phi3", "Qwen3Moe", "GPT2", "DeepseekV3"])
def test_check_says_what_holds_for_this_model(name):
    config = getattr(transformers, f"{name}Config")()
    facts = model_facts(config)
    assert {"family", "decoding", "packing", "GGUF"} <= facts.keys()
    known = name in ("Llama", "Phi3", "Qwen3Moe")
    assert (name in facts["family"] and "RMSNorm" in facts["family"]) == known
    assert ("transformers" not in facts["decoding"]) == known
    try:
        checked_family(config)
        assert not facts["GGUF"].startswith("no")
    except ModelError:
        assert facts["GGUF"].startswith("no")
