"""Preference training as a run: its reference, its records, resuming, evaluating."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from halfbyte.cli import app
from halfbyte.evaluation.held_out import evaluate
from halfbyte.export.merge import merge
from halfbyte.methods import method_of
from halfbyte.methods.answers import score
from halfbyte.runs.saved import load_saved
from halfbyte.train.run import finetune
from halfbyte.utils.errors import ConfigError, TrainingError

NUMBERS = ("chosen", "rejected", "accuracies", "margins")


@pytest.fixture(scope="module")
def data(place):
    """24 sums with a right and a wrong answer."""
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    paired = [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f" no {' 7' * (n % 3)} {n}"}
        for n, row in enumerate(rows)
    ]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in paired))
    single = [
        {"prompt": row["prompt"], "completion": row["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
        for n, row in enumerate(paired)
    ]
    (place / "single.jsonl").write_text("".join(json.dumps(row) + "\n" for row in single))
    return place


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


def keys(output, **more):
    keys = {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False, "r": 4}
    keys |= {"learning_rate": 1e-2, "warmup_steps": 0, "sample_prompts": 0, "max_length": 64, "logging_steps": 1}
    return keys | {"method": "dpo", "per_device_train_batch_size": 4} | more


def run(data, output, **more):
    rows = "single" if more.get("method") == "kto" else "pairs"
    return finetune(str(data / "model"), str(data / f"{rows}.jsonl"), **keys(output, **more))


def records(output, kind="train"):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [record for record in lines if record["kind"] == kind]


def losses(output):
    return [record["loss"] for record in records(output)]


def adapter(output):
    return load_file(output / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo", "cpo"])
def test_it_learns_to_prefer(data, tmp_path, method):
    run(data, tmp_path / "out", method=method, num_train_epochs=4, eval_split_size=6)
    before, *_, after = records(tmp_path / "out", "eval")
    assert after["loss"] < before["loss"]
    assert after["rewards/accuracies"] > 0.8
    assert after["rewards/margins"] > before["rewards/margins"]
    trained = records(tmp_path / "out")
    assert {f"rewards/{name}" for name in NUMBERS} | {"logps/chosen", "logps/rejected", "pairs"} <= trained[0].keys()
    assert trained[0]["pairs"] == 4
    assert "accuracy" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [pytest.param({}, marks=pytest.mark.slow), {"loss_type": "apo_zero_unpaired", "padding_free": True}]
)
def test_single_answers_with_a_label(data, tmp_path, asked):
    run(data, tmp_path / "out", method="kto", num_train_epochs=4, eval_split_size=6, **asked)
    before, *_, after = records(tmp_path / "out", "eval")
    assert after["loss"] < before["loss"] == pytest.approx(0.5, abs=1e-4)
    assert after["rewards/margins"] > 0.1
    assert "kl" in after
    assert after["desirable"] + after["undesirable"] == after["answers"] == 6
    found = evaluate(str(tmp_path / "out"), str(data / "single.jsonl")).numbers
    halves = evaluate(str(tmp_path / "out"), str(data / "single.jsonl"), ["per_device_eval_batch_size=5"]).numbers
    assert halves["loss"] == pytest.approx(found["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="packing"):
        run(data, tmp_path / "other", method="kto", packing=True)


def test_first_losses_of_a_reference_of_each_step_and_of_a_precomputed_one(data, tmp_path):
    """In half the micro-batches: the same steps."""
    run(data, tmp_path / "each", num_train_epochs=1, precompute_ref_log_probs=False)
    run(data, tmp_path / "kept", num_train_epochs=1, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert losses(tmp_path / "kept") == pytest.approx(losses(tmp_path / "each"), rel=1e-4)
    assert losses(tmp_path / "each")[0] == pytest.approx(0.6931, abs=1e-4)
    assert abs(losses(tmp_path / "each")[-1] - 0.6931) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "reward"])
def test_prompts_are_computed_once_and_the_steps_are_the_same(data, tmp_path, method):
    """Compared with a run whose answers have a prompt each."""
    more = {"method": method, "max_steps": 4, "eval_split_size": 6, "num_train_epochs": 1}
    run(data, tmp_path / "once", **more)
    run(data, tmp_path / "apart", **more, use_kernels=False)
    assert losses(tmp_path / "once") == pytest.approx(losses(tmp_path / "apart"), rel=1e-4)
    once, apart = (json.loads((tmp_path / name / "data_report.json").read_text()) for name in ("once", "apart"))
    assert once["train"]["computed_tokens"] < once["train"]["tokens_apart"]
    assert "computed" in (tmp_path / "once" / "report.html").read_text()
    assert once["eval"]["computed_tokens"] < once["eval"]["tokens_apart"]
    assert "computed_tokens" not in apart["train"]
    tokens = [sum(record["tokens"] for record in records(tmp_path / name)) for name in ("once", "apart")]
    assert tokens[0] < tokens[1]
    checks = json.loads((tmp_path / "once" / "checks.json").read_text())
    assert checks["shared_prompts"]["tokens"] > 0
    assert checks["shared_prompts"]["largest_difference"] < 1e-4
    notices = json.loads((tmp_path / "apart" / "environment.json").read_text())["notices"]
    assert "use_kernels: false" in str(notices)
    found = evaluate(str(tmp_path / "once"), str(data / "pairs.jsonl")).numbers
    alone = evaluate(str(tmp_path / "once"), str(data / "pairs.jsonl"), ["use_kernels=false"]).numbers
    assert found == pytest.approx(alone, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_a_wrong_cached_reference_stops_the_run(data, tmp_path, cache):
    from safetensors.torch import save_file

    run(data, tmp_path / "first", max_steps=7)
    [kept] = cache.iterdir()
    save_file({name: values - 0.1 for name, values in load_file(kept).items()}, kept)
    with pytest.raises(TrainingError):
        run(data, tmp_path / "second", max_steps=7)


def test_an_adapter_that_adds_something_at_first_is_no_reference(data, tmp_path):
    with pytest.raises(ConfigError) as error:
        run(data, tmp_path / "out", max_steps=7, init_lora_weights=False)
    assert "init_lora_weights" in error.value.fix


@pytest.mark.slow
def test_continuing_from_an_adapter_it_is_the_reference(data, tmp_path):
    run(data, tmp_path / "first", num_train_epochs=2)
    more = {"adapter_path": str(tmp_path / "first" / "adapter"), "eval_split_size": 6}
    run(data, tmp_path / "second", num_train_epochs=2, **more)
    before = records(tmp_path / "second", "eval")[0]
    assert before["loss"] == pytest.approx(0.6931, abs=1e-4)  # against the base it would be lower
    found = evaluate(str(tmp_path / "second"), str(data / "pairs.jsonl")).numbers
    against_base = evaluate(str(tmp_path / "second"), str(data / "pairs.jsonl"), ["adapter_path=null"]).numbers
    assert found["rewards/margins"] < against_base["rewards/margins"]
    with pytest.raises(ConfigError, match="adapter_path"):
        run(data, tmp_path / "third", precompute_ref_log_probs=False, **more)


@pytest.mark.slow
def test_full_fine_tuning_has_its_first_weights_as_reference(data, tmp_path):
    run(data, tmp_path / "out", use_peft=False, learning_rate=1e-3, num_train_epochs=2)
    assert losses(tmp_path / "out")[0] == pytest.approx(0.6931, abs=1e-4)
    assert losses(tmp_path / "out")[-1] < 0.6
    with pytest.raises(ConfigError, match="use_peft: false"):
        run(data, tmp_path / "other", use_peft=False, precompute_ref_log_probs=False)


@pytest.mark.slow
def test_a_reward_model_reloads_in_plain_transformers(data, tmp_path):
    """Its head is saved with the adapter; a resumed run has equal bytes, head and all."""
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    whole = {"method": "reward", "num_train_epochs": 3, "eval_split_size": 6, "save_steps": 5, "sample_prompts": 2}
    whole["save_total_limit"] = None
    run(data, tmp_path / "out", **whole, dtype="float32")
    before, *_, after = records(tmp_path / "out", "eval")
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > 0.8
    assert json.loads((tmp_path / "out" / "generations.json").read_text()) == []
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    base = AutoModelForSequenceClassification.from_pretrained(data / "model", num_labels=1, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    saved = adapter(tmp_path / "out")
    assert "base_model.model.score.weight" in saved
    saved_model = load_saved(str(tmp_path / "out"), scores=True)
    rows = method_of(saved_model.config).ready(saved_model.config, tokenizer).train
    batch = method_of(saved_model.config).collator(saved_model.config, tokenizer)([rows[n] for n in range(6)])
    with torch.no_grad():
        own = score(saved_model.model, batch).squeeze(-1)
        theirs.config.pad_token_id = tokenizer.pad_token_id
        expected = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)
    assert own.std() > 0.1
    found = evaluate(str(tmp_path / "out"), str(data / "pairs.jsonl")).numbers
    assert found["accuracy"] > 0.8
    (tmp_path / "prompts.txt").write_text("what is 1?\n")
    answered = CliRunner().invoke(app, ["generate", str(tmp_path / "out"), str(tmp_path / "prompts.txt")])
    assert answered.exit_code == 1
    assert "scores" in answered.output
    merge(tmp_path / "out", tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        scores = merged(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1)
    assert float((scores - expected).abs().max()) < 0.05 * float(expected.abs().max())
    part = tmp_path / "part"
    (part / "checkpoint-5").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.resolved.yaml"):
        (part / name).write_bytes((tmp_path / "out" / name).read_bytes())
    for file in (tmp_path / "out" / "checkpoint-5").iterdir():
        (part / "checkpoint-5" / file.name).write_bytes(file.read_bytes())
    run(data, part, **whole, resume_from_checkpoint=True)
    assert losses(part) == losses(tmp_path / "out")
    assert all(torch.equal(weight, saved[name]) for name, weight in adapter(part).items())
    with pytest.raises(ConfigError, match="use_peft: false"):
        run(data, tmp_path / "full", method="reward", use_peft=False)


@pytest.mark.slow
def test_a_process_reward_model_reloads_in_plain_transformers(data, tmp_path):
    """It learns which steps are right; a resumed run has equal bytes, head and all."""
    from peft import PeftModel
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    rows = [
        {"prompt": f"{n} and {n + 1}?", "completions": [f" is {n}", " no 7", f" it {n}"], "labels": [True, False, True]}
        for n in range(24)
    ]
    file = data / "steps.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = {"method": "prm", "num_train_epochs": 4, "eval_split_size": 6, "save_steps": 5, "sample_prompts": 2}
    whole = keys(tmp_path / "out", save_total_limit=None, **whole)
    finetune(str(data / "model"), str(file), **whole)
    before, *_, after = records(tmp_path / "out", "eval")
    assert after["loss"] < before["loss"]
    assert after["accuracy"] > 0.9
    assert after["labelled_steps"] == 18
    assert json.loads((tmp_path / "out" / "generations.json").read_text()) == []
    saved = adapter(tmp_path / "out")
    assert {"base_model.model.score.weight", "base_model.model.score.bias"} <= saved.keys()
    tokenizer = AutoTokenizer.from_pretrained(data / "model")
    base = AutoModelForTokenClassification.from_pretrained(data / "model", num_labels=2, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    own = load_saved(str(tmp_path / "out"), scores=True)
    method = method_of(own.config)
    batch = method.collator(own.config, tokenizer)([method.ready(own.config, tokenizer).train[n] for n in range(6)])
    with torch.no_grad():
        found = score(own.model, batch, "at")
        logits = theirs(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(found, logits.flatten(0, 1)[batch["at"]], rtol=1e-5, atol=1e-5)
    assert evaluate(str(tmp_path / "out"), str(file)).numbers["accuracy"] > 0.9
    merge(tmp_path / "out", tmp_path / "merged")
    merged = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        outputs = merged(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    assert float((outputs - logits).abs().max()) < 0.05 * float(logits.abs().max())
    part = tmp_path / "part"
    (part / "checkpoint-5").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.resolved.yaml"):
        (part / name).write_bytes((tmp_path / "out" / name).read_bytes())
    for each in (tmp_path / "out" / "checkpoint-5").iterdir():
        (part / "checkpoint-5" / each.name).write_bytes(each.read_bytes())
    finetune(str(data / "model"), str(file), **{**whole, "output_dir": str(part), "resume_from_checkpoint": True})
    assert losses(part) == losses(tmp_path / "out")
    assert all(torch.equal(weight, saved[name]) for name, weight in adapter(part).items())
