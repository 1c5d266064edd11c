"""`generate` and `stream`: a batch of prompts, left-padded to one length, until each has ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import ConfigError, ModelError
from .decoder import context_length
from .engine import WatchPrompt, prompt_slots
from .engine_cache import CACHES, engine_for
from .linears import adapter_names
from .sampling import Draws, Penalties, Sampling
from .stops import eos_tokens

ACTIVE = "active"  # stands for the adapter that is active in the model
MOST = 512  # new tokens, where nobody says how many
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
    on_token: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """Continue each prompt.

    Args:
        model: a causal LM, or a PeftModel around one, in eval mode; not changed.
        prompts: texts, which need `tokenizer`, or token ids.
        tokenizer: makes ids of texts, as they are, and texts of what is generated, without special tokens.
        max_new_tokens: most tokens of every answer, or of each; default: 512, or what the model has positions for.
        sampling: default: the likeliest token always.
        stops: tokens that end a row; default: the EOS tokens of the model's generation config.
        adapter: "active"; an adapter's name; None for the base; or one of these names, or None, for each prompt.
        kv_cache: "auto" (the model's dtype) or "fp8".
        on_token: called with (row, token) as tokens come.

    Returns:
        Texts for texts; for ids the new ids, a stop token included.

    Raises:
        ModelError: a prompt is empty, or too long for the model's positions, with `max_new_tokens` if given; or the
            logits are NaN.
        ConfigError: an argument out of range.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError("prompts are texts, and there is no tokenizer", "pass the tokenizer, or token ids")
    ids: Any = [tokenizer(text)["input_ids"] for text in texts] if texts else prompts
    results: list[list[int]] = [[] for _ in ids]
    for tokens in stream(
        model, ids, max_new_tokens=max_new_tokens, sampling=sampling, stops=stops, adapter=adapter, kv_cache=kv_cache
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
) -> Generator[list[int | None]]:
    """Yield the new token of each row, None for rows that have ended, until all have. Arguments as in `generate`.

    Args:
        watch: called with logits [B, V] and the tokens [B] drawn from them, before these are yielded.
        watch_prompt: called with a column of the prompts, padded on the left to one length, and logits [B, P, V] after
            the tokens from there on, until all are through.
        penalties: what tokens are drawn by, beside the logits.
    """
    if not prompts:
        return
    sampling, longest = sampling or Sampling(), max(map(len, prompts))
    if kv_cache not in CACHES:
        raise ConfigError(f"kv_cache is {kv_cache!r}", f"use one of {', '.join(CACHES)}")
    lengths = new_tokens(model, prompts, max_new_tokens)
    most = max(lengths)
    adapters = chosen_adapters(model, adapter, len(prompts))
    ends = eos_tokens(model) if stops is None else set(stops)
    device = next(model.parameters()).device
    padded = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts], device=device)
    padding = torch.tensor([longest - len(ids) for ids in prompts], device=device)
    draw = Draws(sampling, penalties, device)
    with engine_for(model, adapters, prompt_slots(longest, device) + most, kv_cache) as engine:
        logits = engine.prefill(padded, padding, watch_prompt)
        if bool(logits.isnan().any()):
            raise ModelError("the model's logits are NaN", "check its weights, and its adapter's")
        drawn = draw(logits)
        waiting = [True] * len(prompts)
        for count in range(1, most + 1):
            if watch is not None:
                watch(logits, drawn)
            taken, more = _to_host(drawn), count < most
            # A GPU begins the next step now, and does not wait until these tokens have been read and used.
            ahead = engine.step(drawn) if more and device.type == "cuda" else None
            tokens = taken()
            yield [token if waits else None for token, waits in zip(tokens, waiting, strict=True)]
            rows = zip(tokens, waiting, lengths, strict=True)
            waiting = [waits and token not in ends and count < length for token, waits, length in rows]
            if not any(waiting):
                return
            logits = engine.step(drawn) if ahead is None else ahead
            drawn = draw(logits)


def _to_host(tokens: Tensor) -> Callable[[], list[int]]:
    """Begin to copy tokens; what is returned waits for them, but not for what the device begins later."""
    if tokens.device.type != "cuda":
        return tokens.tolist
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def taken() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return taken


def new_tokens(model: Any, prompts: Sequence[Sequence[int]], asked: Lengths, most: int = MOST) -> list[int]:
    """The most tokens that each prompt gets: `asked`, or else up to `most`, as far as the model has positions.

    Raises:
        ModelError: a prompt is empty, too long, or has tokens that the model does not know.
        ConfigError: fewer than one token is asked for.
    """
    limit = context_length(model)
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", sys.maxsize)
    if asked is None:
        lengths = [most if limit is None else min(most, max(1, limit - len(ids))) for ids in prompts]
    else:
        lengths = [asked] * len(prompts) if isinstance(asked, int) else list(asked)
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
            raise too_long(len(ids), asked if asked is None else length, limit)
    return lengths


def too_long(tokens: int, asked: int | None, limit: int, where: str = "a prompt") -> ModelError:
    """What is wrong with a prompt of so many tokens, for which `asked` new ones, or any, were wanted."""
    if asked is None or tokens >= limit:
        said = f"{where} of {tokens} tokens leaves no room for an answer in the model's {limit} positions"
        return ModelError(said, "shorten the prompt (/reset in chat)")
    said = f"{where} of {tokens} tokens and max_new_tokens {asked} pass the model's {limit} positions"
    return ModelError(said, "shorten the prompt (/reset in chat), or lower max_new_tokens, or leave it out")


def chosen_adapters(model: Any, adapter: str | Sequence[str | None] | None, rows: int) -> list[str | None]:
    """The adapter of each row, by name."""
    wanted = [adapter] * rows if adapter is None or isinstance(adapter, str) else list(adapter)
    if len(wanted) != rows:
        raise ConfigError(f"adapter names {len(wanted)} adapters for {rows} prompts", "name one for each, or one")
    known = adapter_names(model)
    if ACTIVE in wanted and ACTIVE not in known:
        active = model.active_adapter if known and not _disabled(model) else None
        wanted = [active if name == ACTIVE else name for name in wanted]
    for name in wanted:
        if name is not None and name not in known:
            raise ModelError(f"the model has no adapter {name!r}", f"it has: {', '.join(known) or 'none'}")
    return wanted


def _disabled(model: Any) -> bool:
    """Whether the adapters are switched off, as within `disable_adapter()`."""
    return any(getattr(module, "disable_adapters", False) is True for module in model.modules())
