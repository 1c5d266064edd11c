"""Reward models: a head that scores a prompt with its answer, learned from pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ..errors import ConfigError
from .base import LOSS, Batch, Collate, Method, Metric, Numbers
from .preference import ANSWERS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config import RunConfig
    from ..data.prepare import PreparedData

METRICS = (
    replace(LOSS, over="pairs"),
    Metric("accuracy", "accuracy", ".3f", over="pairs"),
    Metric("margin", "margin", over="pairs"),
    Metric("mean_reward", "mean reward", over="pairs"),
)


@dataclass(frozen=True)
class RewardModelling(Method):
    """−log σ(r_w − r_l − margin), r the score of a document's last token: arXiv:2203.02155 (1).

    The head is saved with the adapter, which plain transformers and PEFT load as sequence classification.

    Attributes:
        center: weight of (r_w + r_l)².
    """

    center: float = 0.0

    rows = "pairs"
    shares = True
    scores = True
    numbers = Numbers(METRICS, METRICS)

    def of(self, config: RunConfig) -> Self:
        if not config.use_peft:
            raise ConfigError(
                "use_peft: false with method: reward: the head that scores is saved with an adapter",
                "set use_peft: true",
            )
        return replace(self, center=config.center_rewards_coefficient or 0.0)

    def documents(self, config: RunConfig, data: PreparedData) -> PreparedData:
        from ..data.paired import documents_in

        return documents_in(config, data, ANSWERS)

    def collator(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        from ..data.paired import answer_collator

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
        chosen, rejected = score(model, batch).view(-1, 2).unbind(-1)
        loss = (reward(chosen, rejected, batch.get("margin", 0.0), self.center) * real).sum()
        with_margin = chosen.detach() - rejected.detach()
        values = [(with_margin > 0).float(), with_margin, (chosen.detach() + rejected.detach()) / 2]
        named = zip(METRICS[1:], values, strict=True)
        return {"loss": loss, **{metric.name: (value * real).sum() for metric, value in named}}

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        return {**means, **counts}
