"""Imports of the package: leaf rooms import no room above them, kernels are loaded by name, and no files form a cycle.

Imports inside functions and under TYPE_CHECKING count.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import halfbyte

PACKAGE = Path(halfbyte.__file__).parent
LEAVES = {"utils", "reading", "dispatch", "ops", "formats", "autograd", "tensor", "layers", "adapter_kinds"}
KERNELS_IMPORT = {"kernels", "dispatch", "ops", "formats", "utils"}
KERNELS_IMPORTED_BY = {"kernels", "dispatch", "cli"}  # the command line prints the table of kernels

Graph = Mapping[str, set[str]]  # module → modules that it imports, by names below the package


def import_graph(package: Path) -> Graph:
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        parent = path.relative_to(package).parent.parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for target in imported_names(node, ["halfbyte", *parent]):
                while target and target not in files:
                    target = target.rpartition(".")[0]
                graph[name].update({target} - {name, ""})
    return graph


def imported_names(node: ast.AST, folder: list[str]) -> Iterator[str]:
    """Names below the package that an import statement in `folder` reaches."""
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = folder[: len(folder) - node.level + 1] if node.level else []
        base = [*base, *([node.module] if node.module else [])]
        names = [".".join([*base, alias.name]) for alias in node.names]
    yield from (name.removeprefix("halfbyte.") for name in names if name.startswith("halfbyte."))


def upward_imports(graph: Graph) -> list[str]:
    """Imports that the rooms of both modules do not allow."""
    wrong = []
    for name, targets in graph.items():
        room = name.partition(".")[0]
        for target in sorted(targets):
            other = target.partition(".")[0]
            refused = room in LEAVES and other not in LEAVES | {"kernels"}
            refused |= room == "kernels" and other not in KERNELS_IMPORT
            if refused or (other == "kernels" and room not in KERNELS_IMPORTED_BY):
                wrong.append(f"{name} imports {target}")
    return wrong


def import_cycle(graph: Graph) -> list[str]:
    """One cycle of modules; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            for target in sorted(graph[name]):
                if found := visit(target, [*path, name]):
                    return found
            done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in graph)), [])


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(PACKAGE)


def test_rooms_import_only_what_they_may(graph):
    assert upward_imports(graph) == []


def test_imports_within_the_package_are_relative():
    absolute = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "halfbyte"
    ]
    assert absolute == []


def test_no_files_form_an_import_cycle(graph):
    assert import_cycle(graph) == []
