"""An Ollama Modelfile: where the weights are, how a conversation is written, and what ends an answer.

Ollama writes conversations with a template of its own kind (Go's text/template). One is derived from the tokenizer's
chat template by rendering conversations of placeholders, and is used if it renders the same text as the chat template;
otherwise Ollama falls back to what it finds in the GGUF file. Format:
https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halfbyte.data.chat import prompt_text
from halfbyte.utils.errors import DataError
from halfbyte.utils.notices import notice

from .gguf_source import Source

MARKS = {"system": "\ue000", "user": "\ue001", "assistant": "\ue002"}  # private use: in no template
PROBES: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)


def modelfile(file_names: Sequence[str], source: Source) -> str:
    """The text of the Modelfile for the files beside it: the language model, and the vision part if there is one."""
    tokenizer = source.tokenizer
    lines = [f"FROM ./{name}" for name in file_names]
    if tokenizer.chat_template:
        pieces = derive(tokenizer)
        if pieces is None:
            notice(
                "ollama-template",
                "the chat template does more than put text around each message: the Modelfile has no TEMPLATE, and"
                " Ollama takes what it recognises in the GGUF file",
            )
        else:
            lines.append(f'TEMPLATE """{go_template(pieces)}"""')
    ends = dict.fromkeys([tokenizer.eos_token_id, *source.end_ids])
    for index in ends:
        lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(index)}"')
    lines.append(f"PARAMETER num_ctx {min(source.config.max_position_embeddings, 8192)}")
    return "\n".join(lines) + "\n"


def derive(tokenizer: Any) -> dict[str, tuple[str, str]] | None:
    """Role → the text before and after its content, and "generation" → what opens an answer; None if the chat template
    is not of that kind.

    The beginning-of-text token is left out: Ollama puts it there itself.
    """
    try:
        rendered = {roles: _render(tokenizer, roles) for roles in PROBES}
    except (DataError, ValueError, KeyError):
        return None
    pieces = _cut(rendered)
    if pieces is None or any(_compose(pieces, roles) != text for roles, text in rendered.items()):
        return None
    return pieces


def _render(tokenizer: Any, roles: tuple[str, ...]) -> str:
    messages = [{"role": role, "content": MARKS[role]} for role in roles]
    return prompt_text(tokenizer, messages).removeprefix(tokenizer.bos_token or "")


def _cut(rendered: dict[tuple[str, ...], str]) -> dict[str, tuple[str, str]] | None:
    """Each role's surroundings, as far as the shorter probes tell them apart."""
    user, system, assistant = MARKS["user"], MARKS["system"], MARKS["assistant"]
    first_user, alone = rendered[("user",)].split(user, 1)
    before_system, rest = rendered[("system", "user")].split(system, 1)
    after_system = rest.split(user, 1)[0].removesuffix(first_user)
    between_ua, rest = rendered[("user", "assistant", "user")].split(user, 1)[1].split(assistant, 1)
    after_assistant = rest.split(user, 1)[0].removesuffix(first_user)
    # what ends a user's message is what ends the system's, where it does; otherwise it goes to what follows
    after_user = after_system if alone.startswith(after_system) and between_ua.startswith(after_system) else ""
    return {
        "system": (before_system, after_system),
        "user": (first_user, after_user),
        "assistant": (between_ua.removeprefix(after_user), after_assistant),
        "generation": (alone.removeprefix(after_user), ""),
    }


def _compose(pieces: dict[str, tuple[str, str]], roles: tuple[str, ...]) -> str:
    return "".join(pieces[role][0] + MARKS[role] + pieces[role][1] for role in roles) + pieces["generation"][0]


def go_template(pieces: dict[str, tuple[str, str]]) -> str:
    """The template in Go's language, for Ollama's list of messages."""
    roles = []
    for role in ("system", "user", "assistant"):
        before, after = pieces[role]
        roles.append(f'{{{{ if eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}{{{{ end }}}}')
    return f"{{{{ range .Messages }}}}{''.join(roles)}{{{{ end }}}}{_go(pieces['generation'][0])}"


def _go(text: str) -> str:
    """Text that a Go template prints as it is."""
    return text.replace("{{", '{{ "{{" }}')
