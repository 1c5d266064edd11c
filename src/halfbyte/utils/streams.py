"""Setup of stdout and stderr for commands: any character prints, and other libraries' output is suppressed."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator

from .text import visible

# ASCII replacements for the non-ASCII characters that halfbyte prints.
_SIGNS, _REPLACEMENTS = "·…–—×→≤≥±✓✗█■░━╸╺⟦⟧⏎", "| ... - - x -> <= >= +- ok !! # # . = = - [[ ]] <-|"
_ASCII = dict(zip(_SIGNS, _REPLACEMENTS.split(), strict=True))
ENCODING_ERRORS = "halfbyte.stand-ins"


def to_encoding(text: str, encoding: str) -> str:
    """`text` with characters that `encoding` cannot represent replaced by ASCII."""
    return text if text.isascii() else text.encode(encoding, ENCODING_ERRORS).decode(encoding)


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    r"""Codec error handler: replace characters by ASCII, or by JSON's \uXXXX escapes so that JSON lines stay valid."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    replacement = ""
    for character in error.object[error.start : error.end]:
        units = character.encode("utf-16-be", "surrogatepass").hex()
        escape = "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))
        replacement += _ASCII.get(character) or escape
    return replacement, error.end


codecs.register_error(ENCODING_ERRORS, _replace_unencodable)


class _VisibleFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def configure_streams(everything: bool) -> None:
    """Configure the streams of a command: any character prints, and stderr shows halfbyte's log messages only.

    Args:
        everything: show other libraries' warnings, logs and progress bars too.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ENCODING_ERRORS)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_VisibleFormatter("%(message)s"))
    if not everything:
        handler.addFilter(logging.Filter("halfbyte"))
        warnings.showwarning = lambda *_args, **_named: None
        quiet_libraries()
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def quiet_libraries() -> None:
    """Have transformers and datasets log errors only, and show tqdm bars on a terminal only, cleared at their end.

    Call it before these libraries are imported: it sets environment variables.
    """
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TQDM_LEAVE" if on_terminal else "TQDM_DISABLE": "" if on_terminal else "1",
    }.items():
        os.environ.setdefault(name, value)


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that Python's final flush does not fail on a closed pipe."""
    try:
        target = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, target)
    os.close(null)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the context, transformers logs errors only: our errors name the tensors that its warnings list."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextlib.contextmanager
def no_dataset_bars() -> Iterator[None]:
    """Within the context, datasets shows no progress bars, unless HF_DATASETS_DISABLE_PROGRESS_BARS=0 asks for them."""
    import datasets

    if datasets.are_progress_bars_disabled() or datasets.config.HF_DATASETS_DISABLE_PROGRESS_BARS is False:
        yield
        return
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.enable_progress_bars()


@contextlib.contextmanager
def no_loading_bars() -> Iterator[None]:
    """Within the context, transformers shows no progress bars, which would be drawn over ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
