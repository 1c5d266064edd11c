"""Along which axes this model's run may be divided, what each way takes, and which one `parallel: auto` chooses.

The rule: `data`, where every process holds all and only adapters' gradients are exchanged, if the plan fits. Else the
fastest by planned seconds of those that fit, first among ways that keep rows whole: frozen bytes divided (`shard`), or
layers (`pipeline`), which exchanges little where links are slow, and is taken where it is clearly faster; then among
those that divide rows, too. All are compared on steps of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import Parallel, RunConfig
from ..memory.activations import Batches
from ..modeling.layer import decoder_layers
from ..parallel.support import layouts, unsupported_context, unsupported_packing, unsupported_reason
from ..parallel.tensor.model import check_products
from ..utils.errors import ConfigError, HalfbyteError
from ..utils.notices import silent
from ..utils.terminal import size
from .cards import H200, Card
from .estimate import estimate
from .memory_plan import MemoryPlan
from .rank import rank_config
from .shapes import ModelShapes

AUTO: tuple[set[str], ...] = ({"data"}, {"data", "shard", "pipeline"}, {"data", "shard", "context"})  # in this order
CLEARLY = 1.1  # times faster: a pipeline also waits where micro-batches are of uneven lengths, which no plan knows


def check_layout(layout: Parallel, config: RunConfig, shapes: ModelShapes) -> None:
    """Whether a run of this model can be divided so, as far as configuration and shapes say.

    Args:
        shapes: the model, whole.

    Raises:
        ConfigError, ModelError: the axis that cannot be, why, and the fix.
    """
    reason = unsupported_reason(layout, config)
    if reason is None and layout.context > 1:
        reason = unsupported_context(shapes.causal_lm.config, layout.context, layout.tensor)
    if reason is None and shapes.packed_way != "positions":
        packs = "packing" if config.packing else "padding_free" if config.padding_free else None
        reason = unsupported_packing(layout, packs)
    if reason:
        raise ConfigError(reason.problem, reason.fix)
    if layout.tensor > 1:
        check_products(shapes.model, layout.tensor)
    if layout.shard > 1:
        decoder_layers(shapes.causal_lm)


@dataclass(frozen=True)
class Option:
    """A way to divide a run.

    Attributes:
        config: the run so divided; its steps keep their rows.
        plan: None where it cannot be divided so, as `refused` says.
    """

    layout: Parallel
    config: RunConfig
    plan: MemoryPlan | None = None
    refused: str = ""

    @property
    def fits(self) -> bool:
        return self.plan is not None and self.plan.fits


@dataclass(frozen=True)
class Device:
    """What every process of a run computes on.

    Attributes:
        capacity_bytes: of the smallest.
        card: whose rates planned seconds go by.
        on_host: processes that share a host's memory; None: all.
    """

    torch: torch.device
    capacity_bytes: int
    card: Card = H200
    on_host: int | None = None


class Meshes:
    """The ways to divide a run.

    Args:
        config: its steps have the rows that `data` over all processes would have.
        batches: those of a configuration.
        shapes: the model, whole, where it was built before.
    """

    def __init__(
        self, config: RunConfig, model_config: Any, device: Device, batches: Callable[[RunConfig], Batches],
        shapes: ModelShapes | None = None,
    ):  # fmt: skip
        self.config, self.model_config, self.device, self.batches = config, model_config, device, batches
        self.shapes = {1: shapes or ModelShapes(config, model_config, device.torch)}  # by the ways of tensor

    def option(self, layout: Parallel, accumulation: int | None = None) -> Option:
        """The run divided so.

        Args:
            accumulation: micro-batches of a step on each process; default: as many as keep the step's rows.
        """
        steps = accumulation or self.config.gradient_accumulation_steps * layout.size // (layout.data * layout.shard)
        ways = {axis: getattr(layout, axis) for axis in layout.axes} or {"data": 1}
        config = self.config.model_copy(update={"parallel": ways, "gradient_accumulation_steps": steps})
        try:
            check_layout(layout, config, self.shapes[1])
            with silent():
                plan = estimate(
                    config, self.model_config, device=self.device.torch, capacity_bytes=self.device.capacity_bytes,
                    batches=self.batches(config), shapes=self._shapes(layout), layout=layout, card=self.device.card,
                    on_host=self.device.on_host,
                )  # fmt: skip
        except HalfbyteError as error:
            return Option(layout, config, refused=error.message)
        return Option(layout, config, plan)

    def _shapes(self, layout: Parallel) -> ModelShapes:
        ways = layout.tensor
        if ways not in self.shapes:
            model_config = rank_config(self.model_config, layout)
            self.shapes[ways] = ModelShapes(self.config, model_config, self.device.torch, ways)
        return self.shapes[ways]

    def options(self, processes: int) -> Iterator[Option]:
        """All, those along one axis first."""
        yield from map(self.option, layouts(processes))

    def choose(self, processes: int) -> tuple[Option, str]:
        """What `auto` takes, and why; of what fits nowhere, what needs least."""
        seen: list[Option] = []
        every = list(layouts(processes))
        for axes in AUTO:
            new = [layout for layout in every if {*layout.axes} <= axes and all(layout != o.layout for o in seen)]
            seen += map(self.option, new)
            if fitting := [option for option in seen if option.fits]:
                best = min(fitting, key=_comparable)
                return best, because(best, seen)
        possible = [option for option in seen if option.plan is not None]
        if not possible:
            raise ConfigError(f"parallel: auto finds no way over {processes} GPUs: {seen[0].refused}", "use one GPU")
        least = min(possible, key=lambda option: option.plan.total)  # type: ignore[union-attr]
        return least, because(least, seen)


def _seconds(option: Option) -> float:
    """What a step takes, for a comparison; where rates are unknown the first is taken."""
    assert option.plan is not None
    return option.plan.seconds or 0.0


def _comparable(option: Option) -> float:
    return _seconds(option) * (CLEARLY if option.layout.pipeline > 1 else 1.0)


def because(chosen: Option, seen: Sequence[Option]) -> str:
    """The reason of a choice, in words."""
    plan = chosen.plan
    assert plan is not None
    if not plan.fits:
        return f"nothing fits; it needs least, {size(plan.total)} of {size(plan.capacity_bytes)}"
    if {*chosen.layout.axes} <= {"data"}:
        return f"all of the run fits each GPU, {size(plan.total)} of {size(plan.capacity_bytes)}"
    alone = next(option for option in seen if {*option.layout.axes} <= {"data"})
    needed = size(alone.plan.total) if alone.plan else alone.refused
    words = [f"the whole model would need {needed} of {size(plan.capacity_bytes)} on each GPU"]
    others = [o for o in seen if o.fits and o is not chosen and o.plan and o.plan.seconds and plan.seconds]
    if others:
        second = min(others, key=_seconds)
        words.append(f"{_of_time(chosen)}, as {second.layout} {_of_time(second)}")
    return "; ".join(words)


def _of_time(option: Option) -> str:
    return f"a step is planned with {_seconds(option):.2f} s"
