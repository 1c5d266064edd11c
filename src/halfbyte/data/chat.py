"""Chat templates: which features a template supports, and which characters of a rendered conversation the assistant
wrote.

If a template has `{% generation %}` marks, they give the assistant's text. Otherwise it is found by comparing
renderings (`turns`). This works for templates that rewrite earlier turns (Qwen3 drops their thinking), append a token
at the very end (Phi-3), refuse partial conversations, or write tool results inside the model's turn (Gemma 4).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from ..reading.bounded import Bounded, Failure, restart_clock
from ..reading.model_config import declared_stop_tokens
from ..utils.errors import DataError, HalfbyteError
from ..utils.notices import notice
from .formats import Document, Message, joined_contents
from .tool_template import TOOLS_HEADER, with_tools
from .turns import Turn, Turns, common_prefix, not_shown, with_ends

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PROBE = "halfbyte_probe"
CALL_ID = "abcdefghi"  # nine letters or digits, as Mistral's templates require
FIX_TEMPLATE = "give another template with chat_template_path"
FIX_ROW = "change the row, or give another template with chat_template_path"
MOST_ADDED = 2**20  # characters that a template may add to a conversation, in addition to 16 per input character
MASK_BY_MARKS = "the {% generation %} marks of the chat template"
MASK_BY_DIFFERENCE = "difference of two renderings, one with the assistant turn replaced"


class Features(NamedTuple):
    """Features of a chat template, found by rendering small conversations.

    Attributes:
        tools, tool_calls, tool_results, system: whether the template writes them.
        prompts: whether it writes a generation prompt on request.
        content_parts: whether it takes message content as a list of parts.
        alternating: whether it refuses two user turns in a row.
        closing: the text after the last answer, stripped.
        ending: the special token that ends an answer (of earlier turns, if the last has none); empty without one.
        opening: the first special token of a generation prompt; empty without one.
    """

    tools: bool
    tool_calls: bool
    tool_results: bool
    system: bool
    prompts: bool
    content_parts: bool
    alternating: bool
    closing: str
    ending: str
    opening: str


class ChatTemplate:
    """A tokenizer's chat template and its features, probed by rendering small conversations.

    Args:
        tokenizer: with a chat template.

    Raises:
        DataError: the template cannot render one user and one assistant turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        self.ends = declared_end_tokens(tokenizer)
        self.time = datetime.now()  # the clock of all renderings: two renderings of a row must be comparable
        special = {*map(str, tokenizer.added_tokens_decoder.values()), *self.ends}
        self.marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._features: dict[bool, Features] = {}
        self.content_parts = False
        self.rewrote_tools = False  # whether a conversation's tools, calls or results became plain text
        self._bounded = Bounded(self._render_in_child)
        [features] = self._bounded([None])
        if isinstance(features, Failure):
            raise DataError(f"the chat template fails on a conversation of plain text: {features.reason}", FIX_TEMPLATE)
        if isinstance(features, HalfbyteError):
            raise features
        self._set_features(features)

    def _render_in_child(self, document: Document | None) -> Any:
        """Run in the child process: probe the template (None), else return a conversation's turns, or its text if it
        is open."""
        if document is not None and document.get("open"):
            self._use_features(document.get("tools"))
            return self.render(document["messages"], document.get("tools"), add_generation_prompt=True)
        if document is not None:
            return self.assistant_turns(document)
        named = isinstance(self.tokenizer.chat_template, dict)  # tools select another template
        features = {with_tools: self._probe(with_tools) for with_tools in ((False, True) if named else (False,))}
        self._set_features(features)
        return features

    def _set_features(self, features: dict[bool, Features]) -> None:
        self._features = features
        self._use_features(None)

    def _use_features(self, tools: list[Any] | None) -> None:
        """Set the features of the template that renders conversations with these tools."""
        features = self._features.get(bool(tools)) or self._features[False]
        self.shows_tools, self.shows_tool_calls, self.shows_tool_results, self.shows_system = features[:4]
        self.prompts, self.content_parts, self.alternating, self.closing, self.ending, self.opening = features[4:]
        self.source: str = self.tokenizer.get_chat_template(tools=tools)
        self.marked = bool(MARKS.search(self.source))

    def _probe(self, with_tools: bool) -> Features:
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        tool_list = [_tool("t")] if with_tools else None
        self.content_parts = takes_parts(self.tokenizer, tool_list)
        self.render([user, answer], tool_list)  # raises the template's error if it writes neither form
        call = {"role": "assistant", "content": "", "tool_calls": [_call(PROBE)]}
        result = {"role": "tool", "content": PROBE, "name": "f", "tool_call_id": CALL_ID}
        tools = self._shows([user, answer], [_tool(PROBE)])
        tool_calls = self._shows([user, call, {**result, "content": "c"}, answer], tool_list)
        calling = {**call, "tool_calls": [_call("f")]} if tool_calls else answer
        tool_results = self._shows([user, calling, result, answer], tool_list)
        system = self._shows([{"role": "system", "content": PROBE}, user, answer], tool_list)
        prompt, bare = self.attempt([user], tool_list, add_generation_prompt=True), self.attempt([user], tool_list)
        prompts = prompt is not None and prompt != bare
        alternating = self.attempt([user, user, answer], tool_list) is None
        added = prompt[common_prefix(prompt, bare or "") :] if prompt is not None and prompts else ""
        opening = mark[0] if bare is not None and (mark := self.marks.search(added)) else ""
        closing, ending = self._closing(tool_list)
        return Features(
            tools, tool_calls, tool_results, system, prompts, self.content_parts, alternating, closing, ending, opening
        )

    def _closing(self, tool_list: list[Any] | None) -> tuple[str, str]:
        """Return the text that the template writes after the last answer, and the special token that ends answers."""
        conversation = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PROBE}]
        last = (self.attempt(conversation, tool_list) or "").rpartition(PROBE)[2].strip()
        follow = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
        texts = (last, (self.attempt([*conversation, *follow], tool_list) or "").rpartition(PROBE)[2].lstrip())
        firsts = [mark[0] for text in texts if (mark := self.marks.match(text))]
        ending = next((mark for mark in firsts if mark in self.ends), firsts[0] if self.marks.match(last) else "")
        return last, ending

    def _shows(self, messages: list[Message], tools: list[Any] | None = None) -> bool:
        return PROBE in (self.attempt(messages, tools) or "")

    def attempt(
        self, messages: list[Message], tools: list[Any] | None = None, *, add_generation_prompt: bool = False
    ) -> str | None:
        """Render a probe or part of a conversation; return None if the template refuses it."""
        try:
            return self.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except Exception:  # a template is a program and can raise anything
            return None

    @property
    def mask(self) -> str:
        """Return how assistant turns are found, for the data report."""
        return MASK_BY_MARKS if self.marked else MASK_BY_DIFFERENCE

    @property
    def variables(self) -> set[str]:
        """Return the names that the template reads and that no rendering sets, such as Qwen3's `enable_thinking`."""
        environment = chat_template_utils._compile_jinja_template(self.source).environment
        standard = {*inspect.signature(chat_template_utils.render_jinja_template).parameters, "messages"}
        standard |= {
            *inspect.signature(self.tokenizer.apply_chat_template).parameters,
            *self.tokenizer.special_tokens_map,
        }
        return find_undeclared_variables(environment.parse(self.source)) - standard - environment.globals.keys()

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the conversation as one string. Has no limits of its own: callers run in the bounded child process."""
        with _clock_at(self.time):
            return _render(self.tokenizer, self._in_content_form(messages), tools, add_generation_prompt)

    def _in_content_form(self, messages: Sequence[Message]) -> list[Message]:
        return in_parts(messages) if self.content_parts else list(messages)

    def adapt(self, document: Document) -> Document:
        """Rewrite parts that the template would ignore or refuse into a form that it writes, with a notice for each
        change.

        Tools move into the system message, tool calls become assistant text, tool results and system messages become
        user text. Turns after the last assistant turn are removed, since they contain no trained text.
        """
        messages = document["messages"]
        roles = [message["role"] for message in messages]
        messages = messages[: len(roles) - roles[::-1].index("assistant")] if "assistant" in roles else []
        removed = {"removed": len(roles) - len(messages)} if messages and len(roles) > len(messages) else {}
        messages, tools = self.adapt_messages(messages, document.get("tools"))
        return {**document, "messages": messages, "tools": tools, **removed}

    def adapt_messages(
        self, messages: Sequence[Message], tools: list[Any] | None = None
    ) -> tuple[list[Message], list[Any] | None]:
        """Return the conversation and tools in a form that the template writes, with a notice for each change."""
        self._use_features(tools)
        messages = [dict(message) for message in messages]
        results = [message["role"] == "tool" for message in messages]
        for message in messages:
            as_given = message.pop("call_text", None)
            if "tool_calls" in message and not self.shows_tool_calls:
                calls = message.pop("tool_calls")
                message["content"] += as_given or call_text(calls)
                self.rewrote_tools = True
                notice("tool-calls", "the chat template does not support tool calls: writing them as assistant text")
            if message["role"] == "tool" and not self.shows_tool_results:
                message["role"] = "user"
                self.rewrote_tools = True
                notice(
                    "tool-results", "the chat template does not support role tool: writing tool results as user turns"
                )
        if self.alternating and not self.shows_tool_results:
            messages = _merge_user_turns(messages, results)
        if tools and messages and not self.shows_tools:
            if messages[0]["role"] == "system":
                messages[0]["content"] += f"\n\n{tool_text(tools)}"
            else:
                messages.insert(0, {"role": "system", "content": tool_text(tools)})
            self.rewrote_tools = True
            notice("tools", "the chat template ignores tools: writing their descriptions into the system message")
            tools = None
        if messages and messages[0]["role"] == "system" and not self.shows_system:
            system, *messages = messages
            if messages and messages[0]["role"] == "user":
                messages[0]["content"] = joined_contents(system["content"], messages[0]["content"])
            else:
                messages.insert(0, {"role": "user", "content": system["content"]})
            notice("system", "the chat template does not support role system: writing it before the first user turn")
        return messages, tools

    def save_tools(self) -> None:
        """Extend the tokenizer's template so that it writes tools, calls and results as the rows that `adapt` rewrote.

        Templates that take content as parts stay as they are, with a notice.
        """
        if not self.rewrote_tools:
            return
        if self.content_parts:
            problem = "the saved chat template leaves out tools, tool calls and tool results, which the rows contain"
            notice("tools-saved", f"{problem}: write them into the messages, as `halfbyte preview` shows them")
            return
        template = self.tokenizer.chat_template
        named = template if isinstance(template, dict) else {"default": template}
        extended = {}
        for name, text in named.items():
            features = self._features.get(name == "tool_use") or self._features[False]
            extended[name] = with_tools(
                text,
                tools=features.tools,
                tool_calls=features.tool_calls,
                tool_results=features.tool_results,
                system=features.system,
                alternating=features.alternating,
            )
        self.tokenizer.chat_template = extended if isinstance(template, dict) else extended["default"]

    def turns_of(self, conversations: Sequence[Document]) -> list[tuple[str, list[Turn]] | HalfbyteError]:
        """Return `assistant_turns` of each conversation, from a child process with time and memory limits
        (`reading.bounded`)."""
        return self._in_child(conversations)

    def prompts_of(self, conversations: Sequence[Document]) -> list[str | HalfbyteError]:
        """Return each conversation as text up to the start of an answer, from the child process of `turns_of`."""
        return self._in_child([{**conversation, "open": True} for conversation in conversations])

    def _in_child(self, conversations: Sequence[Document]) -> list[Any]:
        return [
            DataError(f"the chat template refuses the conversation: {rendered.reason}", FIX_ROW)
            if isinstance(rendered, Failure)
            else rendered
            for rendered in self._bounded(conversations)
        ]

    def assistant_turns(self, document: Document) -> tuple[str, list[Turn], list[str]]:
        """Render an adapted conversation and find the assistant's turns, without the first `given` turns, which belong
        to the prompt.

        Returns:
            The text, its assistant turns in order (empty without an assistant), and the names of message parts that the
            text does not contain.

        Raises:
            DataError: the template refuses the conversation, does not write an assistant turn, or marks other parts
                than turns although some turns are not trained.
        """
        messages, tools = document["messages"], document.get("tools")
        if not messages:
            return "", [], []
        self._use_features(tools)
        try:
            text, spans = self._marked(messages, tools) if self.marked else self._differing(messages, tools)
        except (HalfbyteError, MemoryError):
            raise
        except Exception as error:  # a template is a program and can raise anything
            raise DataError(f"the chat template refuses the conversation: {error}", FIX_ROW) from error
        prompt_answers, untrained = document.get("given", 0), document.get("untrained", ())
        count = sum(message["role"] == "assistant" for message in messages)
        if (prompt_answers or untrained) and len(spans) != count:
            raise DataError(
                f"the chat template marks {len(spans)} parts in {count} assistant turns, so halfbyte cannot match parts"
                " with the turns to train",
                "mark each assistant turn with {% generation %} ... {% endgeneration %}",
            )
        turns = with_ends(self, text, spans)
        turns = [replace(turn, trained=i not in untrained) for i, turn in enumerate(turns)][prompt_answers:]
        lost = not_shown(messages, text) + ["turns after the last answer"] * bool(document.get("removed"))
        return text, turns, lost

    def _marked(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Turn]]:
        restart_clock(_extra_seconds(messages))
        # The renderer of apply_chat_template(return_assistant_tokens_mask=True). It returns character positions, which
        # are needed to find the end-of-turn token after a block. Its annotation says that it returns one string.
        render: Any = chat_template_utils.render_jinja_template
        with _clock_at(self.time):
            rendered, blocks = render(
                conversations=[self._in_content_form(messages)],
                tools=tools,
                chat_template=self.source,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        if not blocks[0]:
            raise DataError(
                "the chat template has {% generation %} marks, but none around this conversation's assistant turns",
                "mark every assistant turn in the template, or remove the marks",
            )
        return rendered[0], Turns(self, messages, tools, rendered[0]).by_marks(blocks[0])

    def _differing(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, list[Turn]]:
        text = self.render(messages, tools)
        return text, Turns(self, messages, tools, text).by_difference()


@contextlib.contextmanager
def _clock_at(time: datetime) -> Iterator[None]:
    """Make `strftime_now`, a template's only clock, return this time.

    transformers replaces functions among a template's variables by text, so this replaces the clock that it reads.
    """
    clock = chat_template_utils.datetime
    chat_template_utils.datetime = SimpleNamespace(now=lambda: time)
    try:
        yield
    finally:
        chat_template_utils.datetime = clock


def declared_end_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokens that end an answer according to the tokenizer and the generation_config.json in its folder."""
    folder = Path(tokenizer.name_or_path or "")
    stored = declared_stop_tokens(folder) if tokenizer.name_or_path and folder.is_dir() else []
    names = tokenizer.convert_ids_to_tokens([index for index in stored if index < len(tokenizer)])
    return tuple(dict.fromkeys(str(name) for name in (tokenizer.eos_token, *names) if name))


