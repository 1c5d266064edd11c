"""How much memory a run will take, part by part, from the model's config alone; and what layers keep for backward.

What stays (weights, adapters, gradients, optimizer state) is counted on the model built without storage. What comes and
goes (activations, the loss's logits, scratch) follows the fused forwards where they will run, tensor by tensor and
layer by layer (`memory.policy`). Elsewhere it is found by replaying one step of transformers' forwards on shapes
(`memory.replay`): layers of equal shapes cost equal bytes each, so one and two layers are replayed and the rest is a
straight line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..hardware import segments_grow
from ..memory.batches import Batches, Shape
from ..notices import notice
from ..optim import OPTIMIZERS
from .policy import FUSED, OFFLOADED, Choice, LayerShape, choose, cost, in_words, peak
from .scores import NO_SCORES, score_bytes

if TYPE_CHECKING:
    import torch

    from ..config import Level, RunConfig
    from .scores import Chooser
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
    than all; `use_graphs` whether micro-batches run as CUDA graphs.
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
    attention: Chooser | None = None,
) -> MemoryPlan:
    """Predict the memory of a run and choose whether activations are kept or recomputed.

    Args:
        config: the run.
        model_config: the transformers config of its model; no weights are read.
        device: where it will train (it need not be here); default: `config.device`, else the best device.
        capacity_bytes: what may be used; default: what is free on `device` now. `memory_limit_gib` lowers it.
        attention: what tells which attention will compute, `models.attention.implementation`; default: one that builds
            no scores.
        batches: the micro-batches of its data; default: `per_device_train_batch_size` rows of `max_length` tokens.

    Returns:
        The plan. On CUDA its total is to be compared with `torch.cuda.max_memory_allocated`; on a CPU with the growth
        of the process over what it takes after importing its libraries.

    Raises:
        ModelError: transformers cannot build a causal LM from `model_config`, or the adapter finds no module.
    """
    import torch

    from ..hardware import best_device
    from .shapes import ModelShapes

    target = torch.device(device or config.device or best_device())
    capacity = _capacity(config, target, capacity_bytes)
    shapes = ModelShapes(config, model_config, target)
    batches = batches or _full_rows(config)
    if _is_fused(config, shapes):
        return _Fused(shapes, batches, capacity, attention).plan()
    want = config.activation_checkpointing
    if want != "auto":
        if want not in (True, False, "keep", "checkpoint"):
            notice(
                "activation-level",
                f"activation_checkpointing: {want} is of the fused forwards, which do not run here; whole layers are"
                " recomputed instead",
            )
        return _plan(shapes, want not in (False, "keep"), batches, capacity, "as activation_checkpointing says")
    kept = _plan(shapes, False, batches, capacity, "")
    need = f"{kept.total / GIB:.2f} of {capacity / GIB:.2f} GiB"
    if kept.total <= MARGIN * capacity:
        return replace(kept, reason=f"activations are kept: the run needs {need}")
    recomputed = _plan(shapes, True, batches, capacity, "")
    reason = f"activations are recomputed in backward: keeping them would take {need}"
    if not recomputed.fits:
        reason += f", and even so the run needs {recomputed.total / GIB:.2f} GiB"
    return replace(recomputed, reason=reason)


def _full_rows(config: RunConfig) -> Batches:
    rows, length = config.per_device_train_batch_size, config.max_length
    return Batches.alike(1, rows * length) if config.padding_free else Batches.alike(rows, length)


def _is_fused(config: RunConfig, shapes: ModelShapes) -> bool:
    """Whether the model runs as `halfbyte.patch` does it; not where that is mostly PEFT's forwards."""
    text_config = shapes.causal_lm.config.get_text_config()
    patched = config.use_kernels and shapes.device.type != "cpu" and text_config.model_type in FUSED
    return patched and config.use_peft and not config.use_dora and config.qat_scheme is None


