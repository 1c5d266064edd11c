"""What the documents tell people to type exists: commands, options, make targets, and names in Python examples."""

import ast
import importlib
import itertools
import re

import pytest

from tests.helpers.documents import DOCUMENTS, ROOT, blocks, commands


def documented(program: str) -> list[tuple[str, list[str]]]:
    return [(name, words) for name, text in blocks("bash") for words, _ in commands(text) if words[0] == program]


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def parse(words: list[str]) -> None:
    """Parse one `halfbyte` command line without running it.

    Raises:
        KeyError: there is no such command.
        Exception: typer's usage error, which names the option it does not know or the argument it misses.
    """
    from typer.main import get_command

    from halfbyte.cli import app

    name, *rest = words[1:]
    get_command(app).commands[name].make_context(name, rest)


@pytest.mark.parametrize("words", [words for _, words in documented("halfbyte")], ids=" ".join)
def test_documented_commands_parse(words):
    from halfbyte.config import RunConfig

    if words[1:] and not {"--help", "--version"} & set(words):
        parse(words)
    overrides = [
        word for before, word in itertools.pairwise(words) if before != "--adapter"
    ]  # whose value is NAME=PATH
    keys = {word.split("=")[0] for word in overrides if re.fullmatch(r"\w+=.*", word)}
    assert keys <= set(RunConfig.model_fields)


@pytest.mark.parametrize("text", [text for _, text in blocks("yaml") if text.startswith("# run.yaml")])
def test_files_to_copy_are_valid_configurations(text, tmp_path):
    from halfbyte.config import load_config

    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    load_config(path)


def test_wrong_commands_and_options_would_be_found():
    parse(["halfbyte", "train", "run.yaml", "learning_rate=1e-4"])
    with pytest.raises(Exception, match=r"--no-such-option"):
        parse(["halfbyte", "merge", "out", "--no-such-option"])  # train takes any --key as an override
    with pytest.raises(KeyError, match="no-such-command"):
        parse(["halfbyte", "no-such-command"])


def test_documented_make_targets_exist():
    asked = {word for _, words in documented("make") for word in words[1:] if "=" not in word}
    assert asked <= make_targets()
    for path in DOCUMENTS:
        inline = set(re.findall(r"`make ([\w-]+)`", path.read_text(encoding="utf-8")))
        assert inline <= make_targets(), path.name


@pytest.mark.parametrize(("document", "text"), blocks("python"))
def test_python_examples_compile_and_their_names_exist(document, text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "halfbyte":
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "halfbyte":
                    importlib.import_module(alias.name)
