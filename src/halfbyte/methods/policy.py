"""What a loss of policy optimization is asked for; without torch, since reports read the names of methods."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Options of the loss, by their names in TRL's GRPOConfig; see there and in `config`."""

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
        """ε_high, which is ε where nothing else is said."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def sampling_mode(self) -> str:
        """How ratios to the probabilities that answers were drawn with are bounded."""
        return self.importance_sampling_mode or ("token_truncate" if self.loss_type == "vespo" else "sequence_mask")

    @property
    def by_answers(self) -> bool:
        """Whether a ratio is of a whole answer."""
        return self.importance_sampling_level == "sequence" or self.loss_type == "rloo"

    @property
    def divisor(self) -> str:
        """What the summed loss is divided by.

        Returns:
            "generated": tokens of all answers of the generation, as a share for each of its micro-batches; "tokens":
            those of the step; "answers": answers of the step; "longest": those times the most tokens of an answer.
        """
        named = {"bnpo": "tokens", "dr_grpo": "longest", "grpo": "answers", "sapo": "answers", "luspo": "answers"}
        return named.get(self.loss_type, "answers" if self.loss_type == "rloo" else "generated")
