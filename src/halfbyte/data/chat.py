"""Chat templates: what a template understands, and which characters of a rendered conversation the assistant wrote.

Nothing here searches for role markers. Where a template has `{% generation %}` marks, they say what the assistant
wrote. Elsewhere it is found by difference: the conversation is rendered again with one assistant turn replaced by a
character that occurs nowhere else; what differs is that turn, as the template wrote it. This holds for templates that
rewrite earlier turns (Qwen3 drops their thinking), append a token at the very end (Phi-3) or refuse partial
conversations.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..errors import DataError, HalfbyteError
from ..notices import notice
from ..reading.bounded import Bounded, Failure, restart_clock
from .formats import Document, Message

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "halfbyte_probe"
ANOTHER = "give another one with chat_template_path"
CHANGE = "change the row, or give another template with chat_template_path"
LONGEST = 2**20  # characters that a template may add to a conversation; beside 16 for each of its own
MASK_BY_MARKS = "the {% generation %} marks of the chat template"
MASK_BY_DIFFERENCE = "difference of two renderings, one with the assistant turn replaced"


@dataclass(frozen=True)
class Turn:
    """What the assistant wrote in one turn, as character positions in the rendered text.

    `start:end` is the answer; `end:limit` is what the template puts after every answer, where an end-of-turn token may
    stand. `trained` is false where the row says that the turn is context alone.
    """

    start: int
    end: int
    limit: int
    trained: bool = True


class ChatTemplate:
    """A tokenizer's chat template and what it was found to understand (by rendering small probes).

    Args:
        tokenizer: with a chat template.

    Raises:
        DataError: the template cannot render even one user and one assistant turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.marked = bool(MARKS.search(tokenizer.get_chat_template()))
        self._bounded = Bounded(self._answer)
        [found] = self._bounded([None])
        if isinstance(found, Failure):
            raise DataError(f"the chat template fails on a plain conversation: {found.said}", ANOTHER)
        if isinstance(found, HalfbyteError):
            raise found
        self._knows(found)

    def _answer(self, document: Document | None) -> Any:
        """What the child process computes: the turns of a conversation, or the text of one that is open; at first, what
        the template understands."""
        if document is not None and document.get("open"):
            return self.render(document["messages"], document.get("tools"), add_generation_prompt=True)
        if document is not None:
            return self.assistant_turns(document)
        found = self._probe()
        self._knows(found)
        return found

    def _knows(self, found: tuple[bool, ...]) -> None:
        self.shows_tools, self.shows_tool_calls, self.shows_tool_results, self.shows_system, self.prompts = found

    def _probe(self) -> tuple[bool, ...]:
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        self.render([user, answer])
        probe_tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {}}}
        call = {"role": "assistant", "content": "", "tool_calls": [_call(PROBE)]}
        result = {"role": "tool", "content": PROBE, "name": "f"}
        tools = self._shows([user, answer], [probe_tool])
        tool_calls = self._shows([user, call, {**result, "content": "c"}, answer])
        tool_results = self._shows(
            [user, {**call, "tool_calls": [_call("f")]} if tool_calls else answer, result, answer]
        )
        system = self._shows([{"role": "system", "content": PROBE}, user, answer])
        prompt, bare = self._try([user], add_generation_prompt=True), self._try([user])
        return tools, tool_calls, tool_results, system, prompt is not None and prompt != bare

    def _shows(self, messages: list[Message], tools: list[Any] | None = None) -> bool:
        return PROBE in (self._try(messages, tools) or "")

    def _try(
        self, messages: list[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Render, or None where the template refuses: what a probe asks, or a conversation without an answer."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except Exception:  # a template is a program, and may raise anything
            return None

    @property
    def mask(self) -> str:
        """How assistant turns are found, for the data report."""
        return MASK_BY_MARKS if self.marked else MASK_BY_DIFFERENCE

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The conversation as one string. Not bounded: called by what is."""
        return _render(self.tokenizer, messages, tools, add_generation_prompt)

    def adapt(self, document: Document) -> Document:
        """Put what the template would ignore or refuse into a form it shows, and say so.

        A list of tools goes into the system message, tool calls become the assistant's text, tool results and system
        messages become the user's. Turns after the last assistant turn are left out: nothing in them is trained.
        """
        messages = document["messages"]
        roles = [message["role"] for message in messages]
        messages = messages[: len(roles) - roles[::-1].index("assistant")] if "assistant" in roles else []
        messages, tools = self.understood(messages, document.get("tools"))
        return {**document, "messages": messages, "tools": tools}

    def understood(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[Message], list[Any] | None]:
        """The same conversation and tools in a form that the template shows; says what it changes."""
        messages = [dict(message) for message in messages]
        for message in messages:
            call_text = message.pop("call_text", None)
            if "tool_calls" in message and not self.shows_tool_calls:
                calls = message.pop("tool_calls")
                message["content"] += call_text or "\n".join(_json(call["function"]) for call in calls)
                notice("tool-calls", "the chat template knows no tool calls: they become the assistant's text")
            if message["role"] == "tool" and not self.shows_tool_results:
                message["role"] = "user"
                notice("tool-results", "the chat template knows no role tool: tool results are given as user turns")
        if tools and messages and not self.shows_tools:
            _prepend_system(messages, tool_text(tools))
            notice("tools", "the chat template ignores tools: their descriptions go into the system message")
            tools = None
        if messages and messages[0]["role"] == "system" and not self.shows_system:
            messages = _system_into_user(messages)
            notice("system", "the chat template knows no role system: that text goes in front of the first user turn")
        return messages, tools

    def turns_of(self, conversations: Sequence[Document]) -> list[tuple[str, list[Turn]] | HalfbyteError]:
        """`assistant_turns` of each, in a child process under limits of time and memory (see `reading.bounded`)."""
        return self._asked(conversations)

    def prompts_of(self, conversations: Sequence[Document]) -> list[str | HalfbyteError]:
        """Each as text up to where an answer begins, in a child process like `turns_of`."""
        return self._asked([{**conversation, "open": True} for conversation in conversations])

    def _asked(self, conversations: Sequence[Document]) -> list[Any]:
        return [
            DataError(f"the chat template refuses the conversation: {found.said}", CHANGE)
            if isinstance(found, Failure)
            else found
            for found in self._bounded(conversations)
        ]

    def assistant_turns(self, document: Document) -> tuple[str, list[Turn]]:
        """Render an adapted conversation and find what the assistant wrote, but for the turns that are given.

        Returns:
            The text and its assistant turns in order; none where no assistant speaks.

        Raises:
            DataError: the template refuses the conversation, does not show an assistant turn, or marks other parts than
                turns where some of them are given.
        """
        messages, tools = document["messages"], document.get("tools")
        if not messages:
            return "", []
        try:
            text, spans = self._marked(messages, tools) if self.marked else self._differing(messages, tools)
        except (HalfbyteError, MemoryError):
            raise
        except Exception as error:  # a template is a program, and may raise anything
            raise DataError(f"the chat template refuses the conversation: {error}", CHANGE) from error
        given, untrained = document.get("given", 0), document.get("untrained", ())
        said = sum(message["role"] == "assistant" for message in messages)
        if (given or untrained) and len(spans) != said:
            raise DataError(
                f"the chat template marks {len(spans)} parts of {said} assistant turns, so it cannot be told which of"
                " them are trained",
                "mark each assistant turn once with {% generation %} ... {% endgeneration %}",
            )
        turns = _with_limits(text, spans)
        return text, [replace(turn, trained=i not in untrained) for i, turn in enumerate(turns)][given:]

    def _marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Turn]]:
        restart_clock(_more(messages))
        # The renderer behind apply_chat_template(return_assistant_tokens_mask=True): it gives characters, which are
        # needed to look behind a block for the end-of-turn token.
        render: Any = render_jinja_template  # annotated to return one string, but gives texts and blocks
        rendered, blocks = render(
            conversations=[messages],
            tools=tools,
            chat_template=self.tokenizer.get_chat_template(tools=tools),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        if not blocks[0]:
            raise DataError(
                "the chat template has {% generation %} marks, but none around this conversation's assistant turns",
                "mark every assistant turn in the template, or remove the marks",
            )
        return rendered[0], [Turn(start, end, end) for start, end in blocks[0]]

    def _differing(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Turn]]:
        text = self.render(messages, tools)
        stranger = next(char for char in map(chr, range(0xE000, 0xF900)) if char not in text)
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            replaced = {"role": "assistant", "content": stranger}
            changed = self.render([*messages[:index], replaced, *messages[index + 1 :]], tools)
            if stranger not in changed:
                raise DataError(
                    f"the chat template does not show assistant turn {index + 1}, so it cannot be told what to train",
                    "mark the assistant's text with {% generation %} ... {% endgeneration %} in a chat_template_path",
                )
            start = common_prefix(text, changed)
            end = len(text) - common_prefix(text[start:][::-1], changed[start:][::-1])
            turns.append(Turn(self._after_prompt(text, start, messages[:index], tools), end, end))
        return text, turns

    def _after_prompt(self, text: str, start: int, before: list[Message], tools: list[Any] | None) -> int:
        """Where a model would begin to write: right behind the generation prompt.

        That is before `start` when the template itself writes the beginning of an answer (Qwen3's empty thoughts).
        """
        if not before or not self.prompts:
            return start
        prompt = self._try(before, tools, add_generation_prompt=True)
        return start if prompt is None or len(prompt) > start or not text.startswith(prompt) else len(prompt)


_renderers: weakref.WeakKeyDictionary[Any, tuple[Any, Bounded[Any, str]]] = weakref.WeakKeyDictionary()


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """A conversation as the tokenizer's chat template writes it, up to where an answer begins, under the same limits.

    Args:
        add_generation_prompt, continue_final_message: as `apply_chat_template` takes them; the latter leaves out what
            the template puts behind the last message.

    Raises:
        DataError: the template refuses the conversation, or takes more time or memory than it may.
    """
    template, renderer = _renderers.get(tokenizer, (None, None))
    if renderer is None or template != tokenizer.chat_template:
        held = weakref.ref(tokenizer)  # so that the entry does not keep its own key
        renderer = Bounded(lambda item: _render(held(), *item))
        _renderers[tokenizer] = tokenizer.chat_template, renderer
    [found] = renderer([(list(messages), None, add_generation_prompt, continue_final_message)])
    if isinstance(found, Failure):
        raise DataError(f"the model's chat template says: {found.said}", "give turns that it takes")
    if isinstance(found, HalfbyteError):
        raise found
    return found


def _render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
) -> str:
    """A conversation as one string. Not bounded: called by what is."""
    restart_clock(_more(messages))
    text = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    assert isinstance(text, str)
    if len(text) > LONGEST and len(text) > LONGEST + 16 * len(_json([messages, tools])):
        raise DataError(f"the chat template makes {len(text):,} characters of one conversation", ANOTHER)
    return text


def _more(messages: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that rendering so much may take beyond what every rendering may."""
    characters = sum(len(content) for message in messages if isinstance(content := message.get("content"), str))
    return len(messages) / 1_000 + characters / 200_000


def _call(name: str) -> dict[str, Any]:
    return {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": {}}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tool_text(tools: list[dict[str, Any]]) -> str:
    """The tools as plain text, one JSON object a line."""
    lines = "\n".join(_json(tool.get("function", tool)) for tool in tools)
    return f"You can call these functions by answering with their name and arguments as JSON:\n{lines}"


def _prepend_system(messages: list[Message], text: str) -> None:
    if messages[0]["role"] == "system":
        messages[0]["content"] += f"\n\n{text}"
    else:
        messages.insert(0, {"role": "system", "content": text})


def _system_into_user(messages: list[Message]) -> list[Message]:
    system, rest = messages[0], messages[1:]
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *rest]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


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


def _with_limits(text: str, turns: list[Turn]) -> list[Turn]:
    """Extend each turn's limit over what follows it the way the end of the text follows the last turn."""
    if not turns:
        return []
    closing = text[turns[-1].end :]
    nexts = [turn.start for turn in turns[1:]] + [len(text)]
    return [
        replace(turn, limit=turn.end + common_prefix(text[turn.end : following], closing))
        for turn, following in zip(turns, nexts, strict=True)
    ]
