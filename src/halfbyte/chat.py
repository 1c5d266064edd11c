"""Talking to a run or a model in the terminal: several turns, streamed, with or without the adapter."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal

from .errors import ModelError
from .notices import notice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .saved import Place, Saved

Message = dict[str, str]
Style = Literal["template", "instruction", "text"]
STYLES = {"instruction": "an instruction of its own", "text": "continued as plain text"}


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; temperature 0 takes the likeliest token."""

    max_new_tokens: int = 512
    temperature: float = 0.7

    def keys(self) -> dict[str, Any]:
        """Arguments of HF `generate`."""
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {"max_new_tokens": self.max_new_tokens, "do_sample": True, "temperature": self.temperature}


class Conversation:
    """The turns so far, and how the model is asked for the next one."""

    def __init__(self, saved: Saved, sampling: Sampling):
        from .train.samples import stop_tokens

        self.saved, self.sampling = saved, sampling
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

    def answer(self, text: str, adapter: bool = True) -> Iterator[str]:
        """Yield the answer to `text` in pieces; closing the iterator, or Ctrl-C, stops the generation."""
        from transformers import TextIteratorStreamer

        tokenizer = self.saved.tokenizer
        encoded = tokenizer(self.prompt(text), return_tensors="pt", add_special_tokens=self.style != "template")
        inputs = {key: encoded[key].to(self.saved.model.device) for key in ("input_ids", "attention_mask")}
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        stop = Event()
        failures: list[BaseException] = []
        worker = Thread(target=self._generate, args=(inputs, streamer, stop, adapter, failures), daemon=True)
        worker.start()
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            stop.set()
            worker.join()
        if failures:
            raise failures[0]

    def _generate(
        self, inputs: dict[str, Any], streamer: Any, stop: Event, adapter: bool, failures: list[BaseException]
    ) -> None:
        """Runs in a thread of its own, so contexts that belong to a thread are entered here."""
        import torch
        from transformers import StoppingCriteriaList

        from .adapters import compute, no_input_casts

        model: Any = self.saved.model
        without = contextlib.nullcontext() if adapter else model.disable_adapter()
        try:
            with torch.inference_mode(), without, no_input_casts(model), compute(model):
                model.generate(
                    **inputs,
                    streamer=streamer,
                    eos_token_id=self.stops,
                    pad_token_id=self.saved.tokenizer.pad_token_id,
                    stopping_criteria=StoppingCriteriaList([_Stopped(stop)]),
                    **self.sampling.keys(),
                )
        except Exception as error:  # raised again by `answer`, in the thread that waits for the text
            failures.append(error)
            streamer.end()


class _Stopped:
    """A stopping criterion that another thread sets."""

    def __init__(self, stop: Event):
        self.stop = stop

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        return torch.full((input_ids.shape[0],), self.stop.is_set(), dtype=torch.bool, device=input_ids.device)


def turn_end(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The special token that the chat template ends an answer with, if it does.

    ChatML models end turns with <|im_end|> whatever their EOS is, so the end of a rendered turn is looked at.
    """
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "halfbyte"}]
    _, _, ending = str(tokenizer.apply_chat_template(turns, tokenize=False)).rpartition("halfbyte")
    return [token for token in tokenizer.tokenize(ending)[:1] if token in tokenizer.all_special_tokens]


def _style(tokenizer: PreTrainedTokenizerBase, report: dict[str, Any]) -> Style:
    """How a line becomes a prompt: as the rows of the run did, and for a model without a run by its template."""
    formats = {source["format"] for source in report.get("sources", ())}
    if formats == {"text"} or not (formats or tokenizer.chat_template):
        return "text"
    return "template" if tokenizer.chat_template else "instruction"


def _data_report(place: Place) -> dict[str, Any]:
    path = place.resolved.parent / "data_report.json" if place.resolved else None
    return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}


def chat(name: str, *, compare_base: bool, max_new_tokens: int, temperature: float) -> None:
    """Read lines, stream answers, until /quit or the end of the input.

    Args:
        name: a run's output_dir, an adapter, or a model.
        compare_base: answer each line without the adapter first; the conversation goes on with the adapter's answer.

    Raises:
        ModelError: `compare_base` without an adapter.
    """
    from .saved import find, load_saved

    if compare_base and find(name).adapter is None:
        raise ModelError(f"--compare-base: {name} has no adapter to switch off", "name a run or an adapter")
    conversation = Conversation(load_saved(name), Sampling(max_new_tokens, temperature))
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
        if compare_base:
            _stream(conversation, line, "base: ", adapter=False)
        answer = _stream(conversation, line, "adapter: " if compare_base else "model: ", adapter=True)
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
    except KeyboardInterrupt:
        answer.close()  # type: ignore[attr-defined]
        print(" (stopped)", end="")
    print(flush=True)
    return "".join(pieces)
