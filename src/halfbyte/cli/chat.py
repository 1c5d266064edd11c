"""`halfbyte chat`: read lines from a terminal or a pipe and stream the model's answers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from typing import TYPE_CHECKING

from ..utils.errors import DataError, HalfbyteError, ModelError
from ..utils.processes import Stopped
from ..utils.text import visible

if TYPE_CHECKING:
    from ..serve.conversation import Conversation


def chat(
    name: str, *, compare_base: bool, max_new_tokens: int | None, temperature: float, trust_remote_code: bool = False
) -> None:
    """Read lines and stream answers until /quit or the end of the input.

    A line that cannot be answered is reported, and reading continues.

    Args:
        name: a run's output_dir, an adapter, or a model.
        compare_base: answer each line without the adapter first; the conversation continues with the adapter's answer.
        max_new_tokens: None for `generation.run.DEFAULT_MAX_NEW_TOKENS` within the model's positions.
        trust_remote_code: run the Python code that comes with the model; the run's own configuration does not count.

    Raises:
        ModelError: `compare_base` without an adapter.
        DataError: raised at the end if piped lines could not be answered.
    """
    from ..runs.saved import load_saved, look_up

    trusting = [f"trust_remote_code={trust_remote_code}"]
    if compare_base and look_up(name, trusting)[0].adapter is None:
        raise ModelError(f"--compare-base: {name} has no adapter to switch off", "name a run or an adapter")
    look_up(name, trusting)
    from ..generation import Sampling
    from ..serve.conversation import Conversation

    sampling = Sampling(temperature)
    conversation = Conversation(load_saved(name, trusting), sampling, max_new_tokens)
    interactive = sys.stdin.isatty()
    if interactive:
        print("/reset starts over, /quit leaves; Ctrl-C stops an answer.")
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
        more = ", …" * (len(failed) > 10)
        lines = f"line {failed[0]}" if len(failed) == 1 else f"lines {', '.join(failed[:10])}{more}"
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
        conversation.messages.clear()
        print("(new conversation)")
        return
    if re.fullmatch(r"/\w+", line):
        raise DataError(f"line {number}: there is no command {line}", "/reset starts over, /quit leaves")
    if compare_base:
        _stream(conversation, line, "base: ", False, interactive)
    answer = _stream(conversation, line, "adapter: " if compare_base else "model: ", True, interactive)
    conversation.remember(line, answer)


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
