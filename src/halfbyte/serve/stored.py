"""Chats that clients ask to be kept (`store: true`): in memory, the newest, as long as the server runs."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.datastructures import QueryParams

from ..utils.text import brief
from .requests import ChatRequest, RequestError

MOST, MOST_BYTES = 1000, 2**26  # chats that are kept, and their bytes as JSON
PAGE, LARGEST_PAGE = 20, 100  # entries of a list
TOLD = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")  # beside the answer


@dataclass(frozen=True)
class StoredChat:
    """A chat.

    Attributes:
        model, metadata: that chats are looked for by.
        answer: as it was given, with what the request said, as JSON.
        messages: that were asked, as JSON.
    """

    model: str
    metadata: Mapping[str, str]
    answer: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.messages) + len(json.dumps(self.metadata))

    def document(self) -> dict[str, Any]:
        return {**json.loads(self.answer), "metadata": dict(self.metadata)}

    def listed(self, asked: QueryParams) -> dict[str, Any]:
        """Messages, a page of them."""
        messages = {each["id"]: each for each in json.loads(self.messages)}
        return _page(list(messages), asked, messages.__getitem__)


class StoredChats:
    """The newest chats, oldest first, at most so many and of so many bytes."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES):
        self.most, self.most_bytes, self.bytes = most, most_bytes, 0
        self.chats: OrderedDict[str, StoredChat] = OrderedDict()

    def add(self, request: ChatRequest, answer: dict[str, Any]) -> None:
        told = request.model_dump(include=set(TOLD))
        messages = [
            {**message.model_dump(exclude_none=True), "id": f"{answer['id']}-{number}", "content": message.content}
            for number, message in enumerate(request.messages)
        ]
        said = (
            json.dumps(each, ensure_ascii=False).encode(errors="replace") for each in ({**answer, **told}, messages)
        )
        self._put(answer["id"], StoredChat(request.model, request.metadata, *said))

    def _put(self, name: str, chat: StoredChat) -> None:
        before = self.chats.get(name)
        self.bytes += chat.size - (before.size if before else 0)
        self.chats[name] = chat
        while len(self.chats) > self.most or self.bytes > self.most_bytes:
            self.bytes -= self.chats.popitem(last=False)[1].size

    def get(self, name: str) -> StoredChat:
        """
        Raises:
            RequestError: no chat of this name is kept, or none any more.
        """
        if name not in self.chats:
            said = f"no chat {brief(name)} is kept here: those of requests with store: true are, the newest {self.most}"
            raise RequestError(404, f"{said}, until the server ends", "completion_id", "not_found")
        return self.chats[name]

    def update(self, name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """The answer of a chat with other metadata."""
        chat = replace(self.get(name), metadata=dict(metadata))
        self._put(name, chat)
        return chat.document()

    def delete(self, name: str) -> dict[str, Any]:
        self.get(name)
        self.bytes -= self.chats.pop(name).size
        return {"object": "chat.completion.deleted", "id": name, "deleted": True}

    def listed(self, asked: QueryParams) -> dict[str, Any]:
        """Answers, a page of them: those of a model, and with some metadata, where these are asked for."""
        wanted = {
            key.removeprefix("metadata[").removesuffix("]"): value
            for key, value in asked.items()
            if key.startswith("metadata[")
        }
        model = asked.get("model")
        found = [
            name
            for name, chat in self.chats.items()
            if model in (None, chat.model) and wanted.items() <= chat.metadata.items()
        ]
        return _page(found, asked, lambda name: self.chats[name].document())


def _page(names: Sequence[str], asked: QueryParams, entry: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """The entries of names behind `after`, up to `limit`, in `order`; none behind one that is not there.

    Raises:
        RequestError: `limit` or `order` says nothing.
    """
    limit, order, after = asked.get("limit", str(PAGE)), asked.get("order", "asc"), asked.get("after")
    if not (limit.isascii() and limit.isdigit() and int(limit[:9]) <= LARGEST_PAGE):
        raise RequestError(400, f"limit: give a whole number up to {LARGEST_PAGE}", "limit")
    if order not in ("asc", "desc"):
        raise RequestError(400, "order: give asc or desc", "order")
    ordered = list(names if order == "asc" else reversed(names))
    if after is not None:
        ordered = ordered[ordered.index(after) + 1 :] if after in ordered else []
    page = ordered[: int(limit)]
    ends = {"first_id": page[0], "last_id": page[-1]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": [entry(name) for name in page], **ends, "has_more": len(page) < len(ordered)}
