"""Stored formats. Adding one: a module here with a `Format` subclass, and its import below."""

import functools

from .base import FORMATS, Format
from .bitplane import KBit
from .blockwise4 import Blockwise4
from .hqq import HQQ

__all__ = ["FORMATS", "HQQ", "Blockwise4", "Format", "KBit", "from_spec"]


@functools.cache
def from_spec(spec: str) -> Format:
    """The format whose `spec` is this string, e.g. "blockwise4:nf4:64:nested"."""
    name, _, options = spec.partition(":")
    return FORMATS[name].parse(options)
