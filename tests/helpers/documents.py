"""The fenced blocks of README and pages, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [path for path in DOCUMENTS if path.is_file()]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(document: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block, in order."""
    return FENCE.findall(document.read_text(encoding="utf-8"))


def blocks(language: str) -> list[tuple[str, str]]:
    """(document, text) of every fenced block in `language`."""
    return [(path.name, text) for path in DOCUMENTS for name, text in blocks_of(path) if name == language]


def commands(text: str) -> Iterator[tuple[list[str], str | None]]:
    """The commands of a shell block as words, without comments, and the file that each is redirected to."""
    for line in text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#\s.*", "", line.removeprefix("$ "))
        for command in re.split(r"\s*(?:&&|;|\|)\s+", line):
            words, *redirected = re.split(r"\s[12]?>", command)
            parts = shlex.split(words, comments=True)
            while parts and re.fullmatch(r"\w+=.*", parts[0]):  # VARIABLE=value before the command
                parts = parts[1:]
            if parts:
                yield parts, shlex.split(redirected[0], comments=True)[0] if redirected else None
