"""Talking to a run or a model in the terminal: several turns, streamed, with or without the adapter."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Generator, Iterator, Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, Literal

from .utils.errors import DataError, HalfbyteError, ModelError
from .utils.notices import notice
from .utils.signals import Stopped
from .utils.text import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .generation import Sampling
    from .runs.saved import Place, Saved

Message = dict[str, str]
Style = Literal["template", "instruction", "text"]
STYLES = {"instruction": "an instruction of its own", "text": "continued as plain text"}


class Conversation:
    """The turns so far, and how the model is asked for the next one."""

    def __init__(self, saved: Saved, sampling: Sampling, max_new_tokens: int | None = None):
        from .generation.stops import stop_tokens
        from .runs.stop_tokens import trained_stop_tokens

        self.saved, self.sampling, self.max_new_tokens = saved, sampling, max_new_tokens
        self.messages: list[Message] = []
        report = _data_report(saved.place)
        self.style = _style(saved.tokenizer, report)
        learned = trained_stop_tokens(report, saved.tokenizer)
        self.stops = sorted({*stop_tokens(saved.tokenizer, saved.model, ()), *learned})
        if self.style != "template":
            notice("chat", f"no chat template in use: each line is {STYLES[self.style]}, without memory of the last")

    def prompt(self, text: str) -> str:
        """The text the model continues, once `text` is said."""
        from .data.encode import INSTRUCTION

        if self.style == "text":
            return text
        if self.style == "instruction":
            return INSTRUCTION.format(prompt=text)
        return self.render([*self.messages, {"role": "user", "content": text}])

    def render(self, turns: Sequence[dict[str, Any]]) -> str:
        """The turns through the chat template, and the beginning of an answer.

        Raises:
            DataError: the template refuses them.
        """
        from .data.chat import prompt_text

        return prompt_text(self.saved.tokenizer, turns)

    def remember(self, text: str, answer: str) -> None:
        """Add a finished exchange."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def prompt_ids(self, text: str) -> list[int]:
        """Tokens of `prompt`; a template writes its special tokens itself."""
        special = self.style != "template"
        return self.saved.tokenizer(self.prompt(text), add_special_tokens=special, verbose=False)["input_ids"]

    def answer(self, text: str, adapter: bool = True) -> Generator[str]:
        """Yield the answer to `text` in pieces; closing the iterator, or Ctrl-C, stops the generation."""
        from .generation.run import ACTIVE
        from .generation.text import continue_texts

        pieces = continue_texts(
            self.saved.model,
            self.saved.tokenizer,
            [self.prompt_ids(text)],
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            ends=self.stops,
            adapter=ACTIVE if adapter else None,
        )
        with contextlib.closing(pieces):
            yield from (piece.text for piece in pieces if piece.text)


def _style(tokenizer: PreTrainedTokenizerBase, report: dict[str, Any]) -> Style:
    """How a line becomes a prompt: as the rows of the run did, and for a model without a run by its template."""
    formats = {source["format"] for source in report.get("sources", ())}
    if formats == {"text"} or not (formats or tokenizer.chat_template):
        return "text"
    return "template" if tokenizer.chat_template else "instruction"


def _data_report(place: Place) -> dict[str, Any]:
    """What the run says about its rows; nothing for a model that no run of ours left."""
    from .runs.stop_tokens import data_report

    return data_report(place.run_dir)


def chat(
    name: str, *, compare_base: bool, max_new_tokens: int | None, temperature: float, trust_remote_code: bool = False
) -> None:
    """Read lines, stream answers, until /quit or the end of the input.

    A line that cannot be answered is said, and the next one read.

    Args:
        name: a run's output_dir, an adapter, or a model.
        compare_base: answer each line without the adapter first; the conversation goes on with the adapter's answer.
        max_new_tokens: None for `generation.run.MOST`, or what the model has positions for.
        trust_remote_code: run the Python code that comes with the model; a run's own configuration does not count.

    Raises:
        ModelError: `compare_base` without an adapter.
        DataError: at the end, where lines were piped in and not all could be answered.
    """
    from .runs.saved import load_saved, look_up

    trusting = [f"trust_remote_code={trust_remote_code}"]
    if compare_base and look_up(name, trusting)[0].adapter is None:
        raise ModelError(f"--compare-base: {name} has no adapter to switch off", "name a run or an adapter")
    look_up(name, trusting)
    from .generation import Sampling

    sampling = Sampling(temperature)
    conversation = Conversation(load_saved(name, trusting), sampling, max_new_tokens)
    interactive = sys.stdin.isatty()
    if interactive:
        print("/reset starts over, /quit leaves; Ctrl-C stops an answer.")
    lost: list[str] = []
    for number, line in _lines("you: " if interactive else None):
        if line.casefold() == "/quit":
            break
        try:
            _say(conversation, line, number, compare_base, interactive)
        except HalfbyteError as error:
            lost.append(str(number))
            print(error, file=sys.stderr, flush=True)
    if lost and not interactive:
        lines = f"line {lost[0]}" if len(lost) == 1 else f"lines {', '.join(lost[:10])}{', …' * (len(lost) > 10)}"
        raise DataError(f"{lines} of the input {'has' if len(lost) == 1 else 'have'} no answer", "see above why")


def _say(conversation: Conversation, line: str, number: int, compare_base: bool, interactive: bool) -> None:
    """Obey or answer a line.

    Raises:
        DataError: it is no text, or an unknown command.
        HalfbyteError: it cannot be answered, e.g. since the conversation has outgrown the model's positions.
    """
    if any("\ud800" <= character <= "\udfff" for character in line):  # what stands for bytes that are no text
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
    """Lines that are not blank, typed after `prompt` or piped in, and their numbers."""
    if isinstance(sys.stdin, TextIOWrapper):  # an undecodable byte must not cost the lines around it
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
    """Print the answer as it comes; Ctrl-C ends this answer only, where somebody types."""
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
