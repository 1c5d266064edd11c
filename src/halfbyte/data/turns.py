"""Find which characters of a rendered conversation the assistant wrote, where its answers end, and which parts are
missing.

Nothing here searches for role markers. Each assistant turn is replaced by one of the same shape (same calls, ids and
keys) in which one text, or the arguments of one call, is a probe: a character, or a number, that occurs nowhere else.
The part of the rendering that changes is the assistant's. It must be the probe and nothing else: if the template also
writes a title, a count or another text that depends on the answer, the row is refused with both renderings. A turn
starts where the generation prompt ends. A call ends where the conversation up to it, rendered alone, stops matching the
full rendering, which excludes tool results that a template writes inside the model's turn. If both ways contradict each
other, the row is refused with both renderings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NoReturn, Protocol

from ..utils.errors import DataError
from ..utils.text import brief
from .formats import Message

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MARK_TURNS = "mark the assistant's text with {% generation %} ... {% endgeneration %} in a chat_template_path"
WRITE_ONCE = (
    "give a chat_template_path that writes each message once and nothing that depends on it or on chance, or "
    + MARK_TURNS
)
TAG = re.compile(r"<[^<>\s]{1,64}>|\[/?\w{1,64}\]|◁[^◁▷\s]{1,64}▷")  # a mark in a text, such as </think>
SHOWN = 40  # characters before a difference in an error
OPENERS = "<[|"  # first characters of marks


class Template(Protocol):
    """The interface of a chat template that is used here.

    Attributes:
        prompts: whether it writes a generation prompt on request.
        ends: tokens that are declared to end an answer.
        closing: the text after the last answer, stripped.
        opening: the first special token of a generation prompt; empty without one.
        marks: matches a special token.
        source: the Jinja text.
    """

    prompts: bool
    ends: tuple[str, ...]
    closing: str
    opening: str
    marks: re.Pattern[str]
    source: str

    def render(self, messages: Sequence[Message], tools: list[Any] | None = None) -> str:
        """Return the conversation as text; raises whatever the template raises."""

    def attempt(
        self, messages: list[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Return the conversation as text, or None if the template refuses it."""


@dataclass(frozen=True)
class Replacement:
    """A message in which one part is made of probes.

    Attributes:
        message: the message.
        probes: the probes in it, as a template writes them.
        decides: whether no other replacement is tried if the template writes this one.
    """

    message: Message
    probes: Sequence[str]
    decides: bool = True


@dataclass(frozen=True)
class Turn:
    """The assistant's text in one turn, as character positions in the rendering.

    Attributes:
        start, end: the answer.
        limit: end of the end-of-turn token (and white space before it) after the answer; `end` without one.
        trained: False if the row excludes the turn from training.
        spans: the pieces of `start:end` that a template marks; empty: all of it.
    """

    start: int
    end: int
    limit: int
    trained: bool = True
    spans: tuple[tuple[int, int], ...] = ()


