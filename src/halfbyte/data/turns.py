"""Which characters of a rendered conversation the assistant wrote, where its answers end, and what is not shown.

Nothing here searches for role markers. Each assistant turn is replaced by one of the same shape: the same calls, ids and
keys, with one text or the arguments of one call at a time exchanged for a character that occurs nowhere else. What
changes is the turn's own. Where it begins is where the generation prompt ends; where a call ends is where the
conversation up to it, rendered alone, stops agreeing with the whole. So results that a template writes inside the
model's turn stay out of it. Where both ways contradict each other the row is refused, with both renderings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..words import brief
from .formats import Message

if TYPE_CHECKING:
    from .chat import ChatTemplate

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MARK_TURNS = "mark the assistant's text with {% generation %} ... {% endgeneration %} in a chat_template_path"
OPENERS = "<[|"  # characters that begin the mark of another part


@dataclass(frozen=True)
class Turn:
    """What the assistant wrote in one turn, as character positions in the rendered text.

    Attributes:
        start, end: the answer.
        limit: the end of what ends the answer, an end-of-turn token and white space before it; `end` where there is
            none.
        trained: false where the row says that the turn is context alone.
        parts: the pieces of `start:end` that a template's marks hold; none: all of it.
    """

    start: int
    end: int
    limit: int
    trained: bool = True
    parts: tuple[tuple[int, int], ...] = ()


class Turns:
    """The turns of one rendered conversation.

    Args:
        template: renders.
        messages, tools: as the template shows them.
        text: the conversation rendered.
    """

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: list[Any] | None, text: str):
        self.template, self.messages, self.tools, self.text = template, messages, tools, text
        self.stranger = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text)
        self._results: list[tuple[int, int]] | None = None

    def found(self) -> list[Turn]:
        """Return the assistant's turns by difference, in order.

        Raises:
            DataError: a turn is not shown, or cannot be told from the results of its calls.
        """
        indices = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        turns = [self._turn(index) for index in indices]
        for index, turn in zip(indices, turns, strict=True):
            for start, end in self.results:
                if turn.start < end and start < turn.end:
                    self._contradiction(index, turn)
        return turns

    def grouped(self, blocks: Sequence[tuple[int, int]]) -> list[Turn]:
        """Return the turns that a template's marks hold; several marked parts of one turn are one.

        Args:
            blocks: positions of the marked parts, in order.
        """
        indices = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(blocks) == len(indices):
            return [Turn(start, end, end) for start, end in blocks]
        starts = [self._begin(index, self._region(index)[0]) for index in indices]
        owned: list[list[tuple[int, int]]] = [[] for _ in indices]
        for start, end in blocks:
            owner = max((place for place, begin in enumerate(starts) if begin < end), default=0)
            owned[owner].append((start, end))
        return [
            Turn(parts[0][0], parts[-1][1], parts[-1][1], parts=tuple(parts) if len(parts) > 1 else ())
            for parts in owned
            if parts
        ]

    @property
    def results(self) -> list[tuple[int, int]]:
        """Positions of what tools returned."""
        if self._results is None:
            tools = [index for index, message in enumerate(self.messages) if message["role"] == "tool"]
            changed = (self._change(index, {**self.messages[index], "content": self.stranger}) for index in tools)
            self._results = [place for place in changed if place is not None]
        return self._results

    def _turn(self, index: int) -> Turn:
        start, end = self._region(index)
        if self.messages[index].get("tool_calls"):
            end = self._end_of_calls(index, start, end)
        return Turn(self._begin(index, start), end, end)

    def _region(self, index: int) -> tuple[int, int]:
        """Return where the text changes when any part of an assistant's turn does.

        Raises:
            DataError: it never does.
        """
        places = [self._change(index, changed) for _, changed in exchanged(self.messages[index], self.stranger)]
        shown = [place for place in places if place is not None] or [self._plain(index)]
        if shown[0] is None:
            raise DataError(
                f"the chat template does not show assistant turn {index + 1}, so it cannot be told what to train",
                MARK_TURNS,
            )
        return min(start for start, _ in shown), max(end for _, end in shown)

    def _plain(self, index: int) -> tuple[int, int]:
        """Where the text changes when a turn becomes a plain text; raises what the template raises."""
        message = {"role": "assistant", "content": self.stranger}
        changed = self.template.render([*self.messages[:index], message, *self.messages[index + 1 :]], self.tools)
        return self._difference(changed)  # type: ignore[return-value]

    def _change(self, index: int, message: Message) -> tuple[int, int] | None:
        changed = self.template.attempt([*self.messages[:index], message, *self.messages[index + 1 :]], self.tools)
        return None if changed is None else self._difference(changed)

    def _difference(self, changed: str) -> tuple[int, int] | None:
        """Return the positions at which the text differs from a rendering with the stranger in it, if it is shown."""
        if self.stranger not in changed:
            return None
        start = common_prefix(self.text, changed)
        return start, len(self.text) - common_prefix(self.text[start:][::-1], changed[start:][::-1])

    def _begin(self, index: int, start: int) -> int:
        """Return where a model would begin to write: right behind the generation prompt.

        That is before `start` when the template itself writes the beginning of an answer (Qwen3's empty thoughts), or
        the marks of a call.
        """
        before = self.messages[:index]
        if before and self.template.prompts:
            prompt = self.template.attempt(before, self.tools, add_generation_prompt=True)
            if prompt is not None and len(prompt) <= start and self.text.startswith(prompt):
                return len(prompt)
        message = self.messages[index]
        if not (message.get("tool_calls") or any(message.get(key) for key in THOUGHTS)):
            return start
        plain = self._change(index, {"role": "assistant", "content": self.stranger})
        floor = max((end for _, end in self.results if end <= start), default=0)
        return start if plain is None else max(floor, min(start, plain[0]))

    def _end_of_calls(self, index: int, start: int, end: int) -> int:
        """Return where the calls of a turn end, with what the template writes behind the last argument."""
        border = self._border(index, end)
        if border is None:
            plain = self._change(index, {"role": "assistant", "content": self.stranger})
            border = end if plain is None else max(end, plain[1])
            if any(begin < border and start < stop for begin, stop in self.results):
                self._contradiction(index, Turn(start, border, border))
        tail = self.text[end:border]
        for mark in (*self.template.ends, self.template.closing):
            if mark and mark in tail:
                return end + tail.index(mark)
        return end + len(tail.rstrip())

    def _border(self, index: int, end: int) -> int | None:
        """Return how far the conversation up to a turn, rendered without the results of its calls, agrees with all.

        None where it stops before `end`: the template writes earlier turns otherwise, or refuses calls without results.
        """
        rest = self.messages[index + 1 :]
        while rest and rest[0]["role"] == "tool":
            rest = rest[1:]
        for after in ([], rest) if rest else ([],):
            alone = self.template.attempt([*self.messages[: index + 1], *after], self.tools)
            border = 0 if alone is None else common_prefix(self.text, alone)
            if alone is not None and border >= end:
                return self._before_a_mark(border) if border < len(alone) and border < len(self.text) else border
        return None

    def _before_a_mark(self, border: int) -> int:
        """Move a border out of the mark whose beginning both renderings happen to share."""
        for found in self.template.marks.finditer(self.text, max(0, border - 200), border + 200):
            if found.start() < border < found.end():
                return found.start()
        return len(self.text[:border].rstrip(OPENERS))

    def _contradiction(self, index: int, turn: Turn) -> None:
        alone = self.template.attempt(self.messages[: index + 1], self.tools)
        raise DataError(
            f"it cannot be told where assistant turn {index + 1} ends and the results of its calls begin: all together"
            f" are written as {brief(self.text[turn.start :])}, the turn alone as {brief((alone or 'refused')[-300:])}",
            MARK_TURNS,
        )


def exchanged(message: Message, stranger: str) -> Iterator[tuple[str, Message]]:
    """Yield a message with one of its parts exchanged, and the part's name: its text, its thoughts, each call."""
    calls = message.get("tool_calls") or []
    if message.get("content") or not (calls or any(message.get(key) for key in THOUGHTS)):
        yield "content", {**message, "content": stranger}
    for key in THOUGHTS:
        if message.get(key):
            yield key, {**message, key: stranger}
    for place, call in enumerate(calls):
        function = call["function"]
        arguments = function.get("arguments")
        if isinstance(arguments, dict) and arguments:
            other = {"arguments": dict.fromkeys(arguments, stranger)}
        elif isinstance(arguments, str) and arguments:
            other = {"arguments": stranger}
        else:
            other = {"name": stranger}
        changed = {**call, "function": {**function, **other}}
        yield f"tool_calls[{place}]", {**message, "tool_calls": [*calls[:place], changed, *calls[place + 1 :]]}


def with_ends(template: ChatTemplate, text: str, turns: Sequence[Turn]) -> list[Turn]:
    """Extend each turn's limit over the special tokens that end it.

    Behind an answer that is the run of special tokens and white space up to the last declared end. Without a declared
    end it is what follows the last turn of the text, too, as far as no generation prompt begins there.
    """
    if not turns:
        return []
    last, _ = _run(template, text, turns[-1].end)
    found = []
    for turn in turns:
        run, declared = _run(template, text, turn.end)
        limit = declared or turn.end + common_prefix(text[turn.end : run], text[turns[-1].end : last])
        found.append(replace(turn, limit=limit))
    return found


def _run(template: ChatTemplate, text: str, end: int) -> tuple[int, int | None]:
    """Return how far special tokens and white space go behind an answer, and the end of the last declared end there."""
    place, declared = end, None
    while found := template.marks.match(text, len(text) - len(text[place:].lstrip())):
        if found[0] in template.ends:
            declared = found.end()
        elif template.opening and found[0] == template.opening:
            break
        place = found.end()
    return place, declared


def not_shown(messages: Sequence[Message], text: str) -> list[str]:
    """Return the names of the texts of messages that a rendered conversation does not hold, such as `assistant content`.

    White space and the escapes of JSON do not count. A text that is shown but for its thoughts is named for these.
    """
    shown = _squeezed(text)
    return [name for message in messages for name, value in _texts(message) if not _is_shown(value, shown)]


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    role, content = message["role"], message.get("content")
    if isinstance(content, str):
        thought, mark, answer = content.rpartition("</think>") if role == "assistant" else ("", "", content)
        yield f"{role} content", answer
        if mark:
            yield "thoughts before </think>", thought.replace("<think>", "")
    for key in THOUGHTS:
        if isinstance(message.get(key), str):
            yield f"{role} {key}", message[key]
    for place, call in enumerate(message.get("tool_calls") or []):
        for value in (call["function"].get("name"), *_leaves(call["function"].get("arguments"))):
            if isinstance(value, str):
                yield f"tool_calls[{place}]", value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _is_shown(value: str, shown: str) -> bool:
    written = (json.dumps(value, ensure_ascii=escaped)[1:-1] for escaped in (False, True))
    return any(_squeezed(each) in shown for each in (value, *written, *(_html(value),)))


def _html(value: str) -> str:
    """A text as jinja's tojson writes it, which escapes the signs of HTML."""
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}
    return re.sub("[<>&']", lambda found: escapes[found[0]], json.dumps(value)[1:-1])


def _squeezed(text: str) -> str:
    return "".join(text.split())


def common_prefix(a: str, b: str) -> int:
    """The number of characters `a` and `b` start with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
