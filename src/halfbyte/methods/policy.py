"""Options of the policy-optimization loss; without torch, since reports read the names of methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Options of the loss, with their names in TRL's GRPOConfig; see there and in `config`."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    importance_sampling_mode: str | None = None
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @property
    def high(self) -> float:
        """ε_high, by default ε."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def sampling_mode(self) -> str:
        """Bounds of importance-sampling ratios, as LEVEL_truncate or LEVEL_mask."""
        return self.importance_sampling_mode or ("token_truncate" if self.loss_type == "vespo" else "sequence_mask")

    @property
    def by_answers(self) -> bool:
        """Return whether a ratio belongs to a whole answer."""
        return self.importance_sampling_level == "sequence" or self.loss_type == "rloo"

    @property
    def divisor(self) -> str:
        """The divisor of the summed loss.

        Returns:
            "generated": tokens of all answers of the generation, divided among its micro-batches; "tokens": tokens of
            the step; "answers": answers of the step; "longest": answers of the step times the maximal tokens of an
            answer.
        """
        named = {"bnpo": "tokens", "dr_grpo": "longest", "grpo": "answers", "sapo": "answers", "luspo": "answers"}
        return named.get(self.loss_type, "answers" if self.loss_type == "rloo" else "generated")
