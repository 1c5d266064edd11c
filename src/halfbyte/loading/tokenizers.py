"""Tokenizers of runs and of saved adapters, the tokens that a run adds, and the embedding rows it trains for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoTokenizer

from ..adapters.token_rows import grow_vocabulary, largest_index, start_rows
from ..config import Origin
from ..config.schema import RunKeys
from ..reading.boundary import answered
from ..reading.tensors import read_adapter_config
from ..utils.errors import ConfigError, ModelError
from ..utils.notices import notice
from ..utils.text import brief
from .find import explain_remote_code
from .load import load_tokenizer

Keys = TypeVar("Keys", bound=RunKeys)


def load_run_tokenizer(config: RunKeys, place: str | Origin | None = None) -> Any:
    """Load the tokenizer of a run, with `add_tokens` and `add_special_tokens`.

    A run that continues an adapter with trained tokens uses the tokenizer saved with it.

    Args:
        place: where the model's files are; default: the config's base.

    Raises:
        ConfigError: a token exists already.
        ModelError: as in `load_tokenizer`.
    """
    adapter = Path(config.adapter_path) if config.adapter_path else None
    if adapter and read_adapter_config(adapter).get("trainable_token_indices"):
        return trained_tokenizer(adapter, config)
    tokenizer = load_tokenizer(place or config.origin, chat_template_path=config.chat_template_path)
    for key in ("add_tokens", "add_special_tokens"):
        tokens = list(getattr(config, key) or ())
        if present := sorted(set(tokens) & tokenizer.get_vocab().keys()):
            at = tokenizer.convert_tokens_to_ids(present[0])
            wrong = f"{key}: {brief(present[0])} is a token of this tokenizer already, with the id {at}"
            raise ConfigError(wrong, f"remove it; to train its rows, set trainable_token_indices: [{at}]")
        tokenizer.add_tokens(tokens, special_tokens=key == "add_special_tokens")
    return tokenizer


def with_token_rows(config: Keys, tokenizer: Any, model_config: Any) -> Keys:
    """Return `config` with the rows of the new tokens in `trainable_token_indices`.

    The embeddings grow only if the vocabulary's padding has no row for a new token. All rows by which they grow are
    trained, so that the adapter has them.

    Args:
        tokenizer: from `load_run_tokenizer`.
        model_config: the model's config, as stored.

    Raises:
        ConfigError: a description has no token but new ones.
        ModelError: an index is beyond the vocabulary.
    """
    ids = _pieces(config, tokenizer).keys()
    rows: int = model_config.get_text_config().vocab_size
    grown = rows
    if ids and (needed := max(ids) + 1) > rows:
        multiple = config.resize_token_embeddings_to_multiple_of or 1
        grown = -(-needed // multiple) * multiple
        notice("new-tokens", f"the embeddings grow from {rows:,} to {grown:,} rows for {len(ids)} new tokens")
    indices = config.trainable_token_indices or []
    if (largest := largest_index(indices)) >= grown:
        wrong = f"trainable_token_indices: {largest} is beyond the vocabulary of {grown} rows"
        raise ModelError(wrong, f"use indices below {grown}, or name new tokens in add_tokens")
    chosen = sorted({*indices, *ids, *range(rows, grown)})
    return config.model_copy(update={"trainable_token_indices": chosen}) if chosen else config


def start_new_tokens(model: Any, config: RunKeys, tokenizer: Any) -> None:
    """Grow the base for the new tokens, and start their rows: from their descriptions, or the mean of the vocabulary.

    Args:
        model: the base.
        config: a result of `with_token_rows`.
        tokenizer: with the new tokens.
    """
    grow_vocabulary(model, largest_index(config.trainable_token_indices) + 1)
    pieces = _pieces(config, tokenizer)
    start_rows(model, pieces, min(pieces, default=0))


def _pieces(config: RunKeys, tokenizer: Any) -> dict[int, list[int]]:
    """Return the id of each new token → ids of the tokens of its description; none without a description.

    Raises:
        ConfigError: a description has no token but new ones.
    """
    described: dict[str, tuple[str, str | None]] = {}  # token → its key, and its description
    for key in ("add_tokens", "add_special_tokens"):
        tokens = getattr(config, key) or ()
        described |= {token: (key, tokens[token] if isinstance(tokens, Mapping) else None) for token in tokens}
    ids = dict(zip(described, tokenizer.convert_tokens_to_ids(list(described)), strict=True))
    pieces = {}
    for token, (key, description) in described.items():
        encoded = tokenizer(description, add_special_tokens=False)["input_ids"] if description else []
        pieces[ids[token]] = [piece for piece in encoded if piece not in ids.values()]
        if description is not None and not pieces[ids[token]]:
            wrong = f"{key}: the description of {brief(token)} has no token: {brief(description)}"
            raise ConfigError(wrong, "describe it in words, or list it without a description")
    return pieces


def trained_tokenizer(folder: Path | None, config: RunKeys) -> Any:
    """Return the tokenizer in an adapter's or a model's folder, as it is there; the base's if it holds none.

    Raises:
        CheckpointError, ModelError: it cannot be loaded.
    """
    if folder is None or not (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(config.origin, chat_template_path=config.chat_template_path)
    with (
        explain_remote_code(str(folder)),
        answered(f"cannot load the tokenizer in {folder}", "copy the base's files there"),
    ):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
