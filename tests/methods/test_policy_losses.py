"""Losses of policy optimization equal TRL's trainers, whose own methods compute them here from the same numbers."""

from types import MethodType, SimpleNamespace

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from halfbyte.config.methods import LOSS_TYPES
from halfbyte.methods.policy import Policy
from halfbyte.methods.policy_losses import Answers, most_uncertain, policy_loss

ROWS, WIDTH, LONGEST = 6, 9, 12
LENGTHS = torch.tensor([9, 1, 4, 7, 0, 3])  # one answer was masked


class Accelerator:
    num_processes = 1
    sync_gradients = True

    @staticmethod
    def reduce(x, reduction="sum"):
        return x

    @staticmethod
    def gather(x):
        return x

    @staticmethod
    def pad_across_processes(x, **_):
        return x


def numbers(seed=0):
    """Padded log-probabilities [B, T] and what goes with them."""
    drawn = torch.Generator().manual_seed(seed)
    mask = (torch.arange(WIDTH) < LENGTHS.unsqueeze(1)).float()

    def near(x, scale):
        return x + scale * torch.randn(x.shape, generator=drawn)

    log_probs = -2 * torch.rand(ROWS, WIDTH, generator=drawn) - 0.1
    return SimpleNamespace(
        mask=mask,
        log_probs=log_probs,
        old=near(log_probs, 0.4),
        reference=near(log_probs, 0.3),
        sampled=near(log_probs, 0.3),
        entropy=3 * torch.rand(ROWS, WIDTH, generator=drawn),
        corrects=False,
        advantages=torch.tensor([1.3, -0.7, 0.0, -1.1, 0.9, 0.4]),
    )


def trainer(policy: Policy, found, log_probs, entropy):
    """Return the inputs of TRL's methods, with given log-probabilities."""
    keys = {name: getattr(policy, name) for name in Policy.__dataclass_fields__ if name != "loss_type"}
    theirs = SimpleNamespace(
        **keys,
        loss_type=policy.loss_type,
        epsilon_low=policy.epsilon,
        top_entropy_threshold=policy.top_entropy_quantile,
        max_completion_length=LONGEST,
        use_vllm=found.corrects,
        vllm_importance_sampling_correction=True,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=policy.entropy_coef != 0,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        accelerator=Accelerator,
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**keys, steps_per_generation=1),
        _metrics={"train": SimpleNamespace()},
    )
    theirs.epsilon_high = policy.high
    theirs._metrics = {"train": {name: [] for name in METRICS}}
    theirs._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropy, None)
    theirs.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    theirs.get_gamma_weights = GRPOTrainer.get_gamma_weights
    theirs.get_high_entropy_mask = MethodType(GRPOTrainer.get_high_entropy_mask, theirs)
    return theirs


METRICS = [
    *("kl", "entropy", "policy_loss", "entropy_coef", "cispo_clip_ratio", "vespo/phi_seq_mean"),
    *(f"clip_ratio/{name}" for name in ("low_mean", "high_mean", "region_mean", "low_min", "high_max")),
]


def of_trl(policy, found, log_probs, entropy):
    theirs = trainer(policy, found, log_probs, entropy)
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64),
        "completion_mask": found.mask,
        "advantages": found.advantages,
        "old_per_token_logps": found.old,
        "ref_per_token_logps": found.reference,
        "num_items_in_batch": found.mask.sum(),
    } | ({"importance_sampling_ratio": ratios(policy, found)} if found.corrects else {})
    return GRPOTrainer._compute_loss(theirs, None, inputs), theirs._metrics["train"]


def ratios(policy, found):
    """Lines 2666 to 2703 of TRL's trainer."""
    level, _, how = policy.sampling_mode.partition("_")
    apart = (found.old - found.sampled) * found.mask
    ratio = (apart.sum(-1, keepdim=True) if level == "sequence" else apart).exp()
    low, high = policy.importance_sampling_clip_min, policy.importance_sampling_clip_max
    if how == "truncate":
        return torch.clamp(ratio, min=low, max=high)
    return ratio.masked_fill((ratio < (low or -torch.inf)) | (ratio > (high or torch.inf)), 0.0)


