"""`halfbyte generate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..errors import DataError


def answer_file(
    name: str, file: Path, max_new_tokens: int, temperature: float, batch_size: int, trust_remote_code: bool = False
) -> Iterator[str]:
    """Yield a JSON line {"prompt", "answer"} for each prompt of `file`, in its order.

    Args:
        name: a run's output_dir, an adapter, or a model.
        file: one prompt a line; of a .jsonl, the value of "prompt". Each is asked as in `halfbyte chat`, on its own.

    Raises:
        DataError: the file cannot be read, or has no prompt.
    """
    prompts = read_prompts(file)
    from ..runs.saved import load_saved

    saved = load_saved(name, [f"trust_remote_code={trust_remote_code}"])
    from ..chat import Conversation
    from ..generation import Sampling
    from ..generation import generate as continue_prompts

    talk = Conversation(saved, Sampling(temperature), max_new_tokens)
    for first in range(0, len(prompts), batch_size):
        some = prompts[first : first + batch_size]
        answers = continue_prompts(
            talk.saved.model,
            [talk.prompt_ids(prompt) for prompt in some],
            max_new_tokens=max_new_tokens,
            sampling=talk.sampling,
            stops=talk.stops,
        )
        for prompt, ids in zip(some, answers, strict=True):
            answer = talk.saved.tokenizer.decode(ids, skip_special_tokens=True)
            yield json.dumps({"prompt": prompt, "answer": answer}, ensure_ascii=False)


def read_prompts(file: Path) -> list[str]:
    """The prompts of a text file or a .jsonl."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {file}: {error}", "give a text file, or .jsonl") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{file} has no prompt", "write one a line")
    return (
        [_prompt(file, number, line) for number, line in numbered]
        if file.suffix == ".jsonl"
        else [line for _, line in numbered]
    )


def _prompt(file: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{file}, line {number}: no object with "prompt"', 'write {"prompt": "..."}') from error
    if not isinstance(prompt, str) or not prompt:
        raise DataError(f"{file}, line {number}: prompt is not a text", 'write {"prompt": "..."}')
    return prompt
