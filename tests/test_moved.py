"""Modules that moved are found by their old names, said once, and nothing else is."""

import importlib
import subprocess
import sys

import pytest

from halfbyte.moved import MOVED
from halfbyte.notices import forget, said


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_name_gives_the_new_module(old):
    sys.modules.pop(f"halfbyte.{old}", None)
    forget()
    found, new = importlib.import_module(f"halfbyte.{old}"), importlib.import_module(f"halfbyte.{MOVED[old]}")
    for name in (name for name in vars(new) if not name.startswith("__")):
        assert getattr(found, name) is getattr(new, name)
    assert f"halfbyte.{MOVED[old]}" in said()[f"moved halfbyte.{old}"]
    assert importlib.import_module(f"halfbyte.{MOVED[old]}") is new


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("halfbyte.never_was")


def test_scripts_of_the_version_before_run():
    script = (
        "from halfbyte.layers_int8 import Linear8bitLt; import halfbyte; print(Linear8bitLt is halfbyte.Linear8bitLt)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
    assert "halfbyte.layers.int8 now" in done.stderr
