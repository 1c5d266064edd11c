"""Learning from single answers with a label, desirable or not: KTO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ..ops import IGNORE_INDEX
from ..utils.errors import ConfigError
from .base import LOSS, Batch, Collate, Method, Metric, Numbers, Rows
from .preference import check_reference

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config import RunConfig
    from ..data.prepare import PreparedData

METRICS = (
    replace(LOSS, over="answers"),
    Metric("rewards/chosen", "desirable reward", over="desirable"),
    Metric("rewards/rejected", "undesirable reward", over="undesirable"),
    Metric("logps/chosen", "desirable log-prob", ".2f", over="desirable"),
    Metric("logps/rejected", "undesirable log-prob", ".2f", over="undesirable"),
    Metric("kl", "KL", over="answers"),
)
MARGINS = Metric("rewards/margins", "margin", over="answers")
Z = "z"  # in a micro-batch: the mean log-ratio of mismatched prompts and answers, not below 0; 0-d


@dataclass(frozen=True)
class KahnemanTverskyOptimization(Method):
    """KTO, and APO of single answers: arXiv:2402.01306 (7, 8), arXiv:2408.06266.

    z is taken over all rows of a step, before any of its losses: each prompt with an answer to the prompt before it in
    the data. (TRL takes it over a micro-batch, with the answer of the row before, which may be to the same prompt.)

    Attributes:
        loss: its name in the table.
        weights: of desirable and of undesirable answers.
        whole: a step is one micro-batch.
        device: that a run asks for, see `config`.
    """

    loss: str = "kto"
    beta: float = 0.1
    weights: tuple[float, float] = (1.0, 1.0)
    whole: bool = False
    device: str | None = None

    rows = "unpaired"
    shares = True
    reference = True
    numbers = Numbers(METRICS, (*METRICS, MARGINS))

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        return self.loss == "kto"

    @property
    def beside(self) -> bool:
        """Whether, where a row's two answers share its prompt, the policy finds z on the way: the mismatched answers go
        through it behind the others, whose prompts' keys and values they see, and only then come the losses. On GPUs,
        where it would make more shapes of CUDA graphs, nobody has measured it."""
        from ..utils.hardware import best_device

        return self.looks_ahead and self.whole and (self.device or best_device().type) == "cpu"

    def of(self, config: RunConfig) -> Self:
        check_reference(config)
        if config.packing:
            raise ConfigError(
                "packing: true with method: kto: rows are answers, and a step takes as many as are asked for",
                "set padding_free: true, which pads as little",
            )
        weights = config.desirable_weight, config.undesirable_weight
        found = replace(self, loss=str(config.loss_type), beta=config.beta or 0.0, weights=weights)
        return replace(found, whole=config.gradient_accumulation_steps == 1, device=config.device)

    def documents(self, config: RunConfig, data: PreparedData) -> PreparedData:
        from ..data.paired import MISMATCHED, documents_in, mismatched

        answers = [("completion_ids", "completion_mask")]
        if self.looks_ahead:
            held_out = None if data.eval is None else mismatched(data.eval, config.max_length)
            data = replace(data, train=mismatched(data.train, config.max_length), eval=held_out)
            answers.append(MISMATCHED)
        return documents_in(config, data, answers, together=False, beside=self.beside)

    def collator(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.paired import unpaired_collator

        return unpaired_collator(config, tokenizer, device, beside=self.beside)

    def tokens(self, rows: Rows) -> int:
        from ..data.branches import ANSWERS
        from ..data.paired import documents_of

        if self.beside and rows and ANSWERS in rows[0]:
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
        """The sum of Δ of mismatched prompts and answers, and their number."""
        own, others = _apart(batch)
        ratios = (_ratios_beside(model, own, others)[2] if _is_beside(others) else _ratios(model, others)[0]).detach()
        return _of_others(ratios, others)

    def needs_ahead(self, taken: Sequence[Batch]) -> bool:
        return len(taken) > 1 or not _is_beside(_apart(taken[0])[1])

    def shared(self, counts: Mapping[str, float], ahead: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        if not ahead:
            return {}
        return {Z: (ahead["ratios"] / ahead["answers"].clamp(min=1)).clamp(min=0)}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch

        from .pair_losses import KTO_LOSSES

        batch, others = _apart(batch)
        z = batch.pop(Z, None)
        real, desirable = batch["real"], batch["label"] > 0
        if z is None and _is_beside(others):
            ratios, log_probs, of_others = _ratios_beside(model, batch, others)
            z = self.shared({}, _of_others(of_others, others))[Z]
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
        found = {**means, **counts}
        if {"rewards/chosen", "rewards/rejected"} <= means.keys():
            found["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return found


def _apart(batch: Batch) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a batch says of rows' own answers, and of mismatched ones."""
    from ..data.paired import AHEAD

    others = {key.removeprefix(AHEAD): value for key, value in batch.items() if key.startswith(AHEAD)}
    return {key: value for key, value in batch.items() if not key.startswith(AHEAD)}, others


def _is_beside(others: Batch) -> bool:
    """Whether they are laid out behind rows' own answers."""
    from ..modeling.shared_prefix import BRANCHES

    return BRANCHES in others


def _of_others(ratios: Tensor, others: Batch) -> dict[str, Tensor]:
    return {"ratios": (ratios * others["real"]).sum(), "answers": others["real"].sum()}


def _ratios_beside(model: nn.Module, batch: Batch, others: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Δ and ℓ [N] of the answers of a batch, and Δ [N] of those behind it."""
    from .answers import log_probs_beside, per_answer, reference_log_probs_beside

    answers = len(batch["real"])
    own, theirs = zip(log_probs_beside(model, batch, others), reference_log_probs_beside(model, batch, others),
                      strict=True)  # fmt: skip
    log_probs = per_answer(own[0], batch["answer"], answers)
    found = (per_answer(each[0] - each[1], part["answer"], answers) for each, part in ((own, batch), (theirs, others)))
    ratios, of_others = found
    return ratios, log_probs, of_others


def _ratios(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Δ and ℓ [N] of the answers of a batch."""
    from .answers import log_probs, per_answer, reference_log_probs

    policy, reference = log_probs(model, batch), reference_log_probs(model, batch)
    answers = len(batch["real"])
    return per_answer(policy - reference, batch["answer"], answers), per_answer(policy, batch["answer"], answers)
