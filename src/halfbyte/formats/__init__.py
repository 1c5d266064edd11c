"""Quantized storage formats. To add one, write a module here with a `Format` subclass and import it below."""

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..utils.errors import ModelError
from .aqlm import Aqlm
from .base import FORMATS, Format
from .bitplane import KBit
from .blockwise4 import Blockwise4
from .float8 import Float8
from .hqq import HQQ
from .hqq_library import HqqLibrary
from .int4 import Awq, Gptq, GptqV2, PackQuantized, PackQuantizedZeros
from .int8 import Int8
from .mxfp4 import Mxfp4
from .nvfp4 import Nvfp4
from .stack import Stack
from .torchao import Torchao

__all__ = [
    "FORMATS",
    "HQQ",
    "Aqlm",
    "Awq",
    "Blockwise4",
    "Float8",
    "Format",
    "Gptq",
    "GptqV2",
    "HqqLibrary",
    "Int8",
    "KBit",
    "Mxfp4",
    "Nvfp4",
    "PackQuantized",
    "PackQuantizedZeros",
    "Stack",
    "Torchao",
    "from_spec",
    "named",
    "names",
    "of_checkpoint",
    "recognize",
]


_GGUF_TYPE = re.compile(r"q\d_(\d|k|k_[sml])", re.IGNORECASE)  # quantization types of llama.cpp


@functools.cache
def from_spec(spec: str) -> Format:
    """The format whose `spec` is this string, e.g. "blockwise4:nf4:64:nested"."""
    name, _, options = spec.partition(":")
    return FORMATS[name].parse(options)


def names() -> dict[str, str]:
    """User-facing name → spec for every format."""
    return {name: spec for cls in FORMATS.values() for name, spec in cls.names.items()}


def named(name: str) -> Format:
    """The format for a user-facing `name`: one of `names()`, or a full spec.

    Raises:
        ModelError: there is no such format, or its options do not parse.
    """
    specs = names()
    if name in specs:
        return from_spec(specs[name])
    if name.partition(":")[0] in FORMATS:
        try:
            return from_spec(name)
        except (ModelError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = error.message if isinstance(error, ModelError) else "its options do not parse"
            examples = FORMATS[name.partition(":")[0]].examples()
            fix = f"write it like {examples[0].spec}" if examples else f"use one of {', '.join(sorted(specs))}"
            reason = reason if examples else "it is only read from checkpoints"
            raise ModelError(f"{name!r} is not the spec of a format: {reason}", fix) from error
    near = difflib.get_close_matches(name, specs, 3, 0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    if _GGUF_TYPE.fullmatch(name):
        hint = f"`halfbyte export RUN --gguf {name.lower()}` writes that type of GGUF files; "
    elif "," in name:
        hint = "write one, or a mapping from layers' names to them, {'*.down_proj': kbit5, '*': nf4}; "
    raise ModelError(f"there is no format {name!r}", f"{hint}formats: {', '.join(sorted(specs))}")


def of_checkpoint(entry: Mapping[str, Any]) -> Format | None:
    """The format of another tool's checkpoint, from the `quantization_config` in its config.json; None if unknown.

    Raises:
        CheckpointError: the tool's format has options that halfbyte does not read.
    """
    return next(filter(None, (cls.from_quantization_config(entry) for cls in FORMATS.values())), None)


def recognize(suffixes: Iterable[str], prefer: type[Format]) -> type[Format]:
    """The format whose checkpoint suffixes match `suffixes` best; some may be missing. `prefer` wins a tie."""
    stored_suffixes = frozenset(suffixes)

    def score(cls: type[Format]) -> tuple[int, bool]:
        format_suffixes = cls.state_suffixes()
        return len(stored_suffixes & format_suffixes) - len(stored_suffixes - format_suffixes), cls is prefer

    return max(FORMATS.values(), key=score)
