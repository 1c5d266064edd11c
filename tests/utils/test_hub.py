"""Local names and hub ids are distinguished, and an unreachable hub costs seconds only."""

import subprocess
import sys
import time

import pytest

from halfbyte.utils import hub
from halfbyte.utils.errors import ModelError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("poet-run/adapter", "Qwen/Qwen3-0.6B", "out/checkpoint-90"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "out" / "metrics.jsonl").touch()
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


LOCAL = [
    *("./m", "/m", "~/m", "a/b/c", "m/", "a b", "", "données été"),
    *("a" * 5000, "a\0b", "data.jsonl", "owner/data.CSV", "model.gguf", "run.yaml"),
    *("poet-rum", "poetrun", "out/checkpoint-9", "loop", "out"),
]
IDS = ["gpt2", "Qwen/Qwen3-8B", "tatsu-lab/alpaca", "owner/Qwen2.5-7B", "nothere"]


@pytest.mark.parametrize("name", LOCAL)
def test_local_names(here, name):
    assert hub.is_local(name)


@pytest.mark.parametrize("name", IDS)
def test_hub_ids(here, name):
    assert not hub.is_local(name)


def test_nearest_path_is_another_existing_path(here):
    assert str(hub.nearest_path(here / "out" / "checkpoint-9")) == f"{here}/out/checkpoint-90"
    assert str(hub.nearest_path(here / "ouut" / "checkpoint-90" / "x")) == f"{here}/out"
    assert hub.nearest_path(here / "loop") is None
    assert hub.nearest_path(here / "quite-another") is None


@pytest.fixture
def silent(monkeypatch):
    """A hub whose name resolves slowly."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_offline_reason", "")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that what is set is taken back
    monkeypatch.setattr(hub, "_request", lambda: time.sleep(3) or "")
    monkeypatch.setattr(hub, "TIMEOUT", 0.0)


def test_unreachable_hub_is_reported_and_not_retried(here, silent):
    from huggingface_hub import constants

    with pytest.raises(ModelError, match=r"https://.*within 0") as error:
        hub.check_model_available("Qwen/Qwen3-0.8B")
    assert error.value.fix == "did you mean Qwen/Qwen3-0.6B?"
    assert constants.HF_HUB_OFFLINE
    started = time.monotonic()
    with pytest.raises(ModelError, match="within 0"):
        hub.check_model_available("nothere")
    assert time.monotonic() - started < 0.4


def test_cached_model_is_used_offline(here, silent, monkeypatch):
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file, revision: f"{name}/{file}")
    hub.check_model_available("Qwen/Qwen3-8B", "main")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", ["check run.yaml", "chat gpt2", "generate gpt2 run.yaml", "export gpt2 --gguf f16"])
def test_commands_fail_fast_without_the_hub(here, command):
    (here / "run.yaml").write_text("model_name_or_path: gpt2\ndataset: data.jsonl\noutput_dir: new\n")
    (here / "data.jsonl").write_text('{"text": "one"}\n')
    program = "import sys\nfrom halfbyte.cli import main\nmain(sys.argv[1:])"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()],
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(here), "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": ":".join(sys.path)},
    )
    assert time.monotonic() - started < 5
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "gpt2" in done.stderr
    assert "  fix: " in done.stderr
