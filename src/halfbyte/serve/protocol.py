"""HTTP/1.1 below the application: what is no request, what comes too slowly, and answers that clients get to read."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .requests import RequestError

CONNECTIONS = 256  # at once, with those that send nothing
HEAD_SECONDS = 10.0  # for the head of a request
REST_BYTES, REST_SECONDS = 2**26, 5.0  # of a body that nobody wants, read so that its sender comes to read the answer


class Protocol(H11Protocol):
    """uvicorn's, with errors in OpenAI's shape, and bounds on connections that send no request."""

    head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            self._refuse(RequestError(503, "too many connections; try again later", kind="server_error"))
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._head_is_there()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self.head is None:
            self.head = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _head_is_there(self) -> None:
        if self.head is not None:
            self.head.cancel()
            self.head = None

    def _head_is_late(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(RequestError(408, f"the head of the request took more than {HEAD_SECONDS:.0f} seconds"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for what h11 cannot read."""
        error = sys.exception()
        self._refuse(RequestError(getattr(error, "error_status_hint", 400), f"this is no HTTP/1.1 request: {error}"))

    def _refuse(self, error: RequestError) -> None:
        """Answer what never becomes a request, and close."""
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.body).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=error.status, headers=headers), h11.Data(body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class Drained:
    """ASGI middleware: a refusal ends once the request's body has been read, too.

    Clients that send all of a body before they read, over a connection that the server has closed by then, get an error
    of their system instead of the answer.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, begun = Headers(scope=scope), False
        sent = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

        async def received() -> Message:
            nonlocal sent, begun
            begun, message = True, await receive()
            sent = sent or message["type"] == "http.disconnect" or not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            if not sent and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            waited_for = begun or "expect" not in headers  # who expects 100 Continue has not begun to send
            if not sent and waited_for and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await rest()
                message = {"type": "http.response.body"}
            await send(message)

        async def rest() -> None:
            read = 0
            try:
                async with asyncio.timeout(REST_SECONDS):
                    while not sent and read <= REST_BYTES:
                        read += len((await received()).get("body", b""))
            except TimeoutError:
                return

        await self.app(scope, received, answer)
