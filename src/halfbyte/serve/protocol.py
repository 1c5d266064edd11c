"""HTTP/1.1 below the application: malformed and slow requests, and refusals that clients can read."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..utils.errors import ConfigError, explain_os_error
from .errors import RequestError

CONNECTIONS = 256  # simultaneous connections, idle ones included
HEAD_SECONDS = 10.0  # time limit for a request's head
REST_BYTES, REST_SECONDS = 2**26, 5.0  # limits on the unread body that `DrainBody` reads


class Protocol(H11Protocol):
    """uvicorn's protocol with errors in OpenAI's format, and limits on connections that send no request."""

    head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS:
            self._refuse(RequestError(503, "too many connections; try again later", error_type="server_error"))
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
        """Handle input that h11 cannot parse; called by uvicorn."""
        error = sys.exception()
        status = getattr(error, "error_status_hint", 400)
        self._refuse(RequestError(status, f"this is not an HTTP/1.1 request: {error}"))

    def _refuse(self, error: RequestError) -> None:
        """Send an error for input that is not a request, and close the connection."""
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


class DrainBody:
    """ASGI middleware that reads the rest of a request's body before it ends a refusal.

    Clients that send the whole body before they read would otherwise get a connection error instead of the response.
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
            sends_body = begun or "expect" not in headers  # a client that expects 100 Continue has not sent its body
            if not sent and sends_body and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await drain()
                message = {"type": "http.response.body"}
            await send(message)

        async def drain() -> None:
            read = 0
            try:
                async with asyncio.timeout(REST_SECONDS):
                    while not sent and read <= REST_BYTES:
                        read += len((await received()).get("body", b""))
            except TimeoutError:
                return

        await self.app(scope, received, answer)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket, before anything is loaded, so that a port in use is reported at once.

    Raises:
        ConfigError: the address is not available.
    """
    listener = None
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, ValueError) as error:  # ValueError: an invalid host name
        if listener is not None:
            listener.close()
        cause = explain_os_error(error) if isinstance(error, OSError) else "invalid host name"
        raise ConfigError(f"cannot listen on {host}:{port}: {cause}", "choose another --host or --port") from error
    return listener
