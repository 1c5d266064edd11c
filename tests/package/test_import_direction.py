"""Imports of the package: folders import from lower floors only, kernels are loaded by name, no files form a cycle.

Imports inside functions and under TYPE_CHECKING count. A module of the root is a room like a folder.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.helpers.sources import PACKAGE, syntax_nodes

# A room imports from lower floors, and from rooms before it on its own floor.
FLOORS = (
    ("utils", "reading", "adapter_kinds"),
    ("dispatch", "formats", "ops", "kernels"),
    ("autograd", "tensor", "layers", "functional", "batch"),
    ("memory", "optim"),
    ("config", "mesh", "data"),
    ("modeling", "qat", "adapters", "gguf"),
    ("methods", "parallel", "loading", "generation"),
    ("auxiliary", "rewards"),
    ("plan", "runs"),
    ("report", "export", "serve", "board", "rl"),
    ("train", "evaluation"),
    ("demo", "cli", "lm_eval", "bitsandbytes", "__main__"),
)
KERNELS_IMPORTED_BY = {"kernels", "cli"}  # the command line prints the table of kernels

Graph = Mapping[str, set[str]]  # module → modules that it imports, by names below the package


def import_graph(package: Path) -> Graph:
    files = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        parent = path.relative_to(package).parent.parts
        for node in syntax_nodes(path):
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
    """Imports of rooms that are not below the importing one, and of kernels by name."""
    height = {room: index for index, room in enumerate(room for floor in FLOORS for room in floor)}
    rooms = {name: name.partition(".")[0] for name in graph if name}
    return [
        f"{name} imports {target}"
        for name, room in rooms.items()
        for target in sorted(graph[name])
        if height[rooms[target]] > height[room] or (rooms[target] == "kernels" and room not in KERNELS_IMPORTED_BY)
    ]


def import_cycle(graph: Graph) -> list[str]:
    """One cycle of modules; empty if there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name not in done:
            for target in sorted(graph[name]):
                if cycle := visit(target, [*path, name]):
                    return cycle
            done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in graph)), [])


@pytest.fixture(scope="module")
def graph() -> Graph:
    return import_graph(PACKAGE)


def test_rooms_import_from_lower_floors_only(graph):
    assert upward_imports(graph) == []


def test_map_names_the_floor_of_each_room():
    page = (PACKAGE.parents[1] / "docs" / "design" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)[^|]*\| (\d+) \|", page, re.MULTILINE)
    floors = {room: number for number, floor in enumerate(FLOORS, 1) for room in floor if room != "__main__"}
    assert {room: int(floor) for room, floor in rows if room != "__init__"} == floors


def test_imports_within_the_package_are_relative():
    absolute = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in syntax_nodes(path)
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "halfbyte"
    ]
    assert absolute == []


def test_no_files_form_an_import_cycle(graph):
    assert import_cycle(graph) == []
