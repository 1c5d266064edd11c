"""Keys of policy optimization and distillation, which sample answers; names and defaults as in TRL."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from .methods import method_field
from .section import Section

POLICY = ("grpo", "rloo")
GRPO = ("grpo",)
DISTILLING = ("gkd",)
SAMPLING = (*POLICY, *DISTILLING)
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
KvCache = Literal["auto", "fp8", "int4"]


class PolicySection(Section):
    """Policy optimization"""

    reward_funcs: list[str | dict[str, Any]] | None = method_field(
        POLICY,
        None,
        "one or several rewards: FILE.py:FUNCTION, {model: PATH}, {regex: PATTERN}, {format: think}, exact, math, code,"
        " {length: {max: 512}}, soft_overlong, repetition",
    )
    reward_weights: list[float] | None = method_field(POLICY, None, "weight of each of reward_funcs; default: 1 each")
    reward_timeout_s: Positive = method_field(
        POLICY, 60.0, "time limit of a reward function per generation, in seconds"
    )
    num_generations: Annotated[int, Field(ge=2)] | None = method_field(
        POLICY, None, "number of answers per prompt (group size); default: by method"
    )
    num_generations_eval: PositiveInt | None = method_field(
        POLICY, None, "number of answers per prompt in evaluations; default: as in training"
    )
    max_completion_length: PositiveInt = method_field(SAMPLING, 512, "largest number of tokens in an answer")
    temperature: Positive = method_field(SAMPLING, 1.0, "temperature of sampling and of the trained log-probabilities")
    top_p: Share = method_field(SAMPLING, 1.0, "sample from the likeliest tokens with this total probability")
    top_k: Annotated[int, Field(ge=0)] = method_field(SAMPLING, 0, "number of likeliest tokens to sample from; 0: all")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = method_field(
        SAMPLING, None, "smallest probability of a sampled token relative to the likeliest token; default: no limit"
    )
    rollout: Literal["halfbyte", "vllm"] = method_field(
        POLICY,
        "halfbyte",
        "engine that samples answers: the trained model itself, or the server at vllm_server_base_url",
    )
    vllm_server_base_url: str | None = method_field(
        POLICY, None, "address of the vLLM server, as in http://localhost:8000"
    )
    vllm_server_timeout: Positive = method_field(
        POLICY, 240.0, "time limit of the vLLM server for the answers to a prompt, in seconds"
    )
    rollout_weights: Literal["auto", "packed", "unpacked"] = method_field(
        SAMPLING,
        "auto",
        "quantized weights in rollouts: packed, or dequantized once per rollout; auto: the faster one that fits",
    )
    rollout_memory_gib: Positive | None = method_field(
        SAMPLING, None, "memory of the KV cache of rollouts, in GiB; default: as much as fits"
    )
    kv_cache: KvCache = method_field(
        SAMPLING, "auto", "dtype of the KV cache of rollouts; auto: the model's dtype; int4: codes of 4 bits"
    )
    dynamic_sampling: bool = method_field(
        GRPO, False, "replace groups whose rewards are all equal by other prompts, in up to ten rounds (DAPO)"
    )
    steps_per_generation: PositiveInt | None = method_field(
        POLICY,
        None,
        "number of micro-batches sampled per generation, of per_device_train_batch_size answers each; default:"
        " gradient_accumulation_steps",
    )
    num_iterations: PositiveInt = method_field(POLICY, 1, "number of training passes over the answers of a generation")
    epsilon: Positive = method_field(
        POLICY, 0.2, "clip range of the probability ratios: from 1 - epsilon to 1 + epsilon"
    )
    epsilon_high: Positive | None = method_field(POLICY, None, "clip range above 1; default: epsilon")
    delta: Positive | None = method_field(
        GRPO, None, "upper bound of all ratios (two-sided clipping), above 1 + epsilon_high"
    )
    importance_sampling_level: Literal["token", "sequence"] = method_field(
        GRPO, "token", "ratios per token, or per sequence as the geometric mean over its tokens (GSPO)"
    )
    importance_sampling_correction: Literal["auto"] | bool = method_field(
        GRPO,
        "auto",
        "weight answers by the ratio of their probabilities in training and in sampling; auto: as soon as over 10% of"
        " the ratios of a step are outside 0.9 to 1.1",
    )
    importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] | None = (
        method_field(
            GRPO,
            None,
            "ratios of the correction per token or per sequence, which the bounds truncate, or set to 0 (mask);"
            " default: token_truncate with loss_type: vespo or kv_cache: fp8 or int4, else sequence_mask",
        )
    )
    importance_sampling_clip_max: Positive | None = method_field(
        GRPO, 3.0, "upper bound of the ratios of the correction"
    )
    importance_sampling_clip_min: Positive | None = method_field(
        GRPO, None, "lower bound of the ratios of the correction; default: none"
    )
    scale_rewards: Literal["group", "batch", "none"] = method_field(
        GRPO,
        "group",
        "divide advantages by the standard deviation of the group or of the batch; none: do not (Dr. GRPO)",
    )
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = method_field(
        GRPO,
        "sum_then_normalize",
        "order of normalizing and summing the rewards of several functions (GDPO: normalize first)",
    )
    use_bias_correction_kl: bool = method_field(
        GRPO, True, "multiply the KL term by the ratio, for an unbiased gradient"
    )
    top_entropy_quantile: Share = method_field(GRPO, 1.0, "share of tokens to train on, by highest entropy")
    entropy_coef: float = method_field(GRPO, 0.0, "weight of the mean entropy as a bonus")
    mask_truncated_completions: bool = method_field(
        POLICY, False, "exclude answers that reach max_completion_length from the loss"
    )
    off_policy_mask_threshold: Positive | None = method_field(
        GRPO, None, "exclude answers of negative advantage whose mean log-probability fell by more; default: none"
    )
    sapo_temperature_neg: Positive = method_field(
        GRPO, 1.05, "loss_type sapo: temperature of the gate for negative advantages"
    )
    sapo_temperature_pos: Positive = method_field(
        GRPO, 1.0, "loss_type sapo: temperature of the gate for positive advantages"
    )
    vespo_k_pos: Positive = method_field(GRPO, 2.0, "loss_type vespo: k for positive advantages")
    vespo_lambda_pos: Positive = method_field(GRPO, 3.0, "loss_type vespo: λ for positive advantages")
    vespo_k_neg: Positive = method_field(GRPO, 3.0, "loss_type vespo: k for negative advantages")
    vespo_lambda_neg: Positive = method_field(GRPO, 2.0, "loss_type vespo: λ for negative advantages")
    normalize_advantages: bool = method_field(
        ("rloo",), False, "normalize advantages over a generation to mean 0 and standard deviation 1"
    )
    reward_clip_range: list[float] | None = method_field(
        ("rloo",), None, "[lowest, highest] value to clip rewards to; default: no clipping"
    )

    @field_validator("reward_funcs", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | dict) else value


class DistillationSection(Section):
    """Distillation"""

    teacher_model_name_or_path: str | None = method_field(
        DISTILLING,
        None,
        "teacher: a model with the same vocabulary, which is quantized like the trained model, or an adapter, which"
        " shares the weights of the trained model if both have the same base",
    )
    teacher_model_revision: str = method_field(DISTILLING, "main", "branch, tag or commit of a teacher on the hub")
    lmbda: Annotated[float, Field(ge=0, le=1)] = method_field(
        DISTILLING,
        1.0,
        "share of generations with answers sampled from the model; the others use the completions of the data",
    )
