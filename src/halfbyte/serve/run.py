"""Binding the address, loading the model, serving, and shutting down at a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

import uvicorn

from ..utils.notices import notice
from ..utils.text import visible
from .app import Endpoints, application
from .guard import LOOPBACK, Access, access_to, url_host
from .model import Limits, load
from .protocol import Protocol, bind

GRACE_SECONDS = 3.0  # for running requests to finish after a signal
HANGUP_SECONDS = 1  # then, for clients to read their error
STEP_SECONDS = 0.5  # then, for the model's current step


class Server(uvicorn.Server):
    """A server that stops generating `GRACE_SECONDS` after a signal, so that clients get an error; exits within 5 s."""

    def __init__(self, config: uvicorn.Config, endpoints: Endpoints):
        super().__init__(config)
        self.endpoints = endpoints

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(GRACE_SECONDS, self.endpoints.stop)
        await super().shutdown(sockets)


def serve(
    name: str,
    host: str,
    port: int,
    adapters: Mapping[str, str],
    limits: Limits,
    hosts: Sequence[str] = (),
    api_key: str | None = None,
    trust_remote_code: bool = False,
    kv_cache: str = "auto",
) -> None:
    """Serve a run or a model until SIGINT or SIGTERM; return after running requests have ended.

    Args:
        name: a run's output_dir, an adapter, or a model.
        port: 0 for any free port, which is printed at the start.
        adapters: name in requests → folder.
        hosts, api_key: see `guard.access_to`.
        trust_remote_code, kv_cache: see `model.load`.

    Raises:
        ConfigError: the address is not available, or requires a key.
        HalfbyteError: the model or an adapter cannot be loaded.
    """
    listener = bind(host, port)
    with listener:
        access = access_to(host, listener.getsockname()[0], hosts, api_key)
        served = load(name, adapters, limits, trust_remote_code, kv_cache)
        if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified and not hosts:
            names = ", ".join(LOOPBACK)
            notice("serve", f"only requests to {names} are accepted; add the names clients use with --allowed-host")
        endpoints = Endpoints(served)
        server = Server(configured(endpoints, access), endpoints)
        listener.listen()
        address = f"http://{url_host(host)}:{listener.getsockname()[1]}/v1"
        print(visible(f"serving {', '.join(served.names)} at {address}; Ctrl-C stops"), flush=True)
        # After its shutdown uvicorn raises the signal again for the previous handler; install no-op handlers.
        previous_handlers = {sign: signal.signal(sign, lambda *_: None) for sign in (signal.SIGINT, signal.SIGTERM)}
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # set by nohup
            previous_handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, server.handle_exit)
        try:
            server.run(sockets=[listener])
        finally:
            for sign, handler in previous_handlers.items():
                signal.signal(sign, handler)
        if not endpoints.idle(STEP_SECONDS):  # e.g. a long prefill on a CPU, which Python's exit would block on
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def configured(endpoints: Endpoints, access: Access) -> uvicorn.Config:
    """Return uvicorn's configuration for the application."""
    return uvicorn.Config(
        application(endpoints, access),
        http=Protocol,
        ws="none",
        log_level="error",
        lifespan="off",
        timeout_graceful_shutdown=int(GRACE_SECONDS) + HANGUP_SECONDS,
    )
