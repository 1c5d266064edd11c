"""What is answered: OpenAI's response objects, whole or as chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from ..generation.text import Piece


class Reply:
    """The objects that answer one request.

    Args:
        chat: of /v1/chat/completions; otherwise of /v1/completions.
        model: the name that was asked for.
        prompt_tokens: over all prompts.
        rows: prompts.
    """

    def __init__(self, chat: bool, model: str, prompt_tokens: int, rows: int):
        self.chat, self.model, self.prompt_tokens, self.rows = chat, model, prompt_tokens, rows
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """All of the answer at once."""
        texts, finishes = [""] * self.rows, [""] * self.rows
        for row, text, finish in pieces:
            texts[row] += text
            finishes[row] = finish or ""
        choices = [
            self._choice(row, {"role": "assistant", "content": text} if self.chat else text, finish, "message")
            for row, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._object(kind, choices), "usage": self._usage(len(pieces))}

    def opening(self) -> Iterator[str]:
        """Events before the first token: who speaks."""
        if self.chat:
            yield self._event([self._choice(0, {"role": "assistant", "content": ""}, None, "delta")])

    def event(self, piece: Piece) -> str:
        """The event of a piece; a piece without text or end has none."""
        if not piece.text and piece.finish is None:
            return ""
        content = {"content": piece.text} if piece.text else {}
        return self._event([self._choice(piece.row, content if self.chat else piece.text, piece.finish, "delta")])

    def closing(self, new_tokens: int, include_usage: bool) -> str:
        """The events that end a stream."""
        usage = self._event([], usage=self._usage(new_tokens)) if include_usage else ""
        return f"{usage}data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._object("chat.completion.chunk" if self.chat else "text_completion", choices), **more})

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _choice(self, row: int, content: Any, finish: str | None, key: str) -> dict[str, Any]:
        return {"index": row, key if self.chat else "text": content, "logprobs": None, "finish_reason": finish}

    def _usage(self, new_tokens: int) -> dict[str, int]:
        total = self.prompt_tokens + new_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": new_tokens, "total_tokens": total}


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
