"""Methods that learn from pairs of answers: DPO against a reference; ORPO, SimPO and CPO without one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from ..ops import IGNORE_INDEX
from ..utils.errors import ConfigError
from .base import LOSS, Batch, Collate, Method, Metric, Numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config import RunConfig
    from ..data.prepare import PreparedData
    from .pair_losses import Options, Pairs

ANSWERS = (("chosen_ids", "chosen_mask"), ("rejected_ids", "rejected_mask"))
PAIR_LOSS = replace(LOSS, over="pairs")
REWARDS = (
    Metric("rewards/chosen", "chosen reward", over="pairs"),
    Metric("rewards/rejected", "rejected reward", over="pairs"),
    Metric("rewards/accuracies", "accuracy", ".3f", over="pairs"),
    Metric("rewards/margins", "margin", over="pairs"),
    Metric("logps/chosen", "chosen log-prob", ".2f", over="pairs"),
    Metric("logps/rejected", "rejected log-prob", ".2f", over="pairs"),
)
NLL = Metric("nll_loss", "NLL of chosen", over="likelihood_tokens")
NLL_SCALE = "nll_scale"  # in a micro-batch: pairs of the step over tokens of its likelihood, 0-d; not in evaluations


@dataclass(frozen=True)
class PairedMethod(Method):
    """A method whose rows are pairs: a chosen and a rejected answer to a prompt.

    The loss of a step is the mean over its pairs, plus, where the method has it, `nll_weight` times the mean negative
    log-likelihood of the chosen answers' tokens; both means are over the whole step.

    Attributes:
        losses: names in the method's table of losses, each with its weight.
        options: their numbers; None before a run's keys are read.
        nll_of_prompts: the likelihood is of the prompts, too.
    """

    losses: tuple[tuple[str, float], ...] = ()
    options: Options | None = None
    nll_weight: float = 0.0

    rows = "pairs"
    shares = True
    nll_of_prompts = False

    def of(self, config: RunConfig) -> Self:
        from .pair_losses import Options

        return replace(self, options=Options(**{field.name: getattr(config, field.name) for field in fields(Options)}))

    @property
    def numbers(self) -> Numbers:  # type: ignore[override]
        metrics = (PAIR_LOSS, *REWARDS, *([NLL] if self.nll_weight else []))
        return Numbers(metrics, metrics)

    def documents(self, config: RunConfig, data: PreparedData) -> PreparedData:
        from ..data.paired import documents_in

        return documents_in(config, data, ANSWERS)

    def collator(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.paired import answer_collator

        return answer_collator(config, tokenizer, device, prompts=self.nll_of_prompts)

    def counts(self, batch: Batch) -> dict[str, float]:
        asked, answer = batch["wanted"] != IGNORE_INDEX, batch["answer"]
        return {
            "pairs": int(batch["real"].sum()),
            "trained_tokens": int((answer >= 0).sum()),
            "likelihood_tokens": int((asked & self._likely(answer)).sum()),
        }

    def blank(self, batch: Batch) -> dict[str, Any]:
        nothing = {"wanted": IGNORE_INDEX, "answer": -1, "real": 0}
        return {**batch, **{name: batch[name].new_full(batch[name].shape, fill) for name, fill in nothing.items()}}

    def shared(self, counts: Mapping[str, float], ahead: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        if not (counts and self.nll_weight):
            return {}
        return {NLL_SCALE: counts["pairs"] / max(counts["likelihood_tokens"], 1)}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs = {key: value for key, value in batch.items() if key != NLL_SCALE}
        policy, pairs, weights = self.forward(model, inputs)
        loss = (self.pair_losses(pairs) * weights).sum()
        sums = {"loss": loss, **_rewards(*self.rewards(pairs), *self.shown(pairs), pairs.real)}
        if self.nll_weight:
            # what fills up has a log-probability of 0
            nll = -(policy * self._likely(batch["answer"])).sum()
            sums["nll_loss"] = nll.detach()
            sums["loss"] = loss + self.nll_weight * batch.get(NLL_SCALE, 0.0) * nll
        return sums

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Pairs, Tensor]:
        """Log-probabilities of tokens [M], of answers, and the weight of each pair [P], 0 of what fills up."""
        from .answers import log_probs

        policy = log_probs(model, batch)
        return policy, pairs_of(batch, policy), batch["real"]

    @abstractmethod
    def pair_losses(self, pairs: Pairs) -> Tensor:
        """[P]."""

    @abstractmethod
    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Of the chosen and the rejected answers, [P] each."""

    def shown(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Their log-probabilities as the records have them, [P] each."""
        return pairs.chosen, pairs.rejected

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        found = {**means, **counts}
        if self.nll_weight:
            found["loss"] += self.nll_weight * means["nll_loss"]
        return found

    def _likely(self, answer: Tensor) -> Tensor:
        """Bool [M]: tokens of the likelihood, of chosen answers and perhaps prompts, with what fills up."""
        chosen = answer % 2 == 0  # -1 is odd, too
        return chosen | (answer < 0) if self.nll_of_prompts else chosen


def pairs_of(batch: Batch, policy: Tensor, reference: Tensor | None = None, ld_alpha: float | None = None) -> Pairs:
    """The pairs of a batch, from log-probabilities of tokens [M].

    Args:
        ld_alpha: weight of an answer's tokens beyond the length of the shorter one of its pair; default: 1. LD-DPO,
            arXiv:2409.06411 (10).
    """
    import torch

    from .answers import per_answer, shared_lengths
    from .pair_losses import Pairs

    answer, answers = batch["answer"], 2 * len(batch["real"])
    counts = per_answer(torch.ones_like(policy), answer, answers)
    reference = torch.zeros_like(policy) if reference is None else reference
    if ld_alpha is not None:
        within = batch["place"] < shared_lengths(counts, answer)
        policy, reference = (torch.where(within, each, ld_alpha * each) for each in (policy, reference))
    sums = [per_answer(each, answer, answers) for each in (policy, reference)]
    (chosen, rejected), (ref_chosen, ref_rejected), (chosen_tokens, rejected_tokens) = (
        each.view(-1, 2).unbind(-1) for each in (*sums, counts.clamp(min=1))
    )
    return Pairs(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens, batch["real"])


def _rewards(
    chosen: Tensor, rejected: Tensor, chosen_log_probs: Tensor, rejected_log_probs: Tensor, real: Tensor
) -> dict[str, Tensor]:
    """The sums of `REWARDS`, in their order."""
    values = [chosen, rejected, (chosen > rejected).float(), chosen - rejected, chosen_log_probs, rejected_log_probs]
    return {metric.name: (value.detach() * real).sum() for metric, value in zip(REWARDS, values, strict=True)}


def with_all_it_has(config: RunConfig) -> bool:
    """Whether the reference is the model with all that it has before the first step, not the one without an adapter."""
    return bool(not config.use_peft or config.adapter_path or config.qat_scheme)


def check_reference(config: RunConfig) -> None:
    """Raise a ConfigError where a reference is wanted in each step that is not there any more, or is not what is
    trained before the first."""
    if config.init_lora_weights is False and not with_all_it_has(config):
        wrong = f"init_lora_weights: false with method: {config.method}: the reference is the model without its adapter"
        raise ConfigError(f"{wrong}, which must add nothing at first", "set init_lora_weights: true")
    if config.precompute_ref_log_probs is not False or not with_all_it_has(config):
        return
    why = "adapter_path" if config.adapter_path else "qat_scheme" if config.qat_scheme else "use_peft: false"
    raise ConfigError(
        f"precompute_ref_log_probs: false with {why}: the reference is the model as it was before training, and"
        " taking the adapter off does not give it back",
        "set precompute_ref_log_probs: true",
    )


@dataclass(frozen=True)
class DirectPreferenceOptimization(PairedMethod):
    """DPO and its relatives: the policy against a frozen reference."""

    ld_alpha: float | None = None
    use_weighting: bool = False

    reference = True

    def of(self, config: RunConfig) -> Self:
        check_reference(config)
        names = [config.loss_type] if isinstance(config.loss_type, str) else list(config.loss_type or ())
        weights = config.loss_weights or [1.0] * len(names)
        losses = [(name, weight) for name, weight in zip(names, weights, strict=True) if name != "sft"]
        likelihood = sum(weight for name, weight in zip(names, weights, strict=True) if name == "sft")
        found = replace(super().of(config), losses=tuple(losses), nll_weight=likelihood)
        return replace(found, ld_alpha=config.ld_alpha, use_weighting=config.use_weighting)

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Pairs, Tensor]:
        from .answers import aligned_log_probs, log_probs

        if not self.use_weighting:
            policy = log_probs(model, batch)
            return policy, self._pairs(model, batch, policy), batch["real"]
        policy, aligned = aligned_log_probs(model, batch)
        pairs, of_answers = self._pairs(model, batch, policy), pairs_of(batch, aligned)
        # WPO, arXiv:2406.11827 (2), with the weights of its equation 5
        likely = of_answers.chosen / pairs.chosen_tokens + of_answers.rejected / pairs.rejected_tokens
        return policy, pairs, likely.exp() * batch["real"]

    def pair_losses(self, pairs: Pairs) -> Tensor:
        from .pair_losses import DPO_LOSSES

        assert self.options is not None
        losses = [weight * DPO_LOSSES[name](pairs, self.options) for name, weight in self.losses]
        return sum(losses[1:], losses[0]) if losses else pairs.real.new_zeros(len(pairs.real))

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """βΔ: arXiv:2305.18290 (5), without its constant."""
        assert self.options is not None
        chosen, rejected = pairs.ratios
        return self.options.beta * chosen, self.options.beta * rejected

    def _pairs(self, model: nn.Module, batch: Batch, policy: Tensor) -> Pairs:
        from .answers import reference_log_probs

        return pairs_of(batch, policy, reference_log_probs(model, batch), self.ld_alpha)


@dataclass(frozen=True)
class OddsRatioPreferenceOptimization(PairedMethod):
    """ORPO: the likelihood of prompt and chosen answer, and the odds of the answers; arXiv:2403.07691 (6)."""

    nll_weight: float = 1.0

    nll_of_prompts = True

    def pair_losses(self, pairs: Pairs) -> Tensor:
        from .pair_losses import orpo

        assert self.options is not None
        return orpo(pairs, self.options)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        assert self.options is not None
        chosen, rejected = self.shown(pairs)
        return self.options.beta * chosen, self.options.beta * rejected

    def shown(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Means over tokens."""
        return pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens


@dataclass(frozen=True)
class ContrastivePreferenceOptimization(PairedMethod):
    """CPO, and SimPO, which takes means over tokens: the policy's own log-probabilities are the rewards.

    Attributes:
        loss: its name in the tables; "simpo" is SimPO's.
    """

    loss: str = "sigmoid"

    def of(self, config: RunConfig) -> Self:
        loss = "simpo" if config.method == "simpo" else str(config.loss_type)
        return replace(super().of(config), nll_weight=config.cpo_alpha or 0.0, loss=loss)

    def pair_losses(self, pairs: Pairs) -> Tensor:
        from .pair_losses import CPO_LOSSES, simpo

        assert self.options is not None
        return (simpo if self.loss == "simpo" else CPO_LOSSES[self.loss])(pairs, self.options)

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        from .pair_losses import alpha_reward

        options = self.options
        assert options is not None
        chosen, rejected = (alpha_reward(each, options.alpha) for each in self.shown(pairs))
        return options.beta * chosen, options.beta * rejected

    def shown(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Sums, or means over tokens where the loss takes those."""
        if self.loss not in ("ipo", "simpo"):
            return pairs.chosen, pairs.rejected
        return pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens
