"""Trackers of `report_to`: what they get, and that their errors do not reach the run."""

import json
from types import SimpleNamespace

import pytest
from transformers import TrainerCallback

from halfbyte import finetune
from halfbyte.train import trackers
from halfbyte.train.trackers import Details, Trackers
from halfbyte.utils.notices import notices_so_far


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


def test_a_tracker_that_fails_is_left_out_and_the_others_end_after_the_report(monkeypatch, caplog, tmp_path):
    events.clear()
    monkeypatch.setattr(trackers, "get_reporting_integration_callbacks", lambda names: [Broken, Sound])
    followers = Trackers(["two"], None, tmp_path)
    for loss in (2.0, 1.0):
        followers.event("on_log", None, None, None, logs={"loss": loss})
    followers.event("on_train_end", None, None, None)
    assert events == [{"loss": 2.0}, {"loss": 1.0}]
    followers.finish(Details({}))
    followers.finish(Details({}))
    assert events[2:] == ["end"]
    assert len([record for record in caplog.records if "Broken" in record.message]) == 1


class Service:
    """A tracker's library: records its calls, and has one run at a time."""

    def __init__(self, calls):
        self.calls, self.run = calls, None

    def start(self, **options):
        self.calls.append(options)
        self.run = SimpleNamespace(info=SimpleNamespace(run_id=options.get("run_id") or f"mlflow-{len(self.calls)}"))
        return self.run

    init = start_run = start

    def finish(self, *_, **options):
        self.calls.append({"end": True, **options})
        self.run = None

    end_run = finish

    def get_run(self):
        return self.run

    active_run = get_run

    def set_experiment(self, name):
        self.calls.append({"experiment": name})


class Silent(TrainerCallback):
    """A callback of transformers', without a library."""

    logging_dir = tb_writer = None

    def __init__(self):
        self.calls = CALLS.setdefault(type(self).__name__.removesuffix("Callback"), [])
        self._wandb = self._ml_flow = self._swanlab = Service(self.calls)

    def _SummaryWriter(self, **options):
        self.calls.append(options)


class NamedByArguments(Silent):
    def on_train_begin(self, args, state, control, **keys):
        self.calls.append({"name": args.run_name})


CALLS = {}
NAMES = ("Wandb", "MLflow", "SwanLab", "TensorBoard", "Trackio")


@pytest.fixture
def fake_trackers(monkeypatch):
    for name in ("WANDB_RUN_ID", "WANDB_PROJECT", "MLFLOW_RUN_ID", "SWANLAB_RUN_ID", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    bases = {"Trackio": NamedByArguments}
    classes = [type(f"{name}Callback", (bases.get(name, Silent),), {}) for name in NAMES]
    monkeypatch.setattr(trackers, "get_reporting_integration_callbacks", lambda names: classes)
    CALLS.clear()
    return CALLS


def begun(folder, step=0, run_name=None, project=None):
    followers = Trackers(["all"], None, folder, project)
    followers.event("on_train_begin", SimpleNamespace(run_name=run_name), SimpleNamespace(global_step=step), None)
    return followers


@pytest.mark.parametrize("run_name", [None, "mine"])
def test_a_resumed_run_continues_in_its_trackers(fake_trackers, tmp_path, run_name):
    begun(tmp_path, 0, run_name, "theirs").close(failed=True)
    ids = json.loads((tmp_path / "trackers.json").read_text())
    assert set(ids) == {*NAMES}
    started = {name: [call for call in calls if "end" not in call] for name, calls in fake_trackers.items()}
    assert started["Wandb"] == [{"project": "theirs", "name": run_name, "id": ids["Wandb"], "resume": "allow"}]
    assert started["MLflow"] == [{"experiment": "theirs"}, {"run_name": run_name}]
    assert started["SwanLab"][0].items() >= {"project": "theirs", "experiment_name": run_name}.items()
    assert {"end": True, "exit_code": 1} in fake_trackers["Wandb"]
    for calls in fake_trackers.values():
        calls.clear()
    begun(tmp_path, 7, run_name)
    assert json.loads((tmp_path / "trackers.json").read_text()) == ids
    assert fake_trackers["Wandb"][0]["id"] == ids["Wandb"]
    assert fake_trackers["MLflow"] == [{"run_id": ids["MLflow"]}]
    assert fake_trackers["SwanLab"][0]["id"] == ids["SwanLab"]
    assert fake_trackers["TensorBoard"] == [{"log_dir": str(tmp_path / ids["TensorBoard"]), "purge_step": 8}]
    assert fake_trackers["Trackio"] == [{"name": ids["Trackio"]}]


def test_damaged_ids_make_a_new_run(fake_trackers, tmp_path):
    (tmp_path / "trackers.json").write_text('{"Wandb": ')
    begun(tmp_path, 3)
    assert "tracker ids" in notices_so_far()
    assert fake_trackers["Wandb"][0]["id"] == json.loads((tmp_path / "trackers.json").read_text())["Wandb"]


def test_a_new_run_in_the_same_folder_is_a_new_run_in_its_trackers(fake_trackers, tmp_path):
    begun(tmp_path, 3).close()
    ids = json.loads((tmp_path / "trackers.json").read_text())
    begun(tmp_path)
    assert json.loads((tmp_path / "trackers.json").read_text())["Wandb"] != ids["Wandb"]


def test_swanlab_gets_configuration_and_answers(fake_trackers, tmp_path):
    followers = begun(tmp_path)
    (swanlab,) = [
        callback._swanlab for callback in followers._callbacks if type(callback).__name__ == "SwanLabCallback"
    ]
    swanlab.config, swanlab.Text, logged = {}, lambda *texts: texts, []
    swanlab.log = logged.append
    followers.send(Details({"configuration": {"r": 4}}, [(2, "Why?", "So.", None)]))
    assert swanlab.config == {"halfbyte/configuration": {"r": 4}}
    assert logged == [{"answers": [("Why?\n\nSo.", "step 2")]}]


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