class Turns:
    """The turns of one rendered conversation.

    Args:
        template: renders conversations.
        messages, tools: in the form that the template writes.
        text: the rendered conversation.
    """

    def __init__(self, template: Template, messages: list[Message], tools: list[Any] | None, text: str):
        self.template, self.text = template, text
        self.messages, self.tools = messages, tools
        self.probe, self.other_probe = islice(self._characters(), 2)
        self._results: list[tuple[int, int]] | None = None

    def by_difference(self) -> list[Turn]:
        """Return the assistant's turns, found by comparing renderings, in order.

        Raises:
            DataError: the template does not write a turn, or a turn cannot be separated from the results of its calls.
        """
        indices = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        turns = [self._turn(index) for index in indices]
        for index, turn in zip(indices, turns, strict=True):
            for start, end in turn.spans or ((turn.start, turn.end),):
                if any(begin < end and start < stop for begin, stop in self.results):
                    self._raise_contradiction(index, start)
        return turns

    def by_marks(self, blocks: Sequence[tuple[int, int]]) -> list[Turn]:
        """Return the turns that a template marks; several marked parts of one turn are merged.

        Args:
            blocks: positions of the marked parts, in order.
        """
        indices = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(blocks) == len(indices):
            return [Turn(start, end, end) for start, end in blocks]
        regions = [self._regions(index) for index in indices]
        starts = [self._begin(index, *_hull(region)) for index, region in zip(indices, regions, strict=True)]
        owned: list[list[tuple[int, int]]] = [[] for _ in indices]
        for start, end in blocks:
            owner = max((number for number, begin in enumerate(starts) if begin < end), default=0)
            owned[owner].append((start, end))
        return [
            Turn(marked[0][0], marked[-1][1], marked[-1][1], spans=tuple(marked) if len(marked) > 1 else ())
            for marked in owned
            if marked
        ]

    @property
    def results(self) -> list[tuple[int, int]]:
        """Positions of tool results."""
        if self._results is None:
            tools = [index for index, message in enumerate(self.messages) if message["role"] == "tool"]
            probed = {index: {**self.messages[index], "content": self.probe} for index in tools}
            regions = [self._region(index, [Replacement(message, self.probe)]) for index, message in probed.items()]
            self._results = [region for region in regions if region is not None]
        return self._results

    def _turn(self, index: int) -> Turn:
        regions = self._regions(index)
        start, end = _hull(regions)
        self._check_others(index, start, end)
        if not self.messages[index].get("tool_calls"):
            return Turn(self._begin(index, start, end), end, end)
        # the regions before the first result of the turn's calls, and texts after it
        cut = min((begin for begin, _ in self.results if start < begin < end), default=end)
        later = [region for name, region in regions.items() if region[0] >= cut and not name.startswith("tool_calls")]
        first = [region for region in regions.values() if region not in later] or later
        calls = self._end_of_calls(index, *_hull(first))
        start = self._begin(index, start, calls)
        if not later:
            return Turn(start, calls, calls)
        return Turn(start, end, end, spans=((start, calls), _hull(later)))

    def _regions(self, index: int) -> dict[str, tuple[int, int]]:
        """Return the region of the rendering that changes with each part of an assistant's turn, by the part's name.

        Raises:
            DataError: nothing changes.
        """
        replaced = with_probes(self.messages[index], self.template.source, self._characters, self._numbers)
        regions = {name: self._region(index, replacements) for name, replacements in replaced}
        shown = {name: region for name, region in regions.items() if region is not None}
        if shown:
            return shown
        if (plain := self._plain(index)) is None:
            raise DataError(
                f"the chat template does not write assistant turn {index + 1}, so there is no text to train",
                MARK_TURNS,
            )
        return {"content": plain}

    def _plain(self, index: int) -> tuple[int, int] | None:
        """Return the region that changes if a turn becomes plain text; errors of the template propagate."""
        message = {"role": "assistant", "content": self.probe}
        changed = self.template.render([*self.messages[:index], message, *self.messages[index + 1 :]], self.tools)
        if self.probe not in changed:
            return None
        region = self._exact(changed, self.probe)
        if region is None:
            self._raise_ambiguous(index, changed)
        return region

    def _characters(self) -> Iterator[str]:
        """Yield characters for private use that the rendering does not contain."""
        private = map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
        yield from (char for char in private if char not in self.text)

    def _numbers(self) -> Iterator[int]:
        """Yield numbers of ten digits that the rendering does not contain."""
        yield from (number for number in range(9_070_503_001, 10**10, 101) if str(number) not in self.text)

    def _region(self, index: int, replacements: Sequence[Replacement]) -> tuple[int, int] | None:
        """Return the region of the rendering that a part of a message fills; None if the template does not write it.

        Args:
            replacements: ways to replace this part, in order of preference.

        Raises:
            DataError: replacing the part changes the rendering elsewhere, too.
        """
        ambiguous = None
        for replacement in replacements:
            changed = self._with(index, replacement.message)
            if changed is None or not any(probe in changed for probe in replacement.probes):
                continue
            if (region := self._exact(changed, replacement.probes)) is not None:
                return region
            ambiguous = ambiguous or changed
            if replacement.decides:
                break
        if ambiguous is not None:
            self._raise_ambiguous(index, ambiguous)
        return None

    def _with(self, index: int, message: Message) -> str | None:
        """Return the rendering with another message at `index`; None if the template refuses it."""
        return self.template.attempt([*self.messages[:index], message, *self.messages[index + 1 :]], self.tools)

    def _exact(self, changed: str, probes: Sequence[str]) -> tuple[int, int] | None:
        """Return the region that probes replace in `changed`, or None if more differs than probes and white space."""
        spans = [match.span() for match in re.finditer("|".join(probes), changed)]
        first, last = spans[0][0], spans[-1][1]
        start, end = self._differing(changed)
        longer = len(changed) - len(self.text)
        once = len(spans) == len({changed[begin:stop] for begin, stop in spans})
        if not once or changed[start:first].strip() or changed[last : end + longer].strip():
            return None
        return min(start, first), max(end, last - longer)

    def _change(self, index: int, message: Message) -> tuple[int, int] | None:
        """Return the region between the first and the last change if a message is replaced by one with the probe; None
        if the template refuses or omits it."""
        changed = self._with(index, message)
        return None if changed is None or self.probe not in changed else self._differing(changed)

    def _differing(self, changed: str) -> tuple[int, int]:
        """Return the region between the first and the last difference from another rendering."""
        start = common_prefix(self.text, changed)
        return start, len(self.text) - common_prefix(self.text[start:][::-1], changed[start:][::-1])

    def _check_others(self, index: int, start: int, end: int) -> None:
        """Raise a DataError if a turn contains the text of another message; tool results are checked separately."""
        turn, content = self.text[start:end], self.messages[index].get("content")
        if isinstance(content, str) and turn.strip() == content.strip():
            return
        for number, message in enumerate(self.messages):
            content = message.get("content")
            if number == index or message["role"] == "tool" or not isinstance(content, str) or not content.strip():
                continue
            if content.strip() in turn:
                changed = self._with(number, {**message, "content": self.probe})
                if changed is not None and turn not in changed:
                    self._raise_ambiguous(number, changed)

    def _begin(self, index: int, start: int, end: int) -> int:
        """Return where the model would start to write: right after the generation prompt.

        This is before `start` if the template writes the beginning of an answer (Qwen3's empty thoughts) or the marks
        of a call, and after it if the generation prompt opens the thought that the row contains.
        """
        earlier = self.messages[:index]
        if earlier and self.template.prompts:
            prompt = self.template.attempt(earlier, self.tools, add_generation_prompt=True)
            if prompt is not None and len(prompt) <= end and self.text.startswith(prompt):
                return len(prompt)
        message = self.messages[index]
        if message.get("tool_calls") or any(message.get(key) for key in THOUGHTS):
            start = self._after_header(index, start)
        return next((mark.start() for mark in self._marks_around(start)), start)

    def _after_header(self, index: int, start: int) -> int:
        """Return where a turn starts if the template writes its first marks: after the header of a plain turn.

        The header is the text between the previous message and a plain text in place of the turn.
        """
        previous, plain = self.messages[max(0, index - 1) : index], {"role": "assistant", "content": self.probe}
        if not previous or not isinstance(previous[0].get("content"), str):
            return start
        floor = self._change(index - 1, {**previous[0], "content": self.probe})
        earlier = [*self.messages[: index - 1], {**previous[0], "content": self.other_probe}, plain]
        for later in (self.messages[index + 1 :], []):
            changed = self.template.attempt([*earlier, *later], self.tools) or ""
            header = changed.partition(self.other_probe)[2].partition(self.probe)
            if floor and header[1] and self.text.startswith(header[0], floor[1]) and floor[1] + len(header[0]) <= start:
                return floor[1] + len(header[0])
        return start

    def _end_of_calls(self, index: int, start: int, end: int) -> int:
        """Return where the calls of a turn end, including the template's text after the last argument."""
        border = self._border(index, end)
        if border is None:
            plain = self._change(index, {"role": "assistant", "content": self.probe})
            border = end if plain is None else max(end, plain[1])
            if any(begin < border and start < stop for begin, stop in self.results):
                self._raise_contradiction(index, start)
        tail = self.text[end:border]
        for mark in (*self.template.ends, self.template.closing):
            if mark and mark in tail:
                return end + tail.index(mark)
        return end + len(tail.rstrip())

    def _border(self, index: int, end: int) -> int | None:
        """Return up to where the conversation until a turn, rendered without the results of its calls, matches the full
        text.

        Returns None if that is before `end`: the template rewrites earlier turns, or refuses calls without results.
        """
        later = self.messages[index + 1 :]
        while later and later[0]["role"] == "tool":
            later = later[1:]
        alone = [
            self.template.attempt([*self.messages[: index + 1], *following], self.tools) for following in ([], later)
        ]
        shared = {text: common_prefix(self.text, text) for text in alone if text is not None}
        if not shared or max(shared.values()) < end:
            return None
        longest = max(shared, key=shared.__getitem__)
        border = shared[longest]
        if border in (len(longest), len(self.text)):
            return border
        # both renderings may share the beginning of different marks by chance
        inside = next((mark.start() for mark in self._marks_around(border)), None)
        return len(self.text[:border].rstrip(OPENERS)) if inside is None else inside

    def _marks_around(self, position: int) -> Iterator[re.Match[str]]:
        """Yield the special token that contains a position."""
        for mark in self.template.marks.finditer(self.text, max(0, position - 200), position + 200):
            if mark.start() < position < mark.end():
                yield mark

    def _raise_ambiguous(self, index: int, changed: str) -> NoReturn:
        start, end = self._differing(changed)
        begin = max(0, start - SHOWN)
        stop = end + len(changed) - len(self.text)
        raise DataError(
            f"replacing a text of message {index + 1} ({self.messages[index]['role']}) changes more than this text in"
            " the rendered conversation, so halfbyte cannot find the tokens to train: the chat template writes"
            f" {brief(self.text[begin : end + SHOWN])}, and with the text replaced by {self.probe!r} it writes"
            f" {brief(changed[begin : stop + SHOWN])}",
            WRITE_ONCE,
        )

    def _raise_contradiction(self, index: int, start: int) -> NoReturn:
        alone = self.template.attempt(self.messages[: index + 1], self.tools)
        raise DataError(
            f"halfbyte cannot find where assistant turn {index + 1} ends and the results of its calls start: the chat"
            f" template writes all turns as {brief(self.text[start:])}, and the conversation up to this turn as"
            f" {brief((alone or 'refused')[-300:])}",
            MARK_TURNS,
        )


