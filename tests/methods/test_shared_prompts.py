"""Answers that share a prompt equal answers with separate prompts: losses, gradients, references and attention."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset
from transformers import AutoConfig, GPT2Config

from halfbyte.adapters.lora import add_adapter
from halfbyte.data.answer_documents import as_documents, first_prompt, with_own_prompts
from halfbyte.data.collate_answers import answer_collator
from halfbyte.data.tables import packed
from halfbyte.methods.answers import log_probs
from halfbyte.modeling.attention import with_shared_prefixes
from halfbyte.modeling.patch import unpatch
from halfbyte.modeling.shared_prefix import unshared_reason
from tests.helpers.families import FAMILIES
from tests.helpers.pair_models import (
    PAIRED,
    assert_same_gradients,
    config,
    gradients,
    mean_loss,
    method,
    model,
    pairs,
)
from tests.helpers.pair_models import tokenizer as make_tokenizer
from tests.helpers.patch_models import tiny

ROWS = [row | {"margin": 0.1 * number} for number, row in enumerate(pairs(6, seed=3, longest=20))]
LAYOUTS = [{}, {"padding_free": True}, {"packing": True}]
METHODS = [
    {"method": "dpo", "loss_type": ["sigmoid", "sft"]},
    {"method": "dpo", "loss_type": "ipo", "use_weighting": True},
    {"method": "orpo"},
    {"method": "simpo"},
    {"method": "cpo"},
    {"method": "reward"},
]
SHARING = ["Llama", "Qwen2", "Qwen3", "Gemma", "Phi3", "Qwen3Moe"]


def prepared(asked, *, shared, rows=ROWS):
    numbers = ["margin"] if asked["method"] == "reward" else []
    return as_documents(Dataset.from_list(rows), PAIRED, numbers, shared=shared)


def collated(asked, *, shared, rounded=False, rows=ROWS, **layout):
    made = prepared(asked, shared=shared, rows=rows)
    made = packed(made, 128) if layout.get("packing") else made
    chosen = config(**asked, **layout)
    if rounded:
        collate = answer_collator(chosen, make_tokenizer())
        return replace(collate, rounded=True, collate=replace(collate.collate, rounded=True))(list(made))
    return method(**asked).collator(chosen, make_tokenizer())(list(made))


def policy_of(asked, family="Llama"):
    if asked["method"] != "reward":
        return model(family)
    torch.manual_seed(4)
    policy = add_adapter(tiny(family, adapter=False), config(**asked, r=4), scores="SEQ_CLS").train()
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


def assert_alike(asked, policy, batch, expected, tolerance=2e-6):
    loss, sums, counts = mean_loss(method(**asked), policy, [expected])
    gradient = gradients(loss, policy)
    found, found_sums, found_counts = mean_loss(method(**asked), policy, [batch])
    assert found_counts == counts
    assert float(found) == pytest.approx(float(loss), rel=tolerance)
    for name, value in sums.items():
        assert float(found_sums[name]) == pytest.approx(float(value), rel=1e-5, abs=2e-5), name
    assert_same_gradients(gradients(found, policy), gradient, tolerance)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("asked", METHODS, ids=lambda asked: "-".join(map(str, asked.values())))
@pytest.mark.parametrize("layout", LAYOUTS, ids=["padded", "flat", "packed"])
def test_losses_and_gradients_equal_those_of_separate_prompts(asked, layout):
    policy = policy_of(asked)
    batch, expected = (collated(asked, shared=shared, **layout) for shared in (True, False))
    assert batch["input_ids"].numel() < expected["input_ids"].numel()
    assert_alike(asked, policy, batch, expected)


@pytest.mark.parametrize("family", SHARING)
def test_families(family):
    policy = model(family)
    assert unshared_reason(config(), policy.get_base_model().config) == ""
    assert_alike(METHODS[0], policy, *(collated(METHODS[0], shared=shared) for shared in (True, False)))


def test_rounded_batch_with_activation_checkpointing():
    policy = model("Qwen3")
    policy.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    batch = collated(METHODS[0], shared=True, rounded=True)
    assert batch["input_ids"].shape[1] == 128
    assert_alike(METHODS[0], policy, batch, collated(METHODS[0], shared=False))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_the_isolation_check_fit_a_batch(layout):
    """With separate prompts, the answers of a packed row can exceed the row's tokens."""
    rows = prepared({"method": "dpo"}, shared=True, rows=pairs(60, seed=3, longest=20))
    chosen = config(method="dpo", max_length=512, **layout)
    rows = packed(rows, 2 * chosen.max_length) if layout.get("packing") else rows
    collate = answer_collator(chosen, make_tokenizer(), torch.device("cuda"))
    for row in rows:
        first = first_prompt(row)
        batches = [collate([each]) for each in (first, with_own_prompts(first))]
        tokens = [batch["input_ids"].flatten()[batch["at"]] for batch in batches]
        for batch in (batch for batch in batches if "cu_seq_lens_q" in batch):
            bounds = batch["cu_seq_lens_q"]
            assert bounds.diff().min() >= 0
            assert bounds[-1] == batch["input_ids"].numel()
        wanted = [batch["wanted"][batch["answer"] >= 0] for batch in batches]
        assert torch.equal(*wanted)
        assert torch.equal(*(each[: len(wanted[0])] for each in tokens))


