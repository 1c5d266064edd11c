"""Parallel layouts of a run: which ones the model supports, the plan of each, and the one that `auto` chooses.

`parallel: auto` uses `data` if the plan fits: every rank holds the full model, and only adapter gradients are
exchanged. Otherwise it takes the layout with the fewest predicted seconds among those that fit: first among layouts
that keep sequences unsplit, which shard frozen weights (`shard`) or partition layers (`pipeline`, chosen only if
clearly faster); then among layouts that also split sequences (`context`). All are compared at the same global batch
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import Parallel
from ..config.layouts import layouts, unsupported_context, unsupported_packing, unsupported_reason
from ..config.schema import RunKeys
from ..data.batch_shapes import Batches
from ..modeling.layer import decoder_layers
from ..parallel.tensor import check_tensor_parallel
from ..utils.errors import ConfigError, HalfbyteError
from ..utils.notices import silent
from ..utils.text import size
from ..utils.waiting import waiting
from .cards import H200, Card
from .estimate import estimate
from .memory_plan import MemoryPlan
from .rank import rank_config
from .shapes import ModelShapes

# Axes to consider, in this order.
AUTO: tuple[set[str], ...] = ({"data"}, {"data", "shard", "pipeline"}, {"data", "shard", "context"})
PIPELINE_FACTOR = 1.1  # on a pipeline's seconds: micro-batches of uneven lengths add idle time that no plan predicts


def check_layout(layout: Parallel, config: RunKeys, shapes: ModelShapes) -> None:
    """Check that this model and configuration support a layout.

    Args:
        shapes: the unsharded model.

    Raises:
        ConfigError, ModelError: the unsupported axis, the reason and the fix.
    """
    reason = unsupported_reason(layout, config)
    if reason is None and layout.context > 1:
        reason = unsupported_context(shapes.causal_lm.config, layout.context, layout.tensor)
    if reason is None and shapes.document_separation != "positions":
        packs = "packing" if config.packing else "padding_free" if config.padding_free else None
        reason = unsupported_packing(layout, packs)
    if reason:
        raise ConfigError(reason.problem, reason.fix)
    if layout.tensor > 1:
        check_tensor_parallel(shapes.model, layout.tensor)
    if layout.shard > 1:
        decoder_layers(shapes.causal_lm)


@dataclass(frozen=True)
class Option:
    """A layout and its plan.

    Attributes:
        config: the run with this layout, at the same global batch size.
        plan: None if the layout is not supported.
        refused: the reason why it is not supported; else empty.
    """

    layout: Parallel
    config: RunKeys
    plan: MemoryPlan | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits


@dataclass(frozen=True)
class Device:
    """The device type of all ranks.

    Attributes:
        capacity_bytes: memory of the rank with the least.
        card: the GPU whose rates predicted seconds use.
        ranks_per_host: ranks that share one host's memory; None: all.
    """

    torch: torch.device
    capacity_bytes: int
    card: Card = H200
    ranks_per_host: int | None = None


class Meshes:
    """Layouts of a run with their plans.

    Args:
        config: the run as `data` over all ranks would have it, which sets the global batch size.
        batches: the micro-batches of a configuration.
        shapes: the unsharded model, if it was built before.
    """

    def __init__(
        self, config: RunKeys, model_config: Any, device: Device, batches: Callable[[RunKeys], Batches],
        shapes: ModelShapes | None = None,
    ):  # fmt: skip
        self.config = config
        self.model_config = model_config
        self.device = device
        self.batches = batches
        self.shapes = {1: shapes or ModelShapes(config, model_config, device.torch)}  # by degree of tensor parallelism

    @waiting("planning layouts")
    def option(self, layout: Parallel, accumulation: int | None = None) -> Option:
        """Plan the run with `layout`.

        Args:
            accumulation: micro-batches of a step on each rank; default: keeps the global batch size.
        """
        steps = accumulation or self.config.gradient_accumulation_steps * layout.size // (layout.data * layout.shard)
        degrees = {axis: getattr(layout, axis) for axis in layout.axes} or {"data": 1}
        config = self.config.model_copy(update={"parallel": degrees, "gradient_accumulation_steps": steps})
        try:
            check_layout(layout, config, self.shapes[1])
            with silent():
                plan = estimate(
                    config, self.model_config, device=self.device.torch, capacity_bytes=self.device.capacity_bytes,
                    batches=self.batches(config), shapes=self._shapes(layout), layout=layout, card=self.device.card,
                    ranks_per_host=self.device.ranks_per_host,
                )  # fmt: skip
        except HalfbyteError as error:
            return Option(layout, config, refused=error.message)
        return Option(layout, config, plan)

    def _shapes(self, layout: Parallel) -> ModelShapes:
        degree = layout.tensor
        if degree not in self.shapes:
            model_config = rank_config(self.model_config, layout)
            self.shapes[degree] = ModelShapes(self.config, model_config, self.device.torch, degree)
        return self.shapes[degree]

    def options(self, processes: int) -> Iterator[Option]:
        """Plan every layout of `processes` ranks, single-axis layouts first."""
        yield from map(self.option, layouts(processes))

    def choose(self, processes: int) -> tuple[Option, str]:
        """Choose the layout of `parallel: auto` and give the reason. If none fits, the one that needs least."""
        seen: list[Option] = []
        every = list(layouts(processes))
        for axes in AUTO:
            new = [layout for layout in every if {*layout.axes} <= axes and all(layout != o.layout for o in seen)]
            seen += map(self.option, new)
            if fitting := [option for option in seen if option.fits]:
                best = min(fitting, key=lambda o: _seconds(o) * (PIPELINE_FACTOR if o.layout.pipeline > 1 else 1.0))
                return best, choice_reason(best, seen)
        possible = [option for option in seen if option.plan is not None]
        if not possible:
            problem = f"parallel: auto finds no supported layout for {processes} GPUs: {seen[0].refused}"
            raise ConfigError(problem, "use one GPU")
        smallest = min(possible, key=lambda option: option.plan.total)  # type: ignore[union-attr]
        return smallest, choice_reason(smallest, seen)


def _seconds(option: Option) -> float:
    """Predicted seconds of a step; 0 where rates are unknown, so that the first option wins."""
    assert option.plan is not None
    return option.plan.seconds or 0.0


def choice_reason(chosen: Option, seen: Sequence[Option]) -> str:
    """Explain why `auto` chose a layout among `seen`."""
    plan = chosen.plan
    assert plan is not None
    if not plan.fits:
        host = "" if plan.fits_host else f" and {size(plan.host_bytes)} of host memory"
        return f"no layout fits; this one needs least, {size(plan.total)} of {size(plan.capacity_bytes)}{host}"
    if {*chosen.layout.axes} <= {"data"}:
        return f"the full run fits each GPU, {size(plan.total)} of {size(plan.capacity_bytes)}"
    data = next(option for option in seen if {*option.layout.axes} <= {"data"})
    needed = size(data.plan.total) if data.plan else data.refused
    words = [f"the unsharded model would need {needed} of {size(plan.capacity_bytes)} on each GPU"]
    alternatives = [o for o in seen if o.fits and o is not chosen and o.plan and o.plan.seconds and plan.seconds]
    if alternatives:
        second = min(alternatives, key=_seconds)
        words.append(f"predicted step time {_seconds(chosen):.2f} s, with {second.layout} {_seconds(second):.2f} s")
    return "; ".join(words)
