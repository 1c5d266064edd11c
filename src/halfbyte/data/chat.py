"""Chat templates: what a template understands, and which characters of a rendered conversation the assistant wrote.

Where a template has `{% generation %}` marks, they say what the assistant wrote. Elsewhere it is found by difference
(`turns`), which holds for templates that rewrite earlier turns (Qwen3 drops their thinking), append a token at the very
end (Phi-3), refuse partial conversations, or write the results of calls inside the model's turn (Gemma 4).
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from ..reading.bounded import Bounded, Failure, restart_clock
from ..reading.model_config import declared_stop_tokens
from ..utils.errors import DataError, HalfbyteError
from ..utils.notices import notice
from .formats import Document, Message
from .turns import Turn, Turns, common_prefix, not_shown, with_ends

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "halfbyte_probe"
CALL_ID = "abcdefghi"  # nine letters or digits, as Mistral's templates want it
ANOTHER = "give another one with chat_template_path"
CHANGE = "change the row, or give another template with chat_template_path"
LONGEST = 2**20  # characters that a template may add to a conversation; beside 16 for each of its own
MASK_BY_MARKS = "the {% generation %} marks of the chat template"
MASK_BY_DIFFERENCE = "difference of two renderings, one with the assistant turn replaced"


class Known(NamedTuple):
    """What a template was found to understand, by rendering small conversations.

    Attributes:
        tools, tool_calls, tool_results, system: whether it shows them.
        prompts: whether it writes a generation prompt when asked.
        parts: whether it takes the content of messages as a list of parts.
        alternating: whether it refuses two user turns in a row.
        closing: what it writes behind the last answer, without white space.
        ending: the special token that ends an answer, by earlier turns where the last has none; empty: there is none.
        opening: the first special token of a generation prompt; empty: it has none.
    """

    tools: bool
    tool_calls: bool
    tool_results: bool
    system: bool
    prompts: bool
    parts: bool
    alternating: bool
    closing: str
    ending: str
    opening: str


class ChatTemplate:
    """A tokenizer's chat template and what it was found to understand (by rendering small probes).

    Args:
        tokenizer: with a chat template.

    Raises:
        DataError: the template cannot render even one user and one assistant turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.ends = declared_end_tokens(tokenizer)
        special = {*map(str, tokenizer.added_tokens_decoder.values()), *self.ends}
        self.marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._known: dict[bool, Known] = {}
        self.parts = False
        self._bounded = Bounded(self._answer)
        [found] = self._bounded([None])
        if isinstance(found, Failure):
            raise DataError(f"the chat template fails on a plain conversation: {found.said}", ANOTHER)
        if isinstance(found, HalfbyteError):
            raise found
        self._know(found)

    def _answer(self, document: Document | None) -> Any:
        """What the child process computes: the turns of a conversation, or the text of one that is open; at first, what
        the template understands."""
        if document is not None and document.get("open"):
            self._choose(document.get("tools"))
            return self.render(document["messages"], document.get("tools"), add_generation_prompt=True)
        if document is not None:
            return self.assistant_turns(document)
        named = isinstance(self.tokenizer.chat_template, dict)  # which is written depends on whether there are tools
        found = {with_tools: self._probe(with_tools) for with_tools in ((False, True) if named else (False,))}
        self._know(found)
        return found

    def _know(self, found: dict[bool, Known]) -> None:
        self._known = found
        self._choose(None)

    def _choose(self, tools: list[Any] | None) -> None:
        """Take what is known of the template that writes conversations with these tools."""
        known = self._known.get(bool(tools)) or self._known[False]
        self.shows_tools, self.shows_tool_calls, self.shows_tool_results, self.shows_system = known[:4]
        self.prompts, self.parts, self.alternating, self.closing, self.ending, self.opening = known[4:]
        self.marked = bool(MARKS.search(self.tokenizer.get_chat_template(tools=tools)))

    def _probe(self, with_tools: bool) -> Known:
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        given = [_tool("t")] if with_tools else None
        self.parts = False
        self.render([user, answer], given)
        self.parts = takes_parts(self.tokenizer, given)
        call = {"role": "assistant", "content": "", "tool_calls": [_call(PROBE)]}
        result = {"role": "tool", "content": PROBE, "name": "f", "tool_call_id": CALL_ID}
        tools = self._shows([user, answer], [_tool(PROBE)])
        tool_calls = self._shows([user, call, {**result, "content": "c"}, answer], given)
        calling = {**call, "tool_calls": [_call("f")]} if tool_calls else answer
        tool_results = self._shows([user, calling, result, answer], given)
        system = self._shows([{"role": "system", "content": PROBE}, user, answer], given)
        prompt, bare = self.attempt([user], given, add_generation_prompt=True), self.attempt([user], given)
        prompts = prompt is not None and prompt != bare
        alternating = self.attempt([user, user, answer], given) is None
        added = prompt[common_prefix(prompt, bare or "") :] if prompt is not None and prompts else ""
        opening = found[0] if bare is not None and (found := self.marks.search(added)) else ""
        closing, ending = self._closing(given)
        return Known(
            tools, tool_calls, tool_results, system, prompts, self.parts, alternating, closing, ending, opening
        )

    def _closing(self, given: list[Any] | None) -> tuple[str, str]:
        """What the template writes behind the last answer, and the special token that ends answers."""
        asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
        last = (self.attempt(asked, given) or "").rpartition(PROBE)[2].strip()
        follow = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
        texts = (last, (self.attempt([*asked, *follow], given) or "").rpartition(PROBE)[2].lstrip())
        firsts = [found[0] for text in texts if (found := self.marks.match(text))]
        ending = next((mark for mark in firsts if mark in self.ends), firsts[0] if self.marks.match(last) else "")
        return last, ending

    def _shows(self, messages: list[Message], tools: list[Any] | None = None) -> bool:
        return PROBE in (self.attempt(messages, tools) or "")

    def attempt(
        self, messages: list[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Render, or None where the template refuses: what a probe asks, or a part of a conversation."""
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
        return _render(self.tokenizer, self._as_taken(messages), tools, add_generation_prompt)

    def _as_taken(self, messages: Sequence[Message]) -> list[Message]:
        return in_parts(messages) if self.parts else list(messages)

    def adapt(self, document: Document) -> Document:
        """Put what the template would ignore or refuse into a form it shows, and say so.

        A list of tools goes into the system message, tool calls become the assistant's text, tool results and system
        messages become the user's. Turns after the last assistant turn are left out: nothing in them is trained.
        """
        messages = document["messages"]
        roles = [message["role"] for message in messages]
        messages = messages[: len(roles) - roles[::-1].index("assistant")] if "assistant" in roles else []
        behind = {"behind": len(roles) - len(messages)} if messages and len(roles) > len(messages) else {}
        messages, tools = self.understood(messages, document.get("tools"))
        return {**document, "messages": messages, "tools": tools, **behind}

    def understood(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[Message], list[Any] | None]:
        """The same conversation and tools in a form that the template shows; says what it changes."""
        self._choose(tools)
        messages = [dict(message) for message in messages]
        results = [message["role"] == "tool" for message in messages]
        for message in messages:
            call_text = message.pop("call_text", None)
            if "tool_calls" in message and not self.shows_tool_calls:
                calls = message.pop("tool_calls")
                message["content"] += call_text or "\n".join(_json(call["function"]) for call in calls)
                notice("tool-calls", "the chat template knows no tool calls: they become the assistant's text")
            if message["role"] == "tool" and not self.shows_tool_results:
                message["role"] = "user"
                notice("tool-results", "the chat template knows no role tool: tool results are given as user turns")
        if self.alternating and not self.shows_tool_results:
            messages = _joined(messages, results)
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

    def assistant_turns(self, document: Document) -> tuple[str, list[Turn], list[str]]:
        """Render an adapted conversation and find what the assistant wrote, but for the turns that are given.

        Returns:
            The text, its assistant turns in order (none where no assistant speaks), and the names of what the
            messages say that the text does not hold.

        Raises:
            DataError: the template refuses the conversation, does not show an assistant turn, or marks other parts than
                turns where some of them are given.
        """
        messages, tools = document["messages"], document.get("tools")
        if not messages:
            return "", [], []
        self._choose(tools)
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
                "mark each assistant turn with {% generation %} ... {% endgeneration %}",
            )
        turns = with_ends(self, text, spans)
        turns = [replace(turn, trained=i not in untrained) for i, turn in enumerate(turns)][given:]
        return text, turns, not_shown(messages, text) + ["turns behind the last answer"] * bool(document.get("behind"))

    def _marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Turn]]:
        restart_clock(_more(messages))
        # The renderer behind apply_chat_template(return_assistant_tokens_mask=True): it gives characters, which are
        # needed to look behind a block for the end-of-turn token.
        render: Any = render_jinja_template  # annotated to return one string, but gives texts and blocks
        rendered, blocks = render(
            conversations=[self._as_taken(messages)],
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
        return rendered[0], Turns(self, messages, tools, rendered[0]).grouped(blocks[0])

    def _differing(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Turn]]:
        text = self.render(messages, tools)
        return text, Turns(self, messages, tools, text).found()


def declared_end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokens that a tokenizer, and the generation_config.json beside its files, say an answer ends with."""
    folder = Path(tokenizer.name_or_path or "")
    stored = declared_stop_tokens(folder) if tokenizer.name_or_path and folder.is_dir() else []
    names = tokenizer.convert_ids_to_tokens([each for each in stored if each < len(tokenizer)])
    return tuple(dict.fromkeys(str(name) for name in (tokenizer.eos_token, *names) if name))


def takes_parts(tokenizer: Any, tools: list[Any] | None = None) -> bool:
    """Whether a chat template shows the content of a message as a list of parts, and as a text does not (LLaVA's)."""
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    for parts in (False, True):
        try:
            text = _render(tokenizer, in_parts(messages) if parts else messages, tools, False)
        except Exception:  # a template is a program, and may raise anything
            continue
        if PROBE in text:
            return parts
    return False


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Messages whose texts are lists of one part."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else dict(message)
        for message in messages
    ]


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
        renderer = Bounded(lambda item: _prompt(held(), *item))
        _renderers[tokenizer] = tokenizer.chat_template, renderer
    [found] = renderer([(list(messages), None, add_generation_prompt, continue_final_message)])
    if isinstance(found, Failure):
        raise DataError(f"the model's chat template says: {found.said}", "give turns that it takes")
    if isinstance(found, HalfbyteError):
        raise found
    return found


def _prompt(tokenizer: Any, messages: list[Message], *options: Any) -> str:
    return _render(tokenizer, in_parts(messages) if takes_parts(tokenizer) else messages, *options)


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


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def _call(name: str) -> dict[str, Any]:
    return {"type": "function", "id": CALL_ID, "function": {"name": name, "arguments": {}}}


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


def _joined(messages: list[Message], results: Sequence[bool]) -> list[Message]:
    """Messages in which results of calls, which are user turns here, are one turn with the user turns around them."""
    joined: list[Message] = []
    before = False  # whether the last message holds a result
    for message, result in zip(messages, results, strict=True):
        if joined and message["role"] == joined[-1]["role"] == "user" and (result or before):
            joined[-1]["content"] += f"\n\n{message['content']}"
        else:
            joined.append(message)
            before = False
        before |= result
    return joined
