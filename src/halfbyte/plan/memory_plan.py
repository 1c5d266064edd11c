"""What a plan says: predicted bytes of a run, part by part, and what it chose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..config import Level, Parallel
from .rank import ONE
from .rollouts import RolloutPlan

GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes of one process of a run at the highest moment of a step. `total` is their sum.

    `levels` says what each layer keeps, where the fused forwards run; `activation_checkpointing` whether any keeps less
    than all; `use_graphs` whether micro-batches run as CUDA graphs; `rough` that activations are only guessed.

    Of several processes the plan is that of the one that needs most. `layout` says how the run is divided among them,
    `stays` which decoder layers' divided bytes are gathered once and for all, `hosted` of which a process's slice waits
    in the host's memory, `gathers` how many bytes the gathers of a step come to, and `seconds` what a step takes; None
    where layers are not of a kind with known rates.
    """

    weights: int  # frozen, as stored
    adapters: int  # what is trained
    gradients: int
    optimizer: int
    activations: int
    logits: int
    runtime: int
    activation_checkpointing: bool
    reason: str
    device: str
    capacity_bytes: int
    levels: tuple[Level, ...] = ()
    graphs: int = 0  # what runs beside the pool of CUDA graphs, which is as large as activations and logits
    use_graphs: bool = False
    rough: bool = False
    gathered: int = 0  # frozen blocks, or experts, that are whole: on their way, in use, or for good
    layout: Parallel = ONE
    stays: tuple[int, ...] = ()
    hosted: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()  # decoder layers whose experts wait in the host's memory
    gathers: int = 0
    seconds: float | None = None
    rollouts: int = 0  # answering prompts, beyond what comes and goes in a step
    answering: RolloutPlan | None = None

    PARTS: ClassVar = (
        *("weights", "gathered", "adapters", "gradients", "optimizer", "activations", "logits", "graphs"),
        *("rollouts", "runtime"),
    )

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in self.PARTS)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity_bytes

    def predicted(self) -> dict[str, int]:
        """Part → bytes, and the total: what memory.json holds."""
        return {part: getattr(self, part) for part in self.PARTS} | {"total": self.total}
