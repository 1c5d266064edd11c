"""Reward models: a head that scores a prompt with its answer, trained on pairs, or each step of an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ..utils.errors import ConfigError
from .base import LOSS, Batch, Collate, Method, Metric, Numbers
from .preference import ANSWERS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config.schema import RunKeys
    from ..data.prepare import PreparedData

METRICS = (
    replace(LOSS, over="pairs"),
    Metric("accuracy", "accuracy", ".3f", over="pairs"),
    Metric("margin", "margin", over="pairs"),
    Metric("mean_reward", "mean reward", over="pairs"),
)


@dataclass(frozen=True)
class RewardModelling(Method):
    """−log σ(r_w − r_l − margin), where r is the score of a document's last token: arXiv:2203.02155 (1).

    The head is saved with the adapter; plain transformers and PEFT load it as sequence classification.

    Attributes:
        center: weight of (r_w + r_l)².
    """

    center: float = 0.0

    rows = "pairs"
    shares = True
    scores = "SEQ_CLS"
    numbers = Numbers(METRICS, METRICS)

    def of(self, config: RunKeys) -> Self:
        _check_adapter(config)
        return replace(self, center=config.center_rewards_coefficient or 0.0)

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        from ..data.answer_documents import documents_in

        return documents_in(config, data, ANSWERS)

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_answers import answer_collator

        collate = answer_collator(config, tokenizer, device, numbers=("margin",))

        def without_tokens(rows: list[dict[str, Any]]) -> dict[str, Any]:
            batch = collate(rows)
            return {name: value for name, value in batch.items() if name not in ("at", "wanted", "answer", "place")}

        return without_tokens

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"pairs": int(batch["real"].sum())}

    def blank(self, batch: Batch) -> dict[str, Any]:
        return {**batch, "real": batch["real"].new_zeros(batch["real"].shape)}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        from .answers import score
        from .pair_losses import reward

        real = batch["real"]
        chosen, rejected = score(model, batch).view(-1, 2).unbind(-1)  # one label
        loss = (reward(chosen, rejected, batch.get("margin", 0.0), self.center) * real).sum()
        with_margin = chosen.detach() - rejected.detach()
        values = [(with_margin > 0).float(), with_margin, (chosen.detach() + rejected.detach()) / 2]
        named = zip(METRICS[1:], values, strict=True)
        return {"loss": loss, **{metric.name: (value * real).sum() for metric, value in named}}


def _check_adapter(config: RunKeys) -> None:
    if not config.use_peft:
        raise ConfigError(
            f"use_peft: false with method: {config.method}: the score head is saved with an adapter",
            "set use_peft: true",
        )


STEP_METRICS = (
    replace(LOSS, over="labelled_steps"),
    Metric("accuracy", "accuracy", ".3f", over="labelled_steps"),
    Metric("right", "steps taken to be right", ".3f", over="labelled_steps"),
)


@dataclass(frozen=True)
class ProcessRewardModelling(Method):
    """Cross-entropy of each step's label with a head of two classes (wrong, right) at the step's last token.

    Process supervision: arXiv:2305.20050 (section 2.6, appendix F) and arXiv:2211.14275 (section 2.5). The head is
    saved with the adapter; plain transformers and PEFT load it as token classification.
    """

    rows = "stepwise"
    scores = "TOKEN_CLS"
    numbers = Numbers(STEP_METRICS, STEP_METRICS)

    def of(self, config: RunKeys) -> Self:
        _check_adapter(config)
        return self

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        from ..data.answer_documents import documents_in

        return documents_in(config, data, [("steps_ids", "steps_mask")])

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.collate_answers import step_collator

        return step_collator(config, tokenizer, device)

    def counts(self, batch: Batch) -> dict[str, float]:
        return {"labelled_steps": int(batch["real"].sum())}

    def blank(self, batch: Batch) -> dict[str, Any]:
        return {**batch, "real": batch["real"].new_zeros(batch["real"].shape)}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        import torch.nn.functional as F

        from .answers import score

        logits, real = score(model, batch, "at"), batch["real"]
        labels = batch["right"].long()
        predicted = logits.detach().argmax(-1)
        return {
            "loss": (F.cross_entropy(logits, labels, reduction="none") * real).sum(),
            "accuracy": ((predicted == labels) * real).sum(),
            "right": (predicted * real).sum(),
        }
