"""What `preview` prints is what the batch says: documents, trained tokens, ends."""

import pytest
import torch

from halfbyte.cli.preview import documents, legend, render, render_answers
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


PAIR = {
    "prompt_ids": [1, 2], "chosen_ids": [3, 0], "chosen_mask": [1, 1], "rejected_ids": [4, 5, 0],
    "rejected_mask": [1, 0, 1], "margin": 1.5,
}  # fmt: skip


def test_a_prompt_is_shown_once_and_both_answers_in_their_colours():
    lines = list(render_answers(PAIR, Letters(), {0}, 1, marks=True))
    assert [line.plain.strip().rstrip("─ ") for line in lines] == [
        "── row 2, prompt: 2 tokens",
        "ab",
        "── row 2, chosen: 2 tokens, 2 trained",
        "⟦c⟧⟦.⏎⟧",
        "── row 2, rejected: 3 tokens, 2 trained",
        "⟦d⟧e⟦.⏎⟧",
        "margin: 1.5",
    ]
    coloured = list(render_answers(PAIR, Letters(), {0}, 1))
    assert [[span.style for span in coloured[index].spans] for index in (1, 3, 5)] == [
        ["dim"],
        ["green", "green reverse"],
        ["red", "dim", "red reverse"],
    ]


@pytest.mark.parametrize(("label", "style", "said"), [(True, "green", "desirable"), (False, "red", "undesirable")])
def test_an_answer_with_a_label_is_shown_by_it(label, style, said):
    row = {"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1], "label": label}
    _, _, heading, answer = render_answers(row, Letters(), {0}, 0)
    assert f"completion ({said}): 1" in heading.plain
    assert answer.spans[0].style == style


def test_a_prompt_alone_is_shown_with_its_further_columns():
    row = {"prompt_ids": [1, 2], "prompt": "ab", "columns": {"answer": "x" * 500, "level": 3}}
    _, prompt, further = render_answers(row, Letters(), {0}, 0, marks=True)
    assert prompt.plain == "ab"
    answer, level = further.plain.splitlines()
    assert answer.startswith("answer: 'xxx")
    assert len(answer) < 200
    assert level == "level: 3"


def test_the_legend_uses_the_same_styles():
    assert {span.style for span in legend(marks=False).spans} == {"green", "dim", "reverse"}
    assert {span.style for span in legend(marks=False, answers=True).spans} == {"green", "red", "dim", "reverse"}
    assert "⟦trained⟧" in legend(marks=True).plain


def test_characters_of_several_tokens_stay_whole(shared):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(shared / "models/llama-40m"))
    tokens = tokenizer("one 🤗 two")["input_ids"]
    lines = list(
        render(batch(tokens, [IGNORE_INDEX, *tokens[1:]], attention_mask=[1] * len(tokens)), tokenizer, set(), 0, True)
    )
    assert lines[1].plain.replace("⟦", "").replace("⟧", "") == "one 🤗 two"
