"""Routes of the board. Handlers are synchronous, and run in threads, since they read files."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ..report.page import document
from ..report.run import Run, read_run
from ..report.sections import text
from ..report.style import CSS
from ..runs import layout
from ..serve.guard import LOCAL, Access
from ..utils.errors import ConfigError, HalfbyteError
from .actions import ACTIONS, Actions
from .chat import chat_page, chosen_weights, saved_weights
from .folders import Cache, Runs, Summary, version_of
from .guard import Gate
from .pages import frame, run_page, runs_page
from .queue_pages import new_page, queue_page
from .tables import MOST_RUNS, Member, as_markdown, compare_page, data_page

HERE = Path(__file__).parent
BODY_BYTES = 1 << 18
EVENTS = "text/event-stream"
LOOK_SECONDS = 0.5  # between two looks for changes of an open page; twice as long if none came for `QUIET_SECONDS`
QUIET_SECONDS = 10.0
SILENT_SECONDS = 20.0  # after which a comment is sent, which fails if the client is gone
CACHED = {"cache-control": "private, max-age=300"}
CONTENTS = (
    *(layout.RESOLVED_CONFIG, layout.MEMORY, layout.DATA_REPORT, layout.GENERATIONS, layout.ENVIRONMENT),
    *(layout.CHECKS, layout.EXPERTS, layout.MERGE, layout.COMPLETIONS, layout.ROW_LOSSES, layout.SAMPLES),
)


@dataclass
class Board:
    """The handlers of the routes.

    Attributes:
        runs: the runs in the board's folders.
        actions: changes that pages make; None: the board is read-only.
        is_closing: whether streams of changes are to end, so that the server can.
    """

    runs: Runs
    actions: Actions | None
    is_closing: bool = False

    def __post_init__(self) -> None:
        self.contents = Cache(16)

    # --- reading -----------------------------------------------------------------------------------------------------

    def runs_page(self, request: Request) -> Response:
        def version() -> str:
            return "\n".join(run.version for run in self.runs.all())

        return self._live(
            request,
            version,
            lambda: runs_page(self.runs.all(), request.query_params, self.runs.roots, self.actions is None),
        )

    def run_page(self, request: Request) -> Response:
        run = self._run(request.path_params["run"])

        def make() -> str:
            return run_page(
                run,
                self._contents(run),
                self.runs.metrics(run.folder),
                self.runs.lines(run.folder, layout.SAMPLES),
                request.query_params,
                log=self.runs.log_of(run.folder),
                read_only=self.actions is None,
            )

        return self._live(request, lambda: self.runs.version(run.folder), make)

    def data_page(self, request: Request) -> Response:
        run = self._run(request.path_params["run"])
        return HTMLResponse(data_page(run, self._contents(run), request.query_params))

    def compare_page(self, request: Request) -> Response:
        chosen = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_RUNS]
        summaries = [self._run(number) for number in chosen]

        def version() -> str:
            return "\n".join(self.runs.version(run.folder) for run in summaries)

        def members() -> list[Member]:
            return [
                Member(
                    run,
                    self._contents(run),
                    self.runs.metrics(run.folder),
                    self.runs.lines(run.folder, layout.SAMPLES),
                )
                for run in summaries
            ]

        form = request.query_params.get("format")
        if form == "md":
            return PlainTextResponse(as_markdown(members()), media_type="text/markdown")
        if form == "html":
            body = compare_page(members(), request.query_params, chosen, saved=True)
            page = document("Comparison", body).replace("</style>", f"{_style()}</style>", 1)
            name = {"content-disposition": 'attachment; filename="comparison.html"'}
            return HTMLResponse(page, headers=name)
        return self._live(request, version, lambda: compare_page(members(), request.query_params, chosen))

    def queue_page(self, request: Request) -> Response:
        def page() -> str:
            return queue_page(self.runs, self.actions is None)

        return self._live(request, page, page)

    def new_page(self, request: Request) -> Response:
        number = request.query_params.get("from", "")
        run = self._run(number) if number else None
        return HTMLResponse(new_page(run, self.actions is None))

    def chat_page(self, request: Request) -> Response:
        query = request.query_params
        run = self._run(query["run"]) if query.get("run") else None
        number, _, step = query.get("with", "").partition(":")
        try:
            other = chosen_weights(self._run(number), step) if number else None
            weights = chosen_weights(run, query["step"]) if run is not None and query.get("step") else None
        except ConfigError as error:
            raise HTTPException(404, f"{error.message}: {error.fix}.") from error
        engines = None if self.actions is None else self.actions.engines

        def version() -> str:
            engine = None if engines is None else engines.engine
            return "" if engine is None else f"{engine.runs} {engine.state} {engine.lines}"

        def page() -> str:
            engine = None if engines is None else engines.engine
            chosen = weights or (next(iter(saved_weights(run)), None) if run is not None else None)
            return chat_page(self.runs.all(), run, chosen, other, engine, engines is None)

        return self._live(request, version, page)

    def _run(self, number: str) -> Summary:
        """Return a run by its id, unless a link leads from its folder out of the board's folders.

        Raises:
            HTTPException: there is none, or a link leads out.
        """
        try:
            run = self.runs.summary(number)
        except KeyError as error:
            raise HTTPException(404, "There is no such run. It may have been moved or deleted.") from error
        for name in (*CONTENTS, layout.METRICS, layout.STATUS, layout.NOTES):
            path = run.folder / name
            if path.is_symlink() and not any(path.resolve().is_relative_to(root) for root in self.runs.roots):
                raise HTTPException(403, f"{name} of this run is a link that leads out of the board's folders.")
        return run

    def _contents(self, run: Summary) -> Run:
        """Return the files of a run without its records; a copy whose parts must not be changed."""
        versions = [version_of(run.folder / name) for name in CONTENTS]
        contents = self.contents.get(run.folder, versions, lambda: read_run(run.folder, records=False))
        data = None if contents.data is None else {**contents.data}
        if data is not None and isinstance(data.get("train"), dict):
            data["train"] = {**data["train"]}
        return Run(**{**vars(contents), "data": data})

    def _live(self, request: Request, version: Callable[[], str], make: Callable[[], str]) -> Response:
        """Return a page with the hash of its version as ETag, 304 if the client has it, or a stream of its changes.

        Args:
            version: a function of a text that changes when the page changes.
            make: a function of the page.
        """

        def tag() -> str:
            key = f"{version()}{request.url.query}".encode(errors="surrogateescape")
            return f'"{hashlib.sha256(key).hexdigest()[:32]}"'

        if EVENTS in request.headers.get("accept", ""):
            return StreamingResponse(self._changes(tag, request.headers.get("last-event-id")), media_type=EVENTS)
        etag = tag()
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers={"etag": etag})
        return HTMLResponse(
            make().replace("<main data-live", f'<main data-live="{text(etag)}"', 1), headers={"etag": etag}
        )

    async def _changes(self, tag: Callable[[], str], seen: str | None) -> AsyncIterator[str]:
        """Yield a server-sent event with the page's tag as its id whenever it is not the one last `seen`."""
        changed = sent = time.monotonic()
        while not self.is_closing:
            current = await run_in_threadpool(tag)
            now = time.monotonic()
            if current != seen:
                yield f"id: {current}\ndata: changed\n\n"
                seen = current
                changed = sent = now
            elif now - sent > SILENT_SECONDS:
                yield ":\n\n"
                sent = now
            await asyncio.sleep(LOOK_SECONDS if now - changed < QUIET_SECONDS else 2 * LOOK_SECONDS)

    # --- writing -----------------------------------------------------------------------------------------------------

    async def act(self, request: Request) -> Response:
        """Run one of the `ACTIONS` with the fields of a JSON object."""
        name = request.path_params["action"]
        if self.actions is None or name not in ACTIONS:
            raise HTTPException(404, "There is no such action.")
        fields = await _fields(request)
        run = self._run(fields.pop("run")) if "run" in fields else None
        try:
            answer = await run_in_threadpool(ACTIONS[name], self.actions, run, fields)
        except HalfbyteError as error:
            return JSONResponse({"message": f"{error.message}: {error.fix}" if error.fix else error.message}, 400)
        self.runs.forget()
        return JSONResponse(answer)

    async def chat(self, request: Request) -> Response:
        """Return the stream of a model's answer."""
        if self.actions is None:
            raise HTTPException(404, "There is no such action.")
        fields = await _fields(request)
        try:
            answer = await run_in_threadpool(self.actions.engines.answer, fields)
        except HalfbyteError as error:
            return JSONResponse({"message": f"{error.message}: {error.fix}"}, 400)
        return StreamingResponse(answer, media_type=EVENTS)


