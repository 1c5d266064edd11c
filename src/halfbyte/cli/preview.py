"""`halfbyte preview`: the rows as the model will see them, with what is trained in colour."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ..config import RunConfig
from ..ops import IGNORE_INDEX
from ..runs.inputs import check_inputs
from ..utils.console import Console, has_colours
from ..utils.text import brief
from .imports import quick_imports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAINED, MASKED, EOS = "green", "dim", "reverse"
REJECTED = "red"  # trained tokens of an answer that is not wanted


def preview_rows(config: RunConfig, count: int) -> None:
    """Print the first `count` rows, prepared and collated exactly as in training."""
    check_inputs(config)
    with quick_imports():
        from ..data.prepare_answers import prepare_answers
        from ..loading.load import load_tokenizer
        from ..methods import method_of

    tokenizer = load_tokenizer(config.origin, chat_template_path=config.chat_template_path)
    method = method_of(config)
    kind = method.rows
    prepared = method.prepare(config, tokenizer) if kind == "text" else prepare_answers(config, tokenizer, kind)
    collate = method.collator(config, tokenizer) if kind == "text" else None
    stops = [tokenizer.convert_tokens_to_ids(token) for token in prepared.report["stop_tokens"]]
    ends = {tokenizer.eos_token_id, *stops}
    console = Console(soft_wrap=True)
    marks = not has_colours(console)
    console.print(legend(marks, answers=collate is None))
    for number in range(min(count, len(prepared.train))):
        row = prepared.train[number]
        if collate is not None:
            shown = render(collate([row]), tokenizer, ends, number, marks)
        else:
            shown = render_answers(row, tokenizer, ends, number, marks)
        for document in shown:
            console.print(document)


def legend(marks: bool, *, answers: bool = False) -> Text:
    """What the colours mean, or the brackets where the output has no colours.

    Args:
        answers: whether there may be answers that are not wanted.
    """
    if marks:
        return Text("⟦trained⟧ masked ⏎=EOS")
    others = [(" rejected", REJECTED)] if answers else []
    return Text.assemble(("trained", TRAINED), *others, "  ", ("masked", MASKED), "  ", ("EOS", EOS))


def render(
    batch: dict[str, Any], tokenizer: PreTrainedTokenizerBase, ends: set[int], row: int, marks: bool = False
) -> Iterator[Text]:
    """One heading and one text per document of a collated batch of one row.

    Args:
        batch: `input_ids`, `labels` and `attention_mask` or `position_ids`, each (1, length).
        ends: ids that end a text or a turn; they are marked as EOS.
        row: its number, from 0.
        marks: put trained text into ⟦⟧ and mark EOS, for output without colours.
    """
    tokens, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    spans = documents(batch)
    for index, (start, end) in enumerate(spans):
        trained = sum(label != IGNORE_INDEX for label in labels[start:end])
        yield _heading(f"row {row + 1}, document {index + 1} of {len(spans)}: {end - start} tokens, {trained} trained")
        yield _coloured(tokens[start:end], labels[start:end], tokenizer, ends, marks)


def render_answers(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, ends: set[int], number: int, marks: bool = False
) -> Iterator[Text]:
    """A heading and a text for a prompt, which is shown once, and for each of its answers; then its further columns.

    Args:
        row: as `data.prepare_answers` makes it.
        ends, marks: as of `render`.
        number: of the row, from 0.
    """
    prompt = row["prompt_ids"]
    yield _heading(f"row {number + 1}, prompt: {len(prompt)} tokens")
    yield _coloured(prompt, [IGNORE_INDEX] * len(prompt), tokenizer, ends, marks)
    for name in (name.removesuffix("_mask") for name in row if name.endswith("_mask")):
        ids, mask = row[f"{name}_ids"], row[f"{name}_mask"]
        wanted = row.get("label", name != "rejected")
        said = f"{name} ({'desirable' if wanted else 'undesirable'})" if "label" in row else name
        yield _heading(f"row {number + 1}, {said}: {len(ids)} tokens, {sum(mask)} trained")
        labels = [token if trained else IGNORE_INDEX for token, trained in zip(ids, mask, strict=True)]
        yield _coloured(ids, labels, tokenizer, ends, marks, TRAINED if wanted else REJECTED)
    further = {name: row[name] for name in ("margin", "right") if name in row} | row.get("columns", {})
    if further:
        yield Text("\n".join(f"{name}: {brief(value)}" for name, value in further.items()), style="cyan")


def _heading(said: str) -> Text:
    return Text(f"\n{f'── {said} ':─<100}", style="cyan")


def documents(batch: dict[str, Any]) -> list[tuple[int, int]]:
    """Start and end of each document: where positions restart, or all that is not padding."""
    if "position_ids" in batch:
        positions = batch["position_ids"][0].tolist()
        starts = [index for index, position in enumerate(positions) if position == 0]
        return list(zip(starts, [*starts[1:], len(positions)], strict=True))
    real = batch["attention_mask"][0].nonzero().flatten().tolist()
    return [(real[0], real[-1] + 1)] if real else []


def _coloured(
    tokens: list[int],
    labels: list[int],
    tokenizer: PreTrainedTokenizerBase,
    ends: set[int],
    marks: bool,
    colour: str = TRAINED,
) -> Text:
    """Tokens of one kind are decoded together: a character may take several."""
    text = Text()
    kinds = [(label != IGNORE_INDEX, token in ends) for token, label in zip(tokens, labels, strict=True)]
    at = 0
    for (trained, is_eos), run in groupby(kinds):
        size = len(list(run))
        piece = str(tokenizer.decode(tokens[at : at + size], skip_special_tokens=False))
        at += size
        if marks:
            piece += "⏎" if is_eos else ""
            piece = f"⟦{piece}⟧" if trained else piece
        style = colour if trained else MASKED
        text.append(piece, f"{style} {EOS}" if is_eos else style)
    return text
