"""`halfbyte chat` and `halfbyte generate`: answers of a saved model to lines of a terminal, a pipe or a file."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reading import parse_json, read_text
from ..utils.errors import DataError, HalfbyteError, ModelError
from ..utils.processes import Stopped
from ..utils.text import json_line, visible
from ..utils.waiting import waiting
from .startup import import_models

if TYPE_CHECKING:
    from ..data.chat import ChatTemplate
    from ..serve.conversation import Conversation, Prompt

IMAGE_COLUMNS = ("images", "image")  # as in `data.images`, which imports torch
FIX = 'write one prompt per line, in a .jsonl as {"prompt": "..."}'
TABLES = (".arrow", ".csv", ".tsv", ".parquet", ".json")  # files whose lines are not prompts


def chat(
    name: str,
    *,
    compare_base: bool,
    max_new_tokens: int | None,
    temperature: float,
    trust_remote_code: bool = False,
    repetition_penalty: float = 1.0,
    **draws: Any,
) -> None:
    """Read lines and stream answers until /quit or the end of the input.

    A line that cannot be answered is reported, and reading continues.

    Args:
        name: a run's output_dir, an adapter, or a model.
        compare_base: answer each line without the adapter first; the conversation continues with the adapter's answer.
        max_new_tokens: None for `generation.run.DEFAULT_MAX_NEW_TOKENS` within the model's positions.
        trust_remote_code: run the Python code that comes with the model, whatever the run's own configuration says.
        repetition_penalty: see `generation.Penalties`.
        draws: top_k, top_p and min_p of `generation.Sampling`.

    Raises:
        ModelError: `compare_base` without an adapter.
        DataError: raised at the end if piped lines could not be answered.
    """
    from ..runs.saved import load_saved, look_up

    trusting = [f"trust_remote_code={trust_remote_code}"]
    if compare_base and look_up(name, trusting)[0].adapter is None:
        raise ModelError(f"--compare-base: {name} has no adapter to switch off", "name a run or an adapter")
    look_up(name, trusting)
    from ..generation import Penalties, Sampling
    from ..serve.conversation import Conversation

    sampling, penalties = Sampling(temperature, **draws), Penalties(repetition=repetition_penalty)
    conversation = Conversation(load_saved(name, trusting), sampling, max_new_tokens, penalties)
    interactive = sys.stdin.isatty()
    if interactive:
        images = "/image FILE adds an image, " if conversation.reads_images else ""
        print(f"{images}/reset starts over, /quit leaves; Ctrl-C stops an answer.")
    failed: list[str] = []
    for number, line in _lines("you: " if interactive else None):
        if line.casefold() == "/quit":
            break
        try:
            _handle_line(conversation, line, number, compare_base, interactive)
        except HalfbyteError as error:
            failed.append(str(number))
            print(error, file=sys.stderr, flush=True)
    if failed and not interactive:
        omitted = ", …" * (len(failed) > 10)
        lines = f"line {failed[0]}" if len(failed) == 1 else f"lines {', '.join(failed[:10])}{omitted}"
        raise DataError(f"{lines} of the input {'has' if len(failed) == 1 else 'have'} no answer", "see above why")


def _handle_line(conversation: Conversation, line: str, number: int, compare_base: bool, interactive: bool) -> None:
    """Run a command or answer a line.

    Raises:
        DataError: the line is not text, or an unknown command.
        HalfbyteError: it cannot be answered, e.g. because the conversation exceeds the model's positions.
    """
    if any("\ud800" <= character <= "\udfff" for character in line):  # surrogates mark undecodable bytes
        raise DataError(f"line {number} of the input is not {sys.stdin.encoding} text", "convert it")
    if line.casefold() == "/reset":
        conversation.reset()
        print("(new conversation)")
        return
    if image := re.fullmatch(r"/image\s+(.+)", line, re.IGNORECASE):
        file = _file_name(image[1])
        conversation.attach(file)
        print(f"({file} goes with the next line)")
        return
    if re.fullmatch(r"/\w+", line):
        raise DataError(
            f"line {number}: there is no command {line}",
            "/image FILE adds an image to the next line, /reset starts over, /quit leaves",
        )
    if compare_base:
        _stream(conversation, line, "base: ", False, interactive)
    answer = _stream(conversation, line, "adapter: " if compare_base else "model: ", True, interactive)
    conversation.remember(line, answer)


def _file_name(text: str) -> str:
    """Return the name of a file as it was typed; without the quotes and escapes of a shell if only that is a file."""
    if os.path.isfile(text):
        return text
    with contextlib.suppress(ValueError):  # a quote that is not closed
        words = shlex.split(text)
        if len(words) == 1 and os.path.isfile(os.path.expanduser(words[0])):
            return words[0]
    return text


def _lines(prompt: str | None) -> Iterator[tuple[int, str]]:
    """Yield line number and text of lines that are not blank, typed after `prompt` or piped in."""
    if isinstance(sys.stdin, TextIOWrapper):  # an undecodable byte must fail only its own line
        sys.stdin.reconfigure(errors="surrogateescape")
    number = 0
    while True:
        try:
            line = (input(prompt) if prompt else input()).strip()
        except EOFError:
            if prompt:
                print()
            return
        number += 1
        if line:
            yield number, line


def _stream(conversation: Conversation, line: str, label: str, adapter: bool, interactive: bool) -> str:
    """Print the answer as it is generated; in an interactive session Ctrl-C stops only this answer."""
    print(label, end="", flush=True)
    pieces: list[str] = []
    answer = conversation.answer(line, adapter)
    try:
        for piece in answer:
            pieces.append(piece)
            print(visible(piece), end="", flush=True)
    except KeyboardInterrupt as stop:
        if not interactive or isinstance(stop, Stopped):
            raise
        answer.close()
        print(" (stopped)", end="")
    except HalfbyteError:
        print(flush=True)
        raise
    print(flush=True)
    return "".join(pieces)


def answer_file(
    name: str,
    file: Path,
    max_new_tokens: int | None,
    temperature: float,
    batch_size: int,
    trust_remote_code: bool = False,
    repetition_penalty: float = 1.0,
    images: Sequence[Path] = (),
    **draws: Any,
) -> Iterator[str]:
    """Yield a JSON line {"prompt", "answer"} for each prompt of `file`, in its order.

    Args:
        name: a run's output_dir, an adapter, or a model.
        file: one prompt per line, or a .jsonl of objects; see `read_prompts`. Each starts a new conversation of
            `halfbyte chat`.
        images: files to show before each prompt that is a text.
        max_new_tokens: None for `generation.run.DEFAULT_MAX_NEW_TOKENS` within the model's positions.
        repetition_penalty, draws: as in `chat`.

    Raises:
        DataError: the file cannot be read, has no prompt, or a prompt is too long; raised before the first answer.
    """
    prompts = read_prompts(file)
    if images and (placed := next((prompt for prompt in prompts if prompt.turns), None)):
        raise DataError(f"--image: {placed.location} places its images itself", "name them there, or leave out --image")
    from ..runs.saved import load_saved, look_up

    trusting = [f"trust_remote_code={trust_remote_code}"]
    look_up(name, trusting)
    import_models()
    from ..generation import Penalties, Sampling
    from ..generation import generate as continue_prompts
    from ..serve.conversation import Conversation

    sampling, penalties = Sampling(temperature, **draws), Penalties(repetition=repetition_penalty)
    saved = load_saved(name, trusting)

    talk = Conversation(saved, sampling, max_new_tokens)
    for image in images:
        talk.attach(str(image))
    template = _template(talk, prompts)
    lengths = [len(_encoded(talk, template, prompt).ids) for prompt in prompts]
    _check_room(talk, file, [prompt.line for prompt in prompts], lengths)
    for first in range(0, len(prompts), batch_size):
        batch = prompts[first : first + batch_size]
        encoded = [_encoded(talk, template, prompt) for prompt in batch]  # memory holds the pixels of one batch
        with waiting(f"answering prompts {first + 1} to {min(first + batch_size, len(prompts))} of {len(prompts)}"):
            answers = continue_prompts(
                saved.model,
                [prompt.ids for prompt in encoded],
                images=[prompt.images for prompt in encoded],
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stops=talk.stops,
                penalties=penalties,
            )
        for prompt, ids in zip(batch, answers, strict=True):
            answer = saved.tokenizer.decode(ids, skip_special_tokens=True)
            yield json_line({"prompt": prompt.text or prompt.turns, "answer": answer})


def _template(talk: Conversation, prompts: Sequence[AskedPrompt]) -> ChatTemplate | None:
    """Return the model's chat template if it has one and a prompt consists of turns.

    Raises:
        DataError: it has none, or prompts have images that the model does not read.
    """
    from ..data.chat import ChatTemplate

    placed = [prompt for prompt in prompts if prompt.turns]
    if any(prompt.images for prompt in placed):
        talk.check_reads_images()
    if placed and talk.style != "template":
        raise DataError(f"{placed[0].location}: turns need a chat template, and this model has none", FIX)
    return ChatTemplate(talk.saved.tokenizer) if placed else None


def _encoded(talk: Conversation, template: ChatTemplate | None, prompt: AskedPrompt) -> Prompt:
    """Return the tokens of a prompt, and the model's inputs for its images."""
    if template is None or not prompt.turns:
        return talk.encoded(prompt.text)
    from ..data.chat import prompt_text

    turns, tools = template.adapt_messages(prompt.turns, prompt.tools)
    return talk.with_images(prompt_text(template.tokenizer, turns, tools=tools), prompt.images, prompt.location)


