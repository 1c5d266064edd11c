"""Streamed text: complete at the end, without partial characters, cut before stop sequences."""

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.generation.text import UNFINISHED, Text, token_text
from tests.helpers.serve_tiny import byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def pieces_of(text: Text, ids) -> list[str]:
    pieces = []
    for token in ids:
        pieces.append(text.add(token))
        if text.stopped:
            return pieces
    return [*pieces, text.flush()]


@given(st.text(max_size=20).filter(lambda words: "<|" not in words))  # special tokens are silent
def test_pieces_are_whole_characters_and_add_up(words):
    pieces = pieces_of(Text(decode), TOKENIZER(words)["input_ids"])
    assert "".join(pieces) == words
    assert all(UNFINISHED not in piece for piece in pieces) or UNFINISHED in words


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_sequence(words, stops):
    text = Text(decode, stops)
    said = "".join(pieces_of(text, TOKENIZER(words)["input_ids"]))
    ends = [words.find(stop) for stop in stops if stop in words]
    assert text.stopped == bool(ends)
    # If two stop sequences overlap, the one that is complete first ends the text.
    finished = min((words.find(stop) + len(stop) for stop in stops if stop in words), default=len(words))
    expected = min((words[:finished].find(stop) for stop in stops if stop in words[:finished]), default=len(words))
    assert said == words[:expected]


def test_undecodable_bytes_are_flushed_at_the_end():
    ids = TOKENIZER("é")["input_ids"]
    assert pieces_of(Text(decode), [ids[0]]) == ["", UNFINISHED]


def test_special_tokens_are_silent():
    ids = [*TOKENIZER("a")["input_ids"], TOKENIZER.eos_token_id, *TOKENIZER(" b")["input_ids"]]
    assert "".join(pieces_of(Text(decode), ids)) == "a b"


@pytest.mark.parametrize("folder", ["models/llama-40m"])
def test_pieces_of_a_real_tokenizer_add_up(shared, folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(shared / folder)
    words = "Hello, wörld 🙂 –  two spaces\n\n\tand 日本語."
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    text = Text(lambda some: tokenizer.decode(some, skip_special_tokens=True))
    assert "".join(pieces_of(text, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("words", ["a 🦙!", "ß–漢"])
def test_bytes_of_tokens_add_up_to_the_text(words):
    tokens = [token_text(TOKENIZER, token) for token in TOKENIZER(words)["input_ids"]]
    assert b"".join(token.data for token in tokens) == words.encode()
    assert UNFINISHED in "".join(token.text for token in tokens)
