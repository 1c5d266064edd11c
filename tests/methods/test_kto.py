"""KTO equals TRL's trainer in the same process, with z over a whole step."""

import json
from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from trl import KTOTrainer
from trl.data_utils import unpair_preference_dataset
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

from halfbyte.data.answer_documents import MISMATCHED, as_documents, mismatched, trained_tokens
from halfbyte.data.collate_answers import answer_collator
from halfbyte.data.prepare_answers import prepare_answers
from halfbyte.methods.answers import reference_log_probs
from halfbyte.modeling import shared_prefix
from halfbyte.train.stepper import SharedNumbers, with_numbers
from halfbyte.utils import notices
from tests.helpers.pair_models import (
    assert_same_gradients,
    config,
    gradients,
    mean_loss,
    method,
    model,
    tokenizer,
)

OWN = ("completion_ids", "completion_mask")


def unpaired(count, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def ids():
        length = int(torch.randint(1, 10, (), generator=generator))
        return torch.randint(3, 101, (length,), generator=generator).tolist()

    rows = [{"prompt_ids": ids(), "completion_ids": ids(), "label": n % 3 != 1} for n in range(count)]
    return [row | {"completion_mask": [1] * len(row["completion_ids"])} for row in rows]


ROWS = unpaired(5)


def prepared(rows, asked, shared=False):
    dataset = Dataset.from_list(rows)
    if asked.looks_ahead:
        return list(as_documents(mismatched(dataset, 64), [OWN, MISMATCHED], ["label"], shared=shared))
    return list(as_documents(dataset, [OWN], ["label"]))


def step(asked, policy, parts, **keys):
    """Mean loss, sums and counts of a step of these micro-batches."""
    collate = asked.collator(config(method="kto", **keys), tokenizer())
    return mean_loss(asked, policy, [collate(part) for part in parts])


def theirs(policy, rows, batch=None, **keys):
    """Loss and metrics of TRL's trainer, made with only the parts that compute them, on rows or on a collated batch."""
    from collections import defaultdict

    from accelerate import Accelerator
    from trl.trainer.utils import add_fused_lm_head

    trainer = KTOTrainer.__new__(KTOTrainer)
    trainer.accelerator, trainer.model = Accelerator(cpu=True), policy
    trainer._metrics, trainer._total_train_tokens, trainer._tp_size = defaultdict(lambda: defaultdict(list)), 0, 1
    trainer.aux_loss_enabled = trainer.precompute_ref_logps = False
    trainer.ref_model = None
    trainer.args = type("Arguments", (), {"gradient_checkpointing_kwargs": None})
    for name, value in keys.items():
        setattr(trainer, name, value)
    trainer.calculate_KL = keys["loss_type"] == "kto"
    add_fused_lm_head(policy.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    if trainer.calculate_KL and batch is None:
        rows = [row | {"KL_completion_ids": rows[n - 1]["completion_ids"]} for n, row in enumerate(rows)]
    batch = DataCollatorForUnpairedPreference(pad_token_id=0)(rows) if batch is None else batch
    loss = trainer._compute_loss(policy, batch, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
@pytest.mark.parametrize("layout", [{}, {"padding_free": True}], ids=["padded", "flat"])
def test_loss_and_gradients_equal_trl(family, loss, layout, shared):
    policy = model(family, seed=11)  # with which z is above 0
    keys = {"beta": 0.3, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    asked = method(method="kto", loss_type=loss, **keys)
    found, sums, counts = step(asked, policy, [prepared(ROWS, asked, shared)], **layout)
    found_gradients = gradients(found, policy)
    expected, logged = theirs(policy, ROWS, loss_type=loss, **keys)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(found_gradients, gradients(expected, policy))
    assert [metric.name for metric in asked.numbers.trained] == list(sums)
    assert (sums["kl"] > 0) == (loss == "kto")
    for metric in asked.numbers.trained[1:]:
        assert float(sums[metric.name]) / counts[metric.over] == pytest.approx(logged[metric.name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("layout", [{}, {"padding_free": True}], ids=["padded", "flat"])
def test_z_is_computed_over_the_whole_step(layout):
    """In uneven micro-batches, one of them of a single label and one blank: the large batch."""
    asked = method(method="kto", beta=0.3)
    for seed in (0, 11):  # z is 0 with the one, and above with the other
        policy, rows = model(seed=seed), prepared(ROWS, asked)
        expected, sums, counts = step(asked, policy, [rows])
        found, found_sums, found_counts = step(asked, policy, [rows[:2], rows[2:4], rows[4:]], **layout)
        assert found_counts == counts
        assert float(found) == pytest.approx(float(expected), rel=2e-6)
        assert float(found_sums["kl"]) == pytest.approx(float(sums["kl"]), rel=1e-5)
        assert_same_gradients(gradients(found, policy), gradients(expected, policy), 5e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("rounded", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("layout", [{}, {"padding_free": True}], ids=["padded", "flat"])
def test_joined_mismatched_answers_give_the_same_losses(layout, rounded, checkpointing):
    """Shared prompts: same loss and gradients as separate documents, in fewer tokens, with a precomputed or computed
    reference; and evaluations with a look-ahead forward."""
    policy, chosen = model(seed=11), config(method="kto", **layout)
    asked = method(method="kto", beta=0.3, device="cpu")
    expected, sums, counts = step(asked, policy, [prepared(ROWS, asked)])
    wanted = gradients(expected, policy)
    if checkpointing:
        policy.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    rows = prepared(ROWS, asked, shared=True)
    assert asked.tokens(rows) == sum(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in ROWS) + sum(
        len(row["other_ids"]) for row in mismatched(Dataset.from_list(ROWS), 64)
    )
    collate = asked.collator(chosen, tokenizer())
    if rounded:
        both = replace(collate.collate, rounded=True, collate=replace(collate.collate.collate, rounded=True))
        collate = replace(collate, collate=both)
    batch = collate(rows)
    assert not asked.needs_ahead([batch])
    reference = reference_log_probs(policy, answer_collator(chosen, tokenizer())(rows))
    parts = reference.split([trained_tokens(row) for row in rows])
    known = collate([row | {"reference": part.tolist()} for row, part in zip(rows, parts, strict=True)])
    for given in (batch, known):
        found, found_sums, found_counts = mean_loss(asked, policy, [given])
        assert found_counts == counts
        assert float(found) == pytest.approx(float(expected), rel=2e-6)
        assert float(found_sums["kl"]) == pytest.approx(float(sums["kl"]), rel=1e-5)
        assert_same_gradients(gradients(found, policy), wanted, 5e-6)
    ahead = SharedNumbers(asked, policy)
    with torch.no_grad():
        evaluated = asked.sums(policy, with_numbers(batch, ahead.of_evaluation([batch])))
    assert float(evaluated["loss"]) == pytest.approx(float(sums["loss"]), rel=2e-6)


def test_without_a_kernel_for_it(monkeypatch):
    """By torch's attention of padded batches."""
    monkeypatch.setattr(shared_prefix.causal, "supports_shared_prefix", lambda query: False)
    policy, asked = model(seed=11), method(method="kto", beta=0.3, device="cpu")
    expected, sums, _ = step(asked, policy, [prepared(ROWS, asked)])
    found, found_sums, _ = step(asked, policy, [prepared(ROWS, asked, shared=True)])
    assert float(found) == pytest.approx(float(expected), rel=2e-6)
    assert float(found_sums["kl"]) == pytest.approx(float(sums["kl"]), rel=1e-5)


def test_mismatched_answers_are_separate_on_gpus_and_in_several_micro_batches():
    rows = prepared(ROWS, method(method="kto"), shared=True)
    for keys in ({"device": "cuda"}, {"device": "cpu", "gradient_accumulation_steps": 2}):
        asked = method(method="kto", **keys)
        batch = asked.collator(config(method="kto"), tokenizer())(rows)
        assert asked.needs_ahead([batch])
        assert asked.tokens(rows) > method(method="kto", device="cpu").tokens(rows)


def test_prompts_get_the_answer_of_the_row_before():
    rows = mismatched(Dataset.from_list(ROWS), 12)
    for n, row in enumerate(rows):
        expected = ROWS[n - 1]["completion_ids"][: max(12 - len(row["prompt_ids"]), 1)]
        assert row["other_ids"] == expected
        assert row["other_mask"] == [1] * len(expected)


def answered(*prompts):
    """Rows with these prompts, each with an answer of its own."""
    return [
        {"prompt_ids": [prompt, 50], "completion_ids": [60 + n], "completion_mask": [1], "label": True}
        for n, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("prompts", "others"),
    [
        ([3, 4, 5], [2, 0, 1]),
        ([3, 3, 4, 4, 5, 5], [4, 5, 0, 1, 2, 3]),
        ([3, 3, 3, 4, 5, 5], [4, 5, 4, 0, 3, 3]),
        ([3, 4, 4, 3], [1, 0, 0, 1]),
        ([3, 3], [1, 0]),
    ],
)
def test_mismatched_answers_are_to_another_prompt(prompts, others):
    rows = answered(*prompts)
    found = mismatched(Dataset.from_list(rows), 64)
    assert found["other_ids"][:] == [rows[at]["completion_ids"] for at in others]
    assert ("one-prompt" in notices.notices_so_far()) == (len(set(prompts)) == 1)


def test_mismatched_answers_of_pairs_match_trl(tmp_path):
    """TRL splits pairs so that all chosen answers come first, so the previous row has another prompt."""
    numbers = "34567"  # 0 and 2 are special tokens
    rows = [{"prompt": f"1{n}", "chosen": f" 5{n}", "rejected": f" 6{n}"} for n in numbers]
    apart = unpair_preference_dataset(Dataset.from_list(rows)).to_list()
    theirs = {(row["prompt"], apart[at - 1]["completion"].strip()) for at, row in enumerate(apart)}
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = prepare_answers(config(method="kto", dataset=str(tmp_path / "pairs.jsonl")), tokenizer(), "unpaired")

    def number(ids):
        return next(str(each) for each in ids if each >= 10)

    ours = {(number(row["prompt_ids"]), number(row["other_ids"])) for row in mismatched(data.train, 64)}
    assert ours == theirs
    assert len(ours) == 10
