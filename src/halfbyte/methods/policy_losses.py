"""Losses of policy optimization, as pure functions of the log-probabilities of sampled answers.

Tokens are flat: N of them, those of all answers of a micro-batch one behind the other, and `answer` says whose each is;
what fills N up, with a log-probability of 0, is answer -1's. So padded and padding-free batches are the same here.
Names are TRL's (1.16, `GRPOConfig`), whose trainer is the oracle of tests/methods/test_policy_losses.py.

With ρ = π/π_old of a token (or, at the level of sequences, the geometric mean over an answer: GSPO, arXiv:2507.18071,
equation 7) and A the advantage of its answer, a token's loss is

- grpo, dapo, bnpo, dr_grpo, luspo: −min(ρA, clip(ρ, 1 − ε, 1 + ε_high)A) (GRPO, arXiv:2402.03300, equation 3; ε_high:
  DAPO, arXiv:2503.14476, equation 10; ρ ≤ δ first: INTELLECT-2, arXiv:2505.07291);
- cispo: −sg(min(ρ, ε_high))·A·log π (arXiv:2506.13585, equations 4 and 5);
- sapo: −4/τ·σ(τ(ρ − 1))·A, with a τ for each sign of A (arXiv:2511.20347);
- vespo: −sg(φ(w))·A·log π, with φ(w) = e^λ·w^k·e^(−λw) of an answer's whole ratio w (arXiv:2602.10693);
- rloo: as grpo, of the ratio of whole answers (arXiv:2402.14740).

Each is then summed over tokens, or averaged over each answer's first (`PER_ANSWER`), and divided by what
`Policy.divisor` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .answers import per_answer
from .policy import Policy

CLIPPED = ("dapo", "grpo", "bnpo", "dr_grpo", "luspo", "rloo")
PER_ANSWER = ("grpo", "sapo")  # an answer's tokens are averaged before answers are
LOWEST, HIGHEST = math.log(1e-8), 20.0  # bounds of VESPO's log ratios


@dataclass(frozen=True)
class Answers:
    """The sampled answers of a micro-batch: R answers of N tokens together, all tensors on one device.

    Attributes:
        answer: int64 [N], the answer that each token is of; -1 of what fills up.
        advantages: fp32 [R].
        old: fp32 [N], log-probabilities by the policy that a window began with; None: by the policy as it is.
        sampled: fp32 [N], those that the tokens were drawn with.
        reference: fp32 [N], by the reference model; None where `beta` is 0.
        corrects: whether the loss is weighed by `sampling_weights`.
    """

    answer: Tensor
    advantages: Tensor
    old: Tensor | None
    sampled: Tensor
    reference: Tensor | None
    corrects: bool = False

    @property
    def real(self) -> Tensor:
        """bool [N]: what does not fill up."""
        return self.answer >= 0

    def spread(self, x: Tensor) -> Tensor:
        """[N]: of each token its answer's number of x [R]; any of what fills up."""
        return x[self.answer.clamp(min=0)]

    def total(self, x: Tensor) -> Tensor:
        """Sums [R] of x [N] over each answer."""
        return per_answer(x, self.answer, len(self.advantages))

    def lengths(self) -> Tensor:
        """Tokens [R] of each answer, at least 1."""
        return self.total(torch.ones_like(self.sampled)).clamp(min=1)

    def means(self, x: Tensor) -> Tensor:
        """Means [R] of x [N] over each answer; 0 of one without tokens."""
        return self.total(x) / self.lengths()


def policy_loss(log_probs: Tensor, entropy: Tensor, answers: Answers, policy: Policy) -> dict[str, Tensor]:
    """The loss of a micro-batch and what is reported of it, as sums.

    Args:
        log_probs: fp32 [N], differentiable.
        entropy: fp32 [N] in nats; differentiable where `entropy_coef` is not 0.

    Returns:
        0-d sums by name: "loss", not divided by anything yet and without the entropy's bonus; "kl" over tokens; "low",
        "high" over ratios (tokens, or answers where `policy.by_answers`): clipped below and above; "weights" over
        tokens: `sampling_weights`; "bonus", the mean entropy of the tokens that are trained, differentiable.
    """
    old = log_probs.detach() if answers.old is None else answers.old
    advantages = answers.spread(answers.advantages)
    log_ratio = log_probs - old
    by_answer = _log_ratio_of_answers(log_ratio, answers, policy) if policy.by_answers else None
    ratio = (log_ratio if by_answer is None else answers.spread(by_answer)).exp()
    weights = sampling_weights(old, answers, policy) if answers.corrects else None
    loss = _token_loss(log_probs, log_ratio, ratio, advantages, answers, policy, weights)
    kept = answers.real.to(loss)
    if weights is not None:
        weights = weights * kept
        kept = kept if policy.loss_type == "vespo" else weights
    if policy.off_policy_mask_threshold is not None:
        kept = kept * answers.spread(on_policy(log_probs, answers, policy.off_policy_mask_threshold))
    uncertain = most_uncertain(entropy, answers.real, policy.top_entropy_quantile).to(loss)
    loss = loss * kept * uncertain
    kl = torch.zeros_like(loss)
    if answers.reference is not None:
        kl = k3(log_probs, answers.reference)
        kl = kl * ratio if policy.use_bias_correction_kl else kl
        loss = loss + policy.beta * kl
    own = ratio.detach() if by_answer is None else by_answer.detach().exp()
    clipped = _clipped(own, advantages if by_answer is None else answers.advantages, policy)
    if by_answer is None:
        clipped = [each * answers.real for each in clipped]
    return {
        "loss": (answers.means(loss) if policy.loss_type in PER_ANSWER else loss).sum(),
        "kl": kl.detach().sum(),
        "low": clipped[0].sum(),
        "high": clipped[1].sum(),
        "weights": answers.real.to(loss).sum() if weights is None else weights.sum(),
        "bonus": (entropy * uncertain).sum() / uncertain.sum().clamp(min=1),
    }


