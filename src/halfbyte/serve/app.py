"""The web application: routes, the queue before the model, streams, and what ends them early.

One thread owns the model. Requests take turns: a batch of `generation.stream` starts and ends together, with one way of
sampling, so the prompts of one request are a batch, and those of two requests are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

import torch
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..generation.text import Piece
from .guard import LOCAL, Access
from .model import Served, Work
from .replies import Reply, event
from .requests import ChatRequest, CompletionRequest, Request, RequestError, parse

HOP_SECONDS = 0.02  # tokens of so long are passed between threads at once
CLIENT_CLOSED_REQUEST = 499  # nginx's status for its log; nobody reads the response
Result = TypeVar("Result")


class Turns:
    """One request runs, in the order of arrival; a limited number waits."""

    def __init__(self, queue: int):
        self.queue, self.waiting, self.lock = queue, 0, asyncio.Lock()

    def check(self) -> None:
        """Raise RequestError 429 where no more may wait."""
        if self.lock.locked() and self.waiting >= self.queue:
            message = f"{self.waiting} requests are waiting already; try again later"
            raise RequestError(429, message, code="queue_full", kind="rate_limit_error")

    @contextlib.asynccontextmanager
    async def take(self, deadline: float) -> AsyncIterator[None]:
        """Wait for one's turn until `deadline`, on the loop's clock, and have it."""
        self.check()
        self.waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self.lock.acquire()
        except TimeoutError:
            raise _late("while it waited for its turn") from None
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.lock.release()


class Endpoints:
    """What the routes call."""

    def __init__(self, served: Served):
        self.served, self.limits, self.turns = served, served.limits, Turns(served.limits.queue)
        self.thread = ThreadPoolExecutor(1, "model")
        self.created, self.stopping = int(time.time()), False

    def stop(self) -> None:
        """End what runs and what waits, within a token's time, with an error that says so."""
        self.stopping = True

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served.names]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self.served.names:
            raise RequestError(404, f"no model {name!r} here", "model", "model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "halfbyte"}

    async def chat(self, request: HttpRequest) -> Response:
        return await self._complete(request, ChatRequest)

    async def completions(self, request: HttpRequest) -> Response:
        return await self._complete(request, CompletionRequest)

    async def _complete(self, request: HttpRequest, kind: type[Request]) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        self.turns.check()
        asked = parse(kind, await self._body(request, deadline))
        work = await run_in_threadpool(self.served.prepare, asked)
        reply = Reply(kind is ChatRequest, asked.model, work.prompt_tokens, len(work.prompts))
        pieces = self._pieces(work, deadline)
        if not asked.stream:
            return JSONResponse(reply.whole(await _unless_gone(request, _all(pieces))))
        first = await _unless_gone(request, anext(pieces))  # what is refused has its own status
        return EventStream(_events(reply, first, pieces, asked.stream_options.include_usage))

    async def _body(self, request: HttpRequest, deadline: float) -> bytes:
        # Any web page may send text/plain to a server on this machine; for JSON a browser asks first, and is refused.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "content-type: send application/json")
        body = bytearray()
        try:
            async with asyncio.timeout_at(deadline):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > self.limits.body_bytes:
                        raise RequestError(413, f"the body is longer than {self.limits.body_bytes} bytes")
        except TimeoutError:
            raise _late("before its body had arrived") from None
        return bytes(body)

    async def _pieces(self, work: Work, deadline: float) -> AsyncGenerator[list[Piece], None]:
        """The answer, some tokens at a time. Closing it stops the generation."""
        loop = asyncio.get_running_loop()
        async with self.turns.take(deadline):
            pieces = self.served.answer(work)
            new_tokens = 0
            try:
                while not self.stopping and (some := await loop.run_in_executor(self.thread, _next_few, pieces)):
                    yield some
                    new_tokens += len(some)
                    if loop.time() > deadline:
                        raise _late(f"after {new_tokens} tokens")
                if self.stopping:
                    raise RequestError(503, "the server is shutting down", kind="server_error")
            except torch.OutOfMemoryError:
                message = f"out of memory with {len(work.prompts)} prompts of {work.prompt_tokens} tokens in all"
                raise RequestError(503, message, code="out_of_memory", kind="server_error") from None
            finally:
                self.thread.submit(pieces.close)  # type: ignore[attr-defined]  # runs before the next one's first step


def _next_few(pieces: Iterator[Piece]) -> list[Piece]:
    """Pieces of the next `HOP_SECONDS`, at least one; none at the end."""
    until, found = time.perf_counter() + HOP_SECONDS, []
    for piece in pieces:
        found.append(piece)
        if time.perf_counter() >= until:
            break
    return found


async def _all(pieces: AsyncGenerator[list[Piece], None]) -> list[Piece]:
    async with contextlib.aclosing(pieces):
        return [piece async for some in pieces for piece in some]


async def _events(
    reply: Reply, first: list[Piece], pieces: AsyncGenerator[list[Piece], None], include_usage: bool
) -> AsyncGenerator[str, None]:
    """Server-sent events of an answer whose first pieces are there; an error on the way is the last event."""
    new_tokens = 0
    async with contextlib.aclosing(pieces):
        some: list[Piece] | None = first
        yield "".join(chain(reply.opening(), map(reply.event, first)))
        new_tokens += len(first)
        try:
            async for some in pieces:
                new_tokens += len(some)
                yield "".join(map(reply.event, some))
        except RequestError as error:
            yield event(error.body)
            return
    yield reply.closing(new_tokens, include_usage)


class EventStream(StreamingResponse):
    """A stream of events that ends its generator whatever ends the stream."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]):
        super().__init__(events, headers={"cache-control": "no-cache"})
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.events):
            await super().__call__(scope, receive, send)


async def _unless_gone(request: HttpRequest, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientDisconnect: it has gone.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _late(when: str) -> RequestError:
    return RequestError(504, f"the request ran out of time {when}", code="timeout", kind="server_error")


def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body, error.status, {"retry-after": "1"} if error.status == 429 else None)


def _no_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = RequestError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    return JSONResponse(refused.body, error.status_code, error.headers)


def _bug(_: HttpRequest, __: Exception) -> Response:
    """Starlette raises the exception again after this, so the log has its traceback."""
    return JSONResponse(RequestError(500, "internal error; see the server's log", kind="server_error").body, 500)


def _nobody(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def application(endpoints: Endpoints, access: Access = LOCAL) -> Starlette:
    """The ASGI application."""
    return Starlette(
        middleware=access.middleware(),
        routes=[
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
        ],
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_route,
            ClientDisconnect: _nobody,
            Exception: _bug,
        },
    )