def _hull(regions: Any) -> tuple[int, int]:
    """Return the first and the last position of some regions."""
    spans = list(regions.values() if isinstance(regions, dict) else regions)
    return min(start for start, _ in spans), max(end for _, end in spans)


def with_probes(
    message: Message, source: str, characters: Callable[[], Iterator[str]], numbers: Callable[[], Iterator[int]]
) -> Iterator[tuple[str, list[Replacement]]]:
    """Yield the name of each part of a message (its text, its thoughts, each call) with ways to replace it by probes.

    Args:
        source: the chat template, which may split texts at tags that occur in it.
        characters, numbers: return unused ones, to replace texts and other values.
    """
    probe = next(characters())
    calls = message.get("tool_calls") or []
    if message.get("content") or not (calls or any(message.get(key) for key in THOUGHTS)):
        yield (
            "content",
            [
                Replacement({**message, "content": probe}, probe, decides=False),
                *_between_tags(message, source, characters()),
            ],
        )
    for key in THOUGHTS:
        if message.get(key):
            yield key, [Replacement({**message, key: probe}, probe)]
    for index, call in enumerate(calls):
        function, probes = call["function"], list[str]()
        arguments = _with_leaves(function.get("arguments"), characters(), numbers(), probes)
        changes_of_call = [({"arguments": arguments}, probes, True)]
        if not probes:  # some templates fail on a number in place of empty arguments, or write more around it
            number = next(numbers())
            changes_of_call = [({"arguments": number}, [str(number)], False)]
        replacements = []
        for changes, written, decides in (*changes_of_call, ({"name": probe}, [probe], True)):
            changed = {**call, "function": {**function, **changes}}
            several = [*calls[:index], changed, *calls[index + 1 :]]
            replacements.append(Replacement({**message, "tool_calls": several}, written, decides))
        yield f"tool_calls[{index}]", replacements


