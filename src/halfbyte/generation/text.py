"""Decoding tokens to text as they are generated, up to a stop sequence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from .grammar import Grammar, GrammarRows
from .images import Columns
from .run import ACTIVE, Lengths, new_tokens, stream
from .sampling import Penalties, Sampling

MIN_LOG_PROB = -9999.0  # as OpenAI reports it; JSON has no infinity
UNFINISHED = "\ufffd"  # decoded from an incomplete character
BYTE_SYMBOL = r"<0x[0-9A-F]{2}>"  # a byte in SentencePiece's vocabularies
BYTE_OF_LETTER = {letter: byte for byte, letter in bytes_to_unicode().items()}  # in byte-level vocabularies


class TokenText(NamedTuple):
    """A token decoded by itself, and its bytes; the text of a part of a character is `UNFINISHED`."""

    text: str
    data: bytes


class TokenScore(NamedTuple):
    """A token, its log-probability in nats, and the most likely tokens with theirs, best first.

    A text's first token has no log-probability.
    """

    token: TokenText
    log_prob: float | None
    likeliest: list[tuple[TokenText, float]]


class Piece(NamedTuple):
    """The text that one new token adds to a row (often empty).

    The row's last piece has the reason why it ended. `scored` is set if log-probabilities were requested, except for a
    token that ends the row. `tokens` is 0 for pieces without a generated token.
    """

    row: int
    text: str
    finish: Literal["stop", "length"] | None
    scored: TokenScore | None = None
    tokens: int = 1


class Text:
    """The text of one row, decoded token by token and cut before the first stop sequence.

    Text that may start a stop sequence or an incomplete character is held back until it is decided. Only the last few
    tokens are decoded again for each new one, as in text-generation-inference; the tokens before the new one preserve
    the space that decoders drop at the start of a text.

    Args:
        decode: token ids to text.
        stops: stop sequences; none of them empty.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, stops
        self.tokens: list[int] = []
        self.begin = self.end = 0  # tokens[begin:end] are decoded again before the new ones
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Return the text that is final after this token; `stopped` is set once a stop sequence has ended the text."""
        self.tokens.append(token)
        new = self._undecoded()
        if not new or new.endswith(UNFINISHED):
            return ""
        self.begin, self.end = self.end, len(self.tokens)
        return self._release(new)

    def flush(self) -> str:
        """Return the text that was held back, when no token follows."""
        text = self._release(self._undecoded())
        return text if self.stopped else text + self.held

    def _undecoded(self) -> str:
        """Return the text of the tokens after `end`."""
        context = self.decode(self.tokens[self.begin : self.end])
        return self.decode(self.tokens[self.begin :])[len(context) :]

    def _release(self, new: str) -> str:
        """Return the part of the held and new text that no stop sequence can start in, or the text before one."""
        text = self.held + new
        starts = [at for at in map(text.find, self.stops) if at >= 0]
        if starts:
            self.stopped = True
            return text[: min(starts)]
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        lengths = range(min(len(text), longest), 0, -1)
        held = next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)
        final = len(text) - held
        self.held = text[final:]
        return text[:final]


class Scores:
    """Log-probabilities of the newest tokens; passed to `generation.stream` as `watch`.

    Args:
        spell: token id to text and bytes.
        count: number of most likely tokens to record.
    """

    def __init__(self, spell: Callable[[int], TokenText], count: int):
        self.spell, self.count = spell, count
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.best: list[list[tuple[int, float]]] = []

    def __call__(self, logits: Tensor, drawn: Tensor) -> None:
        logs = logits.float().log_softmax(-1).clamp(min=MIN_LOG_PROB)
        self.tokens, self.log_probs = drawn.tolist(), logs.gather(1, drawn.unsqueeze(1)).squeeze(1).tolist()
        values, ids = logs.topk(min(self.count, logs.shape[1]))
        self.best = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]

    def of(self, row: int) -> TokenScore:
        likeliest = [(self.spell(token), log_prob) for token, log_prob in self.best[row]]
        return TokenScore(self.spell(self.tokens[row]), self.log_probs[row], likeliest)


class PromptScores:
    """Log-probabilities of the prompts' tokens; passed to `generation.stream` as `watch_prompt`.

    Args:
        spell, count: as in `Scores`.

    Attributes:
        scores: per row, the scores of its tokens; the first one has no log-probability.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], spell: Callable[[int], TokenText], count: int):
        self.prompts = prompts
        self.spell = spell
        self.count = count
        self.longest = max(map(len, prompts))
        self.scores = [[TokenScore(spell(prompt[0]), None, [])] for prompt in prompts]

    def __call__(self, rows: Sequence[int], first: int, logits: Tensor) -> None:
        for row, row_logits in zip(rows, logits, strict=True):
            prompt = self.prompts[row]
            begin = self.longest - len(prompt)  # column of its first token
            columns = range(max(first, begin), min(first + len(row_logits), self.longest - 1))
            if not columns:
                continue
            prompt_logits = row_logits[columns[0] - first : columns[-1] - first + 1]
            logs = prompt_logits.float().log_softmax(-1).clamp(min=MIN_LOG_PROB)
            ids = prompt[columns[0] + 1 - begin : columns[-1] + 2 - begin]
            log_probs = logs.gather(1, torch.tensor(ids, device=logs.device).unsqueeze(1)).squeeze(1).tolist()
            values, best = (x.tolist() for x in logs.topk(min(self.count, logs.shape[1])))
            for token, log_prob, *likeliest in zip(ids, log_probs, best, values, strict=True):
                named = [(self.spell(candidate), value) for candidate, value in zip(*likeliest, strict=True)]
                self.scores[row].append(TokenScore(self.spell(token), log_prob, named))


