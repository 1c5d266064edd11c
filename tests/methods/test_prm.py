"""Process reward models equal the formula in float64 with transformers' token classification."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForTokenClassification

from halfbyte.adapters.lora import add_adapter
from halfbyte.data.prepare import PreparedData
from tests.helpers.pair_models import assert_same_gradients, config, gradients, mean_loss, method
from tests.helpers.pair_models import tokenizer as make_tokenizer
from tests.helpers.patch_models import tiny


def stepwise(count, seed=0):
    """Rows with one to four steps of one to four tokens."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    rows = []
    for _ in range(count):
        lengths = [number(1, 4) for _ in range(number(1, 4))]
        mask = [int(at == length - 1) for length in lengths for at in range(length)]
        prompt, steps = ([number(3, 100) for _ in range(size)] for size in (number(1, 6), sum(lengths)))
        labels = [bool(number(0, 1)) for _ in lengths]
        rows.append({"prompt_ids": prompt, "steps_ids": steps, "steps_mask": mask, "right": labels})
    return rows


ROWS = stepwise(6, seed=3)


def documents(rows, **keys):
    data = PreparedData(Dataset.from_list(rows), None, {})
    return list(method(method="prm").documents(config(method="prm", **keys), data).train)


def batch_of(rows, **keys):
    return method(method="prm").collator(config(method="prm", **keys), make_tokenizer())(documents(rows, **keys))


def both(family):
    """A causal LM with a head of two classes, and transformers' token classification with the same weights in fp64."""
    torch.manual_seed(4)
    causal = tiny(family, adapter=False)
    plain = {name: value.clone() for name, value in causal.state_dict().items() if not name.startswith("lm_head")}
    two_labels = copy.deepcopy(causal.config)
    two_labels.num_labels, two_labels.classifier_dropout = 2, 0.0
    theirs = AutoModelForTokenClassification.from_config(two_labels)
    missing = theirs.load_state_dict(plain, strict=False).missing_keys
    assert missing == ["score.weight", "score.bias"]
    policy = add_adapter(causal, config(method="prm", r=4), scores="TOKEN_CLS").train()
    theirs = get_peft_model(theirs, copy.deepcopy(policy.peft_config["default"])).train()
    own = dict(policy.named_parameters())
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name or "score" in name:
            torch.nn.init.normal_(own[name], std=0.1)
        if parameter.requires_grad:
            parameter.data.copy_(own[name])
    return policy, theirs.double()


def expected_of(model, rows):
    """Mean −log p(label) over all steps, and how many are judged rightly and taken to be right, row by row."""
    losses, accurate, taken = [], 0, 0
    for row in rows:
        logits = model(torch.tensor([[*row["prompt_ids"], *row["steps_ids"]]])).logits[0]
        assert logits.dtype == torch.float64
        ends = [len(row["prompt_ids"]) + at for at, end in enumerate(row["steps_mask"]) if end]
        for end, label in zip(ends, row["right"], strict=True):
            log_sum = torch.logsumexp(logits[end], 0)
            losses.append(log_sum - logits[end, int(label)])
            accurate += int((logits[end, 1] > logits[end, 0]) == label)
            taken += int(logits[end, 1] > logits[end, 0])
    return torch.stack(losses).mean(), accurate, taken


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_loss_gradients_and_metrics_are_the_formulas(family):
    policy, theirs = both(family)
    asked = method(method="prm")
    found, sums, counts = mean_loss(asked, policy, [batch_of(ROWS)])
    expected, accurate, taken = expected_of(theirs, ROWS)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(gradients(found, policy), gradients(expected, theirs))
    assert counts == {"labelled_steps": sum(len(row["right"]) for row in ROWS)}
    assert 0 < accurate < counts["labelled_steps"]
    assert (float(sums["accuracy"]), float(sums["right"])) == (accurate, taken)
    assert [metric.name for metric in asked.numbers.trained] == list(sums)


@pytest.mark.parametrize("layout", [{"padding_free": True}, {"packing": True}], ids=["flat", "packed"])
def test_layouts_and_micro_batches_give_the_same_scores(layout):
    policy, _ = both("Llama")
    asked = method(method="prm")
    expected, sums, counts = mean_loss(asked, policy, [batch_of(ROWS)])
    chosen = {**layout, "max_length": 40}
    if layout.get("packing"):
        assert 1 < len(documents(ROWS, **chosen)) < len(ROWS)
    parts = [batch_of(ROWS[:1], **chosen), batch_of(ROWS[1:], **chosen)]
    found, found_sums, found_counts = mean_loss(asked, policy, parts)
    assert (found_counts, float(found_sums["right"])) == (counts, float(sums["right"]))
    assert float(found) == pytest.approx(float(expected), rel=2e-6)
    assert_same_gradients(gradients(found, policy), gradients(expected, policy), 5e-6)
