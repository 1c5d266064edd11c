"""The site's page of the Python API has every public name, and each of them a docstring that says what it does."""

import importlib.util
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import halfbyte

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8"), re.MULTILINE)
HAS_MKDOCSTRINGS = importlib.util.find_spec("mkdocstrings_handlers") is not None


def named(path: str):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_every_public_name_is_on_the_page():
    shown = {path.rpartition(".")[2] for path in ENTRIES}
    assert set(halfbyte.__all__) - {"__version__", "functional"} <= shown
    from halfbyte import functional, generation
    from halfbyte.optim import fused

    classes = [value for value in vars(fused).values() if inspect.isclass(value) and value.__module__ == fused.__name__]
    assert {optimizer.__name__ for optimizer in classes if issubclass(optimizer, fused.Optimizer)} <= shown
    assert {*generation.__all__} - {"forget", "stream"} <= shown
    functions = {name for name, value in vars(functional).items() if inspect.isfunction(value) and name[0] != "_"}
    assert functions - {"dataclass"} <= shown


@pytest.mark.parametrize("path", ENTRIES)
def test_docstrings_can_be_read_alone(path):
    entry = named(path)
    text = inspect.getdoc(entry) or ""
    assert text.partition("\n")[0].endswith((".", ":"))
    if not inspect.isclass(entry):
        described = set(re.findall(r"[\w]+", " ".join(re.findall(r"^    ([\w, *]+):", text, re.MULTILINE))))
        parameters = {name for name in inspect.signature(entry).parameters if f"`{name}`" not in text}
        assert len(parameters) <= 1 or parameters <= described


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MKDOCSTRINGS, reason="mkdocs-material and mkdocstrings are not installed: make docs")
def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={"NO_MKDOCS_2_WARNING": "1"})
    page = (tmp_path / "python-api.html").read_text(encoding="utf-8")
    assert all(f'id="{path}"' in page for path in ENTRIES)
