"""How much memory a run will take, part by part, from the model's config alone; and what layers keep for backward.

What stays (weights, adapters, gradients, optimizer state) is counted on the model, built without storage as it will be
loaded (`plan.shapes`). What comes and goes (activations, the loss's logits, scratch) is found by running one step on
shapes (`plan.replay`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import psutil
import torch

from ..config import Level, RunConfig
from ..hardware import best_device, segments_grow
from ..memory import host
from ..memory.batches import Batches, Shape
from ..models.unpacking import LIKE
from ..notices import notice
from ..optim import OPTIMIZERS
from .policy import OFFLOADED, REPLAYED, Choice, LayerCost, choose, cost, in_words, peak, replayed_level
from .replay import Step
from .shapes import ModelShapes, Trainable

GIB = 2**30
MARGIN = 0.9  # plan to fill at most this share: allocators fragment, and rows differ
GROWING_MARGIN = 0.96  # the same where a CUDA allocator's segments grow: at most 1.7% were unused (docs/log.md)
HOST_MARGIN = 0.9  # the same of the host's memory for offloads
CUDA_RUNTIME = 96 * 2**20  # cuBLAS workspaces of the forward and the backward thread, inside torch's allocator
GRAPH_RUNTIME = 80 * 2**20  # cuBLAS workspaces of the stream of graphs, and gradients that wait to be added up
CPU_RUNTIME = 64 * 2**20  # thread pools and packed operands of oneDNN and MKL, malloc's slack
CPU_PRIMITIVES = 112 * 2**20  # 16-bit products compiled for batches of many lengths, see hardware.bound_cpu_primitives


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes of a run at the highest moment of a step. `total` is their sum.

    `levels` says what each layer keeps, where the fused forwards run; `activation_checkpointing` whether any keeps less
    than all; `use_graphs` whether micro-batches run as CUDA graphs; `rough` that activations are only guessed.
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

    PARTS: ClassVar = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "graphs", "runtime")

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in self.PARTS)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity_bytes

    def predicted(self) -> dict[str, int]:
        """Part → bytes, and the total: what memory.json holds."""
        return {part: getattr(self, part) for part in self.PARTS} | {"total": self.total}


def estimate(
    config: RunConfig,
    model_config: Any,
    *,
    device: str | torch.device | None = None,
    capacity_bytes: int | None = None,
    batches: Batches | None = None,
    shapes: ModelShapes | None = None,
) -> MemoryPlan:
    """Predict the memory of a run and choose what each layer keeps for backward.

    Args:
        config: the run.
        model_config: the transformers config of its model; no weights are read.
        device: where it will train (it need not be here); default: `config.device`, else the best device.
        capacity_bytes: what may be used; default: what is free on `device` now. `memory_limit_gib` lowers it.
        batches: the micro-batches of its data; default: `per_device_train_batch_size` rows of `max_length` tokens.
        shapes: the model of just this run on just this device, where it was built before.

    Returns:
        The plan. On CUDA its total is to be compared with `torch.cuda.max_memory_allocated`; on a CPU with the growth
        of the process over what it takes after importing its libraries.

    Raises:
        ModelError: transformers cannot build a causal LM from `model_config`, or the adapter finds no module.
        ConfigError: packed documents cannot be kept apart.
    """
    target = torch.device(device or config.device or best_device())
    capacity = _capacity(config, target, capacity_bytes)
    shapes, batches = shapes or ModelShapes(config, model_config, target), batches or _full_rows(config)
    if shapes.packed_way == "unpacked":  # into rows that are padded
        batches = batches.longer(1 / LIKE)
    plan = _Planner(shapes, batches, capacity, graphs=shapes.packed_way == "positions").plan()
    return replace(plan, rough=shapes.rough)


def _full_rows(config: RunConfig) -> Batches:
    rows, length = config.per_device_train_batch_size, config.max_length
    return Batches.alike(1, rows * length) if config.padding_free else Batches.alike(rows, length)


def _level(want: bool | Level) -> Level:
    """Of `activation_checkpointing` that is not auto."""
    return want if isinstance(want, str) else "checkpoint" if want else "keep"


def may_capture(config: RunConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether micro-batches may run as CUDA graphs: not with loss scaling, nor where weights are quantized in every
    step, for which quantizers look at the values; nor with layers offloaded to the host."""
    kernels = config.use_kernels and device.type == "cuda" and dtype != torch.float16
    return kernels and config.qat_scheme is None


