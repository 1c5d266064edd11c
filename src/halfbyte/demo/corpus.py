"""Text from the Python installation: the standard library's docstrings, help topics, the Zen and the license.

There are two kinds of documents. Prose is pretraining text. Exchanges ask for a name and answer with the name and the
first paragraph of its docstring, in the chat format; from them the base learns turns, and to repeat a given name.
"""

from __future__ import annotations

import ast
import builtins
import codecs
import contextlib
import inspect
import io
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# Tests, translations and tools for Python's own development have little prose.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "msilib"}
LONGEST = 4000  # most characters of one document
EXCHANGE_LONGEST = 320  # most characters of an explanation
QUESTIONS = ("What is `{}`?", "Describe `{}`.", "Explain what `{}` does.")


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order: `prose` as text, `exchanges` as (question, answer)."""

    prose: list[str]
    exchanges: list[tuple[str, str]]


class Definition(NamedTuple):
    """A documented module, class or function: its first line of source, name and docstring."""

    head: str
    name: str
    docstring: str


def gather(seed: int = 0) -> Corpus:
    """Read this Python installation's texts, without duplicates, shuffled by `seed` (about 2 MB)."""
    definitions = list(dict.fromkeys([*_builtin_definitions(), *_library_definitions()]))
    prose = [f'{head}:\n    """{docstring}"""'[:LONGEST] for head, _, docstring in definitions]
    prose = list(dict.fromkeys([*prose, *_help_topics(), _zen(), *_license()]))
    exchanges = []
    for number, (_, name, docstring) in enumerate(definitions):
        explanation = docstring.split("\n\n")[0]
        if len(explanation) <= EXCHANGE_LONGEST:
            exchanges.append((QUESTIONS[number % len(QUESTIONS)].format(name), f"`{name}`: {explanation}"))
    random.Random(seed).shuffle(prose)
    random.Random(seed).shuffle(exchanges)
    return Corpus(prose, exchanges)


def _library_definitions() -> Iterator[Definition]:
    """Every module, class and function of the standard library that has a docstring, file by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 20:
                yield Definition(*_head_and_name(node, path.stem), docstring)


def _head_and_name(node: ast.AST, module: str) -> tuple[str, str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}({', '.join(argument.arg for argument in node.args.args)})", node.name
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}", node.name
    return f"# module {module}", module


def _builtin_definitions() -> Iterator[Definition]:
    """Built-in functions and types, with the types' methods."""
    for name, value in sorted(vars(builtins).items()):
        if name.startswith("_") or not callable(value):
            continue
        members = sorted(vars(value).items()) if inspect.isclass(value) else []
        for member, entry in [(name, value), *((f"{name}.{key}", entry) for key, entry in members)]:
            docstring = inspect.getdoc(entry)
            if docstring and "__" not in member:
                yield Definition(f"def {member}(...)", member, docstring)


def _help_topics() -> list[str]:
    from pydoc_data.topics import topics

    return [paragraphs[:LONGEST] for _, text in sorted(topics.items()) for paragraphs in _pieces(text)]


def _pieces(text: str) -> Iterator[str]:
    """Join paragraphs to pieces of up to about `LONGEST` characters."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > LONGEST:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph
    if piece:
        yield piece


def _zen() -> str:
    with contextlib.redirect_stdout(io.StringIO()):  # the module prints itself when imported
        import this
    return codecs.decode(this.s, "rot13")


def _license() -> list[str]:
    """The license in pieces; empty on distributions that store it elsewhere."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    return list(_pieces(path.read_text(encoding="utf-8"))) if path.is_file() else []
