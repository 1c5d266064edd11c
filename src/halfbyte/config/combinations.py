"""Along which axes a run may be divided, and along which together: what is refused has its words here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import get_args

from ..optim import OPTIMIZERS
from .methods import COMPARING
from .policy import SAMPLING
from .resolve import Parallel
from .schema import Axis, RunConfig

AXES: tuple[str, ...] = get_args(Axis)
WITH_PIPELINE = ("data", "shard")
DIVIDE_ROWS = "use parallel: {data: N} or {shard: N}"
WITHOUT = "leave `pipeline` out of `parallel`"


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


def of_keys(layout: Parallel, config: RunConfig) -> tuple[str, str, str] | None:
    """Why a run with these keys cannot be divided so: the key to change, what is wrong, and the fix."""
    pipeline, tensor = layout.pipeline > 1, layout.tensor > 1
    whole = next((axis for axis in ("pipeline", "context", "tensor") if getattr(layout, axis) > 1), "")
    if config.router_aux_loss_coef and whole:
        key = "router_aux_loss_coef"
        wrong = f"{key} with parallel: {whole}: {getattr(layout, whole)}: its sums are over all layers and whole rows"
        return key, wrong, f"remove {key}, or divide the run by data or shard"
    if pipeline and not config.use_peft:
        return "use_peft", "parallel: a pipeline trains adapters, and use_peft is false", WITHOUT
    if pipeline and config.modules_to_save:
        key = "modules_to_save"
        return key, f"{key}: a pipeline trains low-rank adapters alone", f"remove it, or {WITHOUT}"
    if tensor and config.recipe != "bf16":
        wrong = (
            f"parallel: {{tensor: {layout.tensor}}}: recipe {config.recipe} would scale each process's part by itself"
        )
        return "recipe", wrong, "set recipe: bf16"
    if tensor and not OPTIMIZERS[config.optim].elementwise:
        known = ", ".join(name for name, row in OPTIMIZERS.items() if row.elementwise)
        wrong = f"parallel: {{tensor: {layout.tensor}}}: optim {config.optim} cannot step slices of a parameter"
        return "optim", wrong, f"use one of {known}"
    return None


def undivided_sizes(ways: int, heads: int, key_heads: int, channels: int) -> str:
    """Why `tensor` cannot divide layers of these sizes so many ways; empty where it can.

    Args:
        key_heads: how many of the attention's heads are of keys.
        channels: of the MLP.
    """
    if heads % ways or key_heads % ways:
        return f"{heads} heads, {key_heads} of them of keys, are not divided {ways} ways"
    if channels % ways:
        return f"{channels} channels of the MLP are not divided {ways} ways"
    return ""


def layouts(processes: int) -> Iterator[Parallel]:
    """Every way to divide a run among so many processes that nothing here forbids, those along one axis first."""
    factors = [n for n in range(1, processes + 1) if processes % n == 0]
    ways = itertools.product(factors, repeat=len(AXES))
    found = [Parallel(**dict(zip(AXES, each, strict=True))) for each in ways if math.prod(each) == processes]
    found.sort(key=lambda layout: (len(wide(layout)), [-getattr(layout, axis) for axis in AXES]))
    yield from (layout for layout in found if obstacle(layout) is None)
