"""What a GGUF file's keys may be: of which type, within which bounds. Looked over once, when a file is opened.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md ("Standardized key-value pairs")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..reading.gguf import DAMAGED
from ..utils.errors import CheckpointError

LARGEST = 2**31 - 1
TOKENIZER = "tokenizer.ggml."
PER_TOKEN = ("scores", "token_type")
SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")
FP32 = ("scale", "softcapping", "factor")  # how an architecture's keys end whose values are fp32
POSITIVE = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "head_count", "head_count_kv",
    "key_length", "value_length", "dimension_count",
)  # fmt: skip
# May be lists: a value for each layer, or for each axis.
LISTS = ("feed_forward_length", "head_count", "head_count_kv", "dimension_sections")

Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return type(value) is str


def _integer(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _yes_or_no(value: Any) -> bool:
    return type(value) is bool


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


def _pair(value: Any) -> bool:
    return type(value) is str and value.count(" ") == 1


def _score(value: Any) -> bool:
    return type(value) is float and not math.isnan(value)


# key → whether a value is sound, and what it is to be
KINDS: dict[str, tuple[Check, str]] = {
    "general.architecture": (_text, "text"),
    "split.count": (_integer, "a count"),
    "tokenizer.chat_template": (_text, "text"),
    **{f"{TOKENIZER}{name}": (_text, "text") for name in ("model", "pre")},
    f"{TOKENIZER}tokens": (_list_of(_text), "a list of texts"),
    f"{TOKENIZER}merges": (_list_of(_pair), "a list of pairs"),
    f"{TOKENIZER}scores": (_list_of(_score), "a list of numbers"),
    f"{TOKENIZER}token_type": (_list_of(_integer), "a list of numbers"),
    **{f"{TOKENIZER}{name}_token_id": (_integer, "a token's number") for name in SPECIAL},
    **{
        f"{TOKENIZER}{name}": (_yes_or_no, "true or false")
        for name in ("add_bos_token", "add_eos_token", "add_space_prefix")
    },
}


def check_keys(path: Path, keys: Mapping[str, Any]) -> None:
    """Whether the keys of the file at `path` that are read here can be what they say.

    Raises:
        CheckpointError: naming the first key that cannot.
    """
    for key, (sound, kind) in KINDS.items():
        if key in keys and not sound(keys[key]):
            raise _wrong(path, key, kind, keys[key])
    tokens = keys.get(f"{TOKENIZER}tokens", [])
    for name in PER_TOKEN:
        if (found := len(keys.get(f"{TOKENIZER}{name}", tokens))) != len(tokens):
            raise CheckpointError(f"{path}: {TOKENIZER}{name} has {found} values for {len(tokens)} tokens", DAMAGED)
    for name in SPECIAL:
        if tokens and keys.get(key := f"{TOKENIZER}{name}_token_id", 0) >= len(tokens):
            raise CheckpointError(f"{path}: {key} is {keys[key]}, and there are {len(tokens)} tokens", DAMAGED)


def check_hyperparameter(path: Path, key: str, value: Any) -> None:
    """The same of a key of the architecture, e.g. "llama.block_count", or of its default.

    Raises:
        CheckpointError: it cannot be that.
    """
    last = key.rpartition(".")[2]
    if last == "type":
        sound, kind = _text, "text"
    elif last.endswith((*FP32, "epsilon")):
        sound, kind = _number, "a number"
    elif last.startswith("freq_base"):
        sound, kind = (lambda value: _number(value) and value > 0), "a number above 0"
    elif last in POSITIVE:
        sound, kind = (lambda value: _integer(value) and value > 0), "a whole number above 0"
    else:
        sound, kind = _integer, "a whole number"
    if not all(map(sound, value if isinstance(value, list) and last in LISTS else [value])):
        raise _wrong(path, key, kind, value)


def _wrong(path: Path, key: str, kind: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{path}: {key} is to be {kind}, and it is {value!r:.80}", DAMAGED)
