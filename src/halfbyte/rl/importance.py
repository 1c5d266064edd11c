"""Rollouts and the training forward round differently: how far apart they are, and when the loss is weighed for it."""

from __future__ import annotations

from collections.abc import Mapping

from halfbyte.config import RunConfig
from halfbyte.methods.grpo import WEIGHT, PolicyOptimization
from halfbyte.utils.notices import notice

from .served import OTHER, TELLING, ServedRollouts

OFF = 0.1  # share of ratios outside 0.9 to 1.1 above which the mismatch is corrected for
FAINT = 0.5  # mean weight below which whole answers' ratios leave too little to learn from


class Mismatch:
    """Attributes:
    outside: share of ratios outside 0.9 to 1.1 in the last step, see `methods.grpo`.
    corrects: whether the loss is weighed against it; once it is, it stays so.
    """

    def __init__(self, config: RunConfig, method: PolicyOptimization, server: ServedRollouts | None):
        self.config, self.method, self.server = config, method, server
        wanted = config.importance_sampling_correction
        self._tokens = 0.0
        self.outside, self.corrects = 0.0, wanted is True or (wanted == "auto" and server is not None)

    def saw(self, sums: Mapping[str, float], counts: Mapping[str, float]) -> None:
        """A step's numbers have been read."""
        tokens = max(counts["trained_tokens"], 1)
        self._tokens = tokens
        self.outside, weight = sums.get("sampling/outside", 0.0) / tokens, sums.get(WEIGHT, tokens) / tokens
        if self.corrects and weight < FAINT and self.method.policy.sampling_mode.startswith("sequence"):
            said = f"weights against the mismatch are {weight:.2g} on average: ratios of whole answers leave little"
            notice("faint-weights", f"{said}; importance_sampling_mode: token_truncate weighs each token")

    def look(self) -> None:
        """Whether the next generation is corrected for it.

        Raises:
            TrainingError: it is that of other weights.
        """
        said = f"{self.outside:.0%} of the last step's ratios of training to rollout are outside of 0.9 to 1.1"
        if self.server is not None and self._tokens >= TELLING and self.outside > OTHER:
            raise self.server.other_weights(said)
        if self.config.importance_sampling_correction == "auto" and not self.corrects and self.outside > OFF:
            self.corrects = True
            notice("importance-sampling", f"{said}: from here on the loss is weighed (importance_sampling_correction)")
