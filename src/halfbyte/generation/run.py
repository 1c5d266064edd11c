"""`generate` and `stream`: decode a static, left-padded batch of prompts until every row has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import ConfigError, ModelError
from .adapters import active_adapter, adapter_names, check_kinds
from .cache_dtypes import CACHES
from .decoder import context_length
from .engine import engine_for, prompt_slots
from .grammar import Grammar, GrammarRows
from .images import Columns, PromptImages
from .row_groups import WatchPrompt
from .sampling import Penalties, Sampler, Sampling, eos_tokens, report_unread_keys

ACTIVE = "active"  # the model's active adapter
DEFAULT_MAX_NEW_TOKENS = 512
Lengths = int | Sequence[int] | None


def generate(
    model: Any,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    tokenizer: Any = None,
    *,
    max_new_tokens: Lengths = None,
    sampling: Sampling | None = None,
    stops: Sequence[int] | None = None,
    adapter: str | Sequence[str | None] | None = ACTIVE,
    kv_cache: str = "auto",
    penalties: Penalties | None = None,
    grammars: Sequence[Grammar | None] | None = None,
    images: Sequence[Columns | None] | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """Continue each prompt.

    Args:
        model: a causal LM, or a PeftModel around one, in eval mode; unchanged.
        prompts: texts (which need `tokenizer`) or token ids.
        tokenizer: encodes texts without a template, and decodes answers without special tokens.
        max_new_tokens: maximum for all answers, or one for each; default: 512, or the positions that the model has
            left.
        sampling: default: greedy.
        stops: tokens that end a row; default: the EOS tokens of the model's generation config.
        adapter: "active", an adapter's name or None (the base), for all prompts or one for each.
        kv_cache: "auto" (the model's dtype), "fp8" or "int4".
        penalties: changes to the logits before each draw.
        grammars: for each prompt, the JSON texts that its answer may be, or None. An answer ends when its text is
            complete, or at `max_new_tokens`.
        images: for each prompt, the model's inputs for its images (`pixel_values`, ...), as its processor makes them
            for this prompt alone, or None. The prompt has one token for each of an image's features.
        on_token: called with (row, token) for each new token.

    Returns:
        Texts for texts; for token ids the new ids, including a stop token.

    Raises:
        ModelError: a prompt is empty or exceeds the model's positions, together with `max_new_tokens` if given; or the
            logits are NaN.
        ConfigError: an argument out of range.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError("prompts are texts, but no tokenizer is given", "pass the tokenizer, or token ids")
    ids: Any = [tokenizer(text)["input_ids"] for text in texts] if texts else prompts
    results: list[list[int]] = [[] for _ in ids]
    for name, values in (("grammars", grammars), ("images", images)):
        if values is not None and len(values) != len(ids):
            raise ConfigError(f"{name} has {len(values)} entries for {len(ids)} prompts", "give one for each, or None")
    for tokens in stream(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stops=stops,
        adapter=adapter,
        kv_cache=kv_cache,
        penalties=penalties,
        grammars=None if grammars is None else GrammarRows(grammars),
        images=images,
    ):
        for row, token in enumerate(tokens):
            if token is not None:
                results[row].append(token)
                if on_token is not None:
                    on_token(row, token)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in results] if texts else results


