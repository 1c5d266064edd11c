"""Bytecode goes to halfbyte's cache folder if and only if it cannot be stored next to the libraries."""

import importlib
import json
import os
import subprocess
import sys

import pytest

from halfbyte.cli import startup


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A read-only folder of installed packages, and an empty cache folder."""
    (tmp_path / "site" / "largest").mkdir(parents=True)
    (tmp_path / "site" / "largest" / "__init__.py").write_text("value = 1\n")
    (tmp_path / "site" / "largest-1.0.dist-info").mkdir()
    may = os.access
    monkeypatch.setattr(startup.os, "access", lambda path, mode: mode != os.W_OK and may(path, mode))
    monkeypatch.setattr(startup, "LARGEST", "largest")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "site"
    sys.modules.pop("largest", None)


def test_an_installation_without_any_is_compiled_once_into_the_cache_folder(site, tmp_path):
    startup.keep_bytecode()
    importlib.import_module("largest")
    (folder,) = (tmp_path / "cache" / "bytecode").iterdir()
    assert list(folder.rglob("largest/*.pyc"))
    assert not (site / "largest" / "__pycache__").exists()
    assert folder.stat().st_mode & 0o077 == 0


def test_another_version_finds_nothing_of_the_one_before(site, monkeypatch):
    startup.keep_bytecode()
    before = sys.pycache_prefix
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (site / "largest-1.0.dist-info").rename(site / "largest-1.1.dist-info")
    startup.keep_bytecode()
    assert sys.pycache_prefix not in (None, before)


def compiled_as_it_was_installed(site, monkeypatch):
    compiled = importlib.util.cache_from_source(str(site / "largest" / "__init__.py"))
    os.mkdir(os.path.dirname(compiled))
    open(compiled, "wb").close()


def may_be_written_to(site, monkeypatch):
    monkeypatch.setattr(startup.os, "access", lambda path, mode: True)


def imported_already(site, monkeypatch):
    importlib.import_module("largest")


def not_installed(site, monkeypatch):
    monkeypatch.setattr(startup, "LARGEST", "larger")


def no_files_asked_for(site, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def no_place_for_caches(site, monkeypatch):
    (site / "a file").touch()
    monkeypatch.setenv("HALFBYTE_CACHE", str(site / "a file"))


def of_another_user(site, monkeypatch):
    monkeypatch.setattr(startup.os, "geteuid", lambda: -1)


REASONS = [
    compiled_as_it_was_installed, may_be_written_to, imported_already, not_installed, no_files_asked_for,
    no_place_for_caches, of_another_user,
]  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_bytecode_settings_stay_unchanged(site, monkeypatch, reason):
    reason(site, monkeypatch)
    startup.keep_bytecode()
    assert sys.pycache_prefix is None


def test_user_pycache_prefix_stays(site, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", "/theirs")
    startup.keep_bytecode()
    assert sys.pycache_prefix == "/theirs"


def test_every_command_calls_keep_bytecode(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    program = (
        "import contextlib, json, os, sys\n"
        "os.access = lambda *asked: False\n"
        "from halfbyte.cli import main\n"
        "with contextlib.suppress(SystemExit):\n"
        "    main(['--version'])\n"
        "print(json.dumps([sys.pycache_prefix, 'torch' in sys.modules]))"
    )
    asked = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "HALFBYTE_CACHE": str(tmp_path / "cache")}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment | asked
    )
    place, heavy = json.loads(done.stdout.splitlines()[-1])
    assert place.startswith(str(tmp_path / "cache" / "bytecode"))
    assert not heavy