def _check_room(talk: Conversation, file: Path, numbers: Sequence[int], lengths: Sequence[int]) -> None:
    """Raise a DataError that lists the prompts that do not fit the model's positions."""
    from ..generation.decoder import context_length

    max_new_tokens, limit = talk.max_new_tokens, context_length(talk.saved.model)
    if empty := [str(number) for number, tokens in zip(numbers, lengths, strict=True) if not tokens]:
        raise DataError(f"{file}: no tokens in line {', '.join(empty[:10])}", "remove these lines")
    long = [pair for pair in zip(numbers, lengths, strict=True) if limit and pair[1] + (max_new_tokens or 1) > limit]
    if not long:
        return
    named = ", ".join(f"line {number} ({tokens:,} tokens)" for number, tokens in long[:10])
    omitted = f" and {len(long) - 10} more" if len(long) > 10 else ""
    new = f" with --max-new-tokens {max_new_tokens}" if max_new_tokens else " and an answer"
    fits = limit is not None and max_new_tokens and all(tokens < limit for _, tokens in long)
    raise DataError(
        f"{file}: {named}{omitted}{new} exceed the model's {limit} positions",
        "lower or remove --max-new-tokens" if fits else "shorten or remove these prompts",
    )


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt of a file.

    Attributes:
        location: file and line.
        text: of a prompt that is a text.
        turns, tools: of a conversation, or of a text with images; an image is a part `{"type": "image"}`.
        images: of the turns, in their order.
    """

    line: int
    location: str
    text: str = ""
    turns: Sequence[dict[str, Any]] = ()
    tools: list[Any] | None = None
    images: Sequence[Mapping[str, Any]] = ()


def read_prompts(file: Path) -> list[AskedPrompt]:
    """Read the prompts of a text file, one per line, or of a .jsonl.

    An object has a `prompt`, a text or a list of turns, or `messages`, whose last answers are left out. Images belong
    to them as in training rows.
    """
    if file.suffix.lower() in TABLES:
        raise DataError(f"{file}: a {file.suffix} cannot be used as prompts", FIX)
    if str(file) == "-":
        raise DataError("prompts cannot be read from the standard input", "write them to a file")
    lines = read_text(file, DataError, FIX).split("\n")
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise DataError(f"{file} has no prompt", FIX)
    if file.suffix == ".jsonl":
        return [_prompt(file, number, line) for number, line in numbered]
    return [AskedPrompt(number, f"{file}:{number}", line) for number, line in numbered]


def _prompt(file: Path, number: int, line: str) -> AskedPrompt:
    record = parse_json(line, str(file), DataError, FIX, line=number)
    location = f"{file}:{number}"
    column = "messages" if isinstance(record, dict) and "prompt" not in record else "prompt"
    if not isinstance(record, dict) or column not in record:
        raise DataError(f'{location}: not an object with "prompt" or "messages"', 'write {"prompt": "..."}')
    prompt = record[column]
    has_images = any(record.get(name) for name in IMAGE_COLUMNS)
    if isinstance(prompt, list) or (column == "prompt" and isinstance(prompt, str) and has_images):
        return _with_turns(record, column, file, number)
    if not isinstance(prompt, str) or not prompt.strip():
        problem = "is empty" if isinstance(prompt, str) else "is not text"
        raise DataError(f"{location}: {column} {problem}", 'write {"prompt": "..."}, or remove the line')
    return AskedPrompt(number, location, prompt)


def _with_turns(record: dict[str, Any], column: str, file: Path, number: int) -> AskedPrompt:
    """Return a prompt that is a conversation, or a text with images."""
    from ..data.formats import conversation, turns_in
    from ..data.images import ImageSource

    location, text = f"{file}:{number}", record[column]
    if isinstance(text, str):
        record = {**record, column: [{"role": "user", "content": text}]}
    messages = turns_in(record, column, location)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{location}: {column} has no turn to answer", "add a user turn")
    document = conversation(messages, record, {"tools": "tools"}, location)
    images = ImageSource(None, allow_urls=False).take(document, record, str(file), location)
    shown = text if isinstance(text, str) else ""
    return AskedPrompt(number, location, shown, document["messages"], document.get("tools"), images)
