"""Experts that wait in the host's memory: which layers', what that leaves on the device, and what it costs.

on the device      `WINDOW` layers' stacks, in the place of those that wait
on the host        all of the latter, pinned
across the link    each of them once in forward and once in backward, beside the layers that compute
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..config import RunConfig
from ..config.policy import SAMPLING
from ..memory.expert_offload import WINDOW
from ..modeling.routers import EXPERT_COUNTS
from ..utils.errors import ConfigError
from ..utils.notices import silent
from .policy import staying
from .shapes import ModelShapes

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan

KEY = "expert_offload"
GIB = 2**30


@dataclass(frozen=True)
class Waiting:
    """The layers whose experts wait in the host's memory.

    Attributes:
        layers: their numbers.
        each: bytes of the stacks of one of them; of the largest.
        bytes: of all of them.
    """

    layers: tuple[int, ...] = ()
    each: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, stacks: Sequence[int], count: int) -> Waiting:
        """`count` of the layers that have stacks, spread evenly.

        Args:
            stacks: bytes of each decoder layer's.
        """
        holders = [at for at, size in enumerate(stacks) if size]
        chosen = tuple(holders[index] for index in staying(len(holders), count))
        sizes = [stacks[at] for at in chosen]
        return cls(chosen, max(sizes, default=0), sum(sizes))

    @property
    def window(self) -> int:
        """Bytes of the device that they pass through."""
        return min(WINDOW, len(self.layers)) * self.each

    def seconds(self, forward: float, backward: float, link: float) -> float:
        """Time that their copies take longer than a micro-batch's forward and backward."""
        copied = self.bytes / link
        return max(0.0, copied - forward) + max(0.0, copied - backward)


RESIDENT = Waiting()
ANSWERING = 0.85  # share of a device that weights may take where a model answers: the rest is for its cache


def with_experts(
    config: RunConfig, stacks: Sequence[int], device: torch.device, *, alone: bool, host: int, budget: int,
    plan: Callable[[Waiting], MemoryPlan],
) -> MemoryPlan:  # fmt: skip
    """The plan with experts where `expert_offload` has them; auto: of as few layers in the host's memory as it takes to
    fit.

    Args:
        stacks: bytes of each decoder layer's packed experts.
        alone: whether one process trains.
        host: bytes of its memory that may be filled.
        budget: bytes of the device that may be filled.
        plan: of a run with these experts on the host.

    Raises:
        ConfigError: what is asked for cannot be, and why.
    """
    asked, holders = config.expert_offload, sum(size > 0 for size in stacks)
    why = _obstacle(config, device, alone, holders)
    if asked is False or (asked == "auto" and why):
        return plan(RESIDENT)
    if why:
        raise ConfigError(f"{KEY}: {asked}: {why}".replace("True", "true"), f"remove {KEY}")
    if asked != "auto":
        waiting = Waiting.of(stacks, holders if asked is True else int(asked))
        if waiting.bytes > host:
            there = f"{waiting.bytes / GIB:.2f} GiB of experts, and the host's memory has room for {host / GIB:.2f}"
            fix = f"set {KEY}: {sum(size <= host for size in _sums(stacks))}, or free some of it"
            raise ConfigError(f"{KEY}: {asked}: {there}".replace("True", "true"), fix)
        return _said(plan(waiting), waiting)
    resident = plan(RESIDENT)
    if resident.total <= budget:
        return replace(resident, reason=f"{resident.reason}; experts stay on the device")
    counts = [Waiting.of(stacks, count) for count in range(1, holders + 1)]
    possible = [each for each in counts if each.bytes <= host and each.bytes > each.window]
    lacking = resident.total - budget
    enough = next((each for each in possible if each.bytes - each.window >= lacking), None)
    waiting = enough or (possible[-1] if possible else RESIDENT)
    return _said(plan(waiting), waiting) if waiting.layers else resident


def while_answering(config: RunConfig, model_config: Any, device: torch.device, free: int) -> tuple[int, ...]:
    """Decoder layers whose experts wait where a saved model is loaded to answer or to be measured.

    Args:
        model_config: the transformers config of its model.
        free: bytes of the device.
    """
    asked = config.expert_offload
    if asked is False or device.type != "cuda" or not is_mixture(model_config):
        return ()
    with silent():
        shapes = ModelShapes(config.model_copy(update={"use_peft": False}), model_config, device)
    stacks = shapes.expert_bytes()
    holders = sum(size > 0 for size in stacks)
    if asked != "auto":
        return Waiting.of(stacks, holders if asked is True else asked).layers
    lacking = shapes.frozen_bytes() - ANSWERING * free
    counts = [Waiting.of(stacks, count) for count in range(holders + 1)]
    enough = (each for each in counts if each.bytes - each.window >= lacking)
    return next(enough, counts[-1]).layers if lacking > 0 else ()


def is_mixture(model_config: Any) -> bool:
    """Whether a transformers config says that layers have several experts."""
    text = model_config.get_text_config()
    return any((getattr(text, key, None) or 0) > 1 for key in EXPERT_COUNTS)


def _obstacle(config: RunConfig, device: torch.device, alone: bool, holders: int) -> str | None:
    """Why experts cannot wait in the host's memory; None: they can."""
    if not holders:
        return "this run has no packed experts"
    if device.type != "cuda":
        return f"experts on {device} are not brought there from the host's memory"
    if not alone:
        return "several processes divide the model, see `parallel`"
    if config.method in SAMPLING:
        return f"method: {config.method} generates, for which experts stay on the device"
    return None


def _sums(stacks: Sequence[int]) -> list[int]:
    """Bytes of the experts of one layer, of two, ..."""
    holders = sum(size > 0 for size in stacks)
    return [Waiting.of(stacks, count).bytes for count in range(1, holders + 1)]


def _said(plan: MemoryPlan, waiting: Waiting) -> MemoryPlan:
    said = f"experts of {len(waiting.layers)} layers wait in the host's memory ({waiting.bytes / GIB:.2f} GiB)"
    return replace(plan, offloaded=waiting.layers, reason=f"{plan.reason}; {said}")
