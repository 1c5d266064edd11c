"""Keys of methods that sample answers, by TRL's names and with its defaults: policy optimization and distillation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from .methods import of
from .section import Section

POLICY = ("grpo", "rloo")
GRPO = ("grpo",)
DISTILLING = ("gkd",)
SAMPLING = (*POLICY, *DISTILLING)
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class PolicySection(Section):
    """Policy optimization"""

    reward_funcs: list[str | dict[str, Any]] | None = of(
        POLICY,
        None,
        "FILE.py:FUNCTION, {model: PATH}, {regex: PATTERN}, {format: think}, exact, math, code, {length: {max: 512}},"
        " soft_overlong, repetition; one or several",
    )
    reward_weights: list[float] | None = of(POLICY, None, "a weight for each of reward_funcs; default: 1 each")
    reward_timeout_s: Positive = of(POLICY, 60.0, "seconds that a reward function may take for a generation")
    num_generations: Annotated[int, Field(ge=2)] | None = of(
        POLICY, None, "answers to each prompt, which are compared; default: by method"
    )
    num_generations_eval: PositiveInt | None = of(POLICY, None, "answers in evaluations; default: as in training")
    max_completion_length: PositiveInt = of(SAMPLING, 512, "most tokens of an answer")
    temperature: Positive = of(SAMPLING, 1.0, "of sampling, and of the log-probabilities that are trained")
    top_p: Share = of(SAMPLING, 1.0, "draw among the likeliest tokens that have this probability together")
    top_k: Annotated[int, Field(ge=0)] = of(SAMPLING, 0, "draw among so many of the likeliest tokens; 0: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = of(
        SAMPLING, None, "draw among tokens at least this times as likely as the likeliest; default: all"
    )
    rollout: Literal["halfbyte", "vllm"] = of(
        POLICY, "halfbyte", "who answers: the model that trains, or the vLLM server of vllm_server_base_url"
    )
    vllm_server_base_url: str | None = of(POLICY, None, "where that server is, such as http://localhost:8000")
    vllm_server_timeout: Positive = of(POLICY, 240.0, "seconds that it may take for the answers to a prompt")
    rollout_weights: Literal["auto", "packed", "unpacked"] = of(
        SAMPLING,
        "auto",
        "how rollouts read quantized weights: from their codes, or decoded once a rollout; auto: as is faster and fits",
    )
    rollout_memory_gib: Positive | None = of(SAMPLING, None, "of rollouts' keys and values; default: what fits")
    kv_cache: Literal["auto", "fp8"] = of(SAMPLING, "auto", "dtype of rollouts' keys and values; auto: the model's")
    dynamic_sampling: bool = of(
        GRPO, False, "sample other prompts for groups whose answers are all as good, up to ten times (DAPO)"
    )
    steps_per_generation: PositiveInt | None = of(
        POLICY,
        None,
        "micro-batches that a generation gives, of per_device_train_batch_size answers each; default: as many as"
        " gradient_accumulation_steps",
    )
    num_iterations: PositiveInt = of(POLICY, 1, "how often the answers of a generation are trained on")
    epsilon: Positive = of(POLICY, 0.2, "how far ratios may move down, and up, before they are clipped")
    epsilon_high: Positive | None = of(POLICY, None, "how far up; default: epsilon")
    delta: Positive | None = of(GRPO, None, "largest ratio at all (two-sided clipping), above 1 + epsilon_high")
    importance_sampling_level: Literal["token", "sequence"] = of(
        GRPO, "token", "what a ratio is of: a token, or the geometric mean over an answer (GSPO)"
    )
    importance_sampling_correction: Literal["auto"] | bool = of(
        GRPO,
        "auto",
        "weigh answers by how training's log-probabilities differ from those they were drawn with; auto: from when on"
        " over 10% of a step's ratios are outside 0.9 to 1.1",
    )
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = of(
        GRPO,
        None,
        "whether those ratios are a token's or an answer's, and are bounded or, outside of the bounds, 0; default:"
        " sequence_mask, with loss_type vespo or kv_cache fp8 token_truncate",
    )
    importance_sampling_clip_max: Positive | None = of(GRPO, 3.0, "upper bound of those ratios")
    importance_sampling_clip_min: Positive | None = of(GRPO, None, "lower bound of those ratios; default: none")
    scale_rewards: Literal["group", "batch", "none"] = of(
        GRPO, "group", "whose standard deviation advantages are divided by; none: they are not (Dr. GRPO)"
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = of(
        GRPO, "sum_then_normalize", "normalize_then_sum: each reward function's rewards on their own first (GDPO)"
    )
    use_bias_correction_kl: bool = of(GRPO, True, "multiply the KL by the ratio, which makes its gradient unbiased")
    top_entropy_quantile: Share = of(GRPO, 1.0, "train on this share of tokens, those of the highest entropy")
    entropy_coef: float = of(GRPO, 0.0, "weight of the mean entropy, which is added to what is maximized")
    mask_truncated_completions: bool = of(POLICY, False, "do not train on answers that reach max_completion_length")
    off_policy_mask_threshold: Positive | None = of(
        GRPO, None, "leave out bad answers whose mean log-prob has fallen by more than this; default: none"
    )
    sapo_temperature_neg: Positive = of(GRPO, 1.05, "loss_type sapo: the gate's temperature for bad answers")
    sapo_temperature_pos: Positive = of(GRPO, 1.0, "loss_type sapo: for good ones")
    vespo_k_pos: Positive = of(GRPO, 2.0, "loss_type vespo: k for good answers")
    vespo_lambda_pos: Positive = of(GRPO, 3.0, "loss_type vespo: λ for good answers")
    vespo_k_neg: Positive = of(GRPO, 3.0, "loss_type vespo: k for bad answers")
    vespo_lambda_neg: Positive = of(GRPO, 2.0, "loss_type vespo: λ for bad answers")
    normalize_advantages: bool = of(("rloo",), False, "scale advantages over a generation to mean 0 and deviation 1")
    reward_clip_range: list[float] | None = of(("rloo",), None, "[least, most] that a reward counts; default: as it is")

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value


class DistillationSection(Section):
    """Distillation"""

    teacher_model_name_or_path: str | None = of(
        DISTILLING,
        None,
        "who is learned from: a model of the same vocabulary, stored as the keys above say, or an adapter, which shares"
        " the weights of the model that trains where it is on that",
    )
    teacher_model_revision: str = of(DISTILLING, "main", "branch, tag or commit of a hub model")
    lmbda: Annotated[float, Field(ge=0, le=1)] = of(
        DISTILLING,
        1.0,
        "share of generations whose answers are the model's own; the others' are the data's completions",
    )
