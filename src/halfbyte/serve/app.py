"""The web application: routes, the queue before the model, streams, and what ends them early.

One thread owns the model. Requests take turns: a batch of `generation.stream` starts and ends together, with one way of
sampling, so the prompts of one request are a batch, and those of two requests are not.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import chain
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ..generation.text import Piece
from ..utils.errors import HalfbyteError
from ..utils.hardware import is_out_of_memory
from ..utils.text import cut, visible
from .guard import HEALTH, LOCAL, Access
from .model import Served, Work
from .protocol import Drained
from .replies import Reply, event, tokens_of
from .requests import ChatRequest, CompletionRequest, Request, RequestError, UpdateRequest, parse
from .stored import StoredChats

HOP_SECONDS = 0.02  # tokens of so long are passed between threads at once
READ_SECONDS = 5.0  # after the last token, for a client to read what it was sent
CLIENT_CLOSED_REQUEST = 499  # nginx's status for its log; nobody reads the response
Result = TypeVar("Result")


class Patience:
    """How long is waited: for each request until its deadline, and for none once the server stops."""

    def __init__(self) -> None:
        self.stopping, self.waits = False, set[asyncio.Timeout]()

    @contextlib.asynccontextmanager
    async def until(self, deadline: float, when: str, status: int = 504) -> AsyncIterator[None]:
        """Raise RequestError rather than wait beyond `deadline`, on the loop's clock; `when` says for what."""
        try:
            async with asyncio.timeout_at(0 if self.stopping else deadline) as timeout:
                self.waits.add(timeout)
                try:
                    yield
                finally:
                    self.waits.discard(timeout)
        except TimeoutError:
            if self.stopping:
                raise RequestError(503, "the server is shutting down", kind="server_error") from None
            kind = "server_error" if status >= 500 else "invalid_request_error"
            raise RequestError(status, f"the request ran out of time {when}", code="timeout", kind=kind) from None

    def stop(self) -> None:
        """End all that is waited for, now and from now on."""
        self.stopping = True
        for timeout in self.waits:
            if not timeout.expired():
                timeout.reschedule(0)


class Turns:
    """One request runs, in the order of arrival; a limited number waits."""

    def __init__(self, queue: int, patience: Patience):
        self.queue, self.patience = queue, patience
        self.waiting, self.lock = 0, asyncio.Lock()

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
            async with self.patience.until(deadline, "while it waited for its turn"):
                await self.lock.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.lock.release()


