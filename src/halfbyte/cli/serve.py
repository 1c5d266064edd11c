"""`halfbyte serve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


def serve_model(name: str, host: str, port: int, adapters: Sequence[str], **limits: Any) -> None:
    """Serve until a signal.

    Args:
        adapters: "name=path" each.
        limits: of `serve.model.Limits`.

    Raises:
        ConfigError: starlette or uvicorn is missing, or an adapter is not name=path.
    """
    folders = dict(map(_named, adapters))
    if len(folders) < len(adapters):
        raise ConfigError("--adapter: a name is given twice", "choose another name")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"serving needs {error.name}", "pip install 'halfbyte[serve]'") from error
    from ..serve.model import Limits
    from ..serve.run import serve

    serve(name, host, port, folders, Limits(**limits))


def _named(adapter: str) -> tuple[str, str]:
    name, found, path = adapter.partition("=")
    if not (name and found and path):
        raise ConfigError(f"--adapter {adapter} is not name=path", "e.g. --adapter poet=runs/poet")
    return name, path
