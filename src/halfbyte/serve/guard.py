"""Who may ask: known host names, pages of these hosts, and holders of the API key.

A server on 127.0.0.1 is open to every page that its user visits, once the page's name leads to 127.0.0.1 (DNS
rebinding): the browser then takes both for one site. The names in Host and Origin are still the page's own.
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
from .requests import RequestError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
KEY_VARIABLE = "HALFBYTE_API_KEY"
HEALTH = "/health"  # which anyone may ask, by any name: what watches over servers has neither


@dataclass(frozen=True)
class Access:
    """What a request must show.

    Attributes:
        hosts: names and addresses that clients may use for this server, in Host's spelling; "*" for any.
        api_key: what "Authorization: Bearer …" must hold; None for anyone.
    """

    hosts: tuple[str, ...] = LOOPBACK
    api_key: str | None = None

    def middleware(self) -> list[Middleware]:
        """The gate that lets in who shows it."""
        return [Middleware(Gate, access=self)]

    def takes_name(self, host: str) -> bool:
        """Whether the server goes by `host` ("name:port"), as a client writes it."""
        return not set("/@?#") & set(host) and self._takes(f"//{host}")

    def takes_page(self, origin: str) -> bool:
        """Whether a page of `origin` ("https://host:port", or "null") may ask."""
        return self._takes(origin)

    def _takes(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname
        except ValueError:
            return False
        if host is None:
            return False
        host = f"[{host}]" if ":" in host else host
        return any(each in ("*", host) or (each.startswith("*.") and host.endswith(each[1:])) for each in self.hosts)

    def takes_key(self, authorization: str) -> bool:
        """Whether the header holds the key; takes the same time whatever it holds."""
        kind, _, given = authorization.partition(" ")
        same = hmac.compare_digest(given.encode("latin-1"), (self.api_key or "").encode())
        return self.api_key is None or (kind.lower() == "bearer" and same)


LOCAL = Access()


def access_to(host: str, address: str, hosts: Sequence[str], api_key: str | None) -> Access:
    """The rules for a server bound to `address`, which `--host` named as `host`.

    Raises:
        UsageError: other machines reach the address, and there is no key; or a key or name that no client can send.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip() == api_key != ""):
        raise UsageError("--api-key: it is empty, or has more than printable ASCII", "choose another key")
    bound = ipaddress.ip_address(address.partition("%")[0])
    if not bound.is_loopback and api_key is None:
        raise UsageError(
            f"--host {host}: other machines reach it, and anyone there could use the model",
            f"set a key with --api-key KEY or {KEY_VARIABLE}, or leave --host out for this machine alone",
        )
    for name in hosts:
        if "*" in name[1:] or (name.startswith("*") and name != "*" and not name.startswith("*.")) or "/" in name:
            raise UsageError(f"--allowed-host {name}: not a host", "write a name, *.example.com, or *")
    known = dict.fromkeys([*LOOPBACK, *(_in_url(each) for each in (host, *hosts))])
    return Access(tuple(each.lower() for each in known), api_key)


def _in_url(host: str) -> str:
    """IPv6 addresses stand in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


class Gate:
    """ASGI middleware: refuses names that are not the server's, pages of other sites, and requests without the key."""

    def __init__(self, app: ASGIApp, access: Access):
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        judged = scope["type"] == "http" and scope["path"] != HEALTH
        refused = self._refusal(Headers(scope=scope)) if judged else None
        if refused is None:
            await self.app(scope, receive, send)
            return
        headers = {"www-authenticate": "Bearer"} if refused.status == 401 else None
        await JSONResponse(refused.body, refused.status, headers)(scope, receive, send)

    def _refusal(self, headers: Headers) -> RequestError | None:
        host = headers.get("host", "")
        if not self.access.takes_name(host):
            message = f"host: this server does not go by {brief(host)}; `halfbyte serve --allowed-host` names more"
            return RequestError(400, message, code="host_not_allowed")
        origin = headers.get("origin")
        if origin is not None and not self.access.takes_page(origin):
            message = f"origin: pages of {brief(origin)} may not ask; `halfbyte serve --allowed-host` names who may"
            return RequestError(403, message, code="origin_not_allowed")
        if not self.access.takes_key(headers.get("authorization", "")):
            message = "authorization: send the server's key, as Bearer; OpenAI's clients call it api_key"
            return RequestError(401, message, code="invalid_api_key")
        return None
