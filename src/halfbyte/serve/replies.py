"""OpenAI's response objects, complete or as the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from ..generation.text import Piece, TokenScore, TokenText


class Reply:
    """The response objects of one request.

    Args:
        chat: for /v1/chat/completions; otherwise for /v1/completions.
        model: name in the request.
        prompt_tokens: over all prompts.
        rows: number of answers.
        scored: whether log-probabilities were requested.
    """

    def __init__(self, chat: bool, model: str, prompt_tokens: int, rows: int, scored: bool):
        self.chat = chat
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.rows = rows
        self.scored = scored
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.offsets = [0] * rows  # characters of the tokens so far

    def full(self, pieces: Sequence[Piece], new_tokens: int) -> dict[str, Any]:
        """Return the complete response; `new_tokens` is for its usage."""
        choices = []
        for row in range(self.rows):
            row_pieces = [piece for piece in pieces if piece.row == row]
            text, finish = "".join(piece.text for piece in row_pieces), row_pieces[-1].finish
            scores = [piece.scored for piece in row_pieces if piece.scored is not None]
            content = {"role": "assistant", "content": text} if self.chat else text
            choices.append(self._choice(row, content, finish, "message", scores))
        object_type = "chat.completion" if self.chat else "text_completion"
        return {**self._object(object_type, choices), "usage": self._usage(new_tokens)}

    def opening(self) -> Iterator[str]:
        """Yield the events before the first token, which set the role."""
        for row in range(self.rows if self.chat else 0):
            yield self._event([self._choice(row, {"role": "assistant", "content": ""}, None, "delta")])

    def event(self, piece: Piece) -> str:
        """Return the event of a piece; empty for a piece without text, end or log-probabilities."""
        if not piece.text and piece.finish is None and piece.scored is None:
            return ""
        content = ({"content": piece.text} if piece.text else {}) if self.chat else piece.text
        scores = [piece.scored] if piece.scored is not None else []
        return self._event([self._choice(piece.row, content, piece.finish, "delta", scores)])

    def closing(self, new_tokens: int, include_usage: bool) -> str:
        """Return the events that end a stream."""
        usage = self._event([], usage=self._usage(new_tokens)) if include_usage else ""
        return f"{usage}data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        return event({**self._object("chat.completion.chunk" if self.chat else "text_completion", choices), **fields})

    def _object(self, object_type: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": object_type, "created": self.created, "model": self.model, "choices": choices}

    def _choice(
        self, row: int, content: Any, finish: str | None, key: str, scores: Sequence[TokenScore] = ()
    ) -> dict[str, Any]:
        log_probs = None
        if self.scored and (scores or key == "message" or not self.chat):
            if self.chat:
                content_scores = [
                    {**_token(score.token, score.log_prob), "top_logprobs": [_token(*pair) for pair in score.likeliest]}
                    for score in scores
                ]
                log_probs = {"content": content_scores, "refusal": None}
            else:
                log_probs = self._text_scores(row, scores)
        return {"index": row, key if self.chat else "text": content, "logprobs": log_probs, "finish_reason": finish}

    def _text_scores(self, row: int, scores: Sequence[TokenScore]) -> dict[str, Any]:
        offsets = []
        for score in scores:
            offsets.append(self.offsets[row])
            self.offsets[row] += len(score.token.text)
        return {
            "tokens": [score.token.text for score in scores],
            "token_logprobs": [score.log_prob for score in scores],
            "top_logprobs": [_by_text(score) for score in scores],
            "text_offset": offsets,
        }

    def _usage(self, new_tokens: int) -> dict[str, int]:
        total = self.prompt_tokens + new_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total}


def _by_text(score: TokenScore) -> dict[str, float] | None:
    """Return the most likely tokens and the drawn one by their texts, or None without a log-probability.

    Two tokens may have the same text, e.g. parts of characters; the more likely one counts.
    """
    if score.log_prob is None:
        return None
    likeliest = {token.text: log_prob for token, log_prob in reversed(score.likeliest)}
    return {score.token.text: score.log_prob, **likeliest}


def _token(token: TokenText, log_prob: float | None) -> dict[str, Any]:
    """Return a token's entry; clients join the bytes of tokens that are parts of a character."""
    return {"token": token.text, "logprob": log_prob, "bytes": list(token.data)}


def tokens_of(pieces: Sequence[Piece]) -> int:
    """Return the number of tokens generated for these pieces."""
    return sum(piece.tokens for piece in pieces)


def event(data: dict[str, Any]) -> str:
    """Return one server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
