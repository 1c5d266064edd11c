"""Conversion of tokenizers to GGUF keys and back.

The other side is tokenizer.json, which every fast tokenizer of transformers provides. The supported families need two
of llama.cpp's tokenizers. "llama" is SentencePiece's BPE, which merges the pair whose piece has the highest score,
falls back to bytes and writes spaces as ▁. "gpt2" is byte-level BPE with merges by rank, after splitting the text by
one of llama.cpp's named patterns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, Keys, TokenType

from ..utils.errors import ModelError
from ..utils.notices import notice
from .file import GgufFile

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MIXED_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# pattern in tokenizer.json → llama.cpp's name
PATTERNS = {
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST: "llama-bpe",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST: "qwen2",
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|" + REST.replace(r"\s\p{L}", r"\s\p{L}\p{M}"): "qwen35",
    MIXED_CASE % ("", "") + r"\p{N}|" + SLASHES: "tekken",
    MIXED_CASE % (CONTRACTIONS + "?", CONTRACTIONS + "?") + r"\p{N}{1,3}|" + SLASHES: "gpt-4o",
}
IGNORE_MERGES = ("llama-bpe", "tekken")  # splits that match a token become that token without merges
NEVER_MERGED = -1e6  # score of pieces that no merge produces, in files that halfbyte writes
SPACES = ("Prepend", "Replace")  # normalizers that llama.cpp has for SentencePiece-like tokenizers
SPECIAL = (TokenType.CONTROL, TokenType.USER_DEFINED)
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
GENERATION_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


# --- writing ----------------------------------------------------------------------------------------------------------


def add_tokenizer(
    writer: GGUFWriter, tokenizer: Any, vocab_size: int, end_ids: Sequence[int] = (), chats: Sequence[str] = ()
) -> None:
    """Write the keys that llama.cpp builds the tokenizer from.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: rows of the embedding; ids beyond the tokenizer's become unused tokens.
        end_ids: stop tokens, the most important first.
        chats: conversations as the chat template renders them.

    Raises:
        ModelError: an unsupported tokenizer, or one with more tokens than the embedding has rows.
    """
    described = _described(tokenizer)
    model = described["model"]
    if model["type"] != "BPE":
        raise ModelError(
            f"the tokenizer's model is {model['type']}, which GGUF export does not support", "export a BPE tokenizer"
        )
    tokens, types = _tokens(described, vocab_size)
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        scores = _scores(model, tokens)
        types = [TokenType.BYTE if BYTE.fullmatch(token) else type_ for token, type_ in zip(tokens, types, strict=True)]
        writer.add_add_space_prefix(_space_prefix(tokenizer, described, chats))
        if not _marks_spaces(described):  # llama.cpp always does
            tokens = [
                token if type_ in SPECIAL else token.replace(" ", "▁")
                for token, type_ in zip(tokens, types, strict=True)
            ]
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre_tokenizer(described))
        writer.add_token_merges([" ".join(_pair(merge)) for merge in model["merges"]])
        scores = None
    normalizer = described["normalizer"] or {"type": "Sequence", "normalizers": []}
    steps: list[dict[str, Any]] = normalizer.get("normalizers", [normalizer])
    skipped = sorted({step["type"] for step in steps} - {*(SPACES if scores else ())})
    if skipped:
        message = f"llama.cpp skips this tokenizer's normalizer ({', '.join(skipped)})"
        notice("gguf-normalizer", f"{message}: texts that it changes get other tokens")
    writer.add_token_list(tokens)
    if scores:
        writer.add_token_scores(scores)
    writer.add_token_types(types)
    _add_special(writer, tokenizer, end_ids)
    # A chat template, or several by name in an order that does not depend on the process.
    templates = tokenizer.chat_template or {}
    named = {"default": templates} if isinstance(templates, str) else templates
    further = {re.sub(r"\W", "_", name): text for name, text in sorted(named.items()) if name != "default"}
    for name, text in further.items():
        writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name), plain_template(text))
    if further:
        writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, [*further])
    if "default" in named:
        writer.add_chat_template(plain_template(named["default"]))


def _described(tokenizer: Any) -> dict[str, Any]:
    """The tokenizer as tokenizer.json describes it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{type(tokenizer).__name__} has no tokenizer.json", "convert it to a fast tokenizer, and save it"
        )
    described: dict[str, Any] = json.loads(backend.to_str())
    return described


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
            "resize and train the embedding, or use the base model's tokenizer",
        )
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(vocab_size)]
    return tokens, [types.get(index, TokenType.UNUSED) for index in range(vocab_size)]


def _scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """Scores with which SentencePiece merges in rank order: the earlier a piece's merge, the higher its score."""
    rank: dict[str, int] = {}
    for merge in model["merges"]:
        rank.setdefault("".join(_pair(merge)), len(rank))
    return [-float(rank[token]) if token in rank else NEVER_MERGED for token in tokens]


