"""Every error about what comes from outside says what to do: it has a fix, or its words say what is asked for."""

import ast
import re
from collections.abc import Iterable

from tests.helpers.sources import PACKAGE as SOURCE
from tests.helpers.sources import syntax_nodes

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
OURS = {"HalfbyteError", "UsageError", "ConfigError", "DataError", "ModelError", "CheckpointError", "TrainingError"}
SAYS_IT = re.compile(r" must |, not | but ")
# Whose words another error takes as its reason, with a fix of its own.
REASONS = {"gguf/tokenizer.py", "gguf/formats.py", "runs/manifest.py"}
# Whose errors are about the arguments of a programmer's call.
INSIDE = {"autograd", "ops", "optim", "tensor.py"}
OUTSIDE = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.relative_to(SOURCE).parts[0] not in INSIDE and path.relative_to(SOURCE).as_posix() not in REASONS
]


def without_fix(nodes: Iterable[ast.AST]) -> list[str]:
    """Each `raise` of one of our errors with a message alone that does not say what is asked for."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            alone = len(node.exc.args) == 1 and not isinstance(node.exc.args[0], ast.Starred) and not node.exc.keywords
            if node.exc.func.id in OURS and alone and not SAYS_IT.search(ast.unparse(node.exc)):
                found.append(f"line {node.lineno}: {ast.unparse(node.exc)}")
    return found


def loose_strings(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines of strings inside functions that no statement uses, such as the second half of a torn message."""
    nodes = list(nodes)
    scopes = [node for node in nodes if isinstance(node, FUNCTIONS | ast.ClassDef)]
    inside = {
        line for node in scopes if isinstance(node, FUNCTIONS) for line in range(node.lineno, node.end_lineno + 1)
    }
    docstrings = {node.body[0].lineno for node in scopes}
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Expr)
        and (isinstance(node.value, ast.JoinedStr) or isinstance(getattr(node.value, "value", None), str))
        and node.lineno in inside
        and node.lineno not in docstrings
    ]


def test_no_message_is_torn():
    torn = 'def check(beta):\n    """Check."""\n    wrong = f"beta: {beta}"\n    f"is negative"\n    return wrong'
    assert loose_strings(ast.walk(ast.parse(torn))) == [4]
    found = {str(path.relative_to(SOURCE)): loose_strings(syntax_nodes(path)) for path in sorted(SOURCE.rglob("*.py"))}
    assert not {path: lines for path, lines in found.items() if lines}


def test_the_folders_exist():
    assert all((SOURCE / name).exists() for name in INSIDE | REASONS)
    assert len(OUTSIDE) > 200


def test_the_check_sees_one():
    bare = ast.parse("raise DataError(f'{where}: half a pair')").body
    assert without_fix(bare) == ["line 1: DataError(f'{where}: half a pair')"]
    assert not without_fix(ast.parse("raise DataError(f'{where}: half a pair', 'write both')").body)
    assert not without_fix(ast.parse("raise DataError('it holds 3, not text')").body)


def test_each_error_says_what_to_do():
    found = {str(path.relative_to(SOURCE)): without_fix(syntax_nodes(path)) for path in OUTSIDE}
    assert not {path: errors for path, errors in found.items() if errors}