class Endpoints:
    """What the routes call."""

    def __init__(self, served: Served):
        self.served, self.limits, self.patience = served, served.limits, Patience()
        self.turns = Turns(served.limits.queue, self.patience)
        self.chats = StoredChats()
        self.thread = ThreadPoolExecutor(1, "model")
        self.created = int(time.time())

    def stop(self) -> None:
        """End what runs and what waits, at once, with an error that says so."""
        self.patience.stop()

    def idle(self, seconds: float) -> bool:
        """Whether the model's thread is at rest, or comes to it in so many seconds: nothing interrupts a step."""
        return not wait([self.thread.submit(int)], seconds).not_done

    async def health(self, _: HttpRequest) -> Response:
        stopping = self.patience.stopping
        return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served.names]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self.served.names:
            raise RequestError(404, f"no model {name!r} here", "model", "model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "halfbyte"}

    async def unload(self, request: HttpRequest) -> Response:
        """Serve an adapter no longer, once what runs has ended."""
        name = request.path_params["name"]
        async with self.turns.take(asyncio.get_running_loop().time() + self.limits.seconds):
            await asyncio.get_running_loop().run_in_executor(self.thread, self.served.take_off, name)
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    async def stored(self, request: HttpRequest) -> Response:
        return JSONResponse(self.chats.listed(request.query_params))

    async def stored_chat(self, request: HttpRequest) -> Response:
        return JSONResponse(self.chats.get(request.path_params["id"]).document())

    async def stored_messages(self, request: HttpRequest) -> Response:
        return JSONResponse(self.chats.get(request.path_params["id"]).listed(request.query_params))

    async def update_chat(self, request: HttpRequest) -> Response:
        asked = parse(UpdateRequest, await self._body(request))
        return JSONResponse(self.chats.update(request.path_params["id"], asked.metadata))

    async def delete_chat(self, request: HttpRequest) -> Response:
        return JSONResponse(self.chats.delete(request.path_params["id"]))

    async def chat(self, request: HttpRequest) -> Response:
        return await self._complete(request, ChatRequest)

    async def completions(self, request: HttpRequest) -> Response:
        return await self._complete(request, CompletionRequest)

    async def _complete(self, request: HttpRequest, kind: type[Request]) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        self.turns.check()
        asked = parse(kind, await self._body(request))
        work = await run_in_threadpool(self.served.prepare, asked)
        scored = asked.likeliest is not None
        reply = Reply(kind is ChatRequest, asked.model, work.prompt_tokens, work.rows, scored)
        pieces = self._pieces(work, deadline)
        if isinstance(asked, ChatRequest) and asked.store:
            pieces = self._stored(asked, reply, pieces)
        if not asked.stream:
            drawn = await _unless_gone(request, _all(pieces))
            return JSONResponse(reply.whole(work.best(drawn), tokens_of(drawn)))
        first = await _unless_gone(request, anext(pieces))  # what is refused has its own status
        return EventStream(_events(reply, first, pieces, asked.stream_options.include_usage), deadline)

    async def _stored(
        self, asked: ChatRequest, reply: Reply, pieces: AsyncGenerator[list[Piece], None]
    ) -> AsyncGenerator[list[Piece], None]:
        """`pieces`, which are kept as a chat when all have come."""
        found: list[Piece] = []
        async with contextlib.aclosing(pieces):
            async for some in pieces:
                found += some
                yield some
        self.chats.add(asked, reply.whole(found, tokens_of(found)))

    async def _body(self, request: HttpRequest) -> bytes:
        # Any web page may send text/plain to a server on this machine; for JSON a browser asks first, and is refused.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "content-type: send application/json")
        too_long = RequestError(413, f"the body is longer than {self.limits.body_bytes} bytes")
        if int(request.headers.get("content-length", 0)) > self.limits.body_bytes:
            raise too_long
        body = bytearray()
        deadline = asyncio.get_running_loop().time() + self.limits.body_seconds
        async with self.patience.until(deadline, "before its body had arrived", 408):
            async for chunk in request.stream():
                body += chunk
                if len(body) > self.limits.body_bytes:
                    raise too_long
        return bytes(body)

    async def _pieces(self, work: Work, deadline: float) -> AsyncGenerator[list[Piece], None]:
        """The answer, some tokens at a time. Closing it stops the generation."""
        loop = asyncio.get_running_loop()
        async with self.turns.take(deadline):
            pieces = self.served.answer(work)
            new_tokens = 0
            try:
                while True:
                    async with self.patience.until(deadline, f"after {new_tokens} tokens"):
                        some = await loop.run_in_executor(self.thread, _next_few, pieces)
                    if not some:
                        return
                    yield some
                    new_tokens += tokens_of(some)
            except HalfbyteError as error:
                raise RequestError(500, error.message, kind="server_error") from None
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
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
        new_tokens += tokens_of(first)
        try:
            async for some in pieces:
                new_tokens += tokens_of(some)
                yield "".join(map(reply.event, some))
        except RequestError as error:
            yield event(error.body)
            return
    yield reply.closing(new_tokens, include_usage)


class EventStream(StreamingResponse):
    """A stream of events that ends its generator whatever ends the stream; at the latest some time after `deadline`, so
    that a client which does not read holds up nobody for longer."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], deadline: float):
        super().__init__(events, headers={"cache-control": "no-cache"})
        self.events, self.deadline = events, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.events), asyncio.timeout_at(self.deadline + READ_SECONDS):
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


def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body, error.status, {"retry-after": "1"} if error.status == 429 else None)


def _no_route(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = cut(visible(f"{request.method} {request.url.path}"), 120)
    message = f"{asked}: {error.detail}; there are {', '.join(sorted(each.path for each in request.app.routes))}"
    refused = RequestError(error.status_code, message)
    return JSONResponse(refused.body, error.status_code, error.headers)


def _bug(_: HttpRequest, __: Exception) -> Response:
    """Starlette raises the exception again after this, so the log has its traceback."""
    return JSONResponse(RequestError(500, "internal error; see the server's log", kind="server_error").body, 500)


def _nobody(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def application(endpoints: Endpoints, access: Access = LOCAL) -> Starlette:
    """The ASGI application."""
    return Starlette(
        middleware=[Middleware(Drained), *access.middleware()],
        routes=[
            Route(HEALTH, endpoints.health, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.unload, methods=["DELETE"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.stored, methods=["GET"]),
            Route("/v1/chat/completions/{id}", endpoints.stored_chat, methods=["GET"]),
            Route("/v1/chat/completions/{id}", endpoints.update_chat, methods=["POST"]),
            Route("/v1/chat/completions/{id}", endpoints.delete_chat, methods=["DELETE"]),
            Route("/v1/chat/completions/{id}/messages", endpoints.stored_messages, methods=["GET"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
        ],
        exception_handlers={
            RequestError: _refused,
            HTTPException: _no_route,
            ClientDisconnect: _nobody,
            Exception: _bug,
        },
    )
