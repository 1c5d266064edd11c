"""Drawing the next token from its logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..utils.errors import ConfigError
from ..utils.text import brief

LOWEST = 1e-6  # temperature that fp32 divides by; below 1e-38 it is 0


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: divides the logits; 0 takes the likeliest token, and nothing below matters.
        top_k: draw among so many of the likeliest tokens; 0 for all.
        top_p: draw among the likeliest tokens whose probabilities reach this sum (Holtzman et al. 2019,
            arXiv:1904.09751, section 3.1), the one that reaches it included.
        min_p: draw among the tokens at least this times as likely as the likeliest (Nguyen et al. 2024,
            arXiv:2407.01082, section 3); 0 for all.
        seed: of the draws; None takes torch's global generator.

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            if not isinstance(value := getattr(self, name), int | float):
                raise ConfigError(f"{name} is {brief(value)}", "give a number")
        for name, wrong, fix in (
            ("temperature", not 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k < 0, "0 or more"),
            ("top_p", not 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", not 0 <= self.min_p <= 1, "from 0 to 1"),
        ):
            if wrong:
                raise ConfigError(f"{name} is {getattr(self, name)}", f"use a value {fix}")

    def generator(self, device: torch.device) -> torch.Generator | None:
        """What `draw` takes its random numbers from."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def draw(self, logits: Tensor, generator: torch.Generator | None) -> Tensor:
        """int64 [B]: a token for each row of logits [B, V]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """fp32 [B, V], zero for tokens that cannot be drawn."""
        scores, kept = self._scores(logits), self.kept(logits)
        return (scores if kept is None else scores.masked_fill(~kept, -torch.inf)).softmax(-1)

    def kept(self, logits: Tensor) -> Tensor | None:
        """bool [B, V]: the tokens that can be drawn; None for all. Some of the likeliest always can."""
        narrow = 0 < self.top_k < logits.shape[-1]
        if self.temperature == 0 or not (narrow or self.top_p < 1 or self.min_p > 0):
            return None
        scores = self._scores(logits)
        if narrow:
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[:, -1:], -torch.inf)
        probabilities = scores.softmax(-1)
        kept = probabilities >= self.min_p * probabilities.amax(-1, keepdim=True)
        if self.top_p < 1:
            ordered, order = probabilities.sort(descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            kept &= ~torch.zeros_like(beyond).scatter(1, order, beyond)
        return kept if not narrow else kept & (scores > -torch.inf)

    def _scores(self, logits: Tensor) -> Tensor:
        """fp32 [B, V]: logits over the temperature, the largest 0."""
        logits = logits.float()
        return (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, LOWEST)


@dataclass(frozen=True)
class Penalties:
    """What is changed in logits before a token is drawn, as OpenAI's interface has it.

    Args:
        frequency: taken from a token's logit for each time that the answer has it.
        presence: taken once if the answer has it at all.
        bias: added to the logits of tokens, by their ids.
    """

    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.frequency or self.presence or self.bias)

    def applied(self, logits: Tensor, counts: Tensor) -> Tensor:
        """fp32 [B, V], of logits [B, V] and how often each row has each token, fp32 [B, V]."""
        found = logits.float() - self.frequency * counts - self.presence * (counts > 0)
        if self.bias:
            found[:, list(self.bias)] += torch.tensor(list(self.bias.values()), device=logits.device)
        return found


class Draws:
    """Draws the tokens of a batch, one a row at a time, and counts them where penalties go by that."""

    def __init__(self, sampling: Sampling, penalties: Penalties | None, device: torch.device):
        self.sampling, self.penalties, self.generator = sampling, penalties, sampling.generator(device)
        self.counts: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """int64 [B], from logits [B, V]."""
        if not self.penalties:
            return self.sampling.draw(logits, self.generator)
        if self.counts is None:
            self.counts = torch.zeros_like(logits, dtype=torch.float32)
        drawn = self.sampling.draw(self.penalties.applied(logits, self.counts), self.generator)
        self.counts.scatter_add_(1, drawn.unsqueeze(1), self.counts.new_ones(len(drawn), 1))
        return drawn
