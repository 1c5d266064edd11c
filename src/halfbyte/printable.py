"""Text from outside, as text: paths, data and answers may hold anything, and a terminal must not obey it."""

from __future__ import annotations

import codecs
import logging
import os
import re
import sys
import warnings

# Control characters, marks and overrides of writing direction, line separators, halves of characters.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_KEPT_IN_LINES = "\n\t"

# Stand-ins for the signs that halfbyte itself prints, where the output's encoding has none of them.
_SIGNS, _INSTEAD = "·…–—×→≤≥±✓✗█■░━╸╺⟦⟧⏎", "| ... - - x -> <= >= +- ok !! # # . = = - [[ ]] <-|"
_STAND_INS = dict(zip(_SIGNS, _INSTEAD.split(), strict=True))
ENCODING_ERRORS = "halfbyte.stand-ins"


def printable(text: str, lines: bool = False) -> str:
    r"""`text` with what a terminal would obey, and what has no form, written as escapes: \x1b, \u202e.

    Args:
        lines: leave newlines and tabs as they are.
    """
    return _UNPRINTABLE.sub(
        lambda found: found[0] if lines and found[0] in _KEPT_IN_LINES else ascii(found[0])[1:-1], text
    )


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


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


def settle_streams(everything: bool) -> None:
    """For a command: its outputs take any character, and stderr holds halfbyte's own words.

    Args:
        everything: let other libraries' warnings and bars through, too.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=ENCODING_ERRORS)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(message)s"))
    if not everything:
        handler.addFilter(logging.Filter("halfbyte"))
        warnings.showwarning = lambda *_args, **_named: None
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("DATASETS_VERBOSITY", "error")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def nobody_reads() -> None:
    """Let what is still to be flushed to stdout go nowhere, so that Python does not complain at its end."""
    try:
        target = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or none of this process's
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, target)
    os.close(nowhere)
