"""Tokenizers as GGUF's keys. The source is the tokenizer.json that every fast tokenizer of transformers can give.

llama.cpp has two tokenizers that the families here need. "llama": SentencePiece's BPE, which merges the pair whose
piece has the highest score, falls back to bytes and writes spaces as ▁. "gpt2": byte-level BPE with merges by rank,
after splitting the text by one of the patterns that llama.cpp knows by name.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gguf import GGUFWriter, TokenType

from halfbyte.errors import ModelError
from halfbyte.models.gguf.tokenizer import NEVER_MERGED, PATTERNS
from halfbyte.notices import notice

SPECIAL = (TokenType.CONTROL, TokenType.USER_DEFINED)
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
GENERATION_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def add_tokenizer(writer: GGUFWriter, tokenizer: Any, vocab_size: int, end_ids: list[int] | None = None) -> None:
    """Everything llama.cpp needs to turn texts into the tokenizer's ids.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: rows of the embedding; ids beyond the tokenizer's are filled with unused tokens.
        end_ids: tokens that end an answer (generation_config.json's eos_token_id).

    Raises:
        ModelError: a tokenizer of another kind, or one with more tokens than the embedding has rows.
    """
    described = json.loads(_backend(tokenizer).to_str())
    model = described["model"]
    if model["type"] != "BPE":
        raise ModelError(
            f"the tokenizer's model is {model['type']}, which GGUF export does not know", "export a BPE tokenizer"
        )
    tokens, types = _tokens(described, vocab_size)
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        scores = _scores(model, tokens)
        types = [TokenType.BYTE if BYTE.fullmatch(token) else type_ for token, type_ in zip(tokens, types, strict=True)]
        writer.add_add_space_prefix(_prepends_space(described))
        if not _marks_spaces(described):  # llama.cpp does in any case
            tokens = [
                token if type_ in SPECIAL else token.replace(" ", "▁")
                for token, type_ in zip(tokens, types, strict=True)
            ]
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(described))
        writer.add_token_merges([" ".join(_pair(merge)) for merge in model["merges"]])
        scores = None
        if described["normalizer"]:
            notice("gguf-normalizer", f"llama.cpp does not normalize texts ({described['normalizer']['type']})")
    writer.add_token_list(tokens)
    if scores:
        writer.add_token_scores(scores)
    writer.add_token_types(types)
    _add_special(writer, tokenizer, end_ids or [])
    if tokenizer.chat_template:
        writer.add_chat_template(plain_template(tokenizer.chat_template))


def _backend(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{type(tokenizer).__name__} has no tokenizer.json", "convert it to a fast tokenizer and save that"
        )
    return backend


def _pair(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _tokens(described: dict[str, Any], vocab_size: int) -> tuple[list[str], list[TokenType]]:
    by_id = {index: token for token, index in described["model"]["vocab"].items()}
    types = dict.fromkeys(by_id, TokenType.NORMAL)
    for added in described["added_tokens"]:
        by_id[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    unknown = described["model"].get("unk_token")
    if unknown in described["model"]["vocab"]:
        types[described["model"]["vocab"][unknown]] = TokenType.UNKNOWN
    if max(by_id) >= vocab_size:
        raise ModelError(
            f"the tokenizer has the id {max(by_id)} ({by_id[max(by_id)]!r}), the embedding {vocab_size} rows",
            "train the embedding along, or use the base model's tokenizer",
        )
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    return tokens, [types.get(index, TokenType.UNUSED) for index in range(vocab_size)]


def _scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """Scores that make SentencePiece choose as merges by rank do: the earlier a piece is merged, the higher."""
    rank: dict[str, int] = {}
    for merge in model["merges"]:
        rank.setdefault("".join(_pair(merge)), len(rank))
    return [-float(rank[token]) if token in rank else NEVER_MERGED for token in tokens]


def _marks_spaces(described: dict[str, Any]) -> bool:
    """Whether spaces are written as ▁ before pieces are looked up."""
    return "▁" in json.dumps([described["normalizer"], described["pre_tokenizer"]], ensure_ascii=False)


def _prepends_space(described: dict[str, Any]) -> bool:
    text = json.dumps([described["normalizer"], described["pre_tokenizer"]])
    return '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text


def pre_tokenizer(described: dict[str, Any]) -> str:
    """llama.cpp's name for how a tokenizer.json splits texts.

    Raises:
        ModelError: it has none that is known here.
    """
    steps = described["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex")
        if pattern in PATTERNS:
            return PATTERNS[pattern]
    raise ModelError(
        f"the tokenizer splits texts in a way that llama.cpp has no name for here: {json.dumps(steps)[:300]}",
        f"known are {', '.join(['gpt-2', 'smollm', *PATTERNS.values()])}",
    )


def _add_special(writer: GGUFWriter, tokenizer: Any, end_ids: list[int]) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    others = [index for index in end_ids if index != tokenizer.eos_token_id]
    if others:
        writer.add_eot_token_id(others[0])
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and full[0] == tokenizer.bos_token_id != plain[0])
    writer.add_add_eos_token(len(full) > len(plain) and full[-1] == tokenizer.eos_token_id)


def plain_template(template: str) -> str:
    """A chat template without transformers' `{% generation %}` marks, which other programs do not know; what they do to
    the whitespace around them stays."""
    return GENERATION_MARK.sub(lambda mark: f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}", template)
