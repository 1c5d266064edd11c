"""Check the versions of installed packages against the bounds in halfbyte's own metadata (pyproject.toml).

Only `importlib.metadata` is used, because a package of another version may not be importable.
"""

import functools
import re

from .errors import HalfbyteError
from .notices import notice

_REQUIREMENT = re.compile(r"^Requires-Dist: ([\w.-]+)([^;\n]*)(?:;.*extra == .([\w-]+).)?$", re.MULTILINE)
_VERSION = re.compile(r"^Version: (\S+)", re.MULTILINE)
_BOUND = re.compile(r"(>=|<)\s*([\d.]+)")


@functools.cache
def check_versions(extra: str = "") -> None:
    """Refuse packages that are older than halfbyte needs, and log packages that are newer than its upper bounds.

    Packages that are not installed, and an installation of halfbyte without metadata, are not reported.

    Args:
        extra: check the packages of this extra of halfbyte ("serve") instead of those that it always needs.

    Raises:
        HalfbyteError: a package is too old.
    """
    old: dict[str, str] = {}
    new: dict[str, str] = {}
    for name, specifier, of_extra in _REQUIREMENT.findall(_metadata("halfbyte")):
        version = _VERSION.search(_metadata(name)) if of_extra == extra else None
        if version is None:
            continue
        requirement = name + ",".join(sorted((bound.strip() for bound in specifier.split(",")), reverse=True))
        release = _release(version[1])
        for operator, limit in _BOUND.findall(specifier):
            if operator == ">=" and release < _release(limit):
                old[requirement] = f"{name} {version[1]}"
            elif operator == "<" and release >= _release(limit):
                new[requirement] = f"{name} {version[1]}"
    if old:
        raise HalfbyteError(f"halfbyte needs {', '.join(old)}; installed: {', '.join(old.values())}", _install(old))
    if new:
        message = f"halfbyte is tested with {', '.join(new)}; installed: {', '.join(new.values())}; it runs untested"
        notice("versions", f"{message}. If something fails: {_install(new)}")


def _metadata(package: str) -> str:
    """Return a package's metadata; empty if it is not installed. `metadata.version` takes 6 times longer."""
    from importlib import metadata  # takes longer than the check; `halfbyte --help` does without

    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return ""
    return distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""


def _release(version: str) -> list[int]:
    """Return the numbers of a version without zeros at the end: 2.11.0a0+git is the release 2.11."""
    numbers = re.match(r"[\d.]*", version)
    release = [int(number) for number in numbers[0].split(".") if number] if numbers else []
    while release and not release[-1]:
        release.pop()
    return release


def _install(requirements: dict[str, str]) -> str:
    return f"pip install {' '.join(repr(requirement) for requirement in requirements)}"
