"""The one way in for text and files from outside: whatever reading or parsing raises becomes one of halfbyte's errors.

Callers say which error it is (`DataError`, `CheckpointError`, ...) and what to do when the file is missing or
malformed. What the system or a parser has against it, and where, is found and said here.
"""

from .files import look, open_bytes, open_text, read_text, why
from .json import parse_json, read_json

__all__ = ["look", "open_bytes", "open_text", "parse_json", "read_json", "read_text", "why"]
