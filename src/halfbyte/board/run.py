"""The address, the token and the server of `halfbyte board`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from ..runs.queue import queue_folder
from ..serve.guard import url_host
from ..serve.protocol import Protocol, bind
from ..utils.errors import ConfigError, UsageError
from ..utils.text import visible
from .actions import Actions
from .app import Board, application
from .folders import Runs
from .guard import load_token

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve_board(folders: Sequence[Path], host: str, port: int, read_only: bool, allowed: Sequence[Path]) -> None:
    """Serve the board until SIGINT or SIGTERM. Runs and the queue do not notice its end.

    Args:
        folders: with runs.
        port: 0 for any free port.
        allowed: further folders that keys of a new run may name.

    Raises:
        ConfigError: a folder does not exist, the address is not available, or the token's file cannot be used.
        UsageError: the address can be reached from other machines.
    """
    for folder in (*folders, *allowed):
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder", "name folders with runs; default: the current one")
    if host not in LOOPBACK:
        fix = f"leave --host out, and on your machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE"
        raise UsageError(f"--host {host}: the board is for this machine only", fix)
    state = queue_folder().parent / "board"
    token = load_token(state)
    with bind(host, port) as listener:
        port = listener.getsockname()[1]
        roots = list(folders)
        actions = None if read_only else Actions(Runs(roots), allowed, state)
        app = application(roots, token, port=port, actions=actions)
        config = uvicorn.Config(
            app, http=Protocol, ws="none", log_level="error", lifespan="off", timeout_graceful_shutdown=3
        )
        listener.listen()
        address = f"http://{url_host(host)}:{port}/?token={token}"
        print(
            visible(f"board of {', '.join(map(str, roots))}: {address}\nCtrl-C ends the board; runs go on"), flush=True
        )
        for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises it again after its shutdown
            signal.signal(number, lambda *_: None)
        _Server(config, app.state.board).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A server that ends the streams of open pages with the first signal."""

    def __init__(self, config: uvicorn.Config, board: Board):
        super().__init__(config)
        self.board = board

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.board.is_closing = True
        super().handle_exit(sig, frame)
