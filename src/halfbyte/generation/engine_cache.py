"""Engines of earlier batches: the cache's memory, and the captured graph, serve the next batch of the same rows."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..utils.errors import ModelError
from ..utils.notices import notice
from .decoder import context_length
from .engine import FP8, Engine, StaticEngine, StockEngine
from .linears import Unknown

ROUND = 64  # the cache's size is a multiple of this
KEPT = 4  # engines of a model; chat beside its base needs two
CACHES = {"auto": None, "fp8": FP8}

Key = tuple[tuple[str | None, ...], str]
_engines: weakref.WeakKeyDictionary[Any, dict[Key, StaticEngine]] = weakref.WeakKeyDictionary()


def forget(model: Any) -> None:
    """Free what `generate` and `stream` keep for the next call with this model: key-value caches and graphs."""
    _engines.pop(model, None)


@contextmanager
def engine_for(model: Any, adapters: Sequence[str | None], tokens: int, kv_cache: str) -> Iterator[Engine]:
    """An engine for rows of so many tokens, for one caller; it goes into the cache unless an error ends its use."""
    key = tuple(adapters), kv_cache
    try:
        engine = _static(model, key, tokens)
    except Unknown as reason:
        notice(f"generation: {reason}", f"generating with transformers' own forward, more slowly: {reason}")
        if kv_cache != "auto":
            raise ModelError(f"kv_cache: {kv_cache}, but {reason}", "use kv_cache: auto") from reason
        yield StockEngine(model, adapters)
        return
    try:
        yield engine
    except GeneratorExit:  # whoever read the tokens has enough
        _keep(model, key, engine)
        raise
    _keep(model, key, engine)


def _static(model: Any, key: Key, tokens: int) -> StaticEngine:
    """The one in the cache, or a new one; of twice the size if that one is too small, as in a chat that goes on."""
    engine = _engines.get(model, {}).pop(key, None)
    if engine is not None:
        if engine.slots >= tokens and engine.renew():
            return engine
        limit = context_length(model) or tokens
        tokens = max(tokens, min(2 * engine.slots, limit) if engine.slots < tokens else engine.slots)
        del engine  # its memory is free for the next
    with torch.inference_mode():
        return StaticEngine(model, key[0], -(-tokens // ROUND) * ROUND, CACHES[key[1]])


def _keep(model: Any, key: Key, engine: StaticEngine) -> None:
    engines = _engines.setdefault(model, {})
    engines[key] = engine
    while len(engines) > KEPT:
        del engines[next(iter(engines))]
