"""Reward models as rewards: scores equal plain transformers', on shared and on separate weights; runs, plan, resume."""

import json
import shutil

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from typer.testing import CliRunner

from halfbyte.adapters.lora import add_adapter
from halfbyte.cli import app
from halfbyte.config import load_config
from halfbyte.rewards.model_scores import loaded_reward_models
from halfbyte.rewards.score import Rewards
from halfbyte.rewards.specs import read_specs
from halfbyte.train.preflight import prepare_run
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError, HalfbyteError
from tests.helpers.run_records import records_of

PT = {"format": "pt"}


@pytest.fixture(scope="module")
def judges(place, tmp_path_factory):
    """A folder with prompts; adapters with a head, `answers` and `steps`; and a classification model, `whole`."""
    folder = tmp_path_factory.mktemp("judges")
    shutil.copytree(place / "model", folder / "model")
    weights = load_file(folder / "model/model.safetensors")
    weights["lm_head.weight"] *= 15
    save_file(weights, folder / "model/model.safetensors", PT)
    rows = [json.loads(line) for line in (place / "data.jsonl").read_text().splitlines()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " what is"} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    steps = [{"prompt": row["prompt"], "completions": [" it is", " 3?"], "labels": [True, False]} for row in rows]
    (folder / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    keys = {"model_name_or_path": str(folder / "model"), "device": "cpu", "dtype": "float32", "load_in_4bit": False}
    keys |= {"max_length": 96, "r": 4, "learning_rate": 2e-2, "sample_prompts": 0, "max_steps": 5, "warmup_steps": 0}
    for name, method, data in (("answers", "reward", "pairs"), ("steps", "prm", "steps")):
        train(load_config(None, keys | {"method": method, "dataset": str(folder / f"{data}.jsonl"),
                                        "output_dir": str(folder / name)}))  # fmt: skip
    torch.manual_seed(4)
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "whole")
    return folder


def keys(judges, output, rewards, **more):
    found = {"model_name_or_path": str(judges / "model"), "dataset": str(judges / "prompts.jsonl"), "method": "grpo"}
    found |= {"output_dir": str(output), "device": "cpu", "dtype": "float32", "load_in_4bit": False, "r": 4}
    found |= {"reward_funcs": rewards, "num_generations": 4, "max_completion_length": 8, "max_length": 96}
    found |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    return found | {"warmup_steps": 0, "sample_prompts": 0} | more


def entry(judges, name):
    return {"model": str(judges / name)}


TEXTS = [([40, 41, 42], [50, 51, 52, 53]), ([60, 61], [70]), ([44, 45, 46, 47, 48], [33, 34])]


def scored(judges, rewards, *, model, prompts, answers):
    """Return the scores of prompts and answers, with a policy whose own adapter is not zero."""
    config = load_config(None, keys(judges, judges / "none", rewards))
    asked = Rewards(read_specs(rewards, []), [], 1.0, 8)
    tokenizer = AutoTokenizer.from_pretrained(judges / "model")
    with loaded_reward_models(config, asked, model, tokenizer, torch.device("cpu"), torch.float32):
        return [judge(prompts, answers) for judge in asked.models.values()]


def policy(judges):
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(judges / "model", dtype=torch.float32)
    model = add_adapter(base, load_config(None, keys(judges, judges / "none", ["repetition"]))).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.slow
def test_scores_equal_plain_transformers(judges):
    """For an adapter on the trained weights, on a copy of them, and a full model; the policy does not change."""
    shutil.copytree(judges / "model", judges / "copy", dirs_exist_ok=True)
    shutil.copytree(judges / "answers/adapter", judges / "elsewhere", dirs_exist_ok=True)
    said = json.loads((judges / "elsewhere/adapter_config.json").read_text())
    said["base_model_name_or_path"] = str(judges / "copy")
    (judges / "elsewhere/adapter_config.json").write_text(json.dumps(said))
    model, (prompts, answers) = policy(judges), zip(*TEXTS, strict=True)
    ids = torch.tensor([TEXTS[0][0]])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = model(ids).logits
    found = scored(judges, [entry(judges, "answers"), entry(judges, "elsewhere"), entry(judges, "whole")],
                   model=model, prompts=prompts, answers=answers)  # fmt: skip
    head = {"num_labels": 1, "dtype": torch.float32}
    with torch.no_grad():
        assert torch.equal(model(ids).logits, before)
        base = AutoModelForSequenceClassification.from_pretrained(judges / "model", **head)
        theirs = PeftModel.from_pretrained(base, judges / "answers/adapter").eval()
        whole = AutoModelForSequenceClassification.from_pretrained(judges / "whole", **head).eval()
        expected, others = (
            [float(other(torch.tensor([prompt + answer])).logits) for prompt, answer in TEXTS]
            for other in (theirs, whole)
        )
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert not hasattr(model.get_base_model(), "score")
    assert found[0] == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert found[1] == pytest.approx(expected, abs=1e-5, rel=1e-5)
    assert found[2] == pytest.approx(others, abs=1e-5, rel=1e-5)
    assert len({round(value, 3) for value in expected}) == 3


