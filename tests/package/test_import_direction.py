"""Imports run one way. This reads every import of the package, those inside functions too, and fails on an arrow up."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import halfbyte

PACKAGE = Path(halfbyte.__file__).parent

# Lowest first. A module imports from its own row and from the rows above it here, never from those below.
ORDER = [
    [
        "__init__",
        "errors",
        "notices",
        "moved",
        "files",
        "processes",
        "signals",
        "hardware",
        "config",
        "optim",
        "streams",
        "hub",
        "console",
        "terminal",
        "environment",
        "architectures",
        "families",
        "layer_sizes",
        "reading",
        "words",
        "orders",
    ],
    ["dispatch"],
    ["ops", "formats"],
    ["autograd"],
    ["tensor", "parallel"],
    ["layers", "memory", "functional", "gguf"],
    ["qat"],
    ["adapters"],
    ["models"],
    ["data", "generation", "rewards"],
    ["plan"],
    ["runs", "methods"],
    ["report"],  # reads only the files of a run, so a run may end by writing its report
    ["export"],  # reads only saved runs, so a finished run can offer to merge itself
    ["train"],
    ["evaluation"],
    ["serve"],
    ["lm_eval"],
    ["demo"],
    ["cli", "__main__"],
]
RANK = {unit: rank for rank, units in enumerate(ORDER) for unit in units}

# Kernels are loaded lazily, by name, from dispatch; they know these and nothing else.
KERNELS_MAY_IMPORT = {"errors", "files", "notices", "kernels", "dispatch", "ops", "formats"}

Arrow = tuple[str, str, str]  # unit that imports, unit imported, "file:line"


def unit_of(path: Path, package: Path) -> str:
    """The module or subpackage directly under the package that `path` belongs to."""
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(node: ast.AST, module: list[str]) -> Iterator[list[str]]:
    """Absolute dotted names, as lists, that an import statement in `module` (a package's __init__ included) reaches."""
    if isinstance(node, ast.Import):
        yield from (alias.name.split(".") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = module[: len(module) - node.level] if node.level else []
        base = base + (node.module.split(".") if node.module else [])
        yield from ([*base, alias.name] for alias in node.names)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that can run: everything but the bodies of `if TYPE_CHECKING:`."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending += node.orelse if is_type_checking(node) else ast.iter_child_nodes(node)


def arrows(package: Path) -> list[Arrow]:
    found = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package).with_suffix("")
        module = ["halfbyte", *relative.parts]
        for node in runtime_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            for name in imported_modules(node, module):
                if name[0] == "halfbyte":
                    target = name[1] if len(name) > 1 else "__init__"
                    is_module = (package / target).is_dir() or (package / f"{target}.py").is_file()
                    to = unit_of(package / target, package) if is_module else "__init__"
                    found.append((unit_of(path, package), to, f"{relative}.py:{node.lineno}"))
    return found


def upward(found: list[Arrow]) -> list[str]:
    """The arrows that point up, or from the kernels to what they must not know."""
    wrong = []
    for source, target, where in found:
        if source == "kernels":
            bad = target not in KERNELS_MAY_IMPORT
        else:
            bad = (target == "kernels" and source != "dispatch") or RANK.get(target, 0) > RANK.get(source, 0)
        if bad and source != "cli":
            wrong.append(f"{where}: {source} imports {target}")
    return wrong


def cycles(found: list[Arrow]) -> list[str]:
    """Units that reach themselves over other units."""
    graph: dict[str, set[str]] = {}
    for source, target, _ in found:
        if source != target and target != "__init__":
            graph.setdefault(source, set()).add(target)

    def reaches(start: str) -> bool:
        seen, pending = set(), list(graph.get(start, ()))
        while pending:
            unit = pending.pop()
            if unit == start:
                return True
            if unit not in seen:
                seen.add(unit)
                pending += graph.get(unit, ())
        return False

    return [unit for unit in graph if reaches(unit)]


def test_documented_order_matches_the_table():
    """docs/design.md draws ORDER, highest row first; a row may take several lines."""
    text = (PACKAGE.parents[1] / "docs" / "design.md").read_text(encoding="utf-8")
    block = text.split("**Imports run one way**")[1].split("```")[1].strip()
    drawn = [set(row.replace(",\n", ", ").split(", ")) for row in re.split(r"(?<!,)\n", block)]
    assert drawn == [set(row) - {"__init__", "__main__"} for row in reversed(ORDER)]


def test_every_module_has_a_rank():
    present = {unit_of(path, PACKAGE) for path in PACKAGE.rglob("*.py")}
    assert present <= RANK.keys() | {"kernels"}, "give the new module a row in ORDER"


def test_no_import_points_up():
    assert upward(arrows(PACKAGE)) == []


def test_no_two_modules_import_each_other():
    assert cycles(arrows(PACKAGE)) == []


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("tensor.py", "from .layers import Linear4bit", ["tensor.py:1: tensor imports layers"]),
        ("ops/x.py", "def f():\n    from ..train import sft", ["ops/x.py:2: ops imports train"]),
        ("ops/x.py", "from .. import train", ["ops/x.py:1: ops imports train"]),
        ("utils/errors.py", "import halfbyte.loading.load", ["utils/errors.py:1: errors imports models"]),
        ("kernels/x.py", "from ..layers import Linear4bit", ["kernels/x.py:1: kernels imports layers"]),
        ("ops/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..train import sft", []),
        ("train/x.py", "from ..ops import x\nfrom .. import __version__", []),
    ],
)
def test_the_check_itself(tmp_path, file, text, expected):
    for unit in ("errors", "ops", "layers", "models", "train"):
        (tmp_path / unit).with_suffix(".py").touch()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert upward(arrows(tmp_path)) == expected


def test_the_cycle_check_itself():
    found = [("memory", "layers", ""), ("layers", "memory", ""), ("ops", "errors", "")]
    assert sorted(cycles(found)) == ["layers", "memory"]
