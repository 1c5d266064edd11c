"""An Ollama Modelfile: the weight files, the prompt template, and the stop tokens.

Ollama's templates use Go's text/template. One is derived from the tokenizer's chat template by rendering conversations
of placeholders, and used if it renders the same text; otherwise Ollama uses the chat template in the GGUF file. Source:
"Modelfile reference" of https://docs.ollama.com.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data.chat import call_text, prompt_text, tool_text
from ..data.tool_template import TOOLS_HEADER
from ..data.turns import common_prefix
from ..gguf.tokenizer import adds_bos
from ..utils.errors import DataError
from ..utils.notices import notice

MARKS = {"system": "\ue000", "user": "\ue001", "assistant": "\ue002"}  # private-use characters, in no template
PROBES: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)
QUOTE, QUOTES = r'{{ "\"" }}', r'{{ "\"\"\"" }}'  # three in a row would end the Modelfile's text
TOOLS = f"{TOOLS_HEADER}{{{{ range $.Tools }}}}\n{{{{ .Function }}}}{{{{ end }}}}"
CALL = '{"name": "{{ .Function.Name }}", "arguments": {{ .Function.Arguments }}}'
# Role → what follows its content where the chat template writes tools as text.
TOOLS_OF = {
    "system": f"{{{{ if and $.Tools (eq $i 0) }}}}\n\n{TOOLS}{{{{ end }}}}",
    "assistant": f"{{{{ range $n, $call := .ToolCalls }}}}{{{{ if $n }}}}\n{{{{ end }}}}{CALL}{{{{ end }}}}",
}
REFUSALS = (DataError, ValueError, KeyError)  # of a template that does not render a probe


@dataclass(frozen=True)
class Pieces:
    """A chat template as text around messages.

    Attributes:
        around: role → text before and after its content.
        generation: the start of an answer.
        system: the system message of a conversation that has none; "": it gets none.
        result: text before and after a tool's result, if tools are written as `data.tool_template` does; else None.
    """

    around: Mapping[str, tuple[str, str]]
    generation: str
    system: str = ""
    result: tuple[str, str] | None = None

    @property
    def writes_system(self) -> bool:
        """Whether Ollama's template writes `system`: tools follow it, or it cannot stand within triple quotes."""
        return bool(self.result or '"""' in self.system or self.system.endswith('"'))

    def compose(self, messages: Sequence[tuple[str, str]]) -> str:
        """Return a conversation of roles and contents as the chat template renders it."""
        if self.system and messages[0][0] != "system":
            messages = [("system", self.system), *messages]
        text = "".join(self.around[role][0] + content + self.around[role][1] for role, content in messages)
        return text + self.generation


def modelfile(file_names: Sequence[str], tokenizer: Any, end_ids: Sequence[int], positions: int) -> str:
    """Return the text of a Modelfile.

    Args:
        file_names: of the GGUF files in the same folder: the language model and, if there is one, the vision part.
        end_ids: tokens that end an answer, in addition to the tokenizer's EOS.
        positions: context length of the model; `num_ctx` is at most 8192.
    """
    lines = [f"FROM ./{name}" for name in file_names]
    if tokenizer.chat_template:
        pieces = derive(tokenizer)
        if pieces is None:
            notice(
                "ollama-template",
                "the chat template does more than put text around each message: the Modelfile has no TEMPLATE, and"
                " Ollama uses the template that it recognises in the GGUF file",
            )
        else:
            lines.append(f'TEMPLATE """{go_template(pieces)}"""')
            if pieces.system and not pieces.writes_system:
                lines.append(f'SYSTEM """{pieces.system}"""')
            if pieces.result:
                message = "Ollama writes the JSON of tools and calls without spaces, and the run was trained with them"
                notice("ollama-tools", f"{message}: for exact prompts, serve the GGUF file with llama.cpp")
    ends = dict.fromkeys([tokenizer.eos_token_id, *end_ids])
    for index in ends:
        lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(index)}"')
    lines.append(f"PARAMETER num_ctx {min(positions, 8192)}")
    return "\n".join(lines) + "\n"


def rendered_chats(tokenizer: Any) -> list[str]:
    """Return short conversations as the chat template renders them; [] without a template."""
    texts = []
    for roles in PROBES if tokenizer.chat_template else ():
        try:
            texts.append(prompt_text(tokenizer, [{"role": role, "content": f"Hello {role}"} for role in roles]))
        except REFUSALS:
            continue  # templates without system messages, or without earlier answers
    return texts


def derive(tokenizer: Any) -> Pieces | None:
    """Return the text that a chat template puts around messages.

    None if it does more than that. A beginning-of-text token that the tokenizer adds is left out, since Ollama adds it.
    """
    try:
        rendered = {roles: _render(tokenizer, roles) for roles in PROBES}
    except REFUSALS:
        return None
    if any(MARKS[role] not in text for roles, text in rendered.items() for role in roles):
        return None
    for cut in (_cut, _cut_after_default):
        pieces = cut(rendered)
        if pieces and all(
            pieces.compose([(role, MARKS[role]) for role in roles]) == rendered[roles] for roles in PROBES
        ):
            return replace(pieces, result=_around_result(tokenizer, pieces))
    return None


