"""The processes that train together. Everything else asks these few verbs, and nothing else asks for ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """One process, for which every verb is the identity.

    Attributes:
        rank: of this process, from 0.
        size: how many there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files, says notices and shows the run."""
        return self.rank == 0

    def sum(self, value: T) -> T:
        """The sum over all processes of a number or a tensor, on its device."""
        return value

    def max(self, value: T) -> T:
        """The largest of all processes' values."""
        return value

    def first(self, make: Callable[[], T]) -> T:
        """What `make` gives, made by the main process before the others begin, so that they find what it has cached."""
        return make()

    def equal(self, value: Any) -> bool:
        """Whether all processes hold the same value."""
        return True


ALONE = Mesh()


def present_mesh() -> Mesh:
    """The processes that the launcher has started.

    Raises:
        ConfigError: more than one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("this version trains in one process, on one device", "start it without torchrun")
    return ALONE
