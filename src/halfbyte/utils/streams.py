"""stdout and stderr of a command: they take any character, may be closed, and hold halfbyte's own words only."""

from __future__ import annotations

import codecs
import logging
import os
import sys
import warnings

from .text import visible

# Stand-ins for the signs that halfbyte itself prints, where the output's encoding has none of them.
_SIGNS, _INSTEAD = "·…–—×→≤≥±✓✗█■░━╸╺⟦⟧⏎", "| ... - - x -> <= >= +- ok !! # # . = = - [[ ]] <-|"
_STAND_INS = dict(zip(_SIGNS, _INSTEAD.split(), strict=True))
ENCODING_ERRORS = "halfbyte.stand-ins"


def in_encoding(text: str, encoding: str) -> str:
    """`text` in the characters that `encoding` has."""
    return text if text.isascii() else text.encode(encoding, ENCODING_ERRORS).decode(encoding)


def _stand_ins(error: UnicodeError) -> tuple[str, int]:
    r"""A codec's error handler: stand-ins, else \uXXXX in JSON's spelling, so that JSON lines stay JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(character) or _as_json(character) for character in lacking), error.end


def _as_json(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


codecs.register_error(ENCODING_ERRORS, _stand_ins)


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def settle_streams(everything: bool) -> None:
    """For a command: its outputs take any character, and stderr holds halfbyte's own words.

    Args:
        everything: let other libraries' warnings and bars through, too.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ENCODING_ERRORS)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("%(message)s"))
    if not everything:
        handler.addFilter(logging.Filter("halfbyte"))
        warnings.showwarning = lambda *_args, **_named: None
        quiet_libraries()
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def quiet_libraries() -> None:
    """Let transformers and datasets say errors only, and let progress bars go when they are done; they are only shown
    on a terminal. It counts before these libraries are imported."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()
    for name, value in {
        "TRANSFORMERS_VERBOSITY": "error",
        "DATASETS_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "TQDM_LEAVE" if on_terminal else "TQDM_DISABLE": "" if on_terminal else "1",
    }.items():
        os.environ.setdefault(name, value)


def nobody_reads() -> None:
    """Let what is still to be flushed to stdout go nowhere, so that Python does not complain at its end."""
    try:
        target = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or none of this process's
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target)
    os.close(nowhere)
