"""Tokens into text as they come, up to a stop sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .run import ACTIVE, Lengths, new_tokens, stream
from .sampling import Penalties, Sampling

LEAST_LOG_PROB = -9999.0  # OpenAI's; JSON has no infinity
UNFINISHED = "\ufffd"  # what a tokenizer makes of the first bytes of a character


class Scored(NamedTuple):
    """A token as text, its log-probability in nats, and the likeliest tokens with theirs, best first; of a text's first
    token nothing is known."""

    token: str
    log_prob: float | None
    likeliest: list[tuple[str, float]]


class Piece(NamedTuple):
    """What one new token adds to a row: text (often none), on the last one why the row ended, and, where they are
    asked for, log-probabilities; none for a token that ends the row. `tokens` is 0 where a row ends without one."""

    row: int
    text: str
    finish: Literal["stop", "length"] | None
    scored: Scored | None = None
    tokens: int = 1


class Text:
    """The text of one row, token by token, cut before the first stop sequence.

    Text that may be the beginning of a stop sequence, or of a character, is held back until it is known. Only the last
    few tokens are decoded again for a new one, as in text-generation-inference: the ones before them make a decoder
    keep the space that it drops at the start of a text.

    Args:
        decode: token ids to text.
        stops: stop sequences; none of them empty.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.tokens: list[int] = []
        self.begin = self.end = 0  # tokens[begin:end] are decoded again, before the new ones
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now; `stopped` tells whether a stop sequence has ended it."""
        self.tokens.append(token)
        new = self._new()
        if not new or new.endswith(UNFINISHED):
            return ""
        self.begin, self.end = self.end, len(self.tokens)
        return self._release(new)

    def rest(self) -> str:
        """What was held back, once no token follows."""
        text = self._release(self._new())
        return text if self.stopped else text + self.held

    def _new(self) -> str:
        known = self.decode(self.tokens[self.begin : self.end])
        return self.decode(self.tokens[self.begin :])[len(known) :]

    def _release(self, new: str) -> str:
        text = self.held + new
        found = [at for at in map(text.find, self.stops) if at >= 0]
        if found:
            self.stopped = True
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


class Scores:
    """Log-probabilities of the newest tokens; what `generation.stream` calls `watch`.

    Args:
        spell: a token as text.
        count: of the likeliest tokens to keep.
    """

    def __init__(self, spell: Callable[[int], str], count: int):
        self.spell, self.count = spell, count
        self.tokens: list[int] = []
        self.own: list[float] = []
        self.best: list[list[tuple[int, float]]] = []

    def __call__(self, logits: Tensor, drawn: Tensor) -> None:
        logs = logits.float().log_softmax(-1).clamp(min=LEAST_LOG_PROB)
        self.tokens, self.own = drawn.tolist(), logs.gather(1, drawn.unsqueeze(1)).squeeze(1).tolist()
        values, ids = logs.topk(min(self.count, logs.shape[1]))
        self.best = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]

    def of(self, row: int) -> Scored:
        likeliest = [(self.spell(token), log_prob) for token, log_prob in self.best[row]]
        return Scored(self.spell(self.tokens[row]), self.own[row], likeliest)


class PromptScores:
    """Log-probabilities of prompts' own tokens; what `generation.stream` calls `watch_prompt`.

    Args:
        spell, count: as of `Scores`.

    Attributes:
        found: of each row, those of its tokens, the first one's without a number.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], spell: Callable[[int], str], count: int):
        self.prompts, self.spell, self.count = prompts, spell, count
        self.longest = max(map(len, prompts))
        self.found = [[Scored(spell(prompt[0]), None, [])] for prompt in prompts]

    def __call__(self, first: int, logits: Tensor) -> None:
        for row, prompt in enumerate(self.prompts):
            begin = self.longest - len(prompt)  # the column of its first token
            own = [column for column in range(max(first, begin), first + logits.shape[1]) if column + 1 < self.longest]
            if not own:
                continue
            logs = logits[row, own[0] - first : own[-1] - first + 1].float().log_softmax(-1).clamp(min=LEAST_LOG_PROB)
            ids = prompt[own[0] + 1 - begin : own[-1] + 2 - begin]
            wanted = logs.gather(1, torch.tensor(ids, device=logs.device).unsqueeze(1)).squeeze(1).tolist()
            values, best = (each.tolist() for each in logs.topk(min(self.count, logs.shape[1])))
            for token, log_prob, *likeliest in zip(ids, wanted, best, values, strict=True):
                named = [(self.spell(other), value) for other, value in zip(*likeliest, strict=True)]
                self.found[row].append(Scored(self.spell(token), log_prob, named))


def continue_texts(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: Lengths = None,
    sampling: Sampling,
    ends: Sequence[int],
    stops: Sequence[str] = (),
    adapter: str | None = ACTIVE,
    likeliest: int | None = None,
    penalties: Penalties | None = None,
    scored: Sequence[tuple[int, int]] | None = None,
) -> Generator[Piece]:
    """Continue a batch of prompts; a piece for every new token, until each row has ended.

    Args:
        prompts: token ids.
        ends: tokens that end a row.
        stops: texts that end a row; they are not part of it.
        adapter: as in `generation.stream`.
        likeliest: the number of likeliest tokens wanted beside each token and its log-probability, which are the
            model's own, before temperature, top_p and penalties; None for no log-probabilities.
        penalties: as in `generation.stream`.
        scored: with `likeliest`, the first and the end of each prompt's tokens that are scored, too; they come before
            all others, in pieces of no text and no tokens.
    """
    texts = [Text(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), stops) for _ in prompts]
    going = set(range(len(prompts)))
    lengths = new_tokens(model, prompts, max_new_tokens)

    def spelled(token: int) -> str:
        return str(tokenizer.decode([token]))

    scores = None if likeliest is None else Scores(spelled, likeliest)
    asked = None if scored is None or likeliest is None else PromptScores(prompts, spelled, likeliest)
    how: dict[str, Any] = {"sampling": sampling, "stops": list(ends), "adapter": adapter, "penalties": penalties}
    steps = stream(model, prompts, max_new_tokens=lengths, watch=scores, watch_prompt=asked, **how)
    with contextlib.closing(steps):
        for count, tokens in enumerate(steps, 1):
            if asked is not None and count == 1:
                for row, (begin, end) in enumerate(scored or ()):
                    yield from (Piece(row, "", None, each, tokens=0) for each in asked.found[row][begin:end])
            for row in sorted(going):
                token, text = tokens[row], texts[row]
                assert token is not None, "rows that end are not asked for again"
                piece = text.add(token)
                ended = token in ends or count == lengths[row]
                if ended and not text.stopped:
                    piece += text.rest()
                finish: Literal["stop", "length"] | None = None
                if text.stopped or ended:
                    going.discard(row)
                    finish = "stop" if text.stopped or token in ends else "length"
                yield Piece(row, piece, finish, None if scores is None or token in ends else scores.of(row))
            if not going:
                return
