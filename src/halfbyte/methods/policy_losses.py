"""Advantages and losses of policy optimization, as pure functions of rewards and of log-probabilities of sampled
answers.

Names are TRL's (1.16, `GRPOConfig`); tests/methods/test_advantages.py and test_policy_losses.py compare with its
trainers.

Rewards are fp32 [N, F] for N answers and F functions; the `group` answers to a prompt are adjacent. NaN means that a
function gave no reward. An answer without any reward does not count in its group's baseline and has advantage 0.

In the losses, the N tokens of a micro-batch's answers are concatenated, and `answer` holds the index of each token's
answer; padding has answer -1 and log-probability 0. So padded and padding-free batches are the same here. With ρ =
π/π_old of a token (or, at sequence level, the geometric mean over an answer: GSPO, arXiv:2507.18071, equation 7) and A
the advantage of its answer, a token's loss is

- grpo, dapo, bnpo, dr_grpo, luspo: −min(ρA, clip(ρ, 1 − ε, 1 + ε_high)A) (GRPO, arXiv:2402.03300, equation 3; ε_high:
  DAPO, arXiv:2503.14476, equation 10; ρ ≤ δ first: INTELLECT-2, arXiv:2505.07291);
- cispo: −sg(min(ρ, ε_high))·A·log π (arXiv:2506.13585, equations 4 and 5);
- sapo: −4/τ·σ(τ(ρ − 1))·A, with a τ for each sign of A (arXiv:2511.20347);
- vespo: −sg(φ(w))·A·log π, with φ(w) = e^λ·w^k·e^(−λw) of an answer's whole ratio w (arXiv:2602.10693);
- rloo: as grpo, with the ratio of whole answers (arXiv:2402.14740).

The loss is then summed over tokens, or over each answer's mean (`PER_ANSWER`), and divided by `Policy.divisor`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .answers import per_answer
from .policy import Policy

EPSILON = 1e-4  # added to a standard deviation before dividing by it
CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "rloo")
PER_ANSWER = ("grpo", "sapo")  # averaged over each answer's tokens, then over answers
LOWEST, HIGHEST = math.log(1e-8), 20.0  # bounds of VESPO's log ratios


def combined(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum [N] of an answer's rewards; NaN without any reward."""
    total = (rewards * weights).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), torch.nan)


