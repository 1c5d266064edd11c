"""Readers for external text and files. They turn every error of reading or parsing into one of halfbyte's errors.

Callers choose the error class (`DataError`, `CheckpointError`, ...) and the fix for a missing or malformed file. The
readers add the cause and its position.
"""

from .files import look, open_bytes, open_text, read_text
from .json import parse_json, read_json

__all__ = ["look", "open_bytes", "open_text", "parse_json", "read_json", "read_text"]
