"""Runs in a process of their own: handles that wait for them and stop them."""

import time

import pytest

from halfbyte import finetune
from halfbyte.utils.errors import ConfigError, TrainingError


@pytest.fixture
def keys(place, tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_QUEUE", str(tmp_path / "state" / "queue"))
    keys = {"model": str(place / "model"), "dataset": str(place / "data.jsonl"), "device": "cpu", "dtype": "float32"}
    return keys | {"max_length": 64, "r": 4, "sample_prompts": 0, "output_dir": str(tmp_path / "out")}


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"reward_funcs": [len]}, "reward_funcs"), ({"hub_token": "secret"}, "hub_token"), ({"r": -1}, "r")],
)
def test_keys_that_another_process_cannot_have_are_refused(keys, tmp_path, changed, key):
    with pytest.raises(ConfigError, match=key):
        finetune(**keys | changed, background=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_run_in_the_background_gives_the_result_of_one_in_this_process(keys, tmp_path):
    keys |= {"max_steps": 4, "eval_split_size": 0.2}
    run = finetune(**keys, background=True)
    assert "starting" in run._repr_html_()
    with pytest.raises(TimeoutError):
        run.wait(timeout=0.01)
    result, here = run.wait(), finetune(**keys | {"output_dir": str(tmp_path / "here")})
    timed = ("tokens_per_second", "peak_bytes")
    assert {name: value for name, value in result.metrics.items() if name not in timed} == {
        name: value for name, value in here.metrics.items() if name not in timed
    }
    assert set(result.metrics) == set(here.metrics)
    assert 'value="4" max="4"' in run._repr_html_()
    adapters = [path / "adapter" / "adapter_model.safetensors" for path in (result.output_dir, here.output_dir)]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


@pytest.mark.slow
def test_a_run_in_the_background_is_stopped_with_a_checkpoint(keys, tmp_path):
    run = finetune(**keys | {"max_steps": 100_000}, background=True)
    deadline = time.monotonic() + 120
    while run.status is None or run.status.step < 2:
        assert time.monotonic() < deadline, run.log.read_text()
        time.sleep(0.1)
    run.stop()
    assert run.status.state == "stopped"
    assert list((tmp_path / "out").glob("checkpoint-*"))
    with pytest.raises(TrainingError):
        run.wait()
    with pytest.raises(ConfigError):
        run.stop()