async def _fields(request: Request) -> dict[str, str]:
    """Return the JSON object of a request, whose values are texts.

    Raises:
        HTTPException: it is too long, or no such object.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES:
            raise HTTPException(413, "The request is too long.")
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "The request is no JSON.") from error
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        raise HTTPException(400, "The request is no object of texts.")
    return fields


def _style() -> str:
    widths = "".join(f".w{width}{{width:{width}%}}" for width in range(101))
    return CSS + (HERE / "board.css").read_text(encoding="utf-8") + widths


def _styles(_: Request) -> Response:
    return PlainTextResponse(_style(), media_type="text/css", headers=CACHED)


def _script(request: Request) -> Response:
    script = (HERE / request.url.path.rpartition("/")[2]).read_text(encoding="utf-8")
    return PlainTextResponse(script, media_type="text/javascript", headers=CACHED)


def _error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = f"<h1>{error.status_code}</h1><p>{text(error.detail)}</p><p><a href='/'>All runs</a></p>"
    return HTMLResponse(frame("Error", body), error.status_code)


def _internal_error(*_: Any) -> Response:
    body = "<h1>500</h1><p>The board has a fault; its terminal shows it.</p>"
    return HTMLResponse(frame("Error", body), 500)


def application(
    roots: Sequence[Path], token: str, *, access: Access = LOCAL, port: int = 0, actions: Actions | None = None
) -> Starlette:
    """Return the ASGI application.

    Args:
        roots: folders with runs.
        token: that a browser's cookie must hold.
        access: host names of the server.
        port: of the server.
        actions: changes that pages make; None: a read-only board.
    """
    board = Board(Runs(roots), actions)
    app = Starlette(
        middleware=[Middleware(Gate, token=token, access=access, port=port, read_only=actions is None)],
        routes=[
            Route("/", board.runs_page),
            Route("/run/{run}", board.run_page),
            Route("/run/{run}/data", board.data_page),
            Route("/compare", board.compare_page),
            Route("/queue", board.queue_page),
            Route("/new", board.new_page),
            Route("/chat", board.chat_page),
            Route("/api/chat", board.chat, methods=["POST"]),
            Route("/api/{action}", board.act, methods=["POST"]),
            Route("/static/board.css", _styles),
            Route("/static/board.js", _script),
            Route("/static/curves.js", _script),
            Route("/static/chat.js", _script),
        ],
        exception_handlers={HTTPException: _error, Exception: _internal_error},
    )
    app.state.board = board
    return app
