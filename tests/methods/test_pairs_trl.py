"""Each preference loss equals TRL's trainer in the same process: loss and adapter gradients."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from halfbyte.config.methods import LOSS_TYPES
from tests.helpers.pair_models import (
    assert_same_gradients,
    batch_of,
    config,
    gradients,
    mean_loss,
    method,
    model,
    pairs,
    tokenizer,
)

ROWS = pairs(5, seed=3)
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")


def arguments(kind, folder, **keys):
    quiet = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return kind(output_dir=str(folder), per_device_train_batch_size=len(ROWS), max_length=64, **quiet, **keys)


def text_rows():
    rows = [{name: " ".join(map(str, row[f"{name}_ids"])) for name in ("prompt", "chosen", "rejected")} for row in ROWS]
    return Dataset.from_list(rows)


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def dpo(request, tmp_path_factory):
    """TRL's trainer of a policy, whose reference is that policy without its adapter."""
    policy = model(request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = arguments(DPOConfig, tmp_path_factory.mktemp("trl"), use_weighting=True)
        trainer = DPOTrainer(policy, args=chosen, train_dataset=text_rows(), processing_class=tokenizer())
    trainer.model.delete_adapter("ref")  # a copy of the policy as it was
    return trainer


def theirs(trainer, **keys):
    """Loss and gradients of TRL's trainer."""
    names = keys.get("loss_type", "sigmoid")
    trainer.loss_types = [names] if isinstance(names, str) else names
    trainer.loss_weights = keys.get("loss_weights") or [1.0] * len(trainer.loss_types)
    defaults = {"beta": 0.1, "label_smoothing": 0.0, "ld_alpha": None, "use_weighting": False}
    defaults |= {"f_divergence_type": "reverse_kl", "f_alpha_divergence_coef": 0.5}
    for name, value in defaults.items():
        setattr(trainer, name, keys.get(name, value))
    trainer.model.train()
    batch = trainer.data_collator([{key: row[key] for key in row if key.endswith("ids")} for row in ROWS])
    loss = trainer._compute_loss(trainer.model, batch, False)
    return loss, gradients(loss, trainer.model)


def compare(trainer, **keys):
    expected, expected_gradients = theirs(trainer, **keys)
    asked = method(**keys)
    found, sums, counts = mean_loss(asked, trainer.model, [batch_of(ROWS, **keys)])
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(gradients(found, trainer.model), expected_gradients)
    logged = trainer._metrics["train"]
    for metric in asked.numbers.trained[1:]:
        if metric.name in logged:
            assert float(sums[metric.name]) / counts[metric.over] == pytest.approx(logged[metric.name][-1], rel=1e-4)
    assert {metric.name for metric in asked.numbers.trained[1:]} - logged.keys() <= {"nll_loss"}
    assert list(sums) == [metric.name for metric in asked.numbers.trained]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSS_TYPES["dpo"])
def test_every_loss_of_dpo(dpo, name):
    beta = 0.03 if name == "discopop" else 0.3  # its temperature makes 20 times as much of a log-prob's rounding
    compare(dpo, loss_type=name, beta=beta, label_smoothing=0.1 if name in SMOOTHED else 0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("divergence", ["forward_kl", "js_divergence", "alpha_divergence"])
@pytest.mark.parametrize("name", ["sigmoid", "ipo"])
def test_divergences(dpo, divergence, name):
    compare(dpo, loss_type=name, f_divergence_type=divergence, f_alpha_divergence_coef=0.7)


@pytest.mark.parametrize(
    "keys",
    [
        {"ld_alpha": 0.3},
        {"use_weighting": True},
        {"use_weighting": True, "loss_type": "apo_zero"},
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
        {"loss_type": "ipo", "ld_alpha": 0.5, "beta": 0.7},
    ],
    ids=lambda keys: " ".join(keys),
)
def test_options_of_dpo(dpo, keys):
    compare(dpo, **keys)


def without_reference(kind, policy, **keys):
    """Loss, gradients and metrics of TRL's CPO or ORPO trainer, of which only what computes them is made."""
    trainer = kind.__new__(kind)
    trainer.accelerator = Accelerator(cpu=True)
    for name, value in {"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0, **keys}.items():
        setattr(trainer, name, value)
    trainer.aux_loss_enabled = False
    batch = {}
    for side in ("chosen", "rejected"):
        ids = [torch.tensor(row["prompt_ids"] + row[f"{side}_ids"]) for row in ROWS]
        labels = [each.clone() for each in ids]
        for each, row in zip(labels, ROWS, strict=True):
            each[: len(row["prompt_ids"])] = -100
        for name, parts, fill in (
            ("input_ids", ids, 0),
            ("attention_mask", [torch.ones_like(each) for each in ids], 0),
            ("labels", labels, -100),
        ):
            batch[f"{side}_{name}"] = pad_sequence(parts, batch_first=True, padding_value=fill)
    loss, metrics = trainer.get_batch_loss_metrics(policy, batch)
    return loss, gradients(loss, policy), metrics


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize(
    "keys",
    [
        {"method": "orpo", "beta": 0.4},
        {"method": "simpo", "beta": 2.0, "simpo_gamma": 1.2},
        {"method": "simpo", "beta": 2.0, "alpha": 0.2, "cpo_alpha": 0.3},
        {"method": "cpo", "cpo_alpha": 0.7, "label_smoothing": 0.2},
        {"method": "cpo", "cpo_alpha": 0.0},
        {"method": "cpo", "loss_type": "hinge"},
        {"method": "cpo", "loss_type": "ipo", "alpha": 0.1},
    ],
    ids=lambda keys: " ".join(f"{key} {value}" for key, value in keys.items()),
)
def test_methods_without_a_reference(family, keys):
    policy, asked = model(family), method(**keys)
    kind = ORPOTrainer if keys["method"] == "orpo" else CPOTrainer
    chosen = config(**keys)
    options = {name: getattr(chosen, name) for name in ("beta", "label_smoothing", "simpo_gamma", "alpha", "cpo_alpha")}
    options["loss_type"] = "simpo" if keys["method"] == "simpo" else chosen.loss_type
    expected, expected_gradients, logged = without_reference(kind, policy, **options)
    found, sums, counts = mean_loss(asked, policy, [batch_of(ROWS, **keys)])
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(gradients(found, policy), expected_gradients)
    for metric in asked.numbers.trained[1:]:
        assert float(sums[metric.name]) / counts[metric.over] == pytest.approx(logged[metric.name], rel=1e-5)
