"""Memory plan of a run: predicted bytes, component by component, and the choices made to fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, ClassVar

from ..config import Level, Parallel
from ..utils.html import name_table
from ..utils.text import size

GIB = 2**30
SINGLE = Parallel()  # the layout of one process
COMPONENT_NAMES = {  # in the order of allocation: process, loading, training
    "runtime": "runtime",
    "weights": "weights",
    "gathered": "gathered weights",
    "adapters": "adapters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "vision": "images",
    "graphs": "outside CUDA graphs",
    "rollouts": "rollouts beyond a step",
}


def component_names(flat: Mapping[str, Any]) -> dict[str, str]:
    """Component → its name for people; full fine-tuning trains weights and no adapters.

    Args:
        flat: as `flat_plan` returns it.
    """
    return COMPONENT_NAMES | ({"adapters": "trained weights"} if flat.get("trains_all") else {})


@dataclass(frozen=True)
class RolloutPlan:
    """Bytes while completions are sampled, on top of weights, adapters, gradients and optimizer state.

    Attributes:
        weights: how GEMMs read quantized weights, as `generation.Rollouts` takes it: "packed" or "unpacked".
        decoded: bytes of dequantized weights, all of them (unpacked) or the largest one (packed), and of the adapter's
            factors in the compute dtype.
        pages: bytes of the paged KV cache and of recurrent states.
        moving: activations and logits at the highest moment of a decoding step or of the prefill.
        stays: whether all of that stays allocated during training steps.
    """

    weights: str
    decoded: int
    pages: int
    moving: int
    stays: bool = False

    @property
    def total(self) -> int:
        return self.decoded + self.pages + self.moving

    def __str__(self) -> str:
        components = {"pages": self.pages, f"{self.weights} weights": self.decoded, "prompts and logits": self.moving}
        return f"{size(self.total)} ({', '.join(f'{name} {size(count)}' for name, count in components.items())})"


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes at the highest moment of a step, on the rank that needs most. `total` is their sum.

    Attributes:
        levels: activation level of each layer where the fused forwards run; else empty.
        activation_checkpointing: whether any layer saves less than everything.
        trains_all: whether the trained parameters are the model's own weights (full fine-tuning), not adapters.
        use_graphs: whether micro-batches run as CUDA graphs.
        rough: whether activations are only estimated from layer widths.
        layout: how the run is distributed.
        stays: decoder layers that stay gathered for the whole run although they are sharded.
        hosted: decoder layers whose shard is in host memory.
        offloaded: decoder layers whose experts are in host memory.
        gathers: bytes that this rank's all-gathers of a step produce.
        seconds: predicted seconds of a step; None for layers without measured rates.
        answering: bytes while completions are sampled; None for methods that sample none.
        optimizer_choice: values of the keys `optim_in_backward` and `optim_offload`.
        host: configuration key → bytes of host memory that a rank pins for it; the most of any rank.
        host_share: bytes of free host memory divided by the ranks that share it; None: `host` is empty.
    """

    weights: int  # frozen, as stored
    adapters: int  # trained parameters
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
    vision: int = 0  # of vision tower and projector, beyond activations that are allocated after them; and features
    graphs: int = 0  # allocations outside of the CUDA graphs' pool, which is as large as activations and logits
    trains_all: bool = False
    use_graphs: bool = False
    rough: bool = False
    gathered: int = 0  # unsharded frozen layers: in flight, in use, or resident; and the window of offloaded experts
    layout: Parallel = SINGLE
    stays: tuple[int, ...] = ()
    hosted: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()
    gathers: int = 0
    seconds: float | None = None
    rollouts: int = 0  # sampling completions, beyond the bytes that a step allocates and frees
    answering: RolloutPlan | None = None
    optimizer_choice: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)
    host_share: int | None = None

    COMPONENTS: ClassVar = (
        *("weights", "gathered", "adapters", "gradients", "optimizer", "activations", "logits", "vision"),
        *("graphs", "rollouts", "runtime"),
    )

    @property
    def total(self) -> int:
        return sum(getattr(self, component) for component in self.COMPONENTS)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that a rank pins."""
        return sum(self.host.values())

    @property
    def fits(self) -> bool:
        """Whether the device and the host have room for the run."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        return self.total <= self.capacity_bytes

    @property
    def fits_host(self) -> bool:
        return self.host_share is None or self.host_bytes <= self.host_share

    def _repr_html_(self) -> str:
        """Return the bytes by part, as notebooks show them."""
        names = component_names(flat_plan(self))
        parts = [(names[name], size(count)) for name in self.COMPONENTS if (count := getattr(self, name))]
        fits = "fits" if self.fits else "does not fit"
        parts.append(("total", f"{size(self.total)} of {size(self.capacity_bytes)} on {self.device}, {fits}"))
        return name_table(parts)

    def predicted(self) -> dict[str, int]:
        """Part → bytes, and the total, as memory.json holds them."""
        return {component: getattr(self, component) for component in self.COMPONENTS} | {"total": self.total}


def flat_plan(plan: Any) -> dict[str, Any]:
    """Return a flat dict of a MemoryPlan, its dict, or the document of memory.json."""
    flat = asdict(plan) if is_dataclass(plan) and not isinstance(plan, type) else dict(plan)
    return {**flat, **flat.get("predicted", {})}
