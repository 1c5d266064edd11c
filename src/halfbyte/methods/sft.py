"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from ..ops import IGNORE_INDEX
from .base import LOSS, Batch, Collate, Method, Metric, Numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config import RunConfig

BALANCE = Metric("aux_loss", "balancing loss", brief=False)
PERPLEXITY = Metric("perplexity", "perplexity", ".2f")


@dataclass(frozen=True)
class SupervisedFineTuning(Method):
    """Trains on the tokens with a label, each weighed alike. The loss never goes through full logits.

    Where routers are balanced, each micro-batch's balancing loss counts by its share of the step's trained tokens: of
    a step of one micro-batch that is transformers' loss. Evaluations leave it out of their loss.

    Attributes:
        balance: what the balancing loss of a mixture's routers is multiplied by; 0: there is none.
    """

    balance: float = 0.0

    @property
    def numbers(self) -> Numbers:  # type: ignore[override]
        trained = (LOSS, BALANCE) if self.balance else (LOSS,)
        return Numbers(trained, (LOSS, PERPLEXITY, *trained[1:]))

    def of(self, config: RunConfig) -> Self:
        return replace(self, balance=config.router_aux_loss_coef or 0.0)

    def collator(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        plain = super().collator(config, tokenizer, device)
        return _with_real(plain) if self.balance else plain

    def counts(self, batch: Batch) -> dict[str, float]:
        # the first position predicts nothing, wherever its label points
        return {"trained_tokens": int((batch["labels"][..., 1:] != IGNORE_INDEX).sum())}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        from ..modeling.head import causal_lm_loss
        from ..modeling.routers import REAL_TOKENS, tracked_routers

        if not self.balance:
            return {"loss": causal_lm_loss(model, batch)[0]}
        routers = tracked_routers(model)
        assert routers is not None
        loss, count = causal_lm_loss(model, {key: value for key, value in batch.items() if key != REAL_TOKENS})
        balance = routers.loss(loss, batch["labels"].numel()) * count
        return {"loss": loss + self.balance * balance if model.training else loss, "aux_loss": balance}

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        return {**means, "perplexity": math.exp(min(means["loss"], 700)), "tokens": counts["trained_tokens"]}


def _with_real(collate: Collate) -> Collate:
    """Batches that say, too, which of their tokens are no padding: int64 [B, T]."""

    def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        from ..modeling.routers import REAL_TOKENS

        batch = collate(rows)
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        count, width = batch["input_ids"].shape
        lengths = lengths if count == len(rows) else lengths.sum()[None]
        return {**batch, REAL_TOKENS: (torch.arange(width) < lengths[:, None]).long()}

    return collated
