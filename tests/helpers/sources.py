"""Syntax trees of the package's modules, parsed once per process."""

import ast
from functools import cache
from pathlib import Path

import halfbyte

PACKAGE = Path(halfbyte.__file__).parent


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
