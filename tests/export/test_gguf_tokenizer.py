"""Tokenizers as GGUF's keys: against llama.cpp's vocabulary files of the same tokenizers."""

import json

import gguf
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from halfbyte.gguf.file import GgufFile
from halfbyte.gguf.tokenizer import add_tokenizer, plain_template, pre_tokenizer, read_tokenizer
from halfbyte.utils.errors import ModelError
from halfbyte.utils.notices import notices_so_far, reset_notices
from tests.helpers.gguf_models import byte_tokenizer
from tests.helpers.gguf_vocabulary import SOURCES, write_vocabulary


def keys(tokenizer, size, tmp_path, **more):
    writer = gguf.GGUFWriter(tmp_path / "keys.gguf", "llama")
    add_tokenizer(writer, tokenizer, size, **more)
    return {name.removeprefix("tokenizer."): value.value for name, value in writer.kv_data[0].items()}


@pytest.mark.slow  # the gguf library reads 280,000 merges one by one
@pytest.mark.parametrize("fixture", SOURCES)
def test_the_vocabulary_is_llamacpps(shared, tmp_path, fixture):
    found = gguf.GGUFReader(write_vocabulary(shared, fixture, tmp_path / "v.gguf"))
    theirs = gguf.GGUFReader(shared / f"data/gguf/ggml-vocab-{fixture}.gguf")

    def value(reader, key):
        return reader.get_field(f"tokenizer.ggml.{key}").contents()

    assert value(found, "model") == value(theirs, "model")
    assert value(found, "pre") == value(theirs, "pre")
    tokens, expected = value(found, "tokens"), value(theirs, "tokens")
    types, expected_types = value(found, "token_type"), value(theirs, "token_type")
    known = [index for index, type_ in enumerate(expected_types) if type_ == gguf.TokenType.NORMAL]
    assert [tokens[index] for index in known] == [expected[index] for index in known]
    assert len(tokens) == len(expected)
    different = {index for index in range(len(types)) if types[index] != expected_types[index]}
    # The fixture of Qwen2 calls rows that no token uses user-defined, as llama.cpp's converter did then; Qwen 2.5 gives
    # some of them tokens, of which those from 151657 to 151664 are user-defined, too.
    assert different == ({*range(151646, 151657), *range(151665, 151936)} if fixture == "qwen2" else set())
    assert all(expected[index] == f"[PAD{index}]" for index in different)
    unused = {index for index in different if index > 151664}
    assert all(tokens[index] == f"[PAD{index}]" and types[index] == gguf.TokenType.UNUSED for index in unused)
    if fixture == "llama-spm":
        scores, theirs_scores = value(found, "scores"), value(theirs, "scores")
        merged = [index for index in known if scores[index] > -1e6]
        assert len(merged) > 25_000
        by_theirs = sorted(merged, key=lambda index: -theirs_scores[index])
        assert sorted(merged, key=lambda index: -scores[index]) == by_theirs
    else:
        assert value(found, "merges") == value(theirs, "merges")


def test_special_tokens_templates_and_unused_rows(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{%- generation -%}{{ m }}{% endgeneration %}{% endfor %}"
    tokenizer.add_tokens(["<tool>"])
    found = keys(tokenizer, 272, tmp_path, end_ids=[258, 259])
    assert found["ggml.pre"] == "gpt-2"
    assert found["ggml.tokens"][256] == "Ġt"
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<s>", "</s>", "<pad>", "<tool>")}
    types = found["ggml.token_type"]
    assert [types[special[token]] for token in special] == [3, 3, 3, 4]
    assert found["ggml.tokens"][271] == "[PAD271]"
    assert types[271] == gguf.TokenType.UNUSED
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"]) == (special["<s>"], special["</s>"])
    assert found["ggml.eot_token_id"] == next(i for i in (258, 259) if i != special["</s>"])
    assert found["ggml.add_bos_token"] is False
    assert found["chat_template"] == "{% for m in messages %}{%- if true -%}{{ m }}{% endif %}{% endfor %}"


def test_generation_marks_keep_their_whitespace_control():
    marked = "a {%- generation %} b {%+endgeneration-%} c {% generationx %}"
    assert plain_template(marked) == "a {%- if true %} b {%+ endif -%} c {% generationx %}"


def test_a_larger_tokenizer_than_the_embedding_is_refused(tmp_path):
    with pytest.raises(ModelError, match="258 rows"):
        keys(byte_tokenizer(), 258, tmp_path)


def test_an_unknown_kind_of_tokenizer_is_refused(tmp_path):
    unigram = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)))
    with pytest.raises(ModelError, match="Unigram"):
        keys(unigram, 10, tmp_path)
    described = json.loads(byte_tokenizer().backend_tokenizer.to_str())
    described["pre_tokenizer"] = {"type": "Whitespace"}
    with pytest.raises(ModelError, match="Whitespace"):
        pre_tokenizer(described)


def sentencepiece(scheme):
    """Pieces with byte fallback; a space is prepended to the "first" word of a text, "always" after special tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Helo thrusa"]
    merges = [("▁", "H"), ("▁", "t"), ("▁", "u"), ("l", "l"), ("u", "s")]
    vocabulary = {piece: at for at, piece in enumerate(dict.fromkeys([*pieces, *("".join(pair) for pair in merges)]))}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize(
    ("scheme", "chats", "prefix", "said"),
    [
        ("first", ["<s>Hello user</s>there"], False, True),
        ("first", ["Hello user"], True, True),
        ("first", [], True, True),
        ("always", ["<s>Hello user</s>there"], True, False),
        ("never", ["<s>Hello user</s>there"], False, False),
    ],
)
def test_the_space_prefix_gives_chats_their_trained_tokens(tmp_path, scheme, chats, prefix, said):
    """Read back by llama.cpp's rule, which the import follows; a notice where that gives some texts other tokens."""
    reset_notices()
    tokenizer = sentencepiece(scheme)
    size = len(tokenizer)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    add_tokenizer(writer, tokenizer, size, [], chats)
    assert writer.kv_data[0]["tokenizer.ggml.add_space_prefix"].value is prefix
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    back = read_tokenizer(GgufFile(tmp_path / "m.gguf"))
    for text in chats or ["Hello there"]:
        assert back.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False), text
    assert ("gguf-spaces" in notices_so_far()) is said
