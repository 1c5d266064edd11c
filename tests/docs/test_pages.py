"""Pages of the documentation: links lead somewhere, generated pages are current, and the README stays short."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def load(name: str) -> ModuleType:
    """Import one of the programs in docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = load("site_hooks")


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings: lower case, no punctuation, hyphens for spaces, -1 for the second of two."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(each for each in (name, *(f"{name}-{i}" for i in range(1, 99))) if each not in found))
    return found


def links(text: str) -> list[str]:
    """The targets of a page's links, without those to other sites."""
    return [link for link in LINK.findall(FENCED.sub("", text)) if not re.match(r"\w+:", link)]


def broken(text: str, folder: Path, pages: dict[Path, str]) -> list[str]:
    """The links in a page of `folder` that lead to no file or heading. `pages` has the texts of all pages."""
    wrong = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = (folder / name).resolve() if name else None
        there = text if target is None else pages.get(target)
        exists = target is None or there is not None or (target.exists() and target.is_relative_to(ROOT))
        if not exists or (anchor and (there is None or anchor not in anchors(there))):
            wrong.append(link)
    return wrong


@pytest.fixture(scope="module")
def texts():
    return {page: page.read_text(encoding="utf-8") for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_exist(page, texts):
    assert broken(texts[page], page.parent, texts) == []


def test_the_site_has_every_page_once_in_its_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"([\w/.-]+\.md)$", text.partition("nav:")[2], re.MULTILINE)
    pages = [site.in_site(page.relative_to(ROOT).as_posix()) for page in PAGES]
    assert sorted(listed) == sorted(pages)


def test_links_of_the_site_stay_within_it(texts):
    made = {}
    for page, text in texts.items():
        source = page.relative_to(ROOT).as_posix()
        made[ROOT / "site" / site.in_site(source)] = site.adapt(text, source)
    for page, text in made.items():
        local = re.sub(r"\]\([./]*(benchmarks/results/\w+\.json|plots/\w+\.svg)\)", "]()", text)
        assert broken(local, page.parent, made) == [], page


def test_pages_are_adapted_to_the_site():
    page = "text\n- [a](../README.md#more) [b](../src/x.py)\n  more\n- c\n```\nx\n- [d](../README.md)\n```\n"
    adapted = "text\n\n- [a](index.md#more) b\n  more\n- c\n```\nx\n- [d](../README.md)\n```\n"
    assert site.adapt(page, "docs/x.md") == adapted
    assert site.adapt("[a](../data.md)", "docs/design/x.md") == "[a](../data.md)\n"
    assert site.adapt("[a](docs/design/index.md)", "README.md") == "[a](design/index.md)\n"


def test_the_configuration_page_is_that_of_the_schema():
    generator = load("configuration")
    assert generator.PAGE.read_text(encoding="utf-8") == generator.page()


def test_the_configuration_page_has_every_key():
    from halfbyte.config import RunConfig

    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(RunConfig.model_fields)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
