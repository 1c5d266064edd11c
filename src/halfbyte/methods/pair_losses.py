"""Losses of preference training, as functions of the log-probabilities of answers.

ℓ(y) is the summed log-probability of an answer's trained tokens and Δ = ℓ − ℓ_ref the log-ratio to the reference; a bar
means an average over tokens. w is the chosen answer of a pair, l the rejected one. Numbers in brackets are equations of
the arXiv paper. Names, signs and averages over tokens follow TRL (1.16); the tests compare every loss with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EXPONENT = 80.0  # largest exponent, well below float32's overflow
CERTAIN = -1e-7  # largest mean log-prob with finite odds in fp32
LAST = 1e9  # sort key of padding


@dataclass(frozen=True)
class Options:
    """Parameters of the losses, with TRL's names."""

    beta: float = 0.1
    label_smoothing: float = 0.0
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = 0.05
    simpo_gamma: float = 0.5
    alpha: float = 0.0


@dataclass(frozen=True)
class Pairs:
    """Log-probabilities and lengths of P pairs; float tensors [P], constant for the reference.

    Attributes:
        chosen, rejected: ℓ of the policy.
        ref_chosen, ref_rejected: ℓ of the reference; 0 for methods without one.
        chosen_tokens, rejected_tokens: trained tokens of the answers, at least 1.
        real: 1 for pairs, 0 for padding.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    real: Tensor

    @property
    def ratios(self) -> tuple[Tensor, Tensor]:
        """Δ_w and Δ_l."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    def scores(self, options: Options) -> tuple[Tensor, Tensor]:
        """Return f'(π/π_ref) of the divergence f for both answers; log(π/π_ref) for the reverse KL.

        Source: arXiv:2309.16240, table 1.
        """
        chosen, rejected = self.ratios
        score = DIVERGENCES[options.f_divergence_type]
        return score(chosen, options), score(rejected, options)

    def differences(self, options: Options) -> Tensor:
        """Return δ, the difference of the scores."""
        chosen, rejected = self.scores(options)
        return chosen - rejected

    def mean_differences(self, options: Options) -> Tensor:
        """Return δ̄, the difference of the scores per token."""
        chosen, rejected = self.scores(options)
        return chosen / self.chosen_tokens - rejected / self.rejected_tokens


PairLoss = Callable[[Pairs, Options], Tensor]  # [P]


# --- divergences -----------------------------------------------------------------------------------------------------


def _alpha_divergence(log_ratio: Tensor, options: Options) -> Tensor:
    """(u^(α−1) − 1)/(α − 1), u the ratio; its limit log u at α = 1."""
    power = options.f_alpha_divergence_coef - 1.0
    if abs(power) < 1e-6:
        return log_ratio
    return torch.expm1((power * log_ratio).clamp(max=EXPONENT)) / power


DIVERGENCES: dict[str, Callable[[Tensor, Options], Tensor]] = {
    "reverse_kl": lambda log_ratio, options: log_ratio,
    "forward_kl": lambda log_ratio, options: -torch.expm1(-log_ratio),
    "js_divergence": lambda log_ratio, options: math.log(2) + F.logsigmoid(log_ratio),
    "alpha_divergence": _alpha_divergence,
}


# --- with a reference ------------------------------------------------------------------------------------------------


def smoothed(logits: Tensor, smoothing: float) -> Tensor:
    """−log σ with a share of the labels swapped. cDPO: Mitchell 2023, arXiv:2305.18290."""
    return -F.logsigmoid(logits) * (1 - smoothing) - F.logsigmoid(-logits) * smoothing