def of_ours(policy, found, log_probs, entropy, fill=0):
    """fill: tokens that fill up."""

    def flat(x, value=0.0):
        return torch.nn.functional.pad(x[found.mask.bool()], (0, fill), value=value)

    tokens = int(LENGTHS.sum())
    answer = torch.nn.functional.pad(torch.arange(ROWS).repeat_interleave(LENGTHS), (0, fill), value=-1)
    reference = flat(found.reference) if policy.beta else None
    sampled = found.sampled if found.corrects else found.old
    answers = Answers(answer, found.advantages, flat(found.old), flat(sampled), reference, found.corrects)
    sums = policy_loss(flat(log_probs), flat(entropy), answers, policy)
    over = {"generated": tokens, "tokens": tokens, "answers": ROWS, "longest": ROWS * LONGEST}
    return sums["loss"] / over[policy.divisor] - policy.entropy_coef * sums["bonus"], sums, tokens


OPTIONS = {
    "plain": {},
    "higher": {"epsilon_high": 0.28},
    "two-sided": {"delta": 1.3},
    "kl": {"beta": 0.1},
    "kl-biased": {"beta": 0.1, "use_bias_correction_kl": False},
    "sequence": {"importance_sampling_level": "sequence"},
    "sequence-kl": {"importance_sampling_level": "sequence", "beta": 0.1, "delta": 1.2},
    "uncertain": {"top_entropy_quantile": 0.3},
    "entropy": {"entropy_coef": 0.05},
    "entropy-uncertain": {"entropy_coef": 0.05, "top_entropy_quantile": 0.5},
    "off-policy": {"off_policy_mask_threshold": 0.05},
    "all": {"epsilon_high": 0.3, "beta": 0.02, "top_entropy_quantile": 0.6, "entropy_coef": 0.01, "delta": 1.4},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("loss_type", LOSS_TYPES["grpo"])
def test_equals_trl(loss_type, options):
    """Loss, gradients by log-probabilities and entropy, KL and clipped shares."""
    equal_to_trl(Policy(loss_type, **options), numbers())


CORRECTIONS = {
    "token_truncate": {"importance_sampling_clip_max": 1.1},
    "token_mask": {"importance_sampling_clip_max": 1.2, "importance_sampling_clip_min": 0.8},
    "sequence_truncate": {"importance_sampling_clip_max": 1.5, "importance_sampling_clip_min": 0.9},
    "sequence_mask": {"importance_sampling_clip_max": 2.0},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", CORRECTIONS)
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "vespo"])
def test_importance_sampling_correction_equals_trl(loss_type, mode):
    if loss_type == "vespo" and mode.startswith("sequence"):
        pytest.skip("TRL refuses it, and so do we")
    found = numbers(4)
    found.corrects = True
    policy = Policy(loss_type, beta=0.05, importance_sampling_mode=mode, **CORRECTIONS[mode])
    weights = ratios(policy, found).expand(ROWS, WIDTH)[found.mask.bool()]
    assert len(weights.unique()) > 2
    sums = equal_to_trl(policy, found)
    torch.testing.assert_close(sums["weights"], weights.sum())


def equal_to_trl(policy, found):
    """With and without tokens that fill up."""
    equal_with_fill(policy, found, 7)
    return equal_with_fill(policy, found, 0)


