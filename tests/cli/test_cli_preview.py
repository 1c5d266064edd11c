"""What `preview` prints is what the batch says: documents, trained tokens, ends."""

import pytest
import torch

from halfbyte.cli.preview import documents, legend, render
from halfbyte.ops import IGNORE_INDEX


class Letters:
    """A tokenizer whose token i is the i-th letter; token 0 ends a text."""

    def decode(self, tokens, skip_special_tokens):
        assert not skip_special_tokens
        return "".join("." if token == 0 else chr(96 + token) for token in tokens)


def batch(tokens, labels, **others):
    rows = {"input_ids": tokens, "labels": labels, **others}
    return {key: torch.tensor([row]) for key, row in rows.items()}


PACKED = batch([1, 2, 3, 0, 4, 5, 0], [-100, -100, 3, 0, -100, 5, -100], position_ids=[0, 1, 2, 3, 0, 1, 2])
PADDED = batch([1, 2, 0, 9, 9], [-100, 2, 0, -100, -100], attention_mask=[1, 1, 1, 0, 0])


def test_documents_of_packed_and_padded_rows():
    assert documents(PACKED) == [(0, 4), (4, 7)]
    assert documents(PADDED) == [(0, 3)]


def test_without_colours_brackets_hold_what_is_trained():
    lines = [text.plain for text in render(PACKED, Letters(), {0}, row=4, marks=True)]
    assert lines[0].startswith("\n── row 5, document 1 of 2: 4 tokens, 2 trained ─")
    assert lines[1] == "ab⟦c⟧⟦.⏎⟧"
    assert lines[2].startswith("\n── row 5, document 2 of 2: 3 tokens, 1 trained ─")
    assert lines[3] == "d⟦e⟧.⏎"


def test_in_colour_trained_tokens_are_green_and_the_rest_dim():
    _, text = render(PADDED, Letters(), {0}, row=0)
    assert text.plain == "ab."
    assert [(text.plain[span.start : span.end], span.style) for span in text.spans] == [
        ("a", "dim"),
        ("b", "green"),
        (".", "green reverse"),
    ]


def test_the_legend_uses_the_same_styles():
    assert {span.style for span in legend(marks=False).spans} == {"green", "dim", "reverse"}
    assert "⟦trained⟧" in legend(marks=True).plain


def test_characters_of_several_tokens_stay_whole(shared):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(shared / "models/llama-40m"))
    tokens = tokenizer("one 🤗 two")["input_ids"]
    lines = list(
        render(batch(tokens, [IGNORE_INDEX, *tokens[1:]], attention_mask=[1] * len(tokens)), tokenizer, set(), 0, True)
    )
    assert lines[1].plain.replace("⟦", "").replace("⟧", "") == "one 🤗 two"
