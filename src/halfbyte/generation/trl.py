"""Rollouts for TRL's GRPOTrainer: `GRPOTrainer(..., rollout_func=halfbyte.rollout_func(model))`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from ..modeling.layer import causal_lm_of
from ..utils.errors import ConfigError
from .rollouts import Rollouts
from .sampling import Sampling

Rollout = Callable[[list[Any], Any], dict[str, Any]]


def rollout_func(model: Any, **options: Any) -> Rollout:
    """Make a `rollout_func` for GRPOTrainer (TRL 1.16) that generates with `Rollouts`, not transformers' `generate`.

    It reads the packed weights of the model in training and its current adapter.

    Args:
        model: the trainer's model, or the PeftModel around it.
        options: of `Rollouts`.

    Raises:
        ConfigError: an option is out of range; or, when called, the trainer trains another model.
    """
    engine = Rollouts(model, **options)

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return prompt_ids, completion_ids and logprobs, one list for each of `prompts`."""
        own = trainer.accelerator.unwrap_model(trainer.model)
        if causal_lm_of(own) is not causal_lm_of(model):
            raise ConfigError("rollout_func: the trainer trains another model", "make it of the model you give TRL")
        engine.model, tokenizer = own, trainer.processing_class
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        each = {count for _, count in groups}
        n = each.pop() if len(each) == 1 else 1
        asked = [prompt for prompt, _ in groups] if n > 1 else prompts
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        ids = [_ids(tokenizer, prompt, template) for prompt in asked]
        sampling = Sampling(trainer.temperature, trainer.top_k or 0, trainer.top_p, min_p=trainer.min_p or 0.0)
        found = engine.generate(
            ids, n, max_new_tokens=trainer.max_completion_length, sampling=sampling, stops=trainer.eos_token_ids
        )
        engine.free()
        return {
            "prompt_ids": [prompt for prompt in ids for _ in range(n)],
            "completion_ids": [completion.ids for completion in found],
            "logprobs": [completion.log_probs.tolist() for completion in found],
        }

    return rollout


def _ids(tokenizer: Any, prompt: Any, template: dict[str, Any]) -> list[int]:
    """Return the token ids of a text or of chat messages, tokenized as TRL does."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, **template}
    return tokenizer.apply_chat_template([prompt], **how)["input_ids"][0]
