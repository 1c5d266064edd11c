"""Syntax trees of the package's modules, parsed once per process."""

import ast
from functools import cache
from pathlib import Path

import halfbyte

PACKAGE = Path(halfbyte.__file__).parent


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def syntax_nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a module's tree: walking the package's trees takes longer than parsing them."""
    return tuple(ast.walk(syntax_tree(path)))
