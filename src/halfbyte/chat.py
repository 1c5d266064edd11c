"""Talking to a run or a model in the terminal: several turns, streamed, with or without the adapter."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Literal

from .errors import ModelError
from .notices import notice
from .signals import Stopped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .generation import Sampling
    from .runs.saved import Place, Saved

Message = dict[str, str]
Style = Literal["template", "instruction", "text"]
STYLES = {"instruction": "an instruction of its own", "text": "continued as plain text"}


class Conversation:
    """The turns so far, and how the model is asked for the next one."""

    def __init__(self, saved: Saved, sampling: Sampling, max_new_tokens: int = 512):
        from .generation.stops import stop_tokens, turn_end

        self.saved, self.sampling, self.max_new_tokens = saved, sampling, max_new_tokens
        self.messages: list[Message] = []
        report = _data_report(saved.place)
        self.style = _style(saved.tokenizer, report)
        ends = report.get("stop_tokens") or (turn_end(saved.tokenizer) if self.style == "template" else [])
        self.stops = stop_tokens(saved.tokenizer, saved.model, ends)
        if self.style != "template":
            notice("chat", f"no chat template in use: each line is {STYLES[self.style]}, without memory of the last")

    def prompt(self, text: str) -> str:
        """The text the model continues, once `text` is said."""
        from .data.encode import INSTRUCTION

        if self.style == "text":
            return text
        if self.style == "instruction":
            return INSTRUCTION.format(prompt=text)
        turns = [*self.messages, {"role": "user", "content": text}]
        return str(self.saved.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def remember(self, text: str, answer: str) -> None:
        """Add a finished exchange."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def prompt_ids(self, text: str) -> list[int]:
        """Tokens of `prompt`; a template writes its special tokens itself."""
        return self.saved.tokenizer(self.prompt(text), add_special_tokens=self.style != "template")["input_ids"]

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
    path = place.resolved.parent / "data_report.json" if place.resolved else None
    return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}


def chat(
    name: str, *, compare_base: bool, max_new_tokens: int, temperature: float, trust_remote_code: bool = False
) -> None:
    """Read lines, stream answers, until /quit or the end of the input.

    Args:
        name: a run's output_dir, an adapter, or a model.
        compare_base: answer each line without the adapter first; the conversation goes on with the adapter's answer.
        trust_remote_code: run the Python code that comes with the model; a run's own configuration does not count.

    Raises:
        ModelError: `compare_base` without an adapter.
    """
    from .runs.saved import find, load_saved

    if compare_base and find(name).adapter is None:
        raise ModelError(f"--compare-base: {name} has no adapter to switch off", "name a run or an adapter")
    saved = load_saved(name, [f"trust_remote_code={trust_remote_code}"])
    from .generation import Sampling

    conversation = Conversation(saved, Sampling(temperature), max_new_tokens)
    interactive = sys.stdin.isatty()
    if interactive:
        print("/reset starts over, /quit leaves; Ctrl-C stops an answer.")
    for line in _lines("you: " if interactive else None):
        if line == "/quit":
            break
        if line == "/reset":
            conversation.messages.clear()
            print("(new conversation)")
            continue
        try:
            if compare_base:
                _stream(conversation, line, "base: ", adapter=False)
            answer = _stream(conversation, line, "adapter: " if compare_base else "model: ", adapter=True)
        except ModelError as error:  # the conversation has outgrown the model's context
            print(error)
            continue
        conversation.remember(line, answer)


def _lines(prompt: str | None) -> Iterator[str]:
    """Lines that are not blank, typed after `prompt` or piped in."""
    read: Callable[[], str] = (lambda: input(prompt)) if prompt else input
    while True:
        try:
            line = read().strip()
        except EOFError:
            return
        if line:
            yield line


def _stream(conversation: Conversation, line: str, label: str, adapter: bool) -> str:
    """Print the answer as it comes; Ctrl-C ends this answer only."""
    print(label, end="", flush=True)
    pieces: list[str] = []
    answer = conversation.answer(line, adapter)
    try:
        for piece in answer:
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt as stop:
        answer.close()
        if isinstance(stop, Stopped):
            raise
        print(" (stopped)", end="")
    print(flush=True)
    return "".join(pieces)
