"""Trackers of `report_to`: what they get, and that their errors do not reach the run."""

import json

import pytest
from transformers import TrainerCallback

from halfbyte import finetune
from halfbyte.train import trackers
from halfbyte.train.trackers import Details, Trackers


class Sound(TrainerCallback):
    def __init__(self):
        self.events = events

    def on_log(self, args, state, control, logs=None, **keys):
        self.events.append(logs)

    def on_train_end(self, args, state, control, **keys):
        self.events.append("end")


class Broken(Sound):
    def on_log(self, args, state, control, **keys):
        raise OSError("the service is down")


events = []


def test_a_tracker_that_fails_is_left_out_and_the_others_end_after_the_report(monkeypatch, caplog):
    events.clear()
    monkeypatch.setattr(trackers, "get_reporting_integration_callbacks", lambda names: [Broken, Sound])
    followers = Trackers(["two"], None)
    for loss in (2.0, 1.0):
        followers.event("on_log", None, None, None, logs={"loss": loss})
    followers.event("on_train_end", None, None, None)
    assert events == [{"loss": 2.0}, {"loss": 1.0}]
    followers.finish(Details({}))
    followers.finish(Details({}))
    assert events[2:] == ["end"]
    assert len([record for record in caplog.records if "Broken" in record.message]) == 1


@pytest.mark.slow
def test_tensorboard_gets_numbers_configuration_plan_and_answers(place, tmp_path, monkeypatch):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    keys = {"device": "cpu", "dtype": "float32", "max_length": 64, "r": 4, "max_steps": 4, "logging_steps": 1}
    keys |= {"sample_prompts": 2, "sample_steps": 2, "eval_split_size": 0.2, "output_dir": str(tmp_path / "out")}
    finetune(str(place / "model"), str(place / "data.jsonl"), report_to="tensorboard", **keys)
    events = reader.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(losses)

    def text(name):
        (event,) = events.Tensors(f"{name}/text_summary")
        return event.tensor_proto.string_val[0].decode()

    assert '"max_steps": 4' in text("configuration")
    assert '"weights"' in text("memory_plan")
    assert text("answers").count("\n") == 1 + 2 * 3  # at steps 0, 2 and 4
    assert text("report").endswith("report.html")
