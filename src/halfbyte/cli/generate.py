"""`halfbyte generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..reading import parse_json, read_text
from ..utils.errors import DataError
from ..utils.text import json_line
from .imports import import_models

if TYPE_CHECKING:
    from ..serve.conversation import Conversation

FIX = 'write one prompt a line, in a .jsonl as {"prompt": "..."}'
TABLES = (".csv", ".tsv", ".parquet", ".json")  # whose lines are no prompts


def answer_file(
    name: str,
    file: Path,
    max_new_tokens: int | None,
    temperature: float,
    batch_size: int,
    trust_remote_code: bool = False,
) -> Iterator[str]:
    """Yield a JSON line {"prompt", "answer"} for each prompt of `file`, in its order.

    Args:
        name: a run's output_dir, an adapter, or a model.
        file: one prompt a line; of a .jsonl, the value of "prompt". Each is asked as in `halfbyte chat`, on its own.
        max_new_tokens: None for `generation.run.DEFAULT_MAX_NEW_TOKENS`, or what the model has positions for.

    Raises:
        DataError: the file cannot be read, has no prompt, or lines that are too long for the model; before any answer.
    """
    prompts = read_prompts(file)
    from ..runs.saved import load_saved, look_up

    trusting = [f"trust_remote_code={trust_remote_code}"]
    look_up(name, trusting)
    import_models()
    from ..generation import Sampling
    from ..generation import generate as continue_prompts
    from ..serve.conversation import Conversation

    sampling = Sampling(temperature)
    saved = load_saved(name, trusting)

    talk = Conversation(saved, sampling, max_new_tokens)
    asked = [talk.prompt_ids(prompt) for _, prompt in prompts]
    _check_room(talk, file, [number for number, _ in prompts], list(map(len, asked)))
    for first in range(0, len(prompts), batch_size):
        some = slice(first, first + batch_size)
        answers = continue_prompts(
            saved.model, asked[some], max_new_tokens=max_new_tokens, sampling=sampling, stops=talk.stops
        )
        for (_, prompt), ids in zip(prompts[some], answers, strict=True):
            answer = saved.tokenizer.decode(ids, skip_special_tokens=True)
            yield json_line({"prompt": prompt, "answer": answer})


def _check_room(talk: Conversation, file: Path, numbers: Sequence[int], lengths: Sequence[int]) -> None:
    """Raise a DataError that names all lines which the model has no positions for."""
    from ..generation.decoder import context_length

    asked, limit = talk.max_new_tokens, context_length(talk.saved.model)
    if empty := [str(number) for number, tokens in zip(numbers, lengths, strict=True) if not tokens]:
        raise DataError(f"{file}: no tokens in line {', '.join(empty[:10])}", "take these lines out")
    long = [pair for pair in zip(numbers, lengths, strict=True) if limit and pair[1] + (asked or 1) > limit]
    if not long:
        return
    named = ", ".join(f"line {number} ({tokens:,} tokens)" for number, tokens in long[:10])
    more = f" and {len(long) - 10} more" if len(long) > 10 else ""
    new = f" with --max-new-tokens {asked}" if asked else " and an answer"
    fits = limit is not None and asked and all(tokens < limit for _, tokens in long)
    raise DataError(
        f"{file}: the model's {limit} positions do not hold {named}{more}{new}",
        "lower --max-new-tokens, or leave it out" if fits else "shorten these prompts, or take them out",
    )


def read_prompts(file: Path) -> list[tuple[int, str]]:
    """The prompts of a text file or a .jsonl, each with its line's number."""
    if file.suffix.lower() in TABLES:
        raise DataError(f"{file}: {file.suffix} is not read as prompts", FIX)
    if str(file) == "-":
        raise DataError("prompts are not read from the standard input", "write them to a file, and name it")
    lines = read_text(file, DataError, FIX).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{file} has no prompt", FIX)
    if file.suffix == ".jsonl":
        return [(number, _prompt(file, number, line)) for number, line in numbered]
    return numbered


def _prompt(file: Path, number: int, line: str) -> str:
    found = parse_json(line, str(file), DataError, FIX, line=number)
    if not isinstance(found, dict) or "prompt" not in found:
        raise DataError(f'{file}:{number}: no object with "prompt"', 'write {"prompt": "..."}')
    prompt = found["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        said = "is empty" if isinstance(prompt, str) else "is not a text"
        raise DataError(f"{file}:{number}: prompt {said}", 'write {"prompt": "..."}, or take the line out')
    return prompt
