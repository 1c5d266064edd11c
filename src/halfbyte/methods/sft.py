"""Supervised fine-tuning: the mean negative log-likelihood of the trained tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..ops import IGNORE_INDEX
from .base import LOSS, Batch, Method, Metric, Numbers

if TYPE_CHECKING:
    from torch import Tensor, nn


class SupervisedFineTuning(Method):
    """Trains on the tokens with a label, each weighed alike. The loss never goes through full logits."""

    numbers = Numbers(evaluated=(LOSS, Metric("perplexity", "perplexity", ".2f")))

    def counts(self, batch: Batch) -> dict[str, float]:
        # the first position predicts nothing, wherever its label points
        return {"trained_tokens": int((batch["labels"][..., 1:] != IGNORE_INDEX).sum())}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        from ..models.head import causal_lm_loss

        return {"loss": causal_lm_loss(model, batch)[0]}

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        return {**means, "perplexity": math.exp(min(means["loss"], 700)), "tokens": counts["trained_tokens"]}
