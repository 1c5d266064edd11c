"""The process that answers the page Chat: `halfbyte serve` for the board alone, after a look at the free memory."""

from __future__ import annotations

import os
import sys
import threading

LONGEST_ANSWER = 2048  # tokens


def main(name: str, key_file: str, needed: str, *adapters: str) -> None:
    """Serve until the standard input ends, which it does with the board, however that ends.

    Args:
        name: a run's folder.
        key_file: file with the key that requests need; it is removed.
        needed: bytes of memory without which the model is not loaded.
        adapters: NAME=FOLDER of further adapters.
    """
    threading.Thread(target=_end_with_board, daemon=True).start()
    from ..memory.allocators import available_bytes
    from ..reading import read_text
    from ..serve.model import Limits
    from ..serve.run import serve
    from ..utils.errors import ConfigError, HalfbyteError
    from ..utils.hardware import chosen_device, reservable_bytes
    from ..utils.text import size

    try:
        key = read_text(key_file, ConfigError).strip()
        os.unlink(key_file)
        device = chosen_device(None)
        free = reservable_bytes(device) if device.type == "cuda" else available_bytes()
        if int(needed) > free:
            wrong = f"the model needs about {size(int(needed))}, and {size(free)} are free"
            raise ConfigError(wrong, "wait for a run to end, or stop one")
        folders = dict(adapter.split("=", 1) for adapter in adapters)
        serve(name, "127.0.0.1", 0, folders, Limits(max_tokens=LONGEST_ANSWER, queue=4), api_key=key)
    except HalfbyteError as error:
        print(f"{error.message}: {error.fix}" if error.fix else error.message, flush=True)
        sys.exit(1)


def _end_with_board() -> None:
    while os.read(0, 1024):  # unlike sys.stdin, it takes no lock that Python's exit needs
        pass
    os._exit(0)