@pytest.mark.slow
def test_steps_are_scored_at_their_ends(judges):
    """The score is the product over the steps of an answer."""
    tokenizer = AutoTokenizer.from_pretrained(judges / "model")
    prompt = tokenizer("what is 1?")["input_ids"]
    texts = [" it is\n 3\n", " it is 4", "\n"]
    answers = [tokenizer(text)["input_ids"] for text in texts]
    (found,) = scored(judges, [entry(judges, "steps")], model=policy(judges), prompts=[prompt] * 3, answers=answers)
    base = AutoModelForTokenClassification.from_pretrained(judges / "model", num_labels=2, dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, judges / "steps/adapter").eval()
    newline = tokenizer("\n")["input_ids"]
    for steps, own in zip(([" it is", " 3"], [" it is 4"]), found, strict=False):
        ids, product = list(prompt), 1.0
        for step in steps:
            ids += tokenizer(step)["input_ids"] + newline
            with torch.no_grad():
                product *= float(theirs(torch.tensor([ids])).logits[0, -1].softmax(-1)[1])
        assert own == pytest.approx(product, abs=1e-5)
    assert found[2] is None


@pytest.mark.slow
def test_a_run_rewarded_by_a_model(judges, tmp_path):
    """Rewards rise; only the policy's adapter is saved; a resumed run is bit-equal."""
    more = {"max_steps": 8, "save_steps": 4, "beta": 0.01, "lr_scheduler_type": "constant"}
    rewards = [entry(judges, "answers"), {"length": {"max": 6}}]
    whole = tmp_path / "whole"
    train(load_config(None, keys(judges, whole, rewards, reward_weights=[1.0, 0.1], **more)))
    expected = records_of(whole)
    values = [record["rewards/answers/mean"] for record in expected["train"]]
    assert sum(values[-2:]) / 2 > sum(values[:2]) / 2 + 0.1
    names = load_file(whole / "adapter/adapter_model.safetensors").keys()
    assert not [name for name in names if "score" in name or "reward" in name]
    assert {path.name for path in (whole / "adapter").iterdir() if path.is_dir()} == set()
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    shutil.rmtree(other / "adapter")
    train(load_config(None, keys(judges, other, rewards, reward_weights=[1.0, 0.1], **more)),
          resume=str(other / "checkpoint-4"))  # fmt: skip
    assert records_of(other) == expected
    mine, theirs = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (other, whole))
    assert all(mine[name].equal(theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "file"), [("answers/adapter", "adapter_model.safetensors"), ("whole", "model.safetensors")]
)
def test_resuming_with_a_changed_reward_model_is_refused(judges, tmp_path, kind, file):
    shutil.copytree(judges / kind, tmp_path / "judge")
    config = load_config(None, keys(judges, tmp_path / "out", [{"model": str(tmp_path / "judge")}], max_steps=2,
                                    save_steps=1))  # fmt: skip
    train(config)
    path = tmp_path / "judge" / file
    save_file({name: tensor + 1e-3 for name, tensor in load_file(path).items()}, path, PT)
    with pytest.raises(ConfigError):
        train(config, resume=str(tmp_path / "out/checkpoint-1"))


def test_the_plan_counts_reward_models(judges, tmp_path):
    plain, shared, whole = (
        prepare_run(load_config(None, keys(judges, tmp_path / "out", rewards))).plan.weights
        for rewards in (["repetition"], [entry(judges, "answers")], [entry(judges, "whole")])
    )
    adapter = load_file(judges / "answers/adapter/adapter_model.safetensors")
    assert shared - plain == sum(4 * tensor.numel() for tensor in adapter.values())
    assert whole - plain == sum(4 * tensor.numel() for tensor in load_file(judges / "whole/model.safetensors").values())


def test_check_and_preview_print_reward_models(judges, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(keys(judges, tmp_path / "out", [entry(judges, "answers"), entry(judges, "whole")])))
    found = CliRunner().invoke(app, ["check", str(file)])
    assert found.exit_code == 0, found.output
    assert "shares" in found.output
    found = CliRunner().invoke(app, ["preview", str(file), "-n", "1", "--rollouts", "2"])
    assert found.exit_code == 0, found.output
    assert "answers: mean " in found.stdout
    assert "whole: mean " in found.stdout


def other_vocabulary(folder):
    config = AutoConfig.from_pretrained(folder, num_labels=1, vocab_size=99, pad_token_id=0, eos_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def many_labels(folder):
    config = AutoConfig.from_pretrained(folder, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "why"), [(other_vocabulary, "99"), (many_labels, "3 labels"), (shutil.rmtree, "judge")]
)
def test_an_unsuitable_reward_model_is_refused(judges, tmp_path, change, why):
    shutil.copytree(judges / "whole", tmp_path / "judge")
    change(tmp_path / "judge")
    with pytest.raises(HalfbyteError, match=why):
        prepare_run(load_config(None, keys(judges, tmp_path / "out", [{"model": str(tmp_path / "judge")}])))


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ([{"model": "model"}], None),
        ([{"model": {"size": 3}}], "'size'"),
        ([{"model": "answers"}, {"model": "steps"}], None),
    ],
)
def test_invalid_reward_models_are_refused_before_the_run(judges, tmp_path, rewards, why):
    for each in rewards:
        if isinstance(each["model"], str):
            each["model"] = str(judges / each["model"])
    with pytest.raises(ConfigError, match=why):
        prepare_run(load_config(None, keys(judges, tmp_path / "out", rewards)))