def token_text(tokenizer: Any, token: int) -> TokenText:
    """Return a token's text, and the bytes that it adds to an answer."""
    text = str(tokenizer.decode([token]))
    if UNFINISHED not in text:
        return TokenText(text, text.encode())
    symbol = str(tokenizer.convert_ids_to_tokens(token))
    if re.fullmatch(BYTE_SYMBOL, symbol):
        return TokenText(text, bytes([int(symbol[3:5], 16)]))
    is_byte_level = all(letter in BYTE_OF_LETTER for letter in symbol)
    return TokenText(text, bytes(BYTE_OF_LETTER[letter] for letter in symbol) if is_byte_level else text.encode())


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
    scored: bool = False,
    grammars: Sequence[Grammar | None] | None = None,
    images: Sequence[Columns | None] | None = None,
    kv_cache: str = "auto",
) -> Generator[Piece]:
    """Continue a batch of prompts; yield a piece for every new token until each row has ended.

    Args:
        prompts: token ids.
        ends: tokens that end a row.
        stops: texts that end a row, and are not part of it.
        adapter: as in `generation.stream`.
        likeliest: number of most likely tokens to report with each token's log-probability, which is the model's own,
            before temperature, top_p, penalties and grammars. None: no log-probabilities.
        penalties: as in `generation.stream`.
        scored: with `likeliest`, also score the prompts' tokens, in pieces with empty text that come first.
        grammars, images, kv_cache: as in `generation.generate`.
    """
    texts = [Text(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), stops) for _ in prompts]
    running = set(range(len(prompts)))
    lengths = new_tokens(model, prompts, max_new_tokens)

    spelled = partial(token_text, tokenizer)
    scores = None if likeliest is None else Scores(spelled, likeliest)
    prompt_scores = PromptScores(prompts, spelled, likeliest) if scored and likeliest is not None else None
    followed = GrammarRows([None] * len(prompts) if grammars is None else grammars)
    steps = stream(
        model,
        prompts,
        max_new_tokens=lengths,
        sampling=sampling,
        stops=list(ends),
        adapter=adapter,
        watch=scores,
        watch_prompt=prompt_scores,
        penalties=penalties,
        grammars=followed,
        images=images,
        kv_cache=kv_cache,
    )
    with contextlib.closing(steps):
        for count, tokens in enumerate(steps, 1):
            if prompt_scores is not None and count == 1:
                for row, row_scores in enumerate(prompt_scores.scores):
                    yield from (Piece(row, "", None, score, tokens=0) for score in row_scores)
            for row in sorted(running):
                token, text = tokens[row], texts[row]
                assert token is not None, "stream yields tokens for all running rows"
                piece = text.add(token)
                complete = token in ends or followed.complete[row]
                ended = complete or count == lengths[row]
                if ended and not text.stopped:
                    piece += text.flush()
                finish: Literal["stop", "length"] | None = None
                if text.stopped or ended:
                    running.discard(row)
                    finish = "stop" if text.stopped or complete else "length"
                yield Piece(row, piece, finish, None if scores is None or token in ends else scores.of(row))
            if not running:
                return
