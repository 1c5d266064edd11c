"""Text that comes with Python: the standard library's docstrings, the help topics, the Zen and the license.

Two kinds of documents leave here. Prose is what a base model reads. Exchanges are a definition and the first paragraph
of its docstring; the base sees them in the chat format, so that it knows how turns begin and end, but no question.
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

# Tests, translations and tools for developing Python itself are little prose and much noise.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings", "msilib"}
LONGEST = 4000  # characters kept of one document, so that no single one fills the corpus
EXCHANGE_LONGEST = 320  # characters of an answer


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order: `prose` as text, `exchanges` as (definition, explanation)."""

    prose: list[str]
    exchanges: list[tuple[str, str]]


def gather(seed: int = 0) -> Corpus:
    """Read this Python installation's texts, without duplicates, shuffled by `seed` (about 2 MB)."""
    definitions = dict.fromkeys([*_builtin_docstrings(), *_library_docstrings()])
    prose = [f'{head}:\n    """{docstring}"""'[:LONGEST] for head, docstring in definitions]
    exchanges = [(head, docstring.split("\n\n")[0]) for head, docstring in definitions if head.startswith("def ")]
    prose = list(dict.fromkeys([*prose, *_help_topics(), _zen(), *_license()]))
    random.Random(seed).shuffle(prose)
    random.Random(seed).shuffle(exchanges)
    return Corpus(prose, [pair for pair in exchanges if len(pair[1]) <= EXCHANGE_LONGEST])


def _library_docstrings() -> Iterator[tuple[str, str]]:
    """(definition, docstring) of every module, class and function of the standard library, file by file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node)
            if docstring and len(docstring) > 20:
                yield _definition(node, path.stem), docstring


def _definition(node: ast.AST, module: str) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return f"def {node.name}({', '.join(argument.arg for argument in node.args.args)})"
    if isinstance(node, ast.ClassDef):
        return f"class {node.name}"
    return f"# module {module}"


def _builtin_docstrings() -> Iterator[tuple[str, str]]:
    """(definition, docstring) of the functions and types written in C, with the types' methods."""
    for name, value in sorted(vars(builtins).items()):
        if name.startswith("_") or not callable(value):
            continue
        members = sorted(vars(value).items()) if inspect.isclass(value) else []
        for member, entry in [(name, value), *((f"{name}.{key}", entry) for key, entry in members)]:
            docstring = inspect.getdoc(entry)
            if docstring and "__" not in member:
                yield f"def {member}(...)", docstring


def _help_topics() -> list[str]:
    from pydoc_data.topics import topics

    return [paragraphs[:LONGEST] for _, text in sorted(topics.items()) for paragraphs in _pieces(text)]


def _pieces(text: str) -> Iterator[str]:
    """Whole paragraphs, joined up to about `LONGEST` characters."""
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
    """The license, in pieces; some distributions keep it elsewhere, and then it is left out."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    return list(_pieces(path.read_text(encoding="utf-8"))) if path.is_file() else []
