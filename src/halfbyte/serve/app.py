"""The web application: routes, the request queue, streams, and what ends a request early.

One thread owns the model, and requests run one after another. The prompts of one request form a batch of
`generation.stream`, which has one set of sampling parameters and starts and ends as a whole; requests are not combined.
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
from .errors import RequestError
from .guard import HEALTH, LOCAL, Access
from .model import PreparedRequest, Served
from .protocol import DrainBody
from .replies import Reply, event, tokens_of
from .requests import ChatRequest, CompletionRequest, Request, parse

HOP_SECONDS = 0.02  # batch tokens for this long before passing them between threads
READ_SECONDS = 5.0  # time for the client to read the rest after its deadline
CLIENT_CLOSED_REQUEST = 499  # nginx's status for its log; the client never sees it
Result = TypeVar("Result")


class Deadlines:
    """Time limits of all requests; `stop` makes every limit expire at once."""

    def __init__(self) -> None:
        self.stopping, self.timeouts = False, set[asyncio.Timeout]()

    @contextlib.asynccontextmanager
    async def until(self, deadline: float, when: str, status: int = 504) -> AsyncIterator[None]:
        """Raise RequestError at `deadline` on the event loop's clock; `when` completes the message."""
        try:
            async with asyncio.timeout_at(0 if self.stopping else deadline) as timeout:
                self.timeouts.add(timeout)
                try:
                    yield
                finally:
                    self.timeouts.discard(timeout)
        except TimeoutError:
            if self.stopping:
                raise RequestError(503, "the server is shutting down", error_type="server_error") from None
            error_type = "server_error" if status >= 500 else "invalid_request_error"
            raise RequestError(
                status, f"the request ran out of time {when}", code="timeout", error_type=error_type
            ) from None

    def stop(self) -> None:
        """Expire all current and future deadlines."""
        self.stopping = True
        for timeout in self.timeouts:
            if not timeout.expired():
                timeout.reschedule(0)


class RequestQueue:
    """Runs one request at a time, in order of arrival; a limited number is queued."""

    def __init__(self, limit: int, deadlines: Deadlines):
        self.limit, self.deadlines = limit, deadlines
        self.waiting, self.lock = 0, asyncio.Lock()

    def check(self) -> None:
        """Raise RequestError 429 if the queue is full."""
        if self.lock.locked() and self.waiting >= self.limit:
            message = f"{self.waiting} requests are queued already; try again later"
            raise RequestError(429, message, code="queue_full", error_type="rate_limit_error")

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[None]:
        """Hold the request's turn; raises if it has not started by `deadline`, on the event loop's clock."""
        self.check()
        self.waiting += 1
        try:
            async with self.deadlines.until(deadline, "while it waited for its turn"):
                await self.lock.acquire()
        finally:
            self.waiting -= 1
        try:
            yield
        finally:
            self.lock.release()


class Endpoints:
    """The handlers of the routes."""

    def __init__(self, served: Served):
        self.served = served
        self.limits = served.limits
        self.deadlines = Deadlines()
        self.queue = RequestQueue(served.limits.queue, self.deadlines)
        self.thread = ThreadPoolExecutor(1, "model")
        self.created = int(time.time())

    def stop(self) -> None:
        """End running and queued requests at once, with an error."""
        self.deadlines.stop()

    def idle(self, seconds: float) -> bool:
        """Return whether the model's thread becomes idle within `seconds`; a step cannot be interrupted."""
        return not wait([self.thread.submit(int)], seconds).not_done

    async def health(self, _: HttpRequest) -> Response:
        stopping = self.deadlines.stopping
        return JSONResponse({"status": "stopping" if stopping else "ok"}, 503 if stopping else 200)

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served.names]})

    async def model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in self.served.names:
            raise RequestError(404, f"no model {name!r}", "model", "model_not_found")
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "halfbyte"}

    async def unload(self, request: HttpRequest) -> Response:
        """Unload an adapter once the running request has ended."""
        name = request.path_params["name"]
        async with self.queue.turn(asyncio.get_running_loop().time() + self.limits.seconds):
            await asyncio.get_running_loop().run_in_executor(self.thread, self.served.unload, name)
        return JSONResponse({"id": name, "object": "model", "deleted": True})

    async def chat(self, request: HttpRequest) -> Response:
        return await self._complete(request, ChatRequest)

    async def completions(self, request: HttpRequest) -> Response:
        return await self._complete(request, CompletionRequest)

    async def _complete(self, request: HttpRequest, request_type: type[Request]) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        self.queue.check()
        parsed = parse(request_type, await self._body(request))
        work = await run_in_threadpool(self.served.prepare, parsed)
        scored = parsed.likeliest is not None
        reply = Reply(request_type is ChatRequest, parsed.model, work.prompt_tokens, work.rows, scored)
        pieces = self._pieces(work, deadline)
        if not parsed.stream:
            drawn = await _cancel_on_disconnect(request, _collect(pieces))
            return JSONResponse(reply.full(work.best(drawn), tokens_of(drawn)))
        first = await _cancel_on_disconnect(request, anext(pieces))  # early errors keep their HTTP status
        return EventStream(_events(reply, first, pieces, parsed.stream_options.include_usage), deadline)

    async def _body(self, request: HttpRequest) -> bytes:
        # Any web page may post text/plain to localhost; for JSON a browser sends a CORS preflight, which is refused.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RequestError(415, "content-type: send application/json")
        limit = self.served.body_bytes
        too_long = RequestError(413, f"the body is longer than {limit} bytes")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_long
        body = bytearray()
        deadline = asyncio.get_running_loop().time() + self.limits.body_seconds
        async with self.deadlines.until(deadline, "before its body had arrived", 408):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_long
        return bytes(body)

    async def _pieces(self, work: PreparedRequest, deadline: float) -> AsyncGenerator[list[Piece], None]:
        """Yield the answer, some tokens at a time. Closing the generator stops the generation."""
        loop = asyncio.get_running_loop()
        async with self.queue.turn(deadline):
            pieces = self.served.answer(work)
            new_tokens = 0
            try:
                while True:
                    async with self.deadlines.until(deadline, f"after {new_tokens} tokens"):
                        batch = await loop.run_in_executor(self.thread, _next_few, pieces)
                    if not batch:
                        return
                    yield batch
                    new_tokens += tokens_of(batch)
            except HalfbyteError as error:
                raise RequestError(500, error.message, error_type="server_error") from None
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                message = f"out of memory with {len(work.prompts)} prompts of {work.prompt_tokens} tokens in all"
                raise RequestError(503, message, code="out_of_memory", error_type="server_error") from None
            finally:
                self.thread.submit(pieces.close)  # type: ignore[attr-defined]  # queued before the next request's first step