def _between_tags(message: Message, source: str, characters: Iterator[str]) -> Iterator[Replacement]:
    """Yield a message with probes in its text, between the tags at which the template may split it."""
    content = message.get("content")
    if not isinstance(content, str) or not (tags := {tag for tag in TAG.findall(content) if tag in source}):
        return
    *pieces, last = re.split(f"({'|'.join(map(re.escape, tags))})", content)
    probes = list(islice(characters, len(pieces) + 1))
    texts = [
        piece if piece in tags or not piece.strip() else _around(piece, probe)
        for piece, probe in zip(pieces, probes, strict=False)
    ]
    yield Replacement({**message, "content": "".join([*texts, _around(last, probes[-1])])}, probes)


def _around(text: str, probe: str) -> str:
    """Return the probe between the white space around a text."""
    stripped = text.strip()
    return text.replace(stripped, probe) if stripped else text + probe


def _with_leaves(value: Any, characters: Iterator[str], numbers: Iterator[int], probes: list[str]) -> Any:
    """Return a JSON value with probes in place of its texts and numbers; append them to `probes`.

    Empty values stay, since a template may leave them out.
    """
    if not value:
        return value
    if isinstance(value, dict):
        return {key: _with_leaves(leaf, characters, numbers, probes) for key, leaf in value.items()}
    if isinstance(value, list):
        return [_with_leaves(leaf, characters, numbers, probes) for leaf in value]
    probe = next(characters) if isinstance(value, str) else next(numbers)
    probes.append(str(probe))
    return probe


