"""Answers that are JSON texts: llguidance's masks of the tokens that may follow, one grammar for each row.

A mask is computed on the host while the GPU computes the logits that it limits; nothing waits for it but the draw.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import ConfigError, ModelError
from ..utils.text import cut, visible
from .json_schema import check_keywords, check_recursion

ANY_OBJECT = {"type": "object"}
# Between the parts of a text: spaces, or a line break with an indentation. JSON allows any amount, which could fill an
# answer.
WHITESPACE = r"[ \t]{1,4}|\r?\n[ \t]{0,40}"
OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "whitespace_flexible": True, "lenient": False, "coerce_one_of": False}
MAX_CHARACTERS = 120_000  # of a schema; also OpenAI's limit
FIX_SCHEMA = "change the schema"

_vocabularies: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


class Grammar:
    """The JSON texts that match a schema, spelled in the tokens of a model.

    Args:
        tokenizer: the model's.
        ends: tokens that may end an answer once its text is complete.
        schema: a JSON schema; default: any JSON object.

    Raises:
        ConfigError: llguidance is not installed or does not read the tokenizer; or the schema is malformed, has a
            keyword that llguidance does not support, or no text matches it.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int], schema: Mapping[str, Any] | None = None):
        schema = dict(ANY_OBJECT if schema is None else schema)
        text = json.dumps(schema)
        if len(text) > MAX_CHARACTERS:
            raise ConfigError(f"the JSON schema has {len(text)} characters", f"use at most {MAX_CHARACTERS}")
        check_keywords(schema)
        try:
            import llguidance as library
        except ImportError as error:
            raise ConfigError("JSON answers need llguidance", "pip install llguidance") from error
        self.vocabulary = _vocabulary(tokenizer, ends)
        try:
            grammar = library.LLMatcher.grammar_from_json_schema(text, overrides=OPTIONS)
        except ValueError as error:
            raise ConfigError(f"the JSON schema is malformed: {_line(error)}", FIX_SCHEMA) from None
        wrong, messages = library.LLMatcher.validate_grammar_with_warnings(grammar, self.vocabulary)
        if wrong:
            raise ConfigError(f"the JSON schema: {_line(messages[0])}", FIX_SCHEMA)
        check_recursion(schema)
        self._matcher = library.LLMatcher(self.vocabulary, grammar, log_level=0)
        if not any(self._matcher.compute_bitmask()):
            reason = self._matcher.get_error() or "no token of the model begins such a text"
            raise ConfigError(f"the JSON schema: {_line(reason)}", FIX_SCHEMA)

    def matcher(self) -> Any:
        """Return a new llguidance matcher, which has read no token."""
        return self._matcher.deep_copy()


class GrammarRows:
    """The grammars of a batch's rows, advanced token by token.

    Args:
        grammars: one for each row, of one tokenizer; None for a row without.

    Attributes:
        complete: per row, whether its text is complete and cannot continue.
    """

    def __init__(self, grammars: Sequence[Grammar | None]):
        self.matchers = [None if grammar is None else grammar.matcher() for grammar in grammars]
        self.complete = [False] * len(grammars)
        sizes = [grammar.vocabulary.vocab_size for grammar in grammars if grammar is not None]
        self.words = -(-max(sizes, default=0) // 32)
        self._bits: Tensor | None = None  # int32 [B, words], on the host: 1 for each token that may follow

    def advance(self, tokens: Sequence[int], running: Sequence[bool]) -> None:
        """Read the new token of each running row.

        Raises:
            ModelError: a grammar exceeds llguidance's limits.
        """
        for row, (matcher, token) in enumerate(zip(self.matchers, tokens, strict=True)):
            if matcher is None:
                continue
            if running[row] and not matcher.consume_token(token):
                raise _too_complex(matcher)
            self.complete[row] = running[row] and matcher.is_stopped()
            if not running[row] or self.complete[row]:
                self.matchers[row] = None
                if self._bits is not None:
                    self._bits[row] = -1

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits [B, V] that are -inf for tokens that may not follow.

        Raises:
            ModelError: a grammar exceeds llguidance's limits, or no token may follow.
        """
        if not any(matcher is not None for matcher in self.matchers):
            return logits
        vocabulary, on_gpu = logits.shape[1], logits.device.type == "cuda"
        if self._bits is None:
            shape = len(self.matchers), max(self.words, -(-vocabulary // 32))
            self._bits = torch.full(shape, -1, dtype=torch.int32, pin_memory=on_gpu)
            for row, matcher in enumerate(self.matchers):
                if matcher is not None:
                    self._bits[row, self.words :] = 0  # tokens of the model that the tokenizer does not have
        for bits, matcher in zip(self._bits, self.matchers, strict=True):
            if matcher is not None:
                matcher.unsafe_compute_mask_ptr(bits.data_ptr(), 4 * self.words)
                if matcher.is_error() or not bits.any():
                    raise _too_complex(matcher)
        bits = self._bits.to(logits.device, non_blocking=True)
        allowed = (bits.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
        return logits.masked_fill(allowed.flatten(1)[:, :vocabulary] == 0, -torch.inf)


def _too_complex(matcher: Any) -> ModelError:
    reason = _line(matcher.get_error() or "no token of the model continues the text")
    return ModelError(f"the answer cannot follow its JSON schema: {reason}", "use a simpler schema")


def _line(reason: object) -> str:
    """Return the start of a message of llguidance, whose further lines show its own state."""
    return cut(visible(str(reason).partition("\n")[0]), 200)


def _vocabulary(tokenizer: Any, ends: Sequence[int]) -> Any:
    """Return llguidance's table of a tokenizer's tokens, which takes a second for 100,000 of them, from a cache."""
    key = tuple(sorted(set(ends)))
    tables = _vocabularies.setdefault(tokenizer, {})
    if key not in tables:
        from llguidance.hf import from_tokenizer

        try:
            tables[key] = from_tokenizer(tokenizer, eos_token=list(key) or None)
        except Exception as error:  # llguidance raises ValueError, and what its Rust code raises
            message = f"llguidance does not read this tokenizer: {_line(error)}"
            raise ConfigError(message, "use a fast tokenizer") from None
    return tables[key]
