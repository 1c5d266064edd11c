"""Access control: allowed host names, web pages of these hosts, and the API key.

A server on 127.0.0.1 is open to every page its user visits if the page's name resolves to 127.0.0.1 (DNS rebinding),
since the browser then treats both as one site. Host and Origin still hold the page's own name, so they are checked.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..utils.errors import UsageError
from ..utils.text import brief
from .errors import RequestError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
KEY_VARIABLE = "HALFBYTE_API_KEY"
HEALTH = "/health"  # open to anyone: health probes have neither name nor key


@dataclass(frozen=True)
class Access:
    """Requirements for a request.

    Attributes:
        hosts: names and addresses that clients may use for this server, as spelled in the Host header; "*" for any.
        api_key: required in "Authorization: Bearer …"; None: no key is required.
    """

    hosts: tuple[str, ...] = LOOPBACK
    api_key: str | None = None

    def middleware(self) -> list[Middleware]:
        """Return the middleware that enforces these rules."""
        return [Middleware(Gate, access=self)]

    def allows_host(self, host: str) -> bool:
        """Return whether `host` ("name:port"), from the Host header, is allowed."""
        return not set("/@?#") & set(host) and self._allows(f"//{host}")

    def allows_origin(self, origin: str) -> bool:
        """Return whether a page of `origin` ("https://host:port", or "null") is allowed."""
        return self._allows(origin)

    def _allows(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname
        except ValueError:
            return False
        if host is None:
            return False
        host = url_host(host)
        return any(
            allowed in ("*", host) or (allowed.startswith("*.") and host.endswith(allowed[1:]))
            for allowed in self.hosts
        )

    def allows_key(self, authorization: str) -> bool:
        """Return whether the header holds the key, in constant time."""
        scheme, _, token = authorization.partition(" ")
        same = hmac.compare_digest(token.encode("latin-1"), (self.api_key or "").encode())
        return self.api_key is None or (scheme.lower() == "bearer" and same)


LOCAL = Access()


def access_to(host: str, address: str, hosts: Sequence[str], api_key: str | None) -> Access:
    """Return the rules for a server bound to `address`, named `host` on the command line.

    Raises:
        UsageError: the address is reachable from other machines and there is no key; or a key or name is invalid.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UsageError("--api-key: the key must be printable ASCII and not empty", "choose another key")
    bound = ipaddress.ip_address(address.partition("%")[0])
    if not bound.is_loopback and api_key is None:
        raise UsageError(
            f"--host {host}: other machines can reach this address and use the model",
            f"set a key with --api-key KEY or {KEY_VARIABLE}, or leave --host out for this machine alone",
        )
    for name in hosts:
        if "*" in name[1:] or (name.startswith("*") and name != "*" and not name.startswith("*.")) or "/" in name:
            raise UsageError(f"--allowed-host {name}: not a host", "write a name, *.example.com, or *")
    names = dict.fromkeys([*LOOPBACK, *map(url_host, (host, *hosts))])
    return Access(tuple(name.lower() for name in names), api_key)


def url_host(host: str) -> str:
    """Return a host as URLs write it: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Gate:
    """ASGI middleware that refuses unknown host names, pages of other sites, and requests without the key."""

    def __init__(self, app: ASGIApp, access: Access):
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        checked = scope["type"] == "http" and scope["path"] != HEALTH
        refused = self._refusal(Headers(scope=scope)) if checked else None
        if refused is None:
            await self.app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer"} if refused.status == 401 else None
        await JSONResponse(refused.body, refused.status, headers)(scope, receive, send)

    def _refusal(self, headers: Headers) -> RequestError | None:
        host = headers.get("host", "")
        if not self.access.allows_host(host):
            message = f"host: {brief(host)} is not a name of this server; add it with `halfbyte serve --allowed-host`"
            return RequestError(400, message, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not self.access.allows_origin(origin):
            message = f"origin: pages of {brief(origin)} are not allowed; add it with `halfbyte serve --allowed-host`"
            return RequestError(403, message, code="origin_not_allowed")
        if not self.access.allows_key(headers.get("authorization", "")):
            message = "authorization: send the server's key as a Bearer token (api_key in OpenAI's clients)"
            return RequestError(401, message, code="invalid_api_key")
        return None
