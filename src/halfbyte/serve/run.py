"""Binding, loading, serving, and leaving at a signal."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping

import uvicorn

from ..errors import ConfigError
from ..notices import notice
from .app import application
from .model import Limits, load

GRACE_SECONDS = 10  # that running requests get at the end
SPARE_CONNECTIONS = 64  # beyond the queue, for clients that hold one open or are still sending


def serve(name: str, host: str, port: int, adapters: Mapping[str, str], limits: Limits) -> None:
    """Serve a run or a model until SIGINT or SIGTERM; returns after running requests have ended.

    Args:
        name: a run's output_dir, an adapter, or a model.
        port: 0 for any free one; the line printed at the start has it.
        adapters: name in requests → folder.

    Raises:
        ConfigError: the address cannot be had.
        HalfbyteError: the model or an adapter cannot be loaded.
    """
    listener = _bind(host, port)
    with listener:
        served = load(name, adapters, limits)
        if not _is_local(host):
            notice("serve", f"whoever reaches {host} can use the model: there is no authentication")
        config = uvicorn.Config(
            application(served),
            log_level="warning",
            timeout_graceful_shutdown=GRACE_SECONDS,
            limit_concurrency=limits.queue + SPARE_CONNECTIONS,
        )
        listener.listen()
        where = f"[{host}]" if ":" in host else host
        address = f"http://{where}:{listener.getsockname()[1]}/v1"
        print(f"serving {', '.join(served.names)} at {address}; Ctrl-C stops", flush=True)
        # uvicorn repeats a signal once it has shut down, for whoever handled it before; that is nobody now.
        before = {sign: signal.signal(sign, lambda *_: None) for sign in (signal.SIGINT, signal.SIGTERM)}
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            for sign, handler in before.items():
                signal.signal(sign, handler)


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the address, before the model is loaded: a port in use is known at once."""
    listener = None
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", "choose another --host or --port") from error
    return listener


def _is_local(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
