"""Importing torch, transformers and PEFT without what makes it slow."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator


def import_models() -> None:
    """What loads a saved model and answers with it, quickly."""
    with quick_imports():
        from ..generation import run  # noqa: F401
        from ..loading import load  # noqa: F401
        from ..modeling import adapters  # noqa: F401


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """What a command imports inside takes two thirds of the time.

    Garbage collections would go through a million objects that stay: there are none inside, and later ones leave these
    objects out. PEFT would import bitsandbytes, with torch._inductor, as it makes an adapter: it is told that there is
    none, since no model of ours has layers of bitsandbytes. Others find it afterwards.
    """
    hidden, collects = "bitsandbytes" not in sys.modules, gc.isenabled()
    gc.disable()
    if hidden:
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    try:
        yield
        if hidden and "peft" in sys.modules:
            sys.modules["peft"].import_utils.is_bnb_available()  # which remembers the answer
    finally:
        if hidden:
            del sys.modules["bitsandbytes"]
        if collects:
            gc.freeze()
            gc.enable()