def may_capture(config: RunConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether micro-batches may run as CUDA graphs: not with loss scaling, nor where weights are quantized in every
    step, for which quantizers look at the values; nor with layers offloaded to the host."""
    import torch

    kernels = config.use_kernels and device.type == "cuda" and dtype != torch.float16
    return kernels and config.qat_scheme is None


class _Fused:
    """Plans for a model whose fused forwards run.

    Args:
        shapes: the model.
        batches: of its data.
        capacity: bytes that may be used.
        attention: as in `estimate`.
    """

    def __init__(self, shapes: ModelShapes, batches: Batches, capacity: int, attention: Chooser | None):
        from ..ops.losses import chunk_rows

        self.shapes, self.config, self.batches, self.capacity = shapes, shapes.config, batches, capacity
        self.trained, self.attention = shapes.trainable(), attention
        text_config = shapes.causal_lm.config.get_text_config()
        self.layers, vocabulary = text_config.num_hidden_layers, text_config.vocab_size
        self.loss = chunk_rows(vocabulary, shapes.device.type) * vocabulary * (4 + shapes.dtype.itemsize)
        self.largest, self.usual = self._layer(batches.largest), self._layer(batches.usual)
        self.may_capture = may_capture(self.config, shapes.device, shapes.dtype)
        self.still = MemoryPlan(
            weights=shapes.frozen_bytes(),
            adapters=self.trained.bytes,
            gradients=self.trained.bytes,
            optimizer=OPTIMIZERS[self.config.optim].state_bytes(shapes.model),
            activations=0,
            logits=0,
            runtime=CUDA_RUNTIME,
            activation_checkpointing=False,
            reason="as activation_checkpointing says",
            device=str(shapes.device),
            capacity_bytes=capacity,
        )

    def _layer(self, batch: Shape) -> LayerShape:
        text_config, dtype = self.shapes.causal_lm.config.get_text_config(), self.shapes.dtype
        scores = NO_SCORES
        if self.attention is not None:
            packed = self.config.packing or self.config.padding_free
            found = self.attention(text_config, self.shapes.device, dtype, packed=packed)
            scores = score_bytes(text_config, found, batch, dtype)
        return LayerShape.of(
            text_config,
            scores=scores,
            rows=batch.rows,
            length=batch.length,
            rank=self.config.r,
            dropout=self.config.lora_dropout > 0,
            itemsize=dtype.itemsize,
            recipe=self.config.recipe,
        )

    def _moving(self, batch: Shape, choice: Choice) -> int:
        """Bytes that come and go in a step."""
        if not batch.tokens:
            return 0
        there = choice.graphs or self.config.gradient_accumulation_steps > 1  # graphs add to gradients that stay
        moments: dict[str, Any] = {"loss": self.loss, "gradients": self.trained.bytes, "accumulated": there}
        return max(peak(self._layer(batch), choice.levels, **moments) - self.trained.bytes, 0)

    def _evaluated(self) -> int:
        """Bytes that come and go in an evaluation."""
        batch = self.batches.evaluation
        return self._layer(batch).evaluated() + self.loss if batch.tokens else 0

    def planned(self, choice: Choice) -> MemoryPlan:
        """The plan with these levels."""
        moving, evaluated = self._moving(self.batches.largest, choice), self._evaluated()
        graphs = 0
        if choice.graphs:  # beside the pool: evaluation, or the first steps of another shape
            graphs = max(evaluated, self._moving(self.batches.second, choice))
        moving = max(moving, evaluated, _step_scratch(self.config.optim, self.trained, self.shapes.device.type))
        logits = min(self.loss, moving)
        return replace(
            self.still,
            activations=moving - logits,
            logits=logits,
            activation_checkpointing=set(choice.levels) != {"keep"},
            levels=choice.levels,
            runtime=CUDA_RUNTIME + GRAPH_RUNTIME * choice.graphs,
            graphs=graphs,
            use_graphs=choice.graphs,
        )

    def plan(self) -> MemoryPlan:
        """Levels as the config says, or the fastest that fit."""
        want = self.config.activation_checkpointing
        if want != "auto":
            level: Level = want if isinstance(want, str) else "checkpoint" if want else "keep"
            return self._as_asked((level,) * self.layers)
        return self._chosen()

    def _as_asked(self, levels: tuple[Level, ...]) -> MemoryPlan:
        """With graphs where there is room for them."""
        plans = [self.planned(Choice(levels, False))]
        if self.may_capture and OFFLOADED.keys().isdisjoint(levels):
            plans.insert(0, self.planned(Choice(levels, True)))
        return next((plan for plan in plans if plan.fits), plans[-1])

    def _chosen(self) -> MemoryPlan:
        from ..memory.host import available_bytes

        margin = GROWING_MARGIN if segments_grow() and self.shapes.device.type == "cuda" else MARGIN
        choice = choose(
            self.layers,
            int(margin * self.capacity),
            lambda choice: self.planned(choice).total,
            usual=self.usual,
            largest=self.largest,
            host=int(HOST_MARGIN * available_bytes()),
            graphs=self.may_capture,
        )
        plan = self.planned(choice)
        kept = self.planned(Choice(("keep",) * self.layers, choice.graphs))
        need = f"{kept.total / GIB:.2f} of {self.capacity / GIB:.2f} GiB"
        if plan.levels == kept.levels:
            return replace(plan, reason=f"activations are kept: the run needs {need}")
        extra = cost(self.usual, plan.levels, plan.use_graphs) * self.config.gradient_accumulation_steps
        reason = f"{in_words(plan.levels)}, about {extra * 1e3:.0f} ms a step: keeping all would take {need}"
        if not plan.fits:
            reason += f", and even so the run needs {plan.total / GIB:.2f} GiB"
        return replace(plan, reason=reason)


def _plan(shapes: ModelShapes, checkpointed: bool, batches: Batches, capacity: int, reason: str) -> MemoryPlan:
    config, trained = shapes.config, shapes.trainable()
    gradients = trained.bytes
    whole, one_layer = shapes.replays(checkpointed, batches.largest)
    if config.gradient_accumulation_steps > 1:  # the first micro-batch's gradients are there in the second's forward
        moving = whole.total
    else:  # backward frees layer by layer while gradients appear: the higher end counts
        moving = max(whole.total - gradients, one_layer.total)
    moving = max(moving, _step_scratch(config.optim, trained, shapes.device.type))
    logits = min(whole.logits, moving)
    plan = MemoryPlan(
        weights=shapes.frozen_bytes(),
        adapters=trained.bytes,
        gradients=gradients,
        optimizer=OPTIMIZERS[config.optim].state_bytes(shapes.model),
        activations=moving - logits,
        logits=logits,
        runtime=CUDA_RUNTIME if shapes.device.type != "cpu" else _cpu_runtime(shapes, batches),
        activation_checkpointing=checkpointed,
        reason=reason,
        device=str(shapes.device),
        capacity_bytes=capacity,
    )
    if not may_capture(config, shapes.device, shapes.dtype):
        return plan
    beside = whole.total if batches.second.tokens or batches.evaluation.tokens else 0
    captured = replace(plan, graphs=beside, runtime=plan.runtime + GRAPH_RUNTIME, use_graphs=True)
    return captured if captured.fits else plan


def _cpu_runtime(shapes: ModelShapes, batches: Batches) -> int:
    compiled = shapes.dtype.itemsize == 2 and batches.usual != batches.largest
    return CPU_RUNTIME + CPU_PRIMITIVES * compiled


def _step_scratch(name: str, trained: Trainable, device_type: str) -> int:
    """torch's unfused optimizers work on lists of all parameters on accelerators: one copy of them is scratch."""
    return trained.bytes if OPTIMIZERS[name].scratch and device_type != "cpu" else 0


def _capacity(config: RunConfig, device: torch.device, given: int | None) -> int:
    if given is None:
        import psutil
        import torch

        if device.type == "cuda" and torch.cuda.is_available():
            given = torch.cuda.mem_get_info(device)[0]
        elif device.type == "xpu" and torch.xpu.is_available():
            given = torch.xpu.mem_get_info(device)[0]
        else:
            given = psutil.virtual_memory().available
    return given if config.memory_limit_gib is None else min(given, int(config.memory_limit_gib * GIB))