def _next_few(pieces: Iterator[Piece]) -> list[Piece]:
    """Return the pieces of the next `HOP_SECONDS`, at least one; none at the end."""
    until, batch = time.perf_counter() + HOP_SECONDS, []
    for piece in pieces:
        batch.append(piece)
        if time.perf_counter() >= until:
            break
    return batch


async def _collect(pieces: AsyncGenerator[list[Piece], None]) -> list[Piece]:
    async with contextlib.aclosing(pieces):
        return [piece async for batch in pieces for piece in batch]


async def _events(
    reply: Reply, first: list[Piece], pieces: AsyncGenerator[list[Piece], None], include_usage: bool
) -> AsyncGenerator[str, None]:
    """Yield the server-sent events of an answer; an error after the first pieces becomes the last event."""
    new_tokens = 0
    async with contextlib.aclosing(pieces):
        yield "".join(chain(reply.opening(), map(reply.event, first)))
        new_tokens += tokens_of(first)
        try:
            async for batch in pieces:
                new_tokens += tokens_of(batch)
                yield "".join(map(reply.event, batch))
        except RequestError as error:
            yield event(error.body)
            return
    yield reply.closing(new_tokens, include_usage)


class EventStream(StreamingResponse):
    """A stream of events that always closes its generator.

    The stream ends `READ_SECONDS` after `deadline`, so a client that does not read cannot block the queue for longer.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], deadline: float):
        super().__init__(events, headers={"cache-control": "no-cache"})
        self.events, self.deadline = events, deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self.events), asyncio.timeout_at(self.deadline + READ_SECONDS):
            await super().__call__(scope, receive, send)


async def _cancel_on_disconnect(request: HttpRequest, work: Awaitable[Result]) -> Result:
    """Return the result of `work`; cancel it if the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


def _request_error(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse(error.body, error.status, {"retry-after": "1"} if error.status == 429 else None)


def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    target = cut(visible(f"{request.method} {request.url.path}"), 120)
    message = f"{target}: {error.detail}; there are {', '.join(sorted(route.path for route in request.app.routes))}"
    refused = RequestError(error.status_code, message)
    return JSONResponse(refused.body, error.status_code, error.headers)


def application(endpoints: Endpoints, access: Access = LOCAL) -> Starlette:
    """Return the ASGI application."""
    internal_error = RequestError(500, "internal error; see the server's log", error_type="server_error")
    return Starlette(
        middleware=[Middleware(DrainBody), *access.middleware()],
        routes=[
            Route(HEALTH, endpoints.health, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.unload, methods=["DELETE"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
        ],
        exception_handlers={
            RequestError: _request_error,
            HTTPException: _http_error,
            ClientDisconnect: lambda *_: Response(status_code=CLIENT_CLOSED_REQUEST),
            # Starlette raises the exception again after this response, so the log has its traceback.
            Exception: lambda *_: JSONResponse(internal_error.body, 500),
        },
    )
