"""Where what is cached lies."""

from pathlib import Path

import pytest

from halfbyte.errors import ConfigError
from halfbyte.files import cache_folder


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HALFBYTE_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"HALFBYTE_CACHE": "~/own"}, "/home/me/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/halfbyte"),
        ({"XDG_CACHE_HOME": "~/xdg"}, "/home/me/xdg/halfbyte"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/halfbyte"),
        ({}, "/home/me/.cache/halfbyte"),
    ],
)
def test_where_the_cache_is(monkeypatch, environment, folder):
    for name in ("HALFBYTE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | environment).items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_a_user_without_a_home(monkeypatch):
    for name in ("HALFBYTE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def refuse(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", refuse)
    with pytest.raises(ConfigError, match="HALFBYTE_CACHE"):
        cache_folder()