def takes_parts(tokenizer: Any, tools: list[Any] | None = None) -> bool:
    """Return whether a chat template writes message content given as a list of parts but not as text (LLaVA)."""
    messages = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
    for in_content_parts in (False, True):
        try:
            text = _render(tokenizer, in_parts(messages) if in_content_parts else messages, tools, False)
        except Exception:  # a template is a program and can raise anything
            continue
        if PROBE in text:
            return in_content_parts
    return False


def in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each text content as a list of one part."""
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
    tools: list[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation with the tokenizer's chat template up to the start of an answer, under the same limits.

    Args:
        add_generation_prompt, continue_final_message: as in `apply_chat_template`; the latter drops the text that the
            template writes after the last message.
        tools: functions that the answer may call.
        variables: values of the template's own variables.

    Raises:
        DataError: the template refuses the conversation, or exceeds its limits of time or memory.
    """
    template, renderer = _renderers.get(tokenizer, (None, None))
    if renderer is None or template != tokenizer.chat_template:
        held = weakref.ref(tokenizer)  # a strong reference would keep the dictionary's key alive
        renderer = Bounded(lambda item: _prompt(held(), *item))
        _renderers[tokenizer] = tokenizer.chat_template, renderer
    [rendered] = renderer([(list(messages), tools, add_generation_prompt, continue_final_message, variables)])
    if isinstance(rendered, Failure):
        raise DataError(f"the chat template refuses the conversation: {rendered.reason}", "change the turns")
    if isinstance(rendered, HalfbyteError):
        raise rendered
    return rendered


