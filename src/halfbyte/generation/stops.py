"""The tokens that end an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def eos_tokens(model: Any) -> set[int]:
    """Those of the model's generation config."""
    own = model.generation_config.eos_token_id
    return set(own) if isinstance(own, list) else {own} - {None}


def stop_tokens(tokenizer: PreTrainedTokenizerBase, model: Any, turn_ends: Sequence[str]) -> list[int]:
    """The tokenizer's EOS, the model's own, and the special tokens `turn_ends`."""
    ends = (tokenizer.convert_tokens_to_ids(token) for token in turn_ends)
    return sorted(token for token in {tokenizer.eos_token_id, *eos_tokens(model), *ends} if token is not None)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The special token that the chat template ends an answer with, if it does.

    ChatML models end turns with <|im_end|> whatever their EOS is, so the end of a rendered turn is looked at.
    """
    from ..data.chat import prompt_text

    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "halfbyte"}]
    _, _, ending = prompt_text(tokenizer, turns, add_generation_prompt=False).rpartition("halfbyte")
    return [token for token in tokenizer.tokenize(ending)[:1] if token in tokenizer.all_special_tokens]
