"""Modules have fewer than 800 lines, and functions fewer than 100."""

import ast
from pathlib import Path

import halfbyte

SOURCE = Path(halfbyte.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
MODULE, FUNCTION = 800, 100


def long_functions(source):
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name for node in nodes if node.end_lineno - node.lineno + 1 >= FUNCTION}


def test_modules():
    lines = {str(path.relative_to(SOURCE)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count >= MODULE} == {}
    assert len(lines) > 300


def test_functions():
    found = {
        f"{path.relative_to(SOURCE)}: {name}" for path in FILES for name in long_functions(path.read_text("utf-8"))
    }
    assert found == set()