def _log_ratio_of_answers(log_ratio: Tensor, answers: Answers, policy: Policy) -> Tensor:
    """log ρ [R]: of whole answers in RLOO, of their geometric mean in GSPO."""
    return answers.total(log_ratio) if policy.loss_type == "rloo" else answers.means(log_ratio)


def _token_loss(
    log_probs: Tensor, log_ratio: Tensor, ratio: Tensor, advantages: Tensor, answers: Answers, policy: Policy,
    weights: Tensor | None,
) -> Tensor:  # fmt: skip
    """[N]; that of RLOO is an answer's loss on each of its tokens, over their number."""
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
    """Which ratios are clipped, below and above, as TRL counts them: ones and zeros."""
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
    """KL to the reference a token, estimated: r − log r − 1 with r = π_ref/π (GRPO, equation 4), never below 0."""
    log_ratio = reference - log_probs
    return log_ratio.exp() - log_ratio - 1


@torch.no_grad()
def on_policy(log_probs: Tensor, answers: Answers, threshold: float) -> Tensor:
    """fp32 [R], 0 for answers to be left out: those of a negative advantage that have become too improbable.

    DeepSeek-V3.2, arXiv:2512.02556, equation 9: the mean of log π_sampled − log π over an answer exceeds `threshold`.
    """
    away = answers.means(answers.sampled - log_probs)
    return ((answers.advantages >= 0) | (away <= threshold)).to(log_probs)


@torch.no_grad()
def most_uncertain(entropy: Tensor, real: Tensor, quantile: float) -> Tensor:
    """bool [N]: of the `real` tokens the share `quantile` with the highest entropy (arXiv:2506.01939, section 5)."""
    if quantile >= 1 or not len(entropy):
        return real
    return real & (entropy >= torch.nanquantile(entropy.float().masked_fill(~real, torch.nan), 1 - quantile))


@torch.no_grad()
def sampling_weights(old: Tensor, answers: Answers, policy: Policy) -> Tensor:
    """π_old/π_sampled [N] of each token, or of the whole answer it is in, within the policy's bounds.

    What corrects for answers that other arithmetic has drawn than trains on them: bounded (truncated importance
    sampling, Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training") or 0 outside of
    the bounds (masked). By TRL's modes.
    """
    level, _, how = policy.sampling_mode.partition("_")
    log_ratio = old - answers.sampled
    ratio = (answers.spread(answers.total(log_ratio)) if level == "sequence" else log_ratio).exp()
    low, high = policy.importance_sampling_clip_min, policy.importance_sampling_clip_max
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    return ratio.clamp(low, high) if how == "truncate" else ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


@torch.no_grad()
def gamma_weights(log_ratio: Tensor, answers: Answers, policy: Policy, weights: Tensor | None = None) -> Tensor:
    """φ [R] = e^λ·w^k·e^(−λw) of each answer's whole ratio w, with k and λ by the sign of its advantage (VESPO).

    Args:
        weights: `sampling_weights` [N], which w then has as factors.
    """
    log_w = answers.total(log_ratio.clamp(-HIGHEST, HIGHEST))
    if weights is not None:
        log_w = log_w + answers.total(weights.log().clamp(LOWEST, HIGHEST))
    log_w = log_w.clamp(LOWEST, HIGHEST)
    good = answers.advantages >= 0
    k = torch.where(good, policy.vespo_k_pos, policy.vespo_k_neg)
    decay = torch.where(good, policy.vespo_lambda_pos, policy.vespo_lambda_neg).clamp(min=1e-4)
    return (decay + k * log_w - decay * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0)
