"""Preference methods. Pairs of answers: DPO with a reference; ORPO, SimPO and CPO without one. Single labelled
answers: KTO."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from ..batch import BRANCHES, KTO_KL, LOOK_AHEAD, NLL_SCALE
from ..config.initialisations import initialisation
from ..ops import IGNORE_INDEX
from ..utils.errors import ConfigError
from .base import LOSS, Batch, Collate, Method, Metric, Numbers, Rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config.schema import RunKeys
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
KTO_METRICS = (
    replace(LOSS, over="answers"),
    Metric("rewards/chosen", "desirable reward", over="desirable"),
    Metric("rewards/rejected", "undesirable reward", over="undesirable"),
    Metric("logps/chosen", "desirable log-prob", ".2f", over="desirable"),
    Metric("logps/rejected", "undesirable log-prob", ".2f", over="undesirable"),
    Metric("kl", "KL", over="answers"),
)
MARGINS = Metric("rewards/margins", "margin", over="answers")


@dataclass(frozen=True)
class PairedMethod(Method):
    """A method whose rows are pairs: a chosen and a rejected answer to a prompt.

    The loss of a step is the mean over its pairs plus `nll_weight` times the mean negative log-likelihood of the chosen
    answers' tokens; both means are over the complete step.

    Attributes:
        losses: names in the method's table of losses, each with its weight.
        options: parameters of the losses; None until a run's keys are read.
        nll_of_prompts: whether the likelihood includes the prompts.
    """

    losses: tuple[tuple[str, float], ...] = ()
    options: Options | None = None
    nll_weight: float = 0.0

    rows = "pairs"
    shares = True
    shares_numbers = True
    nll_of_prompts = False

    def of(self, config: RunKeys) -> Self:
        from .pair_losses import Options

        return replace(self, options=Options(**{field.name: getattr(config, field.name) for field in fields(Options)}))

    @property
    def numbers(self) -> Numbers:  # type: ignore[override]
        metrics = (PAIR_LOSS, *REWARDS, *([NLL] if self.nll_weight else []))
        return Numbers(metrics, metrics)

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        from ..data.answer_documents import documents_in

        return documents_in(config, data, ANSWERS)

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_answers import answer_collator

        return answer_collator(config, tokenizer, device, prompts=self.nll_of_prompts)

    def counts(self, batch: Batch) -> dict[str, float]:
        is_token = batch["wanted"] != IGNORE_INDEX
        answer = batch["answer"]
        return {
            "pairs": int(batch["real"].sum()),
            "trained_tokens": int((answer >= 0).sum()),
            "likelihood_tokens": int((is_token & self._likely(answer)).sum()),
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
            # padding has a log-probability of 0
            nll = -(policy * self._likely(batch["answer"])).sum()
            sums["nll_loss"] = nll.detach()
            sums["loss"] = loss + self.nll_weight * batch.get(NLL_SCALE, 0.0) * nll
        return sums

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Pairs, Tensor]:
        """Return log-probabilities of tokens [M], of answers, and the weight of each pair [P], 0 for padding."""
        from .answers import log_probs

        policy = log_probs(model, batch)
        return policy, pairs_of(batch, policy), batch["real"]

    @abstractmethod
    def pair_losses(self, pairs: Pairs) -> Tensor:
        """Return the losses [P]."""

    @abstractmethod
    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the implicit rewards of the chosen and the rejected answers, [P] each."""

    def shown(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of both answers as the records show them, [P] each."""
        return pairs.chosen, pairs.rejected

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        numbers = {**means, **counts}
        if self.nll_weight:
            numbers["loss"] += self.nll_weight * means["nll_loss"]
        return numbers

    def _likely(self, answer: Tensor) -> Tensor:
        """Return bool [M]: tokens of the likelihood term: of chosen answers; with `nll_of_prompts` also of none."""
        chosen = answer % 2 == 0  # -1 is odd, too
        return chosen | (answer < 0) if self.nll_of_prompts else chosen


def pairs_of(batch: Batch, policy: Tensor, reference: Tensor | None = None, ld_alpha: float | None = None) -> Pairs:
    """Return the pairs of a batch from log-probabilities of tokens [M].

    Args:
        ld_alpha: weight of an answer's tokens beyond the length of the pair's shorter answer; default: 1. LD-DPO,
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
        policy = torch.where(within, policy, ld_alpha * policy)
        reference = torch.where(within, reference, ld_alpha * reference)
    chosen, rejected = per_answer(policy, answer, answers).view(-1, 2).unbind(-1)
    ref_chosen, ref_rejected = per_answer(reference, answer, answers).view(-1, 2).unbind(-1)
    chosen_tokens, rejected_tokens = counts.clamp(min=1).view(-1, 2).unbind(-1)
    return Pairs(chosen, rejected, ref_chosen, ref_rejected, chosen_tokens, rejected_tokens, batch["real"])


def _rewards(
    chosen: Tensor, rejected: Tensor, chosen_log_probs: Tensor, rejected_log_probs: Tensor, real: Tensor
) -> dict[str, Tensor]:
    """Return the sums of `REWARDS`, in their order."""
    values = [chosen, rejected, (chosen > rejected).float(), chosen - rejected, chosen_log_probs, rejected_log_probs]
    return {metric.name: (value.detach() * real).sum() for metric, value in zip(REWARDS, values, strict=True)}


def reference_is_initial_model(config: RunKeys) -> bool:
    """Return whether the reference is the model before the first step, and not the base model without its adapter."""
    return bool(not config.use_peft or config.adapter_path or config.storage.rounds or _starts_from_weights(config))


def _starts_from_weights(config: RunKeys) -> bool:
    """Return whether the base without the adapter is not the initial model, since the initialisation changed both."""
    row = initialisation(config)
    return row.reads != "nothing" and not row.starts_at_zero


def check_reference(config: RunKeys) -> None:
    """Raise a ConfigError if the reference differs from the policy before the first step, or must be computed in
    advance and the keys do not allow it."""
    if config.init_lora_weights is False and not reference_is_initial_model(config):
        wrong = f"init_lora_weights: false with method: {config.method}: the reference is the model without its adapter"
        raise ConfigError(f"{wrong}, so the initial adapter must be zero", "set init_lora_weights: true")
    if not reference_is_initial_model(config):
        return
    if config.streaming:
        wrong = f"streaming: true with method: {config.method} and a reference that is the model before training"
        raise ConfigError(f"{wrong}: its log-probabilities of all rows are computed first", "remove streaming")
    if config.precompute_ref_log_probs is not False:
        return
    rounded = "qat_scheme" if config.qat_scheme else "merge_aware: true" if config.merge_aware else "use_peft: false"
    why = "adapter_path" if config.adapter_path else rounded
    why = config.written("init_lora_weights") if config.use_peft and _starts_from_weights(config) else why
    raise ConfigError(
        f"precompute_ref_log_probs: false with {why}: the reference is the model before training, and disabling the"
        " adapter does not restore it",
        "set precompute_ref_log_probs: true",
    )


@dataclass(frozen=True)
class DirectPreferenceOptimization(PairedMethod):
    """DPO and its variants: the policy against a frozen reference."""

    ld_alpha: float | None = None
    use_weighting: bool = False

    reference = True

    def of(self, config: RunKeys) -> Self:
        check_reference(config)
        names = [config.loss_type] if isinstance(config.loss_type, str) else list(config.loss_type or ())
        weights = config.loss_weights or [1.0] * len(names)
        losses = [(name, weight) for name, weight in zip(names, weights, strict=True) if name != "sft"]
        likelihood = sum(weight for name, weight in zip(names, weights, strict=True) if name == "sft")
        return replace(
            super().of(config),
            losses=tuple(losses),
            nll_weight=likelihood,
            ld_alpha=config.ld_alpha,
            use_weighting=config.use_weighting,
        )

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
        """Return βΔ: arXiv:2305.18290 (5), without its constant."""
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
        """Return the means over tokens."""
        return pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens


@dataclass(frozen=True)
class ContrastivePreferenceOptimization(PairedMethod):
    """CPO, and SimPO with means over tokens: the policy's own log-probabilities are the rewards.

    Attributes:
        loss: name in the tables of losses; "simpo" for SimPO.
    """

    loss: str = "sigmoid"

    def of(self, config: RunKeys) -> Self:
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
        chosen, rejected = (alpha_reward(log_probs, options.alpha) for log_probs in self.shown(pairs))
        return options.beta * chosen, options.beta * rejected

    def shown(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """Return sums, or means over tokens if the loss uses means."""
        if self.loss not in ("ipo", "simpo"):
            return pairs.chosen, pairs.rejected
        return pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens


# --- KTO --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KahnemanTverskyOptimization(Method):
    """KTO, and APO of single answers: arXiv:2402.01306 (7, 8), arXiv:2408.06266.

    z is the mean over all rows of a step, computed before its losses: each prompt with an answer to the previous prompt
    of the data. (TRL computes it per micro-batch, with the answer of the previous row, which may have the same prompt.)

    Attributes:
        loss: name in the table of losses.
        weights: of desirable and of undesirable answers.
        is_single: whether a step is one micro-batch.
        device: the configured device.
    """

    loss: str = "kto"
    beta: float = 0.1
    weights: tuple[float, float] = (1.0, 1.0)
    is_single: bool = False
    device: str | None = None

    rows = "unpaired"
    shares = True
    shares_numbers = True
    reference = True
    numbers = Numbers(KTO_METRICS, (*KTO_METRICS, MARGINS))

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        return self.loss == "kto"

    @property
    def joined(self) -> bool:
        """Return whether one forward pass computes z and the losses, if the two answers of a row share its prompt.

        The mismatched answers then reuse the keys and values of the rows' own prompts, and the losses follow. Only on
        CPUs: on GPUs it needs more shapes of CUDA graphs, and its speed there has not been measured.
        """
        from ..utils.hardware import best_device

        return self.looks_ahead and self.is_single and (self.device or best_device().type) == "cpu"

    def of(self, config: RunKeys) -> Self:
        check_reference(config)
        if config.packing:
            raise ConfigError(
                "packing: true with method: kto: a step takes a fixed number of answers, so rows cannot be packed",
                "set padding_free: true, which needs as little padding",
            )
        return replace(
            self,
            loss=str(config.loss_type),
            beta=config.beta or 0.0,
            weights=(config.desirable_weight, config.undesirable_weight),
            is_single=config.gradient_accumulation_steps == 1,
            device=config.device,
        )

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        from ..data.answer_documents import MISMATCHED, documents_in, mismatched

        answers = [("completion_ids", "completion_mask")]
        if self.looks_ahead:
            held_out = None if data.eval is None else mismatched(data.eval, config.max_length)
            data = replace(data, train=mismatched(data.train, config.max_length), eval=held_out)
            answers.append(MISMATCHED)
        return documents_in(config, data, answers, together=False, joined=self.joined)

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_answers import unpaired_collator

        return unpaired_collator(config, tokenizer, device, joined=self.joined)

    def tokens(self, rows: Rows) -> int:
        from ..data.answer_documents import documents_of
        from ..data.shared_prefix import ANSWERS

        if self.joined and rows and ANSWERS in rows[0]:
            return super().tokens(rows)
        return sum(len(document["input_ids"]) for row in rows for document in documents_of(row))

    def counts(self, batch: Batch) -> dict[str, float]:
        answers, desirable = int(batch["real"].sum()), int((batch["label"] * batch["real"]).sum())
        numbers = {"answers": answers, "desirable": desirable, "undesirable": answers - desirable}
        return {**numbers, "trained_tokens": int((batch["answer"] >= 0).sum())}

    def blank(self, batch: Batch) -> dict[str, Any]:
        nothing = {"wanted": IGNORE_INDEX, "answer": -1, "real": 0}
        nothing |= {f"ahead_{name}": fill for name, fill in nothing.items() if f"ahead_{name}" in batch}
        return {**batch, **{name: batch[name].new_full(batch[name].shape, fill) for name, fill in nothing.items()}}

    def ahead(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the sum of Δ over mismatched prompts and answers, and their number."""
        rows, mismatched = _split(batch)
        if BRANCHES in mismatched:
            _, _, ratios = _joint_ratios(model, rows, mismatched)
        else:
            ratios, _ = _ratios(model, mismatched)
        return _look_ahead_sums(ratios.detach(), mismatched)

    def needs_ahead(self, micro_batches: Sequence[Batch]) -> bool:
        return len(micro_batches) > 1 or BRANCHES not in _split(micro_batches[0])[1]

    def shared(self, counts: Mapping[str, float], ahead: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        if not ahead:
            return {}
        return {KTO_KL: (ahead["ratios"] / ahead["answers"].clamp(min=1)).clamp(min=0)}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch

        from .pair_losses import KTO_LOSSES

        batch, mismatched = _split(batch)
        z = batch.pop(KTO_KL, None)
        real, desirable = batch["real"], batch["label"] > 0
        if z is None and BRANCHES in mismatched:
            ratios, log_probs, mismatched_ratios = _joint_ratios(model, batch, mismatched)
            z = self.shared({}, _look_ahead_sums(mismatched_ratios, mismatched))[KTO_KL]
        else:
            z = real.new_zeros(()) if z is None else z
            ratios, log_probs = _ratios(model, batch)
        losses = KTO_LOSSES[self.loss](ratios, desirable, z, self.beta)
        good, bad = self.weights
        sums = {"loss": (losses * real * torch.where(desirable, good, bad)).sum()}
        for name, values in (("rewards", self.beta * ratios), ("logps", log_probs)):
            values = values.detach() * real
            sums[f"{name}/chosen"] = (values * desirable).sum()
            sums[f"{name}/rejected"] = (values * ~desirable).sum()
        return {**sums, "kl": z.detach() * real.sum()}

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        numbers = {**means, **counts}
        if {"rewards/chosen", "rewards/rejected"} <= means.keys():
            numbers["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return numbers


def _split(batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a batch into the columns of its rows' answers and the columns of the mismatched answers.

    Mismatched answers that reuse the prompts of the rows have the column `BRANCHES`.
    """
    rows = {key: value for key, value in batch.items() if not key.startswith(LOOK_AHEAD)}
    return rows, {key.removeprefix(LOOK_AHEAD): value for key, value in batch.items() if key.startswith(LOOK_AHEAD)}


def _look_ahead_sums(ratios: Tensor, mismatched: Batch) -> dict[str, Tensor]:
    return {"ratios": (ratios * mismatched["real"]).sum(), "answers": mismatched["real"].sum()}


def _joint_ratios(model: nn.Module, batch: Batch, mismatched: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return Δ and ℓ [N] of the answers of a batch, and Δ [N] of the mismatched ones."""
    from .answers import joint_log_probs, joint_reference_log_probs, per_answer

    answers = len(batch["real"])
    policy, policy_mismatched = joint_log_probs(model, batch, mismatched)
    reference, reference_mismatched = joint_reference_log_probs(model, batch, mismatched)
    log_probs = per_answer(policy, batch["answer"], answers)
    ratios = per_answer(policy - reference, batch["answer"], answers)
    mismatched_ratios = per_answer(policy_mismatched - reference_mismatched, mismatched["answer"], answers)
    return ratios, log_probs, mismatched_ratios


def _ratios(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return Δ and ℓ [N] of the answers of a batch."""
    from .answers import log_probs, per_answer, reference_log_probs

    policy, reference = log_probs(model, batch), reference_log_probs(model, batch)
    answers = len(batch["real"])
    return per_answer(policy - reference, batch["answer"], answers), per_answer(policy, batch["answer"], answers)