def sigmoid(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(βδ): DPO, arXiv:2305.18290 (7)."""
    return -F.logsigmoid(options.beta * pairs.differences(options))


def hinge(pairs: Pairs, options: Options) -> Tensor:
    """max(0, 1 − βδ): SLiC, arXiv:2305.10425 (2), with the normalised likelihood of RSO."""
    return torch.relu(1 - options.beta * pairs.differences(options))


def ipo(pairs: Pairs, options: Options) -> Tensor:
    """(δ̄ − 1/(2β))²: IPO, arXiv:2310.12036 (17), with means over tokens."""
    return (pairs.mean_differences(options) - 1 / (2 * options.beta)) ** 2


def sigmoid_norm(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(βδ̄): DPO with means over tokens, arXiv:2411.15124, section 5."""
    return -F.logsigmoid(options.beta * pairs.mean_differences(options))


def robust(pairs: Pairs, options: Options) -> Tensor:
    """[−(1−ε) log σ(βδ) + ε log σ(−βδ)]/(1 − 2ε) for a share ε of wrong labels: arXiv:2403.00409 (12)."""
    logits, wrong = options.beta * pairs.differences(options), options.label_smoothing
    return (-(1 - wrong) * F.logsigmoid(logits) + wrong * F.logsigmoid(-logits)) / (1 - 2 * wrong)


def exo_pair(pairs: Pairs, options: Options) -> Tensor:
    """KL(σ(βδ), σ(−βδ) ‖ 1−ε, ε): EXO, arXiv:2402.00856 (16)."""
    logits, wrong = options.beta * pairs.differences(options), options.label_smoothing
    won = logits.sigmoid() * (F.logsigmoid(logits) - math.log1p(-wrong))
    return won + (-logits).sigmoid() * (F.logsigmoid(-logits) - math.log(wrong))


def nca_pair(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(βΔ_w) − ½ log σ(−βΔ_w) − ½ log σ(−βΔ_l): NCA, arXiv:2402.05369 (11)."""
    chosen, rejected = (options.beta * ratio for ratio in pairs.ratios)
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def bco_pair(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(βΔ_w) − log σ(−βΔ_l): BCO, arXiv:2404.04656 (8), without its shift."""
    chosen, rejected = (options.beta * ratio for ratio in pairs.ratios)
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(pairs: Pairs, options: Options) -> Tensor:
    """(Δ_w − 1/(2β))² + (Δ_l + 1/(2β))²: SPPO, arXiv:2405.00675 (4.7), with certain preferences."""
    chosen, rejected = pairs.ratios
    return (chosen - 0.5 / options.beta) ** 2 + (rejected + 0.5 / options.beta) ** 2


def _sorted(values: Tensor, real: Tensor) -> Tensor:
    """Return the values in ascending order; padding comes last on both sides of a difference."""
    return torch.where(real > 0, values, LAST).sort().values


def aot(pairs: Pairs, options: Options) -> Tensor:
    """DPO of sorted ℓ_w − ℓ_l against the sorted values of the reference: AOT, arXiv:2406.05882, algorithm 1.

    Values are sorted within a micro-batch, so only this loss and `aot_unpaired` depend on the micro-batch size.
    """
    margins = _sorted(pairs.chosen - pairs.rejected, pairs.real)
    references = _sorted(pairs.ref_chosen - pairs.ref_rejected, pairs.real)
    return smoothed(options.beta * (margins - references), options.label_smoothing)


def aot_unpaired(pairs: Pairs, options: Options) -> Tensor:
    """DPO of sorted Δ_w against sorted Δ_l: AOT, arXiv:2406.05882, algorithm 1."""
    chosen, rejected = (_sorted(ratio, pairs.real) for ratio in pairs.ratios)
    return smoothed(options.beta * (chosen - rejected), options.label_smoothing)


def apo_zero(pairs: Pairs, options: Options) -> Tensor:
    """1 − σ(βΔ_w) + σ(βΔ_l): APO, arXiv:2408.06266 (7)."""
    chosen, rejected = (options.beta * ratio for ratio in pairs.ratios)
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(pairs: Pairs, options: Options) -> Tensor:
    """σ(βΔ_w) + 1 − σ(β(Δ_w − Δ_l)): APO, arXiv:2408.06266 (8)."""
    chosen, rejected = (options.beta * ratio for ratio in pairs.ratios)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop(pairs: Pairs, options: Options) -> Tensor:
    """−(1−m) log σ(βδ) + m e^(−βδ), m = σ(βδ/τ): DiscoPOP, arXiv:2406.08414 (5)."""
    logits = options.beta * pairs.differences(options)
    mixed = (logits / options.discopop_tau).sigmoid()
    return -F.logsigmoid(logits) * (1 - mixed) + (-logits).exp() * mixed


DPO_LOSSES: dict[str, PairLoss] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "aot": aot,
    "aot_unpaired": aot_unpaired,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "sigmoid_norm": sigmoid_norm,
}


# --- without a reference ---------------------------------------------------------------------------------------------


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """log(p/(1 − p)) of p = e^ℓ̄: ORPO, arXiv:2403.07691 (4), clamped at `CERTAIN`."""
    mean_log_prob = mean_log_prob.clamp(max=CERTAIN)
    return mean_log_prob - torch.log(-torch.expm1(mean_log_prob))


def orpo(pairs: Pairs, options: Options) -> Tensor:
    """−β log σ(log odds_w − log odds_l): ORPO, arXiv:2403.07691 (7); the method adds the likelihood term (6)."""
    chosen, rejected = pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
    return -options.beta * F.logsigmoid(log_odds(chosen) - log_odds(rejected))


def alpha_reward(log_prob: Tensor, alpha: float) -> Tensor:
    """(1 − p^−α)/α, log p at α = 0: AlphaPO, arXiv:2501.03884 (7)."""
    return log_prob if alpha == 0 else -torch.expm1(-alpha * log_prob) / alpha


def _reward_difference(pairs: Pairs, options: Options, *, mean: bool) -> Tensor:
    chosen, rejected = pairs.chosen, pairs.rejected
    if mean:
        chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    return alpha_reward(chosen, options.alpha) - alpha_reward(rejected, options.alpha)


def simpo(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(β(ℓ̄_w − ℓ̄_l) − γ): SimPO, arXiv:2405.14734 (6)."""
    logits = options.beta * _reward_difference(pairs, options, mean=True) - options.simpo_gamma
    return smoothed(logits, options.label_smoothing)


def cpo(pairs: Pairs, options: Options) -> Tensor:
    """−log σ(β(ℓ_w − ℓ_l)): CPO, arXiv:2401.08417 (3); the method adds the likelihood term."""
    return smoothed(options.beta * _reward_difference(pairs, options, mean=False), options.label_smoothing)


def cpo_hinge(pairs: Pairs, options: Options) -> Tensor:
    """max(0, 1 − β(ℓ_w − ℓ_l)): SLiC, arXiv:2305.10425 (2), without a reference."""
    return torch.relu(1 - options.beta * _reward_difference(pairs, options, mean=False))


def cpo_ipo(pairs: Pairs, options: Options) -> Tensor:
    """(ℓ̄_w − ℓ̄_l − 1/(2β))²: IPO, arXiv:2310.12036 (17), without a reference."""
    return (_reward_difference(pairs, options, mean=True) - 1 / (2 * options.beta)) ** 2


CPO_LOSSES: dict[str, PairLoss] = {"sigmoid": cpo, "hinge": cpo_hinge, "ipo": cpo_ipo}


# --- unpaired, and rewards -------------------------------------------------------------------------------------------


def kto(ratios: Tensor, desirable: Tensor, z: Tensor, beta: float) -> Tensor:
    """1 − σ(β(Δ − z)) for desirable answers, 1 − σ(β(z − Δ)) for others: KTO, arXiv:2402.01306 (7, 8).

    Args:
        ratios: Δ [N].
        desirable: bool [N].
        z: 0-d, the mean Δ of mismatched prompts and answers, at least 0.
    """
    away = beta * (ratios - z)
    return torch.where(desirable, -away, away).sigmoid()


def apo_zero_unpaired(ratios: Tensor, desirable: Tensor, z: Tensor, beta: float) -> Tensor:
    """1 − σ(βΔ) for desirable answers, σ(βΔ) for others: APO, arXiv:2408.06266 (7), without pairs; z is not used."""
    return kto(ratios, desirable, torch.zeros_like(z), beta)


KTO_LOSSES = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}


def reward(chosen: Tensor, rejected: Tensor, margin: Tensor | float, center: float) -> Tensor:
    """−log σ(r_w − r_l − margin) + c·(r_w + r_l)²: arXiv:2203.02155 (1), 2307.09288 (2), 2312.09244 (2); all [P]."""
    return -F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2
