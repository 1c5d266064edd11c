"""Docstrings, comments and messages of the package name only modules, definitions and pages that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "halfbyte"
DOTTED = re.compile(r"`((?:[A-Za-z_]\w*\.)+\w+)(?:\(\))?`")
PAGE = re.compile(r"(?<![\w/])docs/[\w/.-]+\.md")
# Folders of halfbyte that are also names of other packages, files or variables.
OTHERS = re.compile(r"\w+\.(jsonl?|yaml|html|md|py)|nn\..*|autograd\.Function|triton\.(jit|language)|config\.\w+")


def modules() -> dict[str, str]:
    """The sources of the package's modules by their dotted names without `halfbyte`."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


@cache
def names_in(source: str) -> set[str]:
    """Names that a module or its classes define, import, or set as attributes, and its strings."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.Name() | ast.Attribute() if isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            case ast.alias():
                names.add(node.asname or node.name)
            case ast.Constant(value=str()):  # ops and rows of tables have such names
                names.add(node.value)
    return names


def is_known(dotted: str, sources: dict[str, str]) -> bool:
    """Whether a dotted name is a module, or its last parts are names in the module that the first ones name."""
    parts = dotted.removeprefix("halfbyte.").split(".")
    for count in range(len(parts), 0, -1):
        prefix = ".".join(parts[:count])
        owners = [name for name in sources if name == prefix or name.endswith(f".{prefix}")]
        if any(set(parts[count:]) <= names_in(sources[name]) for name in owners):
            return True
    return False


def stale(sources: dict[str, str]) -> list[str]:
    """The names and pages in the sources that lead nowhere, with their modules and lines."""
    folders = {part for name in sources for part in name.split(".")[:-1]} | {"halfbyte"}
    wrong = []
    for module, source in sources.items():
        for number, line in enumerate(source.splitlines(), 1):
            named = [dotted for dotted in DOTTED.findall(line) if dotted.split(".")[0] in folders]
            missing = [name for name in named if not OTHERS.fullmatch(name) and not is_known(name, sources)]
            missing += [page for page in PAGE.findall(line) if not (ROOT / page).exists()]
            wrong += [f"{module}:{number} {name}" for name in missing]
    return wrong


def test_docstrings_and_comments_name_what_exists():
    assert stale(modules()) == []


def test_missing_names_are_found():
    loop = "class Loop:\n    def step(self): self.rows = 1"
    sources = {"": "", "train": "", "train.loop": loop, "data": "", "data.chat": "A = 1"}
    text = "`train.loop.Loop.step` `train.loop.rows` `data.chat.A` `halfbyte.data` docs/data.md docs/design/index.md"
    assert stale({**sources, "x": text}) == []
    wrongs = ["`train.loop.Stop`", "`train.branches`", "`data.chat.A.b`", "`train.loop.Loop.stop`", "docs/design.md"]
    for wrong in [*wrongs, "`halfbyte.nothing.at_all`"]:
        assert stale({**sources, "x": wrong}) == [f"x:1 {wrong.strip('`')}"]
