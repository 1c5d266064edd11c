"""Installed packages outside the bounds of halfbyte's metadata are named before anything imports them."""

import pytest

import halfbyte
from halfbyte.cli import main
from halfbyte.utils import versions
from halfbyte.utils.errors import HalfbyteError
from halfbyte.utils.notices import notices_so_far

LINES = """\
Requires-Dist: torch<2.16,>=2.11
Requires-Dist: peft>=0.21
Requires-Dist: transformers<5.25,>=5.17
Requires-Dist: no-such-package>=1
Requires-Dist: starlette>=1.0; extra == "serve"
Requires-Dist: trl>=1.16; (platform_system == "Linux") and extra == "test"
"""
WITHIN = {"torch": "2.13.0+cpu", "peft": "0.21", "transformers": "5.24.1", "starlette": "1.10.0", "trl": "1.0.0"}


def write_metadata(folder, packages):
    """Write the metadata of halfbyte with the bounds of LINES, and of packages within them but for `packages`."""
    for name, version in ({"halfbyte": "0.1.0"} | WITHIN | packages).items():
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Name: {name}\nVersion: {version}\n{LINES if name == 'halfbyte' else ''}\nIts page\n")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that has importlib find packages of these versions."""
    monkeypatch.syspath_prepend(tmp_path)
    versions.check_versions.cache_clear()
    yield lambda **packages: write_metadata(tmp_path, packages)
    versions.check_versions.cache_clear()


@pytest.mark.parametrize(
    "packages",
    [{}, {"torch": "2.11.0a0+git"}, {"torch": "2.15.9"}, {"transformers": "5.17.0.dev0"}, {"starlette": "0.9"}],
)
def test_versions_within_the_bounds_pass(installed, packages):
    installed(**packages)
    versions.check_versions()
    assert not notices_so_far()


@pytest.mark.parametrize(
    "packages",
    [{"peft": "0.18.1"}, {"transformers": "5.16.1"}, {"torch": "2.9"}, {"peft": "0.20.9", "transformers": "4.57.0"}],
)
def test_packages_below_a_bound_are_refused_together(installed, packages):
    installed(**packages)
    with pytest.raises(HalfbyteError) as refused:
        _ = halfbyte.load_model
    for name, version in packages.items():
        assert f"{name} {version}" in refused.value.message
        assert f"{name}>=" in refused.value.fix
    assert "trl" not in str(refused.value)


@pytest.mark.parametrize("version", ["5.25.0", "5.25.0.dev0", "6.0"])
def test_a_newer_package_is_logged_once(installed, version):
    installed(transformers=version)
    versions.check_versions()
    assert f"transformers {version}" in notices_so_far()["versions"]
    assert "<5.25" in notices_so_far()["versions"]


def test_an_extra_has_bounds_where_it_is_used(installed):
    installed(starlette="0.49")
    versions.check_versions()
    with pytest.raises(HalfbyteError) as refused:
        versions.check_versions("serve")
    assert "starlette 0.49" in refused.value.message


@pytest.mark.parametrize("command", [["train", "m", "d"], ["generate", "m", "p.txt"], ["env"]])
def test_commands_refuse_by_name(installed, capsys, command):
    installed(peft="0.18.1")
    with pytest.raises(SystemExit) as stop:
        main(command)
    printed = capsys.readouterr()
    assert stop.value.code == 1
    assert "peft 0.18.1" in printed.err
    assert bool(printed.out) == (command == ["env"])