class _Planner:
    """Plans for one model and its data.

    Args:
        shapes: the model.
        batches: of its data.
        capacity: bytes that may be used.
        graphs: whether micro-batches may be captured, as far as the data goes.
    """

    def __init__(self, shapes: ModelShapes, batches: Batches, capacity: int, graphs: bool = True):
        self.shapes, self.config, self.batches, self.capacity = shapes, shapes.config, batches, capacity
        self.trained, self.depth = shapes.trainable(), shapes.text_config.num_hidden_layers
        self.gradients, self.evaluated = shapes.layer_gradients(), shapes.evaluation(batches.evaluation)
        want = self.config.activation_checkpointing
        self.asked: Level | None = None if want == "auto" else _level(want)
        self.replayed = REPLAYED if self.asked is None else (replayed_level(self.asked),)
        self.may_capture = graphs and may_capture(self.config, shapes.device, shapes.dtype)
        cuda = shapes.device.type != "cpu"
        self.still = MemoryPlan(
            weights=shapes.frozen_bytes(),
            adapters=self.trained.bytes,
            gradients=self.trained.bytes,
            optimizer=OPTIMIZERS[self.config.optim].state_bytes(shapes.model),
            activations=0,
            logits=0,
            runtime=CUDA_RUNTIME if cuda else _cpu_runtime(shapes, batches),
            activation_checkpointing=False,
            reason="as activation_checkpointing says",
            device=str(shapes.device),
            capacity_bytes=capacity,
        )

    def plan(self) -> MemoryPlan:
        """Levels as the config says, or the fastest that fit."""
        level = self.asked
        if level is None:
            return self._fastest() if self.shapes.fused else self._kept_or_recomputed()
        if not self.shapes.fused and level not in ("keep", "checkpoint"):
            notice(
                "activation-level",
                f"activation_checkpointing: {level} is of the fused forwards, which do not run here; whole layers are"
                " recomputed instead",
            )
            level = "checkpoint"
        return self._with_graphs_where_they_fit((level,) * self.depth)

    def _with_graphs_where_they_fit(self, levels: tuple[Level, ...]) -> MemoryPlan:
        plans = [self.planned(Choice(levels, False))]
        if self.may_capture and OFFLOADED.keys().isdisjoint(levels):
            plans.insert(0, self.planned(Choice(levels, True)))
        return next((plan for plan in plans if plan.fits), plans[-1])

    def _kept_or_recomputed(self) -> MemoryPlan:
        """All layers alike."""
        kept = self._with_graphs_where_they_fit(("keep",) * self.depth)
        need = self._need(kept)
        if kept.total <= MARGIN * self.capacity:
            return replace(kept, reason=f"activations are kept: the run needs {need}")
        recomputed = self._with_graphs_where_they_fit(("checkpoint",) * self.depth)
        reason = f"activations are recomputed in backward: keeping them would take {need}"
        return replace(recomputed, reason=reason + self._shortage(recomputed))

    def _fastest(self) -> MemoryPlan:
        margin = GROWING_MARGIN if segments_grow() and self.shapes.device.type == "cuda" else MARGIN
        largest = self.layer(self.batches.largest)
        usual = largest.of_share(self.batches.usual)
        choice = choose(
            self.depth,
            int(margin * self.capacity),
            lambda choice: self.planned(choice).total,
            usual=usual,
            largest=largest,
            host=int(HOST_MARGIN * host.available_bytes()),
            graphs=self.may_capture,
        )
        plan = self.planned(choice)
        kept = self.planned(Choice(("keep",) * self.depth, choice.graphs))
        if plan.levels == kept.levels:
            return replace(plan, reason=f"activations are kept: the run needs {self._need(kept)}")
        extra = cost(usual, plan.levels, plan.use_graphs) * self.config.gradient_accumulation_steps
        reason = (
            f"{in_words(plan.levels)}, about {extra * 1e3:.0f} ms a step: keeping all would take {self._need(kept)}"
        )
        return replace(plan, reason=reason + self._shortage(plan))

    def _need(self, plan: MemoryPlan) -> str:
        return f"{plan.total / GIB:.2f} of {self.capacity / GIB:.2f} GiB"

    @staticmethod
    def _shortage(plan: MemoryPlan) -> str:
        return "" if plan.fits else f", and even so the run needs {plan.total / GIB:.2f} GiB"

    def planned(self, choice: Choice) -> MemoryPlan:
        """The plan with these levels."""
        largest = self.batches.largest
        moving, graphs = self._moving(largest, choice), 0
        if choice.graphs:  # beside the pool: evaluation, or the first steps of another shape
            graphs = max(self.evaluated, self._moving(self.batches.second, choice))
        moving = max(moving, self.evaluated, _step_scratch(self.config.optim, self.trained, self.shapes.device.type))
        logits = min(self._step(largest, choice).logits, moving)
        return replace(
            self.still,
            activations=moving - logits,
            logits=logits,
            activation_checkpointing=set(choice.levels) != {"keep"},
            levels=choice.levels if self.shapes.fused else (),
            runtime=self.still.runtime + GRAPH_RUNTIME * choice.graphs,
            graphs=graphs,
            use_graphs=choice.graphs,
        )

    def _moving(self, batch: Shape, choice: Choice) -> int:
        """Bytes that come and go in a step."""
        if not batch.tokens:
            return 0
        step, on_their_way = self._step(batch, choice), 0
        layers = step.layers * (1 if len(step.layers) == self.depth else self.depth)
        if self.shapes.fused:
            cost = self.layer(batch)
            each = {level: cost.bytes(level) for level in set(choice.levels)}
            layers = tuple(each[level] for level in choice.levels)
            on_their_way = max(map(cost.on_host, each))  # as much as one layer saves
        gradients = self.gradients[: len(layers)]
        highest = peak(
            layers,
            before=step.before,
            head=step.head,
            gradients=gradients,
            others=self.trained.bytes - sum(gradients),
            accumulated=choice.graphs or self.config.gradient_accumulation_steps > 1,  # graphs add to what stays
        )
        return max(highest + on_their_way - self.trained.bytes, 0)

    def _step(self, batch: Shape, choice: Choice) -> Step:
        """A replay with one layer at each level that may be asked about."""
        return self.shapes.step(batch, self.replayed if self.shapes.fused else choice.levels[:1])

    @functools.cache  # noqa: B019 (as long as the plan is made)
    def layer(self, batch: Shape) -> LayerCost:
        """A layer of a fused model."""
        layers = self.shapes.step(batch, self.replayed).layers
        config = self.shapes.text_config
        options: dict[str, Any] = {"itemsize": self.shapes.dtype.itemsize, "recipe": self.config.recipe}
        replayed = dict(zip(self.replayed, layers, strict=True))
        return LayerCost.of(config, rows=batch.rows, length=batch.length, replayed=replayed, **options)


def _cpu_runtime(shapes: ModelShapes, batches: Batches) -> int:
    compiled = shapes.dtype.itemsize == 2 and batches.usual != batches.largest
    return CPU_RUNTIME + CPU_PRIMITIVES * compiled


def _step_scratch(name: str, trained: Trainable, device_type: str) -> int:
    """torch's unfused optimizers work on lists of all parameters on accelerators: one copy of them is scratch."""
    return trained.bytes if OPTIMIZERS[name].scratch and device_type != "cpu" else 0


def _capacity(config: RunConfig, device: torch.device, given: int | None) -> int:
    if given is None:
        if device.type == "cuda" and torch.cuda.is_available():
            given = torch.cuda.mem_get_info(device)[0]
        elif device.type == "xpu" and torch.xpu.is_available():
            given = torch.xpu.mem_get_info(device)[0]
        else:
            given = psutil.virtual_memory().available
    return given if config.memory_limit_gib is None else min(given, int(config.memory_limit_gib * GIB))
