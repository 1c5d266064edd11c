"""Along which axes a run may be divided, and along which together: what is refused has its words here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

from .methods import COMPARING
from .policy import SAMPLING
from .resolve import Parallel
from .schema import Axis

AXES: tuple[str, ...] = get_args(Axis)
WITH_PIPELINE = ("data", "shard")


def wide(layout: Parallel) -> tuple[str, ...]:
    """The axes along which there are several processes."""
    return tuple(each.name for each in fields(layout) if getattr(layout, each.name) > 1)


def obstacle(layout: Parallel) -> tuple[str, str] | None:
    """Why no run can be divided so, whatever its model: what is wrong, and the fix."""
    axes = wide(layout)
    beside = [axis for axis in axes if axis not in ("pipeline", *WITH_PIPELINE)]
    if "pipeline" in axes and beside:
        wrong = f"parallel: {layout}: pipeline goes with {' and '.join(WITH_PIPELINE)}, not with {beside[0]}"
        return wrong, f"leave out pipeline or {beside[0]}"
    return None


def of_method(layout: Parallel, method: str) -> tuple[str, str] | None:
    """Why `method` cannot be trained so: what is wrong, and the fix. Its losses may be of whole rows."""
    if method == "sft" or layout.size == 1:
        return None
    if method in SAMPLING:
        return f"parallel: {layout}: method: {method} trains on one device", "remove parallel, or start one process"
    ways = ["data", *(["shard"] if method in COMPARING else [])]
    if layout.size == math.prod(getattr(layout, axis) for axis in ways):
        return None
    wrong = f"parallel: {layout} with method: {method}: its losses are of whole rows"
    return wrong, f"divide rows: use parallel: {' or '.join(f'{{{axis}: N}}' for axis in ways)}"


def layouts(processes: int) -> Iterator[Parallel]:
    """Every way to divide a run among so many processes that nothing here forbids, those along one axis first."""
    factors = [n for n in range(1, processes + 1) if processes % n == 0]
    ways = itertools.product(factors, repeat=len(AXES))
    found = [Parallel(**dict(zip(AXES, each, strict=True))) for each in ways if math.prod(each) == processes]
    found.sort(key=lambda layout: (len(wide(layout)), [-getattr(layout, axis) for axis in AXES]))
    yield from (layout for layout in found if obstacle(layout) is None)
