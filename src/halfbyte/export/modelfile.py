"""An Ollama Modelfile: the weight files, the prompt template, and the stop tokens.

Ollama's templates use Go's text/template. One is derived from the tokenizer's chat template by rendering conversations
of placeholders, and used if it renders the same text; otherwise Ollama uses what it finds in the GGUF file. Format:
https://github.com/ollama/ollama/blob/main/docs/modelfile.md
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..data.chat import prompt_text
from ..utils.errors import DataError
from ..utils.notices import notice

MARKS = {"system": "\ue000", "user": "\ue001", "assistant": "\ue002"}  # private-use characters, in no template
PROBES: tuple[tuple[str, ...], ...] = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)


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
    ends = dict.fromkeys([tokenizer.eos_token_id, *end_ids])
    for index in ends:
        lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(index)}"')
    lines.append(f"PARAMETER num_ctx {min(positions, 8192)}")
    return "\n".join(lines) + "\n"


def derive(tokenizer: Any) -> dict[str, tuple[str, str]] | None:
    """Return role → text before and after its content, and "generation" → the start of an answer.

    None if the chat template does more than surround each message. The beginning-of-text token is left out, since
    Ollama adds it.
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
    """Split the rendered probes into the text around each role's content."""
    user, system, assistant = MARKS["user"], MARKS["system"], MARKS["assistant"]
    first_user, alone = rendered[("user",)].split(user, 1)
    before_system, rest = rendered[("system", "user")].split(system, 1)
    after_system = rest.split(user, 1)[0].removesuffix(first_user)
    between_ua, rest = rendered[("user", "assistant", "user")].split(user, 1)[1].split(assistant, 1)
    after_assistant = rest.split(user, 1)[0].removesuffix(first_user)
    # text after a user message is its end if it also ends a system message, otherwise the start of what follows
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
    """Return the template in Go's language, for Ollama's list of messages."""
    roles = []
    for role in ("system", "user", "assistant"):
        before, after = pieces[role]
        roles.append(f'{{{{ if eq .Role "{role}" }}}}{_go(before)}{{{{ .Content }}}}{_go(after)}{{{{ end }}}}')
    return f"{{{{ range .Messages }}}}{''.join(roles)}{{{{ end }}}}{_go(pieces['generation'][0])}"


def _go(text: str) -> str:
    """Escape text for a Go template."""
    return text.replace("{{", '{{ "{{" }}')