@pytest.mark.parametrize("rounded", [False, True])
def test_another_answer_does_not_change_a_bit_of_its_sibling(rounded):
    policy, changed = model(), [dict(row) for row in ROWS]
    changed[2]["rejected_ids"] = [(token + 1) % 97 + 3 for token in ROWS[2]["rejected_ids"]]
    before, after = (collated(METHODS[0], shared=True, rounded=rounded, rows=rows) for rows in (ROWS, changed))
    found, other = (log_probs(policy, batch) for batch in (before, after))
    its = before["answer"] == 5
    assert its.any()
    assert torch.equal(found[~its], other[~its])
    assert not torch.equal(found[its], other[its])


def test_answer_attends_to_its_prompt():
    policy, changed = model(), [dict(row) for row in ROWS]
    changed[2]["prompt_ids"] = [*changed[2]["prompt_ids"][:-1], 50]
    assert ROWS[2]["prompt_ids"][-1] != 50
    before, after = (collated(METHODS[0], shared=True, rows=rows) for rows in (ROWS, changed))
    moved = log_probs(policy, before) != log_probs(policy, after)
    own = (before["answer"] == 4) | (before["answer"] == 5)
    assert moved[own].all()
    assert not moved[~own].any()


def test_kto_with_several_micro_batches_uses_separate_mismatched_answers():
    """Steps of one micro-batch use the joined layout: see test_kto."""
    rows = [{**row, "label": number % 2 == 0} for number, row in enumerate(ROWS)]
    asked = method(method="kto", gradient_accumulation_steps=2)
    made = {
        shared: list(as_documents(Dataset.from_list(rows), PAIRED, ["label"], shared=shared))
        for shared in (True, False)
    }
    collate = asked.collator(config(method="kto"), make_tokenizer())
    batches = {shared: collate(found) for shared, found in made.items()}
    assert batches[True].keys() == batches[False].keys()
    for name, value in batches[False].items():
        assert torch.equal(batches[True][name], value), name
    assert asked.tokens(made[True]) == asked.tokens(made[False])
    both = answer_collator(config(), make_tokenizer())
    assert both(made[True])["input_ids"].numel() < both(made[False])["input_ids"].numel()


def test_restored_model_is_unpatched():
    policy, batch = model(), collated(METHODS[0], shared=True)
    configured = policy.get_base_model().config
    log_probs(policy, batch)
    assert configured._attn_implementation == "halfbyte"
    plain = collated(METHODS[0], shared=False)
    bound = log_probs(policy, plain)
    unpatch(policy)
    assert configured._attn_implementation == "sdpa"
    assert torch.equal(log_probs(policy, plain), bound)
    assert with_shared_prefixes(policy, plain).keys() == plain.keys()


@pytest.mark.parametrize(
    ("family", "keys", "asked", "why"),
    [
        ("Mistral", {"sliding_window": 32}, {}, "window of 32 tokens, below max_length"),
        ("Mistral", {"sliding_window": 64}, {}, ""),
        ("Gemma2", {"attn_logit_softcapping": 20.0, "sliding_window": 4096}, {}, "caps its attention scores"),
        ("gpt_oss", {}, {}, "heads have sinks"),
        ("Llama", {"attention_dropout": 0.1}, {}, "attention_dropout"),
        ("Llama", {}, {"use_kernels": False}, "use_kernels: false"),
        ("Llama", {}, {"attn_implementation": "eager"}, "attn_implementation is eager"),
        ("Gemma3", {}, {}, "takes images"),
        ("Llama", {}, {}, ""),
    ],
)
def test_unsupported_models_do_not_share_prompts(family, keys, asked, why):
    found = unshared_reason(config(**asked), AutoConfig.for_model(family.lower(), **keys))
    assert why in found
    assert bool(found) == bool(why)


def test_unknown_models_do_not_share_prompts():
    assert unshared_reason(config(), GPT2Config()) == "halfbyte does not know the layers of gpt2"
    assert set(SHARING) < set(FAMILIES)