def stream(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: Lengths = None,
    sampling: Sampling | None = None,
    stops: Sequence[int] | None = None,
    adapter: str | Sequence[str | None] | None = ACTIVE,
    kv_cache: str = "auto",
    watch: Callable[[Tensor, Tensor], None] | None = None,
    watch_prompt: WatchPrompt | None = None,
    penalties: Penalties | None = None,
    grammars: GrammarRows | None = None,
    images: Sequence[Columns | None] | None = None,
) -> Generator[list[int | None]]:
    """Yield the new token of each row (None for rows that have ended) until all have ended.

    Args:
        model, prompts, max_new_tokens, sampling, stops, adapter, kv_cache, images: as in `generate`; prompts are token
            ids.
        watch: called with logits [B, V] and the tokens [B] drawn from them, before these are yielded.
        watch_prompt: called with rows, a column of the left-padded prompts and the logits [rows, P, V] after the
            tokens from that column on, until all columns of all prompts are covered.
        penalties: applied to the logits before each draw.
        grammars: of the rows; they have read the new tokens when these are yielded.
    """
    if not prompts:
        return
    sampling, longest = sampling or Sampling(), max(map(len, prompts))
    if kv_cache not in CACHES:
        raise ConfigError(f"kv_cache is {kv_cache!r}", f"use one of {', '.join(CACHES)}")
    lengths = new_tokens(model, prompts, max_new_tokens)
    max_length = max(lengths)
    adapters = chosen_adapters(model, adapter, len(prompts))
    by_row = {row: PromptImages(model, adapters[row], columns) for row, columns in enumerate(images or ()) if columns}
    ends = eos_tokens(model) if stops is None else set(stops)
    report_unread_keys(model, sampling, penalties)
    device = next(model.parameters()).device
    padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    padding = torch.tensor([longest - len(ids) for ids in prompts], device=device)
    grammars = grammars or GrammarRows([None] * len(prompts))
    draw = Sampler(sampling, penalties, device, prompts, grammars)
    with engine_for(model, adapters, prompt_slots(longest, device) + max_length, kv_cache) as engine:
        logits = engine.prefill(padded, padding, watch_prompt, by_row)
        if bool(logits.isnan().any()):
            raise ModelError("the model's logits are NaN", "check its weights, and its adapter's")
        drawn = draw(logits)
        running = [True] * len(prompts)
        for count in range(1, max_length + 1):
            if watch is not None:
                watch(logits, drawn)
            read, continues = _copy_to_host(drawn), count < max_length
            # On a GPU, launch the next step before reading these tokens.
            ahead = engine.step(drawn) if continues and device.type == "cuda" else None
            tokens = read()
            grammars.advance(tokens, running)
            yield [token if runs else None for token, runs in zip(tokens, running, strict=True)]
            rows = zip(running, grammars.complete, tokens, lengths, strict=True)
            running = [
                runs and not complete and token not in ends and count < length for runs, complete, token, length in rows
            ]
            if not any(running):
                return
            logits = engine.step(drawn) if ahead is None else ahead
            drawn = draw(logits)


def _copy_to_host(tokens: Tensor) -> Callable[[], list[int]]:
    """Start copying tokens to the host; the returned function blocks until this copy is done."""
    if tokens.device.type != "cuda":
        return tokens.tolist
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return read


def new_tokens(
    model: Any, prompts: Sequence[Sequence[int]], max_new_tokens: Lengths, default: int = DEFAULT_MAX_NEW_TOKENS
) -> list[int]:
    """Return the limit of new tokens of each prompt: `max_new_tokens`, or up to `default` within the model's positions.

    Raises:
        ModelError: a prompt is empty or too long, or has tokens outside the vocabulary.
        ConfigError: fewer than one token is requested.
    """
    limit = context_length(model)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", sys.maxsize)
    if max_new_tokens is None:
        lengths = [default if limit is None else min(default, max(1, limit - len(ids))) for ids in prompts]
    else:
        lengths = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if min(lengths) < 1:
        raise ConfigError(f"max_new_tokens is {min(lengths)}", "use 1 or more")
    for row, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
        if len(ids) == 0:
            raise ModelError(f"prompt {row} has no tokens", "give at least one, e.g. the BOS token")
        if not (min(ids) >= 0 and max(ids) < vocabulary):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise ModelError(
                f"prompt {row} has token {wrong}, outside the model's vocabulary of {vocabulary}",
                "tokenize it with the model's own tokenizer",
            )
        if limit is not None and len(ids) + length > limit:
            raise too_long(len(ids), max_new_tokens if max_new_tokens is None else length, limit)
    return lengths


def too_long(tokens: int, max_new_tokens: int | None, limit: int, subject: str = "a prompt") -> ModelError:
    """Return the error for a prompt of `tokens` tokens and `max_new_tokens` new ones (None: at least one)."""
    if max_new_tokens is None or tokens >= limit:
        message = f"{subject} of {tokens} tokens leaves no room for an answer in the model's {limit} positions"
        return ModelError(message, "shorten the prompt (/reset in chat)")
    message = f"{subject} of {tokens} tokens and max_new_tokens {max_new_tokens} pass the model's {limit} positions"
    return ModelError(message, "shorten the prompt (/reset in chat), or lower max_new_tokens, or leave it out")


def chosen_adapters(model: Any, adapter: str | Sequence[str | None] | None, rows: int) -> list[str | None]:
    """Return the name of each row's adapter.

    Raises:
        ConfigError: `adapter` names another number of adapters than there are rows.
        ModelError: the model has no such adapter, several are active, or halfbyte cannot generate with one.
    """
    names = [adapter] * rows if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(names) != rows:
        raise ConfigError(f"adapter names {len(names)} adapters for {rows} prompts", "name one for each, or one")
    available = adapter_names(model)
    if ACTIVE in names and ACTIVE not in available:
        active = active_adapter(model)
        names = [active if name == ACTIVE else name for name in names]
    for name in names:
        if name is not None and name not in available:
            raise ModelError(f"the model has no adapter {name!r}", f"it has: {', '.join(available) or 'none'}")
    check_kinds(model, names)
    return names
