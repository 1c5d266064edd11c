"""A method of one's own: weighted negative log-likelihood, added here, through `finetune` and the command line."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.config import load_config
from halfbyte.evaluation.held_out import evaluate
from halfbyte.methods import METHODS, Method, Metric, Numbers
from halfbyte.modeling.head import IGNORE_INDEX, backbone_inputs, token_log_probs
from halfbyte.runs.metrics import Window
from halfbyte.train.run import finetune
from halfbyte.utils.errors import ConfigError, DataError

SHOWN = (Metric("loss", "weighted loss", ".5f", over="weights"), Metric("plain", "plain loss"))


class WeightedLikelihood(Method):
    """Each row has a `weight`; the loss is the weighted mean over all trained tokens."""

    numbers = Numbers(SHOWN, SHOWN)
    columns = ("weight",)

    def collator(self, config, tokenizer, device=None):
        collate = super().collator(config, tokenizer, device)

        def weighed(rows):
            batch = collate(rows)
            weights = []
            for row in rows:
                lengths = row.get("seq_lengths") or [len(row["input_ids"])]
                weights.append([w for w, length in zip(row["weight"], lengths, strict=True) for _ in range(length)])
            if len(batch["input_ids"]) < len(rows):  # padding_free
                weights = [[w for row in weights for w in row]]
            width = batch["input_ids"].shape[1]
            return {**batch, "weights": torch.tensor([w + [0.0] * (width - len(w)) for w in weights])}

        return weighed

    def counts(self, batch):
        trained = batch["labels"][..., 1:] != IGNORE_INDEX
        return {"weights": float(batch["weights"][..., 1:][trained].sum()), "trained_tokens": int(trained.sum())}

    def sums(self, model, batch):
        batch = dict(batch)
        weights = F.pad(batch.pop("weights")[..., 1:], (0, 1))
        labels = F.pad(batch["labels"][..., 1:], (0, 1), value=IGNORE_INDEX)
        losses = -token_log_probs(model, backbone_inputs(model, batch), labels)[0]
        return {"loss": (losses * weights[labels != IGNORE_INDEX]).sum(), "plain": losses.detach().sum()}


@pytest.fixture(autouse=True)
def added(monkeypatch):
    monkeypatch.setitem(METHODS, "weighted", WeightedLikelihood())


@pytest.fixture(scope="module")
def data(place):
    """Rows of which every other one has weight 0, and the rows with a positive weight."""
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    weighed = [{**row, "weight": 2.5 * (number % 2)} for number, row in enumerate(rows)]
    (place / "weighed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in weighed))
    (place / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1::2]))
    return place


def keys(output, **more):
    keys = {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False, "r": 4}
    return keys | {"learning_rate": 1e-2, "warmup_steps": 0, "sample_prompts": 0, "max_length": 64} | more


def records(output):
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", [{}, {"packing": True}, {"padding_free": True}], ids=["padded", "packed", "flat"])
def test_rows_of_weight_0_do_not_change_the_step(data, tmp_path, layout):
    """A step over all rows equals a step of supervised fine-tuning over those with a weight."""
    whole = {"per_device_train_batch_size": 12, "num_train_epochs": 1, "logging_steps": 1, **layout}
    weighed, plain = tmp_path / "weighed", tmp_path / "plain"
    both = whole | {"per_device_train_batch_size": 24}
    finetune(str(data / "model"), str(data / "weighed.jsonl"), method="weighted", **keys(weighed, **both))
    finetune(str(data / "model"), str(data / "some.jsonl"), **keys(plain, **whole))
    first, second = records(weighed), records(plain)
    assert [r["loss"] for r in first] == pytest.approx([r["loss"] for r in second], rel=1e-5)
    assert [r["weights"] for r in first] == pytest.approx([2.5 * r["trained_tokens"] for r in second])
    assert all(r["plain"] > 0 and r["plain"] != r["loss"] for r in first)
    theirs = load_file(plain / "adapter" / "adapter_model.safetensors")
    for name, weight in load_file(weighed / "adapter" / "adapter_model.safetensors").items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_its_names_go_through_the_command_line(data, tmp_path):
    output = tmp_path / "out"
    config = keys(output, method="weighted", max_steps=3, eval_split_size=6, per_device_train_batch_size=8)
    config |= {"model_name_or_path": str(data / "model"), "dataset": str(data / "weighed.jsonl"), "save_steps": 2}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config))
    for command in ("check", "preview"):
        assert CliRunner().invoke(app, [command, str(path)]).exit_code == 0
    trained = CliRunner().invoke(app, ["train", str(path)])
    assert trained.exception is None, repr(trained.exception)
    assert trained.exit_code == 0, trained.output
    assert "step 0" in trained.output
    assert "plain loss " in trained.output
    before, *_, after = [record for record in records(output) if record["kind"] == "eval"]
    assert after["loss"] < before["loss"]
    assert {"loss", "plain", "weights", "trained_tokens"} <= before.keys()
    for page in ("report.html", "README.md"):
        assert "weighted loss" in (output / page).read_text()
    assert "Held-out plain loss" in (output / "report.html").read_text()
    measured = CliRunner().invoke(app, ["eval", str(output), str(data / "weighed.jsonl")])
    assert "weighted loss " in measured.stdout
    assert evaluate(str(output), str(data / "weighed.jsonl")).numbers["plain"] > 0
    loaded = load_config(output / "config.resolved.yaml")
    assert loaded.method == "weighted"


def test_a_row_without_its_number_is_named(data, tmp_path):
    with pytest.raises(DataError, match=r"some\.jsonl:1:"):
        finetune(str(data / "model"), str(data / "some.jsonl"), method="weighted", **keys(tmp_path))


def test_a_method_that_is_not_there(data, tmp_path):
    with pytest.raises(ConfigError, match="'dpoo'"):
        finetune(str(data / "model"), str(data / "some.jsonl"), method="dpoo", **keys(tmp_path))


def test_an_open_window_lives_in_checkpoints():
    window = Window.of(SHOWN)
    window.add({"loss": 3.0, "plain": 4.0}, {"tokens": 9, "weights": 1.5, "trained_tokens": 2}, 0.5)
    assert Window.of_dict(json.loads(json.dumps(window.as_dict()))) == window
    window.add({"loss": 1.0, "plain": 2.0}, {"tokens": 1, "weights": 0.5, "trained_tokens": 1}, 0.5)
    assert window.means(SHOWN) == {"loss": 2.0, "plain": 2.0}
    assert Window.of(METHODS["sft"].numbers.trained).as_dict() == {
        "loss_sum": 0.0, "tokens": 0, "trained_tokens": 0, "seconds": 0.0, "steps": 0,
    }  # fmt: skip


def test_names_survive_their_file():
    numbers = METHODS["weighted"].numbers
    assert Numbers.of_document(json.loads(json.dumps(numbers.document()))) == numbers
    assert SHOWN[0].shown({"loss": 1.0}) == "1.00000"
    assert SHOWN[0].shown({}) == "–"
