"""`push_to_hub`, against a stand-in of the hub: what each strategy uploads, and what happens without a token or hub."""

import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from halfbyte.utils import hub as hub_check
from halfbyte.utils import notices
from halfbyte.utils.errors import ConfigError
from tests.helpers import fake_hub
from tests.helpers.sft_runs import run

PUSH = {"push_to_hub": True, "hub_token": fake_hub.TOKEN, "hub_model_id": "me/sums", "sample_prompts": 0}
PUSH |= {"max_steps": 2, "save_steps": 1, "eval_split_size": 0}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with fake_hub.running(monkeypatch) as running:
        yield running


def state_files(files):
    return {path for path in files if path.endswith(("optimizer.pt", "trainer_state.json", "rng_state.pth"))}


@pytest.mark.parametrize(
    ("strategy", "folders", "messages"),
    [
        pytest.param("end", set(), ["trained weights"], marks=pytest.mark.slow),
        pytest.param("every_save", set(), ["checkpoint-1", "trained weights"], marks=pytest.mark.slow),
        pytest.param("checkpoint", {"last-checkpoint"}, ["checkpoint-1", "trained weights"], marks=pytest.mark.slow),
        ("all_checkpoints", {"checkpoint-1", "checkpoint-2"}, ["checkpoint-1", "checkpoint-2", "trained weights"]),
    ],
)
def test_a_strategy_uploads_weights_and_checkpoints(place, tmp_path, hub, strategy, folders, messages):
    run(place, tmp_path, **PUSH, hub_strategy=strategy, hub_private_repo=True, save_total_limit=1)
    files = hub.files["me/sums"]
    adapter = {path.name: path.read_bytes() for path in (tmp_path / "adapter").iterdir()}
    assert {name: content for name, content in files.items() if "/" not in name} == adapter
    assert {Path(path).parent.name for path in state_files(files)} == folders
    assert set(messages) <= set(hub.commits)
    assert hub.commits[-1] == "trained weights"
    assert hub.private == {"me/sums": True}
    assert not list(tmp_path.glob(".*-hub-*"))


def test_the_uploaded_card_is_valid_and_no_file_has_the_token(place, tmp_path, hub, capfd):
    run(place, tmp_path, **PUSH)
    card = ModelCard.load(tmp_path / "adapter/README.md")
    assert card.data.library_name == "peft"
    assert yaml.safe_load(card.content.split("---")[1]) == card.data.to_dict()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if fake_hub.TOKEN.encode() in path.read_bytes()]
    assert not [path for path, content in hub.files["me/sums"].items() if fake_hub.TOKEN.encode() in content]
    assert fake_hub.TOKEN not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"hub_token": None}, "push_to_hub"),  # no token at all
        ({"hub_token": "hf_another"}, "push_to_hub"),  # the hub refuses it
        ({"push_to_hub": False, "hub_token": None}, "hub_model_id"),
    ],
)
def test_a_push_that_cannot_work_is_refused_before_training(place, tmp_path, hub, changed, key, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(ConfigError) as refused:
        run(place, tmp_path / "out", **PUSH | changed)
    assert key in refused.value.message
    assert not list((tmp_path / "out").glob("*"))


def test_an_unreachable_hub_is_named_before_training(place, tmp_path, hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub_check, "_offline_reason", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(ConfigError) as refused:
        run(place, tmp_path / "out", **PUSH)
    assert "push_to_hub" in refused.value.message


def test_a_failed_upload_does_not_lose_the_run(place, tmp_path, hub, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub tries again
    hub.failing = True
    result = run(place, tmp_path, **PUSH)
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    assert (tmp_path / "report.html").is_file()
    assert result.metrics["steps"] == 2
    later = notices.notices_so_far()["hub"]
    assert re.search(r"hf upload me/sums \S+/adapter \.", later)


@pytest.mark.slow
def test_a_run_without_push_makes_no_request(place, tmp_path, hub):
    run(place, tmp_path, max_steps=1, warmup_steps=0, sample_prompts=0)
    assert not hub.requests