def _marks_spaces(described: dict[str, Any]) -> bool:
    """Return whether spaces become ▁ before the vocabulary lookup."""
    return "▁" in json.dumps([described["normalizer"], described["pre_tokenizer"]], ensure_ascii=False)


def _space_prefix(tokenizer: Any, described: dict[str, Any], chats: Sequence[str]) -> bool:
    """Return whether llama.cpp should put a space before a text and after each special token (add_space_prefix).

    A tokenizer that puts one before the first word of a text alone has no equal there. The choice is then the one
    that gives conversations the tokens that were trained (without a chat template: a plain text).
    """
    from tokenizers import Tokenizer

    plain = ["Hello there", f"Hello{tokenizer.eos_token}there"]
    texts = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in (*chats, *plain)}
    different: dict[bool, list[str]] = {}
    space = "▁" if _marks_spaces(described) else " "
    spaces = [{"type": "Prepend", "prepend": space}, {"type": "Replace", "pattern": {"String": " "}, "content": space}]
    added = [token | {"lstrip": False, "rstrip": False} for token in described["added_tokens"]]
    for prefix in (True, False):
        rule = described | {"pre_tokenizer": None, "post_processor": None, "added_tokens": added}
        rule["normalizer"] = {"type": "Sequence", "normalizers": spaces if prefix else spaces[1:]}
        backend = Tokenizer.from_str(json.dumps(rule))
        llamacpp_ids = {text: backend.encode(text, add_special_tokens=False).ids for text in texts}
        different[prefix] = [text for text in texts if llamacpp_ids[text] != texts[text]]
    first = [*chats] or plain[:1]
    prefix = sum(text in different[True] for text in first) <= sum(text in different[False] for text in first)
    if different[prefix]:
        position = "before a text and after every special token" if prefix else "nowhere"
        groups = {"chat prompts": [*chats], "plain text": plain[:1], "text after EOS": plain[1:]}
        names = [name for name, texts in groups.items() if any(text in different[prefix] for text in texts)]
        equal_chats = chats and "chat prompts" not in names
        notice(
            "gguf-spaces",
            f"with this file llama.cpp adds a space {position}; the tokenizer does so before the first word of a text"
            f" alone, or drops spaces at special tokens. So {' and '.join(names)} get other tokens than in training: "
            + ("send prompts that the chat template renders" if equal_chats else "compare tokens"),
        )
    return prefix


def pre_tokenizer(described: dict[str, Any]) -> str:
    """Return llama.cpp's name of a tokenizer.json's pre-tokenizer.

    Raises:
        ModelError: it has no name in `PATTERNS`.
    """
    steps = described["pre_tokenizer"] or {}
    steps = steps.get("pretokenizers", [steps])
    types = [step.get("type") for step in steps]
    if types == ["ByteLevel"] and steps[0].get("use_regex", True) and not steps[0]["add_prefix_space"]:
        return "gpt-2"
    if types == ["Digits", "ByteLevel"] and steps[0]["individual_digits"] and steps[1].get("use_regex", True):
        return "smollm"
    if types == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex")
        if pattern in PATTERNS:
            return PATTERNS[pattern]
    raise ModelError(
        f"GGUF export does not support the tokenizer's pre-tokenizer: {json.dumps(steps)[:300]}",
        f"supported are {', '.join(['gpt-2', 'smollm', *PATTERNS.values()])}",
    )


def _add_special(writer: GGUFWriter, tokenizer: Any, end_ids: Sequence[int]) -> None:
    for name in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    further_ends = [index for index in end_ids if index != tokenizer.eos_token_id]
    for add, index in zip((writer.add_eot_token_id, writer.add_eom_token_id), further_ends, strict=False):
        add(index)
    if beyond := tokenizer.convert_ids_to_tokens(further_ends[2:]):
        message = f"a GGUF file has room for three stop tokens, which leaves out {', '.join(beyond)}"
        notice("gguf-ends", f"{message}: pass these to llama.cpp as --reverse-prompt")
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    writer.add_add_bos_token(adds_bos(tokenizer))
    writer.add_add_eos_token(len(full) > len(plain) and full[-1] == tokenizer.eos_token_id)


def adds_bos(tokenizer: Any) -> bool:
    """Return whether the tokenizer puts its beginning-of-text token before a text."""
    plain, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return tokenizer.bos_token_id is not None and full[0] == tokenizer.bos_token_id != plain[0]


