"""`halfbyte serve`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..utils.errors import ConfigError, UsageError
from .imports import import_models


def serve_model(
    name: str,
    host: str,
    port: int,
    adapters: Sequence[str],
    hosts: Sequence[str] = (),
    api_key: str | None = None,
    trust_remote_code: bool = False,
    **limits: Any,
) -> None:
    """Serve until a signal.

    Args:
        adapters: "name=path" each.
        hosts: names that clients use for this server, beside those of this machine and `host`.
        api_key: what clients must send; needed where other machines reach `host`.
        trust_remote_code: run the Python code that comes with the model; a run's own configuration does not count.
        limits: of `serve.model.Limits`.

    Raises:
        ConfigError: starlette or uvicorn is missing, or an adapter is not name=path.
    """
    named = [*map(_named, adapters)]
    folders = dict(named)
    if twice := next((name for name, count in Counter(name for name, _ in named).items() if count > 1), None):
        raise UsageError(f"--adapter: the name {twice} is given twice", "choose another name")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}", "pip install 'halfbyte[serve]'") from error
    from ..runs.saved import find_adapter, look_up

    for folder in folders.values():
        find_adapter(folder)
    look_up(name, [f"trust_remote_code={trust_remote_code}"])
    import_models()
    from ..serve.model import Limits
    from ..serve.run import serve

    serve(name, host, port, folders, Limits(**limits), hosts, api_key, trust_remote_code)


def _named(adapter: str) -> tuple[str, str]:
    name, found, path = adapter.partition("=")
    if not (name and found and path):
        raise UsageError(f"--adapter {adapter} is not name=path", "e.g. --adapter poet=runs/poet")
    return name, path