def _around_result(tokenizer: Any, pieces: Pieces) -> tuple[str, str] | None:
    """Return the text around a tool's result if the chat template writes tools and calls as `data.tool_template`."""
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b"},
    ]
    try:
        text = _without_bos(tokenizer, prompt_text(tokenizer, messages, tools=[tool]))
    except REFUSALS:
        return None
    plain = [("system", tool_text([tool])), ("user", "a"), ("assistant", call_text([call])), ("tool", "b")]
    user_prefix, user_suffix = pieces.around["user"]
    as_tool_role = user_prefix.replace("user", "tool"), user_suffix
    for around in (pieces.around["user"], as_tool_role):
        if replace(pieces, around={**pieces.around, "tool": around}).compose(plain) == text:
            return around
    return None


def _render(tokenizer: Any, roles: tuple[str, ...]) -> str:
    messages = [{"role": role, "content": MARKS[role]} for role in roles]
    return _without_bos(tokenizer, prompt_text(tokenizer, messages))


def _without_bos(tokenizer: Any, text: str) -> str:
    """Remove the beginning-of-text token if the tokenizer adds it to a text."""
    return text.removeprefix(tokenizer.bos_token) if adds_bos(tokenizer) else text


def _cut(rendered: Mapping[tuple[str, ...], str]) -> Pieces | None:
    """Split the rendered probes into the text around each role's content."""
    user = MARKS["user"]
    system = MARKS["system"]
    assistant = MARKS["assistant"]
    first_user, alone = rendered[("user",)].split(user, 1)
    before_system, following = rendered[("system", "user")].split(system, 1)
    after_system = following.split(user, 1)[0].removesuffix(first_user)
    between_ua, following = rendered[("user", "assistant", "user")].split(user, 1)[1].split(assistant, 1)
    after_assistant = following.split(user, 1)[0].removesuffix(first_user)
    # text after a user message is its end if it also ends a system message, otherwise the start of what follows
    after_user = after_system if alone.startswith(after_system) and between_ua.startswith(after_system) else ""
    around = {
        "system": (before_system, after_system),
        "user": (first_user, after_user),
        "assistant": (between_ua.removeprefix(after_user), after_assistant),
    }
    return Pieces(around, alone.removeprefix(after_user))


def _cut_after_default(rendered: Mapping[tuple[str, ...], str]) -> Pieces | None:
    """Split the probes of a template that writes a default system message into conversations without one."""
    user, system = MARKS["user"], MARKS["system"]
    before_system, following = rendered[("system", "user")].split(system, 1)
    between, tail = following.split(user, 1)
    alone = rendered[("user",)]
    if not alone.startswith(before_system) or not alone.endswith(between + user + tail):
        return None
    default = alone[len(before_system) : len(alone) - len(between + user + tail)]
    if not default:
        return None
    opening = next((before_system[:n] for n in range(len(before_system), 0, -1) if before_system[:n] in between), "")
    if opening:  # user and system messages start with the same marker
        before_user = between[between.rindex(opening) :]
    else:  # the system message has no marker, so a later user turn shows what comes before one
        later = rendered[("user", "assistant", "user")].split(MARKS["assistant"], 1)[1].split(user, 1)[0]
        before_user = between[len(between) - common_prefix(between[::-1], later[::-1]) :]
    first = {roles: text.removeprefix(before_system + default + between.removesuffix(before_user))
             for roles, text in rendered.items()}  # fmt: skip
    pieces = _cut(first)
    return replace(pieces, system=default) if pieces else None


def go_template(pieces: Pieces) -> str:
    """Return the template in Go's language, for Ollama's list of messages, to stand within triple quotes."""
    around = pieces.around
    inside: Mapping[str, str] = {}
    messages, first = ".Messages", ""
    if pieces.result:
        around, inside = {**around, "tool": pieces.result}, TOOLS_OF
    if pieces.writes_system:  # where a conversation has no system message: the tools, or the default text
        prefix, suffix = map(_go, pieces.around["system"])
        default = f"{prefix}{_go(pieces.system)}{suffix}" if pieces.system else ""
        otherwise = f"{{{{ else }}}}{default}" if default else ""
        shown = f"{{{{ if $.Tools }}}}{prefix}{TOOLS}{suffix}{otherwise}{{{{ end }}}}" if pieces.result else default
        messages = "$i, $message := .Messages"
        first = f'{{{{ if and (eq $i 0) (ne .Role "system") }}}}{shown}{{{{ end }}}}'
    roles = "".join(
        f'{{{{ if eq .Role "{role}" }}}}{_go(prefix)}{{{{ .Content }}}}{inside.get(role, "")}{_go(suffix)}{{{{ end }}}}'
        for role, (prefix, suffix) in around.items()
    )
    text = f"{{{{ range {messages} }}}}{first}{roles}{{{{ end }}}}{_go(pieces.generation)}".replace('"""', QUOTES)
    return text[:-1] + QUOTE if text.endswith('"') else text


def _go(text: str) -> str:
    """Escape text for a Go template."""
    return text.replace("{{", '{{ "{{" }}')