def plain_template(template: str) -> str:
    """Replace transformers' `{% generation %}` tags in a chat template, which other programs do not support, by no-op
    tags with the same whitespace control."""
    return GENERATION_MARK.sub(lambda mark: f"{{%{mark[1]} {'endif' if mark[2] else 'if true'} {mark[3]}%}}", template)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_tokenizer(file: GgufFile) -> Any:
    """Build the tokenizer of `file`; if that is not supported, load tokenizer.json from the file's folder.

    Raises:
        ModelError: neither works.
    """
    from transformers import PreTrainedTokenizerFast

    tokens = file.get("tokenizer.ggml.tokens")
    try:
        if not tokens:
            raise ModelError(f"{file.path} holds no tokenizer")
        types = file.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
        types = [TokenType.UNUSED if is_padding(at, tokens[at]) else type_ for at, type_ in enumerate(types)]
        backend = _backend(file, tokens, types)
    except ModelError as error:
        return _from_folder(file, tokens or [], error)
    special = {f"{name}_token": tokens[index] for name, index in _special_ids(file).items()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special, clean_up_tokenization_spaces=False)
    default = file.get(Keys.Tokenizer.CHAT_TEMPLATE)
    named = {name: file.get(f"tokenizer.chat_template.{name}") for name in file.get(Keys.Tokenizer.CHAT_TEMPLATES, [])}
    if named:
        named |= {"default": default} if default else {}
    tokenizer.chat_template = {name: text for name, text in named.items() if text} or default
    return tokenizer


def is_padding(index: int, token: str) -> bool:
    """Return whether a token only pads the embedding; older files type such tokens as user-defined."""
    return token == f"[PAD{index}]"


def _special_ids(file: GgufFile) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: index for name, index in ids.items() if index is not None}


def _backend(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    """Build the tokenizers library's Tokenizer."""
    from tokenizers import AddedToken

    model = file.get("tokenizer.ggml.model")
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(model)
    if build is None:
        raise ModelError(f"{file.path}: halfbyte does not support its tokenizer model {model!r}")
    tokenizer = build(file, tokens, types)
    for index, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ in (TokenType.CONTROL, TokenType.USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=type_ == TokenType.CONTROL)])
            if tokenizer.token_to_id(token) != index:
                raise ModelError(f"{file.path}: the token {token!r} occurs twice")
    _add_template(tokenizer, file, tokens)
    return tokenizer


def _byte_level(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges", [])]
    name = file.get("tokenizer.ggml.pre", "")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in IGNORE_MERGES))
    tokenizer.pre_tokenizer = _splitter(file, name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splitter(file: GgufFile, name: str) -> Any:
    """Build the pre-tokenizer that llama.cpp calls `name`."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name == "gpt-2":
        return ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    for pattern, pattern_name in PATTERNS.items():
        if pattern_name == name:
            split = Split(Regex(pattern), behavior="isolated")
            return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ModelError(f"{file.path}: halfbyte does not support its pre-tokenizer {name!r}")


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}
    scores = file.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError(f"{file.path}: the pieces of its tokenizer have no scores")
    pieces = {token: scores[index] for token, index in vocabulary.items() if types[index] == TokenType.NORMAL}
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    # Pairs whose concatenation is a piece, the best score first.
    merged = [piece for piece, score in pieces.items() if len(piece) > 1 and score != NEVER_MERGED]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(merged, key=lambda piece: -pieces[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _add_template(tokenizer: Any, file: GgufFile, tokens: list[str]) -> None:
    """Add BOS and EOS around each text as the file's keys say, with llama.cpp's defaults."""
    from tokenizers.processors import TemplateProcessing

    default = file.get("tokenizer.ggml.model") == "llama" or file.get("tokenizer.ggml.pre") == "llama-bpe"
    ids, special = _special_ids(file), {}
    bos = "bos" in ids and file.get("tokenizer.ggml.add_bos_token", default)
    eos = "eos" in ids and file.get("tokenizer.ggml.add_eos_token", False)
    if bos or eos:
        special = {tokens[ids[name]]: ids[name] for name, added in (("bos", bos), ("eos", eos)) if added}
        prefix = [tokens[ids["bos"]]] if bos else []
        suffix = [tokens[ids["eos"]]] if eos else []
        single = [*prefix, "$A", *suffix]
        pair = [*single, *(f"{token}:1" for token in (*prefix, "$B", *suffix))]
        tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=list(special.items()))


def _from_folder(file: GgufFile, tokens: list[str], reason: ModelError) -> Any:
    """Load the tokenizer from the file's folder; its tokens must equal the file's."""
    from transformers import AutoTokenizer

    folder = Path(file.path).parent
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(reason.message, f"put the model's tokenizer.json and tokenizer_config.json into {folder}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if index < len(tokens) and tokens[index] != token and not is_padding(index, tokens[index]):
            raise ModelError(
                f"token {index} is {token!r} in {folder}/tokenizer.json, and {tokens[index]!r} in {file.path}",
                "put this model's tokenizer there",
            )
    notice(f"gguf-tokenizer-{folder}", f"{reason.message}. The tokenizer is read from {folder}/tokenizer.json")
    return tokenizer
