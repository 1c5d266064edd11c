"""MkDocs hooks: add the pages at the repository's root to the site and adapt GitHub's Markdown (mkdocs.yml).

`adapt` needs no MkDocs, so tests/docs/test_pages.py can check what the site links to.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results/"
ROOT_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
LIST_ITEM = re.compile(r"([-*]|\d+\.) ")


def in_site(path: str) -> str | None:
    """Return the site's path of a file of the repository, or None for a file that the site does not have."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path.startswith(RESULTS) else ROOT_PAGES.get(path)


def adapt(markdown: str, source: str) -> str:
    """Return a page of the repository as MkDocs needs it.

    `source` is the page's path in the repository. Relative links become links within the site; a link to a file outside
    of the site becomes its text. Lists and tables get the blank line before them that Python-Markdown needs.
    """
    here = posixpath.dirname(in_site(source) or "")
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            before = lines[-1] if lines else ""
            if begins_block(line) and before.strip() and not begins_block(before) and not before.startswith("  "):
                lines.append("")
            line = re.sub(r"(!?\[[^\]]*)" + LINK.pattern, lambda found: relink(found, source, here), line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def begins_block(line: str) -> bool:
    """Return whether a line is a list item or a table's row."""
    return line.startswith("|") or bool(LIST_ITEM.match(line))


def relink(found: re.Match[str], source: str, here: str) -> str:
    """Return one link of `source`, relative to the folder `here` of the site."""
    text, link = found.groups()
    path, hash_sign, anchor = link.partition("#")
    if ":" in link or not path:
        return found[0]
    target = in_site(posixpath.normpath((PurePosixPath(source).parent / path).as_posix()))
    if target is None:
        return text.lstrip("!").removeprefix("[")
    return f"{text}]({posixpath.relpath(target, here or '.')}{hash_sign}{anchor})"


def on_files(files: Any, config: Any) -> Any:
    """Add README, CHANGELOG, CONTRIBUTING and the results of benchmarks to the site."""
    from mkdocs.structure.files import File

    for name, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    for path in sorted((ROOT / RESULTS).glob("*.json")):
        files.append(File.generated(config, RESULTS + path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Adapt one page."""
    sources = {site: source for source, site in ROOT_PAGES.items()}
    path = page.file.src_uri
    return adapt(markdown, sources.get(path, f"docs/{path}"))
