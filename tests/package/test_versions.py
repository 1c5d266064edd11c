"""The versions of the libraries that halfbyte builds on most are those whose changes were looked at.

A newer minor version than the newest one listed here fails, and names what to look at before it is listed.
"""

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.helpers.versions import ENDS

ROOT = Path(__file__).resolve().parents[2]
# The newest minor version that the suite has passed on, and where halfbyte depends on a library's internals.
LOOKED_AT = {
    "torch": ("2.15", "tensor subclasses (tensor.py), CUDA graphs (train/graph.py), Inductor's wrappers (kernels/)"),
    "transformers": ("5.24", "names of caches and keywords (modeling/layer.py), masks, Trainer's order, HfQuantizer"),
    "peft": ("0.21", "adapter_config.json, names of tensors, LoRA's variants (adapters/lora.py, layers/plain.py)"),
    "trl": ("1.16", "configurations and defaults (docs/preference.md), losses that tests compare with"),
}


def minor(version):
    return Version(version).release[:2]


@pytest.mark.parametrize("package", LOOKED_AT)
def test_a_newer_minor_version_is_looked_at_before_it_is_used(package):
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    newest, where = LOOKED_AT[package]
    assert minor(installed) <= minor(newest), f"{package} {installed} is newer than {newest}: look at {where}"


def test_the_oldest_python_is_run():
    """`make test-versions` runs the oldest Python that is allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={ENDS['oldest'][0]}"


def test_bounds_and_constraints_agree_with_what_was_looked_at():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {found.name: found.specifier for found in map(Requirement, project["dependencies"])}
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", constraints, re.MULTILINE))
    for package in ("torch", "transformers"):
        newest = ".".join(map(str, minor(LOOKED_AT[package][0])))
        major, last = minor(newest)
        assert bounds[package].contains(f"{newest}.9")
        assert not bounds[package].contains(f"{major}.{last + 1}.0")
    for package in LOOKED_AT:
        assert minor(pinned[package]) <= minor(LOOKED_AT[package][0])
