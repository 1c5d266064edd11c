"""Who may read and write: the token's cookie, host names, origins of writes, and the headers of every response.

A page of another site could send requests to 127.0.0.1, or have its name resolve to it. Its requests have no cookie
(SameSite=Strict), the wrong Host, or the wrong Origin, and cannot send JSON without a preflight, which is refused.
"""

from __future__ import annotations

import hmac
import os
import secrets
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..serve.guard import Access
from ..utils.errors import ConfigError, explain_os_error
from .pages import frame

TOKEN_FILE = "board.token"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; form-action 'self';"
    " base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
READS = ("GET", "HEAD")


def load_token(folder: Path) -> str:
    """Return the token of this user's boards: 256 bits in a file that only the user can read, made if it is missing.

    Raises:
        ConfigError: the file cannot be made, or others can read it.
    """
    path = folder / TOKEN_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_urlsafe(32))
        except FileExistsError:
            pass
        stat = path.stat()
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        cause = explain_os_error(error) if isinstance(error, OSError) else "it is not a token"
        raise ConfigError(f"{path}: {cause}", "remove it, or set HALFBYTE_QUEUE to another folder") from error
    if stat.st_mode & 0o077 or stat.st_uid != os.getuid() or len(token) < 43:
        raise ConfigError(f"{path}: it is no token, or others can read it", "remove it; the board makes a new one")
    return token


class Gate:
    """ASGI middleware that refuses requests without the cookie, to other names, and writes of other pages.

    Args:
        token: of the board.
        access: the names of this server.
        port: of the server; part of the cookie's name, since cookies are shared among ports.
        read_only: refuse every write.
    """

    def __init__(self, app: ASGIApp, token: str, access: Access, port: int, read_only: bool):
        self.app = app
        self.token = token
        self.access = access
        self.read_only = read_only
        self.cookie = f"halfbyte-board-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = [pair for pair in message.get("headers", ()) if pair[0] != b"server"]
                cached = any(name == b"cache-control" for name, _ in present)
                store = [] if cached else [(b"cache-control", b"no-store")]
                message = {**message, "headers": [*present, *HEADERS, *store]}
            await send(message)

        response = self._response(scope, Headers(scope=scope))
        await (response or self.app)(scope, receive, with_headers)

    def _response(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the response to a refused request, or to one that brings the token; None: it is allowed."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.access.allows_host(host):
            return PlainTextResponse("This name is not the board's. Open the address that it printed.\n", 400)
        if origin is not None and not self._is_same_origin(origin, host):
            return PlainTextResponse("Requests of other pages are refused.\n", 403)
        token = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if token and scope["path"] == "/" and scope["method"] in READS and self._is_token(token):
            return self._enter()
        if scope["path"].startswith("/static/"):
            return None
        if not self._is_token(self._cookie_of(headers)):
            return _locked()
        if scope["method"] in READS:
            return None
        if self.read_only:
            return PlainTextResponse("The board is read-only: start it without --read-only.\n", 403)
        site = headers.get("sec-fetch-site", "same-origin")
        is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        if origin is None or site != "same-origin" or not is_json:
            return PlainTextResponse("A write is JSON from a page of this board.\n", 403)
        return None

    def _is_same_origin(self, origin: str, host: str) -> bool:
        try:
            return self.access.allows_origin(origin) and urlsplit(origin).netloc.lower() == host.lower()
        except ValueError:
            return False

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self.token.encode())

    def _cookie_of(self, headers: Headers) -> str:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return morsel.value if morsel is not None else ""

    def _enter(self) -> Response:
        """Set the cookie, and go on to the runs. A page does so: browsers send no strict cookie with a redirect that
        another program has caused."""
        response = HTMLResponse(
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>halfbyte board</title>'
            '<meta http-equiv="refresh" content="0; url=/"></head><body><a href="/">Open the board</a></body></html>'
        )
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/", max_age=30 * 86400)
        return response


def _locked() -> Response:
    body = (
        "<h1>This board needs its token</h1><p>Open the address with <code>?token=</code> that"
        " <code>halfbyte board</code> printed in its terminal. Started again, it prints the same token.</p>"
    )
    return HTMLResponse(frame("Locked", body), 401)
