"""Preflight checks of a run's reward functions, reward models and reference adapter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.policy import POLICY
from ..config.schema import PolicySection, RunKeys
from ..data.images import IMAGES
from ..data.prepare import PreparedData
from ..rewards.model_scores import check_reward_model_compatibility
from ..rewards.score import Rewards
from ..rewards.specs import MODEL, check_columns, read_specs
from ..utils.console import Console
from ..utils.errors import ConfigError
from ..utils.notices import notice
from ..utils.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def rewards_of(config: PolicySection, data: PreparedData) -> Rewards:
    """Return the functions that `reward_funcs` names, for the prompts of `data`.

    Raises:
        ConfigError: an entry is invalid.
    """
    columns = sorted(data.train[0]["columns"])
    specs = read_specs(config.reward_funcs or [], columns)
    return Rewards(specs, columns, config.reward_timeout_s, config.max_completion_length)


def check_rewards(
    config: RunKeys,
    data: PreparedData,
    model_config: Any,
    tokenizer: PreTrainedTokenizerBase,
    console: Console,
) -> None:
    """Load every reward function once, check every reward model, and print the files that are executed.

    Args:
        model_config: transformers' config of the trained model.

    Raises:
        HalfbyteError: one cannot be loaded or called, or the prompts' columns do not suit it.
    """
    if config.method in POLICY and (config.top_p < 1 or config.top_k or config.min_p):
        notice(
            "narrowed-sampling",
            "top_p, top_k and min_p restrict the tokens that are sampled, but training's log-probabilities are over all"
            " tokens: their ratios are biased (trl#6789)",
        )
    rewards = rewards_of(config, data)
    if IMAGES in data.train.column_names and any(spec.function_name == MODEL for spec in rewards.specs):
        rewards.close()
        wrong = "reward_funcs: the prompts have images, and reward models score texts"
        raise ConfigError(wrong, "use functions, or remove the images")
    for rows in (data.train, data.eval):
        if rows is not None:
            check_columns(rewards.specs, rows)
    try:
        rewards.check()
    finally:
        rewards.close()
    for path, digest in rewards.files.items():
        console.print(one_line(f"rewards: {path} (SHA-256 {digest})"), soft_wrap=True)
    check_reward_model_compatibility(config, rewards, model_config, tokenizer, console)


def reference_adapter(config: RunKeys) -> Path | None:
    """Return the adapter that a run continues from, if it is also the reference policy."""
    uses_reference = config.beta and config.method in POLICY
    return Path(config.adapter_path) if config.adapter_path and uses_reference else None
