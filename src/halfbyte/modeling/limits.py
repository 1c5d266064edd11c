"""How far a model's embeddings reach: token ids, and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..utils.errors import ConfigError, ModelError
from ..utils.notices import notice
from .tiny import tiny_config, tiny_model


def check_token_ids(model: Any, largest: Mapping[str, int | None]) -> None:
    """Whether `model`, which may be on the meta device, has an embedding for each token id up to these; None for none.

    Args:
        largest: what a token is of, in words, to the largest id there.

    Raises:
        ModelError: it has not.
    """
    count = model.get_input_embeddings().weight.shape[0]
    for what, index in largest.items():
        if index is not None and index >= count:
            raise ModelError(
                f"the tokenizer gives {what} the id {index}, and the model has embeddings for 0 to {count - 1}",
                "put the tokenizer that the model was trained with beside its weights",
            )


def check_positions(config: Any, length: int, *, trust_remote_code: bool = False, who: str = "the model") -> None:
    """Whether a model of transformers' `config` computes rows of `length` tokens; longer ones than it was trained with
    are said, with `who` it is. A small model of its kind is asked.

    Raises:
        ConfigError: it has no positions for so many.
    """
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or length <= most:
        return
    said = f"max_length: rows have up to {length} tokens, and {who} was made for {most}"
    if _bounded(config, trust_remote_code):
        raise ConfigError(f"{said}: it has no further positions", f"set max_length: {most}")
    notice(f"positions of {who}", said)


def _bounded(config: Any, trust_remote_code: bool) -> bool:
    """Whether a model refuses more tokens than its config names positions."""
    small = tiny_config(config)
    most = small.get_text_config().max_position_embeddings
    try:
        model = tiny_model(config, trust_remote_code=trust_remote_code)
    except Exception:  # whatever its code says to sizes that were not made for it
        return False
    try:
        with torch.no_grad():
            model(input_ids=torch.ones(1, most + 1, dtype=torch.int64), use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return True
    return False
