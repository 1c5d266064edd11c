from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mapped:
    keys: dict[str, Any]


@dataclass(frozen=True)
class Ignored:
    why: str


@dataclass(frozen=True)
class Refused:
    why: str
    fix: str


HINTS = {}


def foreign_names():
    return []


def translate(key, values):
    return None
