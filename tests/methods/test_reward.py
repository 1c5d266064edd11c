"""Reward models equal TRL's trainer with transformers' sequence classification."""

import copy
from collections import defaultdict

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

from halfbyte.adapters.lora import add_adapter
from halfbyte.data.answer_documents import as_documents
from halfbyte.data.tables import packed
from halfbyte.methods.answers import score
from tests.helpers.pair_models import (
    PAIRED,
    assert_same_gradients,
    batch_of,
    config,
    gradients,
    mean_loss,
    method,
    pairs,
)
from tests.helpers.pair_models import tokenizer as make_tokenizer
from tests.helpers.patch_models import tiny

ROWS = pairs(5, seed=2)
MARGINS = [0.0, 0.3, 1.5, 0.1, 0.7]


def both(family):
    """A causal LM with a head that scores, and transformers' sequence classification with the same weights."""
    torch.manual_seed(4)
    asked, causal = config(method="reward", r=4), tiny(family, adapter=False)
    plain = {name: value.clone() for name, value in causal.state_dict().items() if not name.startswith("lm_head")}
    one_label = copy.deepcopy(causal.config)
    one_label.num_labels = 1
    theirs = AutoModelForSequenceClassification.from_config(one_label)
    assert theirs.load_state_dict(plain, strict=False).missing_keys == ["score.weight"]
    policy = add_adapter(causal, asked, scores="SEQ_CLS").train()
    theirs = get_peft_model(theirs, copy.deepcopy(policy.peft_config["default"])).train()
    own = dict(policy.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(own[name], std=0.1)
        if parameter.requires_grad:
            parameter.data.copy_(own[name])
    return policy, theirs


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("center", [None, 0.05])
@pytest.mark.parametrize("margins", [False, True])
def test_loss_gradients_and_metrics_equal_trl(family, center, margins):
    policy, theirs = both(family)
    asked = method(method="reward", center_rewards_coefficient=center)
    rows = [row | {"margin": margin} for row, margin in zip(ROWS, MARGINS, strict=True)] if margins else ROWS
    prepared = as_documents(Dataset.from_list(rows), PAIRED, ["margin"] if margins else [])
    batch = asked.collator(config(method="reward"), make_tokenizer())(list(prepared))
    found, sums, counts = mean_loss(asked, policy, [batch])

    trainer = RewardTrainer.__new__(RewardTrainer)
    trainer.accelerator, trainer.model = Accelerator(cpu=True), theirs
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = defaultdict(lambda: defaultdict(list)), 0, 1
    trainer.args = type("Arguments", (), {"center_rewards_coefficient": center})
    order = [*range(0, 10, 2), *range(1, 10, 2)]  # TRL has the chosen answers first
    inputs = {"input_ids": batch["input_ids"][order], "attention_mask": batch["attention_mask"][order]}
    if margins:
        inputs["margin"] = torch.tensor(MARGINS)
    expected = trainer.compute_loss(theirs, inputs)

    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(gradients(found, policy), gradients(expected, theirs))
    logged = trainer._metrics["train"]
    for metric in asked.numbers.trained[1:]:
        assert float(sums[metric.name]) / counts["pairs"] == pytest.approx(logged[metric.name][-1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("layout", [{"padding_free": True}, {"packing": True}], ids=["flat", "packed"])
def test_layouts_give_the_same_scores(layout):
    policy, _ = both("Llama")
    asked, chosen = method(method="reward"), config(method="reward", **layout)
    rows = as_documents(Dataset.from_list(ROWS), PAIRED)
    rows = packed(rows, 64) if layout.get("packing") else rows
    expected, _, _ = mean_loss(asked, policy, [batch_of(ROWS, method="reward")])
    batch = asked.collator(chosen, make_tokenizer())(list(rows))
    assert float(mean_loss(asked, policy, [batch])[0]) == pytest.approx(float(expected), rel=2e-6)
    blank = asked.blank(batch)
    assert asked.counts(blank) == {"pairs": 0}
    assert float(asked.sums(policy, blank)["loss"]) == 0
    assert len(score(policy, batch)) == 2 * len(ROWS)