def _prompt(tokenizer: Any, messages: list[Message], *options: Any) -> str:
    return _render(tokenizer, in_parts(messages) if takes_parts(tokenizer) else messages, *options)


def _render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Return a conversation as one string, without limits."""
    restart_clock(_extra_seconds(messages))
    text = tokenizer.apply_chat_template(
        list(messages),
        tools=tools,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **(variables or {}),
    )
    assert isinstance(text, str)
    if len(text) > MOST_ADDED and len(text) > MOST_ADDED + 16 * len(_json([messages, tools])):
        raise DataError(f"the chat template writes {len(text):,} characters for one conversation", FIX_TEMPLATE)
    return text


def _extra_seconds(messages: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds that rendering long messages may take in addition to the fixed limit."""
    characters = sum(len(content) for message in messages if isinstance(content := message.get("content"), str))
    return len(messages) / 1_000 + characters / 200_000


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {}}}


def _call(name: str) -> dict[str, Any]:
    return {"type": "function", "id": CALL_ID, "function": {"name": name, "arguments": {}}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def tool_text(tools: list[dict[str, Any]]) -> str:
    """Return the tools as plain text, one JSON object per line."""
    lines = "\n".join(_json(tool.get("function", tool)) for tool in tools)
    return f"{TOOLS_HEADER}\n{lines}"


def call_text(calls: list[dict[str, Any]]) -> str:
    """Return tool calls as plain text, one JSON object per line."""
    return "\n".join(_json(call["function"]) for call in calls)


def _merge_user_turns(messages: list[Message], results: Sequence[bool]) -> list[Message]:
    """Merge tool results, which are user turns here, with the user turns next to them."""
    joined: list[Message] = []
    last_is_result = False  # whether the last message contains a result
    for message, result in zip(messages, results, strict=True):
        if joined and message["role"] == joined[-1]["role"] == "user" and (result or last_is_result):
            joined[-1]["content"] = joined_contents(joined[-1]["content"], message["content"])
        else:
            joined.append(message)
            last_is_result = False
        last_is_result |= result
    return joined