def with_ends(template: Template, text: str, turns: Sequence[Turn]) -> list[Turn]:
    """Extend each turn's limit over the special tokens that end it.

    After an answer these are the special tokens and white space up to the last declared end. Without a declared end,
    they are the text that also follows the last turn, unless a generation prompt starts there.
    """
    if not turns:
        return []
    last, _ = _run(template, text, turns[-1].end)
    extended = []
    for turn in turns:
        run, declared = _run(template, text, turn.end)
        limit = declared or turn.end + common_prefix(text[turn.end : run], text[turns[-1].end : last])
        extended.append(replace(turn, limit=limit))
    return extended


def _run(template: Template, text: str, end: int) -> tuple[int, int | None]:
    """Return where the run of special tokens and white space after an answer ends, and the end of its last declared
    end token."""
    position, declared = end, None
    while mark := template.marks.match(text, len(text) - len(text[position:].lstrip())):
        if mark[0] in template.ends:
            declared = mark.end()
        elif template.opening and mark[0] == template.opening:
            break
        position = mark.end()
    return position, declared


def not_shown(messages: Sequence[Message], text: str) -> list[str]:
    """Return the names of message parts that a rendered conversation does not contain, such as `assistant content`.

    White space and JSON escapes do not count. A text that is shown without its thoughts is named for the thoughts.
    """
    shown = _squeezed(text)
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "'": "\\u0027"}  # as jinja's tojson writes them
    missing = []
    for name, value in (named for message in messages for named in _texts(message)):
        plain, escaped = (json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True))
        html = re.sub("[<>&']", lambda match: escapes[match[0]], escaped)
        if not any(_squeezed(form) in shown for form in (value, plain, escaped, html)):
            missing.append(name)
    return missing


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    role, content = message["role"], message.get("content")
    if isinstance(content, list):
        yield from ((f"{role} content", part["text"]) for part in content if part["type"] == "text")
    if isinstance(content, str):
        thought, mark, answer = content.rpartition("</think>") if role == "assistant" else ("", "", content)
        yield f"{role} content", answer
        if mark:
            yield "thoughts before </think>", thought.replace("<think>", "")
    for key in THOUGHTS:
        if isinstance(message.get(key), str):
            yield f"{role} {key}", message[key]
    for number, call in enumerate(message.get("tool_calls") or []):
        for value in (call["function"].get("name"), *_leaves(call["function"].get("arguments"))):
            if isinstance(value, str):
                yield f"tool_calls[{number}]", value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _squeezed(text: str) -> str:
    return "".join(text.split())


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix of `a` and `b`."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
