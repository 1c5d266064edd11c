"""Pairs in every batch layout and in several micro-batches, and their losses in fp64 from the papers' equations."""

import math
from dataclasses import replace

import pytest
import torch

from halfbyte.config.methods import LOSS_TYPES
from halfbyte.data.answer_documents import trained_tokens
from halfbyte.data.collate_answers import AnswerCollator
from halfbyte.data.tables import packed
from halfbyte.methods.answers import as_reference, log_probs, reference_log_probs
from halfbyte.methods.pair_losses import CPO_LOSSES, DPO_LOSSES, KTO_LOSSES, Options, Pairs, orpo, simpo
from halfbyte.utils.errors import ModelError
from tests.helpers.pair_models import (
    assert_same_gradients,
    batch_of,
    config,
    documents,
    gradients,
    mean_loss,
    method,
    model,
    pairs,
)
from tests.helpers.pair_models import tokenizer as make_tokenizer

ROWS = pairs(7, seed=1)
LAYOUTS = [
    {"padding_free": True},
    {"packing": True},
    {"packing": True, "rounded": True},
    {"rounded": True},
]
METHODS = [{"method": "dpo", "loss_type": ["sigmoid", "sft"]}, {"method": "orpo"}, {"method": "cpo"}]


def collated(rows, asked, **layout):
    """A batch as a CPU gets it, or with `rounded` as a GPU does."""
    rounded = layout.pop("rounded", False)
    chosen = config(**asked, **layout)
    collate = method(**asked).collator(chosen, make_tokenizer())
    prepared = documents(rows)
    if layout.get("packing"):
        prepared = packed(prepared, 64)
        assert len(prepared) < len(rows)
    return replace(collate, rounded=rounded)(list(prepared))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("asked", METHODS, ids=lambda asked: asked["method"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=" and ".join)
def test_batch_layouts_give_the_same_step(asked, layout):
    policy = model()
    expected, sums, counts = mean_loss(method(**asked), policy, [batch_of(ROWS, **asked)])
    batch = collated(ROWS, asked, **layout)
    found, found_sums, found_counts = mean_loss(method(**asked), policy, [batch])
    assert found_counts == counts
    assert float(found) == pytest.approx(float(expected), rel=2e-6)
    expected_sums = {name: float(value) for name, value in sums.items()}
    assert {name: float(value) for name, value in found_sums.items()} == pytest.approx(
        expected_sums, rel=1e-5, abs=1e-5
    )
    assert_same_gradients(gradients(found, policy), gradients(expected, policy), 5e-6)
    if layout.get("rounded"):
        assert len(batch["at"]) > counts["trained_tokens"]


@pytest.mark.parametrize("asked", METHODS, ids=lambda asked: asked["method"])
def test_accumulation_equals_the_large_batch(asked):
    policy = model()
    expected, _, counts = mean_loss(method(**asked), policy, [batch_of(ROWS, **asked)])
    parts = [batch_of(ROWS[:3], **asked), batch_of(ROWS[3:6], **asked), batch_of(ROWS[6:], **asked)]
    blank = method(**asked).blank(parts[0])
    found, _, found_counts = mean_loss(method(**asked), policy, [*parts, blank])
    assert found_counts == counts
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
    assert_same_gradients(gradients(found, policy), gradients(expected, policy), 5e-6)


def test_evaluations_weigh_the_likelihood_by_its_own_tokens():
    asked = {"method": "cpo", "cpo_alpha": 0.7}
    policy = model()
    expected, _, _ = mean_loss(method(**asked), policy, [batch_of(ROWS, **asked)])
    found = [method(**asked).sums(policy, batch_of(part, **asked)) for part in (ROWS[:4], ROWS[4:])]
    _, _, counts = mean_loss(method(**asked), policy, [batch_of(ROWS, **asked)])
    sums = {name: float(sum(each[name] for each in found)) for name in found[0]}
    means = {metric.name: sums[metric.name] / counts[metric.over] for metric in method(**asked).numbers.trained}
    assert method(**asked).evaluation(means, counts)["loss"] == pytest.approx(float(expected), rel=1e-6)


def test_a_precomputed_reference_is_the_reference():
    policy, batch = model(), batch_of(ROWS)
    reference = reference_log_probs(policy, batch)
    rows = list(documents(ROWS))
    parts = reference.split([trained_tokens(row) for row in rows])
    rows = [row | {"reference": part.tolist()} for row, part in zip(rows, parts, strict=True)]
    again = method().collator(config(), make_tokenizer())(rows)
    torch.testing.assert_close(again["reference"], reference)
    assert float(mean_loss(method(), policy, [again])[0]) == pytest.approx(
        float(mean_loss(method(), policy, [batch])[0])
    )
    with policy.disable_adapter():
        torch.testing.assert_close(log_probs(policy, batch), reference)
        assert not torch.allclose(log_probs(model(seed=1), batch), reference)
    assert not torch.allclose(log_probs(policy, batch), reference)


def test_the_reference_is_never_silently_the_base():
    policy, batch = model(), batch_of(ROWS)
    policy.add_adapter("reference", policy.peft_config["default"])
    for name, parameter in policy.named_parameters():
        if ".reference." in name:
            parameter.data.copy_(0.5 * policy.get_parameter(name.replace(".reference.", ".default.")))
    with policy.disable_adapter():
        base = log_probs(policy, batch)
    own = log_probs(policy, batch)
    with as_reference(policy):
        kept = log_probs(policy, batch)
    assert not torch.allclose(kept, base)
    assert not torch.allclose(kept, own)
    torch.testing.assert_close(log_probs(policy, batch), own)
    with pytest.raises(ModelError), as_reference(model(adapter=False)):
        pass


# --- formulas, in fp64 -----------------------------------------------------------------------------------------------

BETA, WRONG, TAU, GAMMA, ALPHA = 0.3, 0.1, 0.05, 0.6, 0.2
NUMBERS = {
    "chosen": -7.0,
    "rejected": -11.0,
    "ref_chosen": -8.5,
    "ref_rejected": -10.0,
    "chosen_tokens": 4.0,
    "rejected_tokens": 5.0,
}
OPTIONS = Options(beta=BETA, label_smoothing=WRONG, discopop_tau=TAU, simpo_gamma=GAMMA)


def sigma(x):
    return 1 / (1 + math.exp(-x))


def written():
    """Each loss as its paper has it, of `NUMBERS`: w and n are log-ratios, mw and ml their means over tokens."""
    w, n = -7 + 8.5, -11 + 10
    d, m = w - n, w / 4 - n / 5
    mw, ml = -7 / 4, -11 / 5
    s, b = sigma, BETA
    mixed = s(b * d / TAU)
    q = s(b * d)
    return {
        "sigmoid": -math.log(s(b * d)),
        "hinge": max(0.0, 1 - b * d),
        "ipo": (m - 1 / (2 * b)) ** 2,
        "exo_pair": q * math.log(q / (1 - WRONG)) + (1 - q) * math.log((1 - q) / WRONG),
        "nca_pair": -math.log(s(b * w)) - 0.5 * math.log(s(-b * w)) - 0.5 * math.log(s(-b * n)),
        "robust": (-(1 - WRONG) * math.log(s(b * d)) + WRONG * math.log(s(-b * d))) / (1 - 2 * WRONG),
        "bco_pair": -math.log(s(b * w)) - math.log(s(-b * n)),
        "sppo_hard": (w - 1 / (2 * b)) ** 2 + (n + 1 / (2 * b)) ** 2,
        "aot": -(1 - WRONG) * math.log(s(b * d)) - WRONG * math.log(s(-b * d)),
        "aot_unpaired": -(1 - WRONG) * math.log(s(b * d)) - WRONG * math.log(s(-b * d)),
        "apo_zero": 1 - s(b * w) + s(b * n),
        "apo_down": s(b * w) + 1 - s(b * (w - n)),
        "discopop": -(1 - mixed) * math.log(s(b * d)) + mixed * math.exp(-b * d),
        "sigmoid_norm": -math.log(s(b * m)),
        "orpo": -b
        * math.log(s(math.log(math.exp(mw) / (1 - math.exp(mw))) - math.log(math.exp(ml) / (1 - math.exp(ml))))),
        "simpo": -(1 - WRONG) * math.log(s(b * (mw - ml) - GAMMA)) - WRONG * math.log(s(-b * (mw - ml) + GAMMA)),
    }


def exact():
    return Pairs(
        **{name: torch.tensor([value], dtype=torch.float64) for name, value in NUMBERS.items()}, real=torch.ones(1)
    )


@pytest.mark.parametrize("name", [*DPO_LOSSES, "orpo", "simpo"])
def test_formulas(name):
    loss = DPO_LOSSES.get(name) or {"orpo": orpo, "simpo": simpo}[name]
    assert float(loss(exact(), OPTIONS)) == pytest.approx(written()[name], rel=1e-12)


def test_formulas_of_alpha_and_of_single_answers():
    options = replace(OPTIONS, alpha=ALPHA, label_smoothing=0.0)
    r = {n: (1 - math.exp(NUMBERS[n]) ** -ALPHA) / ALPHA for n in ("chosen", "rejected")}
    assert float(CPO_LOSSES["sigmoid"](exact(), options)) == pytest.approx(
        -math.log(sigma(BETA * (r["chosen"] - r["rejected"]))), rel=1e-12
    )
    ratios, good = torch.tensor([1.5, -0.4], dtype=torch.float64), torch.tensor([True, False])
    z = torch.tensor(0.7, dtype=torch.float64)
    expected = {
        "kto": [1 - sigma(BETA * (1.5 - 0.7)), 1 - sigma(BETA * (0.7 + 0.4))],
        "apo_zero_unpaired": [1 - sigma(BETA * 1.5), sigma(BETA * -0.4)],
    }
    for name, loss in KTO_LOSSES.items():
        assert loss(ratios, good, z, BETA).tolist() == pytest.approx(expected[name], rel=1e-12)


def test_every_loss_type_is_implemented():
    assert {*DPO_LOSSES, "sft"} == set(LOSS_TYPES["dpo"])
    assert set(CPO_LOSSES) == set(LOSS_TYPES["cpo"])
    assert set(KTO_LOSSES) == set(LOSS_TYPES["kto"])


def test_rows_with_several_pairs_list_no_prompt_tokens():
    batch = AnswerCollator(method().collator(config(packing=True), make_tokenizer()).collate)(
        list(packed(documents(ROWS[:3]), 64))
    )
    flat = batch["input_ids"].flatten()
    for number in range(6):
        own = batch["answer"] == number
        row, side = ROWS[:3][number // 2], ("chosen_ids", "rejected_ids")[number % 2]
        assert flat[batch["at"][own] + 1].tolist() == batch["wanted"][own].tolist() == row[side]
        assert batch["place"][own].tolist() == list(range(len(row[side])))