def equal_with_fill(policy, found, fill):
    ours, theirs = ([x.clone().requires_grad_() for x in (found.log_probs, found.entropy)] for _ in range(2))
    loss, sums, tokens = of_ours(policy, found, *ours, fill)
    expected, metrics = of_trl(policy, found, *theirs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            torch.zeros_like(mine) if mine.grad is None else mine.grad,
            torch.zeros_like(other) if other.grad is None else other.grad,
            rtol=1e-5,
            atol=1e-7,
        )
    over = ROWS if policy.by_answers else tokens
    if policy.beta:
        assert float(sums["kl"]) / tokens == pytest.approx(metrics["kl"][0], rel=1e-5)
    if metrics["clip_ratio/low_mean"]:
        assert float(sums["low"]) / over == pytest.approx(metrics["clip_ratio/low_mean"][0])
        assert float(sums["high"]) / over == pytest.approx(metrics["clip_ratio/high_mean"][0])
        assert float(sums["low"] + sums["high"]) / over == pytest.approx(metrics["clip_ratio/region_mean"][0])
    if metrics["cispo_clip_ratio"]:
        assert float(sums["high"]) / over == pytest.approx(metrics["cispo_clip_ratio"][0])
    return sums


def test_sampling_policy_has_ratio_one():
    """Without `old`, as in a generation's first step: the gradient is that of −A log π."""
    found, policy = numbers(1), Policy("dapo")
    kept = found.mask.bool()
    log_probs = found.log_probs[kept].requires_grad_()
    answer = torch.arange(ROWS).repeat_interleave(LENGTHS)
    sums = policy_loss(
        log_probs, found.entropy[kept], Answers(answer, found.advantages, None, found.old[kept], None), policy
    )
    sums["loss"].backward()
    torch.testing.assert_close(log_probs.grad, -found.advantages[answer])
    assert sums["low"] == sums["high"] == 0


def test_rloo_equals_trl():
    found, policy = numbers(2), Policy("rloo")
    found.old = found.log_probs + 0.05 * torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    found.mask[4, 0] = 1  # of an answer without tokens TRL counts a loss that has no gradient
    lengths = found.mask.sum(1).long()
    mine, theirs = (found.log_probs.clone().requires_grad_() for _ in range(2))
    kept, answer = found.mask.bool(), torch.arange(ROWS).repeat_interleave(lengths)
    answers = Answers(answer, found.advantages, found.old[kept], found.old[kept], None)
    sums = policy_loss(mine[kept], found.entropy[kept], answers, policy)
    filled = [torch.nn.functional.pad(x, (0, 3)) for x in (found.old[kept], mine[kept], found.entropy[kept])]
    more = Answers(torch.nn.functional.pad(answer, (0, 3), value=-1), found.advantages, filled[0], filled[0], None)
    assert policy_loss(*filled[1:], more, policy)["loss"] == sums["loss"]
    other = trainer(policy, found, theirs, found.entropy)
    inputs = {
        "prompt_ids": torch.zeros(ROWS, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(ROWS, WIDTH, dtype=torch.int64),
        "completion_mask": found.mask,
        "advantages": found.advantages,
        "old_logps": (found.old * found.mask).sum(1),
    }
    loss, expected = sums["loss"] / ROWS, RLOOTrainer._compute_loss(other, None, inputs)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert float(sums["low"]) / ROWS == pytest.approx(other._metrics["train"]["clip_ratio/low_mean"][0])


def test_the_most_uncertain_tokens():
    entropy = torch.tensor([0.1, 2.0, 0.3, 1.0, 0.2])
    every = torch.ones(5, dtype=torch.bool)
    assert most_uncertain(entropy, every, 0.4).tolist() == [False, True, False, True, False]
    assert most_uncertain(entropy, every, 1.0).all()
    more, real = torch.cat([entropy, torch.tensor([9.0, 0.0])]), torch.cat([every, ~every[:2]])
    assert most_uncertain(more, real, 0.4).tolist() == [False, True, False, True, False, False, False]


def test_defaults_equal_trl(tmp_path):
    theirs, ours = GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True), Policy()
    assert ours.sampling_mode == theirs.vllm_importance_sampling_mode
    for name in set(Policy.__dataclass_fields__) - {"importance_sampling_mode"}:
        their = f"vllm_{name}" if name.startswith("importance_sampling_clip") else name
        assert getattr(ours, name) == getattr(theirs, their), name
