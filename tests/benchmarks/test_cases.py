"""Benchmarks without a GPU: their imports exist, and the table of cases and the documented commands parse."""

import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import decode
from benchmarks.__main__ import CASES, words_of
from benchmarks.harness import RESULTS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NO_PARSER = {"page", "tables", "kernel_matrix"}  # commands without options


def parser_of(name: str):
    """The parser of a benchmark, or None where the libraries that it imports are not installed."""
    try:
        return importlib.import_module(f"benchmarks.{name}").parser()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("halfbyte", "benchmarks")):
            raise
        return None


def documented() -> set[tuple[str, ...]]:
    """The words behind `python -m benchmarks` in all pages."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES).replace("\\\n", " ")
    return {tuple(shlex.split(words, comments=True)) for words in re.findall(r"-m benchmarks([. ][^`\n]*)", text)}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_every_import_of_halfbyte_exists(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(("halfbyte", "benchmarks")):
            continue
        if not re.match(r"halfbyte\.kernels\.(triton|cuda)", node.module):
            module = importlib.import_module(node.module)
            for alias in node.names:
                found = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                assert found, f"{node.module}.{alias.name}"


@pytest.mark.parametrize("case", CASES)
def test_case_parses_and_has_a_result(case):
    gpus, module, options = words_of(case)
    assert gpus in (1, 2)
    assert (RESULTS / f"{case}.json").is_file()
    if (parser := parser_of(module)) is not None:
        parser.parse_args([*options, "--json", "x"])


def test_documented_commands_parse():
    commands = documented()
    assert len(commands) > 20
    for first, *words in commands:
        if first == "CASE":
            continue
        if not first.startswith("."):
            assert first in CASES
        elif first[1:] in NO_PARSER:
            assert (FOLDER / f"{first[1:]}.py").is_file()
            assert not words
        elif (parser := parser_of(first[1:])) is not None and words:
            parser.parse_args(words)


def test_results_named_on_pages_can_be_made_again():
    linked = {name for page in PAGES for name in re.findall(r"results/(\w+)\.json", page.read_text(encoding="utf-8"))}
    assert linked <= CASES.keys()


def test_prefill_is_excluded_from_decoding_speed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    counts = []

    def generate(count):
        counts.append(count)
        now[0] += 100.0 + count

    assert decode.without_prompt(generate, batch=3, new=65) == pytest.approx(3.0)
    assert counts == [4, 65, 1]
