"""transformers' own words and bars, held back where halfbyte says the same in its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without its warnings: the table of tensors that were missing is followed by an error that names them."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def no_loading_bars() -> Iterator[None]:
    """transformers' own progress bars would be drawn over ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
