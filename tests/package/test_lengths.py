"""Modules have fewer than 800 lines, and functions fewer than 100."""

import ast

from tests.helpers.sources import PACKAGE, syntax_nodes

FILES = sorted(PACKAGE.rglob("*.py"))
MODULE, FUNCTION = 800, 100


def long_functions(path):
    nodes = [node for node in syntax_nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name for node in nodes if node.end_lineno - node.lineno + 1 >= FUNCTION}


def test_modules():
    lines = {str(path.relative_to(PACKAGE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count >= MODULE} == {}
    assert len(lines) > 300


def test_functions():
    assert {f"{path.relative_to(PACKAGE)}: {name}" for path in FILES for name in long_functions(path)} == set()
