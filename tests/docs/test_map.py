"""docs/design: the map has every folder of the package, and names only files and definitions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "halfbyte"
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"(?:[\w.-]+/)*(?:[\w-]+\.(?:py|cu|cuh|c|yml)|[\w-]+/)")


def paths_in(text: str) -> dict[str, set[str]]:
    """Paths in code spans, each with the names that follow it after `::`."""
    found: dict[str, set[str]] = {}
    for span in CODE.findall(text):
        path, _, name = span.partition("::")
        if PATH.fullmatch(path):
            found.setdefault(path, set()).update(filter(None, [name]))
    return found


def file_of(path: str) -> Path | None:
    """The file or folder of a path relative to the package or to the repository."""
    return next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)


def definitions(source: str) -> set[str]:
    """Names that a module defines: functions, classes, their methods, and assigned names."""
    names: set[str] = set()

    def add(body: list[ast.stmt], prefix: str = "") -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            names.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    add(ast.parse(source).body)
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_definitions_exist(page):
    missing = []
    for path, names in paths_in(page.read_text(encoding="utf-8")).items():
        file = file_of(path)
        if file is None:
            missing.append(path)
        elif names:
            known = definitions(file.read_text(encoding="utf-8"))
            missing += [f"{path}::{name}" for name in sorted(names - known)]
    assert missing == []


def test_map_has_every_folder_and_root_module():
    text = (ROOT / "docs" / "design" / "index.md").read_text(encoding="utf-8")
    rows = text.partition("## Folders and modules")[2].partition("\n## ")[0]
    listed = [span.rstrip("/") for line in rows.splitlines() for span in CODE.findall(line[:50].partition(" | ")[0])]
    folders = [path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("__init__.py")]
    modules = [path.name for path in PACKAGE.glob("*.py")]
    assert sorted(listed) == sorted({*folders, *modules} - {"."})


def test_map_is_one_page():
    assert len((ROOT / "docs" / "design" / "index.md").read_text(encoding="utf-8").splitlines()) <= 120