def group_relative(
    rewards: Tensor, weights: Tensor, group: int, scale: str = "group", aggregation: str = "sum_then_normalize"
) -> Tensor:
    """Return GRPO's advantages [N] (arXiv:2402.03300, section 4.1.2): r minus the group's mean, divided by a standard
    deviation.

    Args:
        scale: divide by the deviation of the "group", or of the "batch" (arXiv:2508.08221); "none": do not divide (Dr.
            GRPO, arXiv:2503.20783).
        aggregation: "sum_then_normalize", or "normalize_then_sum": normalize each function's rewards in the group, then
            their weighted sum over the batch (GDPO, arXiv:2601.05242).
    """
    if aggregation == "normalize_then_sum":
        grouped = rewards.view(-1, group, rewards.shape[1])
        normalized = (grouped - grouped.nanmean(1, keepdim=True)) / (deviation(grouped, 1) + EPSILON)
        total = (normalized.view_as(rewards) * weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
        return ((total - total.nanmean()) / (deviation(total, 0) + EPSILON)).nan_to_num(0.0)
    total = combined(rewards, weights)
    grouped = total.view(-1, group)
    advantages = (grouped - grouped.nanmean(1, keepdim=True)).flatten()
    if scale != "none":
        spread = deviation(grouped, 1).expand_as(grouped).flatten() if scale == "group" else deviation(total, 0)
        advantages = advantages / (spread + EPSILON)
    return advantages.nan_to_num(0.0)


def leave_one_out(rewards: Tensor, group: int, normalize: bool = False) -> Tensor:
    """Return RLOO's advantages [N] (arXiv:2402.14740): r [N] minus the mean of the group's other answers.

    Args:
        normalize: to mean 0 and standard deviation 1 over the batch.
    """
    grouped = rewards.view(-1, group)
    scored = (~grouped.isnan()).sum(1, keepdim=True)
    mean_of_other_answers = (grouped.nansum(1, keepdim=True) - grouped) / (scored - 1)
    advantages = (grouped - mean_of_other_answers).flatten()
    if normalize:
        advantages = (advantages - advantages.nanmean()) / (deviation(advantages, 0) + EPSILON)
    return advantages.nan_to_num(0.0, 0.0, 0.0)


def deviation(x: Tensor, dim: int) -> Tensor:
    """Return the standard deviation along `dim` (kept with size 1) over the n non-NaN numbers, divided by n − 1; NaN
    if n is 1."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    variance = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True) / (count - 1).clamp(min=1)
    return variance.sqrt().masked_fill(count <= 1, torch.nan)


def without_spread(rewards: Tensor, group: int) -> Tensor:
    """Return bool [groups]: whether all answers of a group have the same (combined) reward [N], which gives no
    gradient."""
    spread = deviation(rewards.view(-1, group), 1).flatten()
    return torch.isclose(spread, torch.zeros_like(spread))


@dataclass(frozen=True)
class Answers:
    """The sampled answers of a micro-batch: R answers with N tokens in total, all tensors on one device.

    Attributes:
        answer: int64 [N], index of each token's answer; -1 for padding.
        advantages: fp32 [R].
        old: fp32 [N], log-probabilities under the policy at the start of the generation's training; None: under the
            current policy.
        sampled: fp32 [N], log-probabilities that the tokens were sampled with.
        reference: fp32 [N], under the reference model; None if `beta` is 0.
        corrects: whether the loss is weighted by `sampling_weights`.
    """

    answer: Tensor
    advantages: Tensor
    old: Tensor | None
    sampled: Tensor
    reference: Tensor | None
    corrects: bool = False

    @property
    def real(self) -> Tensor:
        """bool [N]: whether a token is not padding."""
        return self.answer >= 0

    def spread(self, x: Tensor) -> Tensor:
        """Return [N]: the value of x [R] for each token's answer; arbitrary for padding."""
        return x[self.answer.clamp(min=0)]

    def total(self, x: Tensor) -> Tensor:
        """Return the sums [R] of x [N] over each answer."""
        return per_answer(x, self.answer, len(self.advantages))

    def lengths(self) -> Tensor:
        """Return the tokens [R] of each answer, at least 1."""
        return self.total(torch.ones_like(self.sampled)).clamp(min=1)

    def means(self, x: Tensor) -> Tensor:
        """Return the means [R] of x [N] over each answer; 0 for an answer without tokens."""
        return self.total(x) / self.lengths()


def policy_loss(log_probs: Tensor, entropy: Tensor, answers: Answers, policy: Policy) -> dict[str, Tensor]:
    """Return the loss of a micro-batch and its metrics, as sums.

    Args:
        log_probs: fp32 [N], differentiable.
        entropy: fp32 [N] in nats; differentiable if `entropy_coef` is not 0.

    Returns:
        0-d sums by name: "loss", not yet divided and without the entropy bonus; "kl" over tokens; "low", "high" over
        ratios (tokens, or answers if `policy.by_answers`): clipped below and above; "weights" over tokens:
        `sampling_weights`; "bonus", the mean entropy of the trained tokens, differentiable.
    """
    old = log_probs.detach() if answers.old is None else answers.old
    advantages = answers.spread(answers.advantages)
    log_ratio = log_probs - old
    by_answer = None
    if policy.by_answers:  # log ρ [R] of whole answers in RLOO, of their geometric mean in GSPO
        by_answer = answers.total(log_ratio) if policy.loss_type == "rloo" else answers.means(log_ratio)
    ratio = (log_ratio if by_answer is None else answers.spread(by_answer)).exp()
    weights = sampling_weights(old, answers, policy) if answers.corrects else None
    loss = _token_loss(log_probs, log_ratio, ratio, advantages, answers, policy, weights)
    factor = answers.real.to(loss)
    if weights is not None:
        weights = weights * factor
        factor = factor if policy.loss_type == "vespo" else weights
    if policy.off_policy_mask_threshold is not None:
        factor = factor * answers.spread(on_policy(log_probs, answers, policy.off_policy_mask_threshold))
    uncertain = most_uncertain(entropy, answers.real, policy.top_entropy_quantile).to(loss)
    loss = loss * factor * uncertain
    kl = torch.zeros_like(loss)
    if answers.reference is not None:
        kl = k3(log_probs, answers.reference)
        kl = kl * ratio if policy.use_bias_correction_kl else kl
        loss = loss + policy.beta * kl
    if by_answer is None:
        clipped = [of_token * answers.real for of_token in _clipped(ratio.detach(), advantages, policy)]
    else:
        clipped = _clipped(by_answer.detach().exp(), answers.advantages, policy)
    return {
        "loss": (answers.means(loss) if policy.loss_type in PER_ANSWER else loss).sum(),
        "kl": kl.detach().sum(),
        "low": clipped[0].sum(),
        "high": clipped[1].sum(),
        "weights": answers.real.to(loss).sum() if weights is None else weights.sum(),
        "bonus": (entropy * uncertain).sum() / uncertain.sum().clamp(min=1),
    }


def _token_loss(
    log_probs: Tensor, log_ratio: Tensor, ratio: Tensor, advantages: Tensor, answers: Answers, policy: Policy,
    weights: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the loss [N] of each token; in RLOO, the answer's loss divided by its number of tokens."""
    if policy.loss_type == "cispo":
        return -ratio.clamp(max=policy.high).detach() * advantages * log_probs
    if policy.loss_type == "sapo":
        temperature = torch.where(advantages > 0, policy.sapo_temperature_pos, policy.sapo_temperature_neg)
        return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
    if policy.loss_type == "vespo":
        return -answers.spread(gamma_weights(log_ratio, answers, policy, weights)) * advantages * log_probs
    within = ratio.clamp(1 - policy.epsilon, 1 + policy.high)
    bounded = ratio if policy.delta is None else ratio.clamp(max=policy.delta)
    loss = -torch.minimum(bounded * advantages, within * advantages)
    return loss / answers.spread(answers.lengths()) if policy.loss_type == "rloo" else loss


def _clipped(ratio: Tensor, advantages: Tensor, policy: Policy) -> list[Tensor]:
    """Return which ratios are clipped below and above, as TRL counts them, as ones and zeros."""
    if policy.loss_type == "cispo":
        low, high = torch.zeros_like(ratio), ((ratio > policy.high) & (advantages > 0)).to(ratio)
    elif policy.loss_type in CLIPPED:
        ratio = ratio if policy.delta is None else ratio.clamp(max=policy.delta)
        low = ((ratio < 1 - policy.epsilon) & (advantages < 0)).to(ratio)
        high = ((ratio > 1 + policy.high) & (advantages > 0)).to(ratio)
    else:
        low = high = torch.zeros_like(ratio)
    return [low, high]


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Return the estimated KL to the reference per token: r − log r − 1 with r = π_ref/π (GRPO, equation 4), at
    least 0."""
    log_ratio = reference - log_probs
    return log_ratio.exp() - log_ratio - 1


@torch.no_grad()
def on_policy(log_probs: Tensor, answers: Answers, threshold: float) -> Tensor:
    """Return fp32 [R], 0 for answers to mask: those with a negative advantage that have become too improbable.

    DeepSeek-V3.2, arXiv:2512.02556, equation 9: the mean of log π_sampled − log π over an answer exceeds `threshold`.
    """
    away = answers.means(answers.sampled - log_probs)
    return ((answers.advantages >= 0) | (away <= threshold)).to(log_probs)


@torch.no_grad()
def most_uncertain(entropy: Tensor, real: Tensor, quantile: float) -> Tensor:
    """Return bool [N]: the share `quantile` of `real` tokens with the highest entropy (arXiv:2506.01939, section 5)."""
    if quantile >= 1 or not len(entropy):
        return real
    return real & (entropy >= torch.nanquantile(entropy.float().masked_fill(~real, torch.nan), 1 - quantile))


@torch.no_grad()
def sampling_weights(old: Tensor, answers: Answers, policy: Policy) -> Tensor:
    """Return π_old/π_sampled [N] of each token, or of its whole answer, within the policy's bounds.

    The weights correct for sampling with other arithmetic than training. Ratios outside the bounds are truncated
    (truncated importance sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
    training") or set to 0 (masked). The modes are TRL's.
    """
    level, _, bounding = policy.sampling_mode.partition("_")
    log_ratio = old - answers.sampled
    ratio = (answers.spread(answers.total(log_ratio)) if level == "sequence" else log_ratio).exp()
    low, high = policy.importance_sampling_clip_min, policy.importance_sampling_clip_max
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    return ratio.clamp(low, high) if bounding == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@torch.no_grad()
def gamma_weights(log_ratio: Tensor, answers: Answers, policy: Policy, weights: Tensor | None = None) -> Tensor:
    """Return φ [R] = e^λ·w^k·e^(−λw) of each answer's whole ratio w, with k and λ by the sign of its advantage (VESPO).

    Args:
        weights: `sampling_weights` [N], multiplied into w.
    """
    log_w = answers.total(log_ratio.clamp(-HIGHEST, HIGHEST))
    if weights is not None:
        log_w = log_w + answers.total(weights.log().clamp(LOWEST, HIGHEST))
    log_w = log_w.clamp(LOWEST, HIGHEST)
    good = answers.advantages >= 0
    k = torch.where(good, policy.vespo_k_pos, policy.vespo_k_neg)
    decay = torch.where(good, policy.vespo_lambda_pos, policy.vespo_lambda_neg).clamp(min=1e-4)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
