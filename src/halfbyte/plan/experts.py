"""Expert offload: which layers' experts are in host memory, the device bytes left, and the seconds of the copies.

on the device      a window of `WINDOW` layers' expert stacks, shared by all offloaded layers
on the host        the stacks of the offloaded layers, pinned
across the link    each stack once in forward and once in backward, concurrently with computation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config.policy import SAMPLING
from ..config.schema import RunKeys, TrainingSection
from ..loading.expert_offload import WINDOW
from ..modeling.routers import EXPERT_COUNTS
from ..utils.errors import ConfigError
from ..utils.notices import silent
from .memory_plan import GIB, MemoryPlan
from .policy import evenly_spaced
from .shapes import ModelShapes

KEY = "expert_offload"


@dataclass(frozen=True)
class OffloadedExperts:
    """The decoder layers whose experts are in host memory.

    Attributes:
        layers: their indices.
        largest: bytes of the expert stacks of the largest such layer.
        bytes: bytes of all their expert stacks.
    """

    layers: tuple[int, ...] = ()
    largest: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, stacks: Sequence[int], count: int) -> OffloadedExperts:
        """Offload `count` of the layers that have expert stacks, evenly spaced.

        Args:
            stacks: bytes of each decoder layer's expert stacks.
        """
        holders = [at for at, size in enumerate(stacks) if size]
        chosen = tuple(holders[index] for index in evenly_spaced(len(holders), count))
        sizes = [stacks[at] for at in chosen]
        return cls(chosen, max(sizes, default=0), sum(sizes))

    @property
    def window(self) -> int:
        """Device bytes of the window that offloaded stacks are copied into."""
        return min(WINDOW, len(self.layers)) * self.largest

    def seconds(self, forward: float, backward: float, link: float) -> float:
        """Seconds by which the copies over `link` bytes/s outlast a micro-batch's forward and backward."""
        copied = self.bytes / link
        return max(0.0, copied - forward) + max(0.0, copied - backward)


RESIDENT = OffloadedExperts()
INFERENCE_SHARE = 0.85  # of a device's memory, for weights at inference; the rest is for the KV cache


def with_experts(
    config: TrainingSection, stacks: Sequence[int], device: torch.device, *, single: bool, host: int, budget: int,
    plan: Callable[[OffloadedExperts], MemoryPlan],
) -> MemoryPlan:  # fmt: skip
    """Make the plan with `expert_offload` as configured; "auto" offloads the fewest layers with which the run fits.

    Args:
        stacks: bytes of each decoder layer's packed experts.
        single: whether one process trains.
        host: bytes of host memory that may be filled.
        budget: bytes of the device that may be filled.
        plan: makes the plan with the given experts offloaded.

    Raises:
        ConfigError: the configured offload is not supported, or the host is too small.
    """
    setting, holders = config.expert_offload, sum(size > 0 for size in stacks)
    why = _unsupported_reason(config, device, single, holders)
    if setting is False or (setting == "auto" and why):
        return plan(RESIDENT)
    if why:
        raise ConfigError(f"{KEY}: {setting}: {why}".replace("True", "true"), f"remove {KEY}")
    if setting != "auto":
        offloaded = OffloadedExperts.of(stacks, holders if setting is True else int(setting))
        if offloaded.bytes > host:
            problem = f"experts need {offloaded.bytes / GIB:.2f} GiB of host memory, and {host / GIB:.2f} are available"
            fitting = [OffloadedExperts.of(stacks, count).bytes <= host for count in range(1, holders + 1)]
            fix = f"set {KEY}: {sum(fitting)}, or free host memory"
            raise ConfigError(f"{KEY}: {setting}: {problem}".replace("True", "true"), fix)
        return _with_reason(plan(offloaded), offloaded)
    resident = plan(RESIDENT)
    if resident.total <= budget:
        return replace(resident, reason=f"{resident.reason}; experts stay on the device")
    counts = [OffloadedExperts.of(stacks, count) for count in range(1, holders + 1)]
    possible = [candidate for candidate in counts if candidate.bytes <= host and candidate.bytes > candidate.window]
    missing = resident.total - budget
    enough = next((candidate for candidate in possible if candidate.bytes - candidate.window >= missing), None)
    offloaded = enough or (possible[-1] if possible else RESIDENT)
    return _with_reason(plan(offloaded), offloaded) if offloaded.layers else resident


def offloaded_at_inference(config: RunKeys, model_config: Any, device: torch.device, free: int) -> tuple[int, ...]:
    """Decoder layers whose experts are offloaded when a saved model is loaded for generation or evaluation.

    Args:
        model_config: the transformers config of its model.
        free: free bytes of the device.
    """
    setting = config.expert_offload
    if setting is False or device.type != "cuda" or not is_mixture(model_config):
        return ()
    with silent():
        shapes = ModelShapes(config.model_copy(update={"use_peft": False}), model_config, device)
    stacks = shapes.expert_bytes()
    holders = sum(size > 0 for size in stacks)
    if setting != "auto":
        return OffloadedExperts.of(stacks, holders if setting is True else setting).layers
    missing = shapes.frozen_bytes() - INFERENCE_SHARE * free
    counts = [OffloadedExperts.of(stacks, count) for count in range(holders + 1)]
    enough = (candidate for candidate in counts if candidate.bytes - candidate.window >= missing)
    return next(enough, counts[-1]).layers if missing > 0 else ()


def is_mixture(model_config: Any) -> bool:
    """Return whether a transformers config describes a mixture of experts."""
    text = model_config.get_text_config()
    return any((getattr(text, key, None) or 0) > 1 for key in EXPERT_COUNTS)


def _unsupported_reason(config: TrainingSection, device: torch.device, single: bool, holders: int) -> str | None:
    """Return why experts cannot be offloaded, or None."""
    if not holders:
        return "this run has no packed experts"
    if device.type != "cuda":
        return f"experts on {device} cannot be offloaded, only experts on CUDA devices"
    if not single:
        return "it needs a single process, and `parallel` uses several"
    if config.method in SAMPLING:
        return f"method: {config.method} samples completions, which needs the experts on the device"
    return None


def _with_reason(plan: MemoryPlan, offloaded: OffloadedExperts) -> MemoryPlan:
    experts = f"experts of {len(offloaded.layers)} layers are in host memory ({offloaded.bytes / GIB:.2f} GiB)"
    return replace(plan, offloaded=offloaded.layers, reason=f"{plan.reason}; {experts}")
