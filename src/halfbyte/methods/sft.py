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

    from ..config.schema import RunKeys

BALANCE = Metric("aux_loss", "balancing loss", brief=False)
PERPLEXITY = Metric("perplexity", "perplexity", ".2f")


@dataclass(frozen=True)
class SupervisedFineTuning(Method):
    """Supervised fine-tuning on the labelled tokens, with equal weights. The loss never materialises full logits.

    With a router balancing loss, each micro-batch's balancing loss is weighted by its share of the step's trained
    tokens; for a step of one micro-batch this is transformers' loss. Evaluations exclude it from their loss.

    Attributes:
        balance: coefficient of the routers' balancing loss; 0: none.
    """

    balance: float = 0.0
    skips_rows = True

    @property
    def numbers(self) -> Numbers:  # type: ignore[override]
        trained = (LOSS, BALANCE) if self.balance else (LOSS,)
        return Numbers(trained, (LOSS, PERPLEXITY, *trained[1:]))

    def of(self, config: RunKeys) -> Self:
        return replace(self, balance=config.router_aux_loss_coef or 0.0)

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        plain = super().collator(config, tokenizer, device)
        return _with_real(plain) if self.balance else plain

    def counts(self, batch: Batch) -> dict[str, float]:
        # a label at the first position is never predicted
        return {"trained_tokens": int((batch["labels"][..., 1:] != IGNORE_INDEX).sum())}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        from ..batch import REAL_TOKENS
        from ..modeling.head import causal_lm_loss
        from ..modeling.routers import tracked_routers

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
    """Return a collator whose batches also mark the tokens that are not padding: int64 [B, T]."""

    def collated(rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        from ..batch import REAL_TOKENS

        batch = collate(rows)
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        count, width = batch["input_ids"].shape
        lengths = lengths if count == len(rows) else lengths.sum()[None]
        return {**batch, REAL_TOKENS: (torch.arange(width) < lengths[:, None]).long()}

    return collated
