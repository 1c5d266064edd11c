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
from ..notices import notice
from .policy import FUSED, LayerShape, choose, cost, in_words, peak

if TYPE_CHECKING:
    import torch

    from ..config import Level, RunConfig
    from .shapes import ModelShapes, Trainable

GIB = 2**30
MARGIN = 0.9  # plan to fill at most this share: allocators fragment, and rows differ
GROWING_MARGIN = 0.96  # the same where a CUDA allocator's segments grow: at most 1.7% were unused (docs/log.md)
HOST_MARGIN = 0.9  # the same of the host's memory for offloads
CUDA_RUNTIME = 96 * 2**20  # cuBLAS workspaces of the forward and the backward thread, inside torch's allocator
CPU_RUNTIME = 64 * 2**20  # thread pools and packed operands of oneDNN and MKL, malloc's slack

# Optimizer state of transformers' `optim` names: copies of the parameter in its own dtype, and bytes beside them.
OPTIMIZER_STATE: dict[str, tuple[int, float]] = {
    "adamw_torch": (2, 0),
    "adamw_torch_fused": (2, 0),
    "adamw_torch_xla": (2, 0),
    "adamw_torch_8bit": (0, 2),
    "adamw_torch_4bit": (0, 1),
    "adamw_bnb_8bit": (0, 2),
    "adamw_8bit": (0, 2),
    "paged_adamw_8bit": (0, 2),
    "paged_adamw": (0, 8),
    "paged_adamw_32bit": (0, 8),
    "lion": (0, 4),
    "lion_32bit": (0, 4),
    "paged_lion": (0, 4),
    "paged_lion_32bit": (0, 4),
    "lion_8bit": (0, 1),
    "paged_lion_8bit": (0, 1),
    "ademamix": (0, 12),
    "ademamix_8bit": (0, 3),
    "rmsprop": (1, 0),
    "adagrad": (1, 0),
    "sgd": (0, 0),
    "adafactor": (0, 0.1),
}


@dataclass(frozen=True)
class MemoryPlan:
    """Predicted bytes of a run at the highest moment of a step. `total` is their sum.

    `levels` says what each layer keeps, where the fused forwards run; `activation_checkpointing` whether any keeps less
    than all.
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

    PARTS: ClassVar = ("weights", "adapters", "gradients", "optimizer", "activations", "logits", "runtime")

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
    length: int | None = None,
) -> MemoryPlan:
    """Predict the memory of a run and choose whether activations are kept or recomputed.

    Args:
        config: the run.
        model_config: the transformers config of its model; no weights are read.
        device: where it will train (it need not be here); default: `config.device`, else the best device.
        capacity_bytes: what may be used; default: what is free on `device` now. `memory_limit_gib` lowers it.
        length: tokens of the longest row; default: `max_length`.

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
    length = min(length or config.max_length, config.max_length)
    layer = _fused_layer(config, shapes, length)
    if layer is not None:
        return _fused_plan(shapes, layer, capacity)
    want = config.activation_checkpointing
    if want != "auto":
        if want not in (True, False, "keep", "checkpoint"):
            notice(
                "activation-level",
                f"activation_checkpointing: {want} is of the fused forwards, which do not run here; whole layers are"
                " recomputed instead",
            )
        return _plan(shapes, want not in (False, "keep"), length, capacity, "as activation_checkpointing says")
    kept = _plan(shapes, False, length, capacity, "")
    need = f"{kept.total / GIB:.2f} of {capacity / GIB:.2f} GiB"
    if kept.total <= MARGIN * capacity:
        return replace(kept, reason=f"activations are kept: the run needs {need}")
    recomputed = _plan(shapes, True, length, capacity, "")
    reason = f"activations are recomputed in backward: keeping them would take {need}"
    if not recomputed.fits:
        reason += f", and even so the run needs {recomputed.total / GIB:.2f} GiB"
    return replace(recomputed, reason=reason)


def _fused_layer(config: RunConfig, shapes: ModelShapes, length: int) -> LayerShape | None:
    """A layer of the model as `halfbyte.patch` runs it; None where it will not, or runs mostly PEFT's forwards."""
    text_config = shapes.causal_lm.config.get_text_config()
    patched = config.use_kernels and shapes.device.type != "cpu" and text_config.model_type in FUSED
    if not patched or not config.use_peft or config.use_dora or config.qat_scheme is not None:
        return None
    return LayerShape.of(
        text_config,
        rows=config.per_device_train_batch_size,
        length=length,
        rank=config.r,
        dropout=config.lora_dropout > 0,
        itemsize=shapes.dtype.itemsize,
        recipe=config.recipe,
    )


def _fused_plan(shapes: ModelShapes, layer: LayerShape, capacity: int) -> MemoryPlan:
    """Levels as the config says, or the fastest that fit; and the memory of the run with them."""
    from ..ops.losses import chunk_rows
    from .host import available_bytes

    config, trained = shapes.config, shapes.trainable()
    text_config = shapes.causal_lm.config.get_text_config()
    layers, vocabulary = text_config.num_hidden_layers, text_config.vocab_size
    loss = chunk_rows(vocabulary, shapes.device.type) * vocabulary * (4 + shapes.dtype.itemsize)
    accumulated = config.gradient_accumulation_steps > 1
    moments: dict[str, Any] = {"loss": loss, "gradients": trained.bytes, "accumulated": accumulated}
    still = MemoryPlan(
        weights=shapes.frozen_bytes(),
        adapters=trained.bytes,
        gradients=trained.bytes,
        optimizer=_optimizer_bytes(config.optim, trained),
        activations=0,
        logits=0,
        runtime=CUDA_RUNTIME,
        activation_checkpointing=False,
        reason="as activation_checkpointing says",
        device=str(shapes.device),
        capacity_bytes=capacity,
    )

    def planned(levels: tuple[Level, ...]) -> MemoryPlan:
        moving = max(peak(layer, levels, **moments) - trained.bytes, 0)
        moving = max(moving, _step_scratch(config.optim, trained, shapes.device.type))
        logits = min(loss, moving)
        less = set(levels) != {"keep"}
        return replace(still, activations=moving - logits, logits=logits, activation_checkpointing=less, levels=levels)

    want = config.activation_checkpointing
    if want != "auto":
        level: Level = want if isinstance(want, str) else "checkpoint" if want else "keep"
        return planned((level,) * layers)
    margin = GROWING_MARGIN if segments_grow() and shapes.device.type == "cuda" else MARGIN
    budget = int(margin * capacity) - (still.total - trained.bytes)
    host = int(HOST_MARGIN * available_bytes())
    plan = planned(choose(layer, layers, budget, host=host, **moments))
    kept = planned(("keep",) * layers)
    need = f"{kept.total / GIB:.2f} of {capacity / GIB:.2f} GiB"
    if plan.levels == kept.levels:
        return replace(plan, reason=f"activations are kept: the run needs {need}")
    extra = cost(layer, plan.levels or ()) * config.gradient_accumulation_steps
    reason = f"{in_words(plan.levels)}, about {extra * 1e3:.0f} ms a step: keeping all would take {need}"
    if not plan.fits:
        reason += f", and even so the run needs {plan.total / GIB:.2f} GiB"
    return replace(plan, reason=reason)


def _plan(shapes: ModelShapes, checkpointed: bool, length: int, capacity: int, reason: str) -> MemoryPlan:
    config, trained = shapes.config, shapes.trainable()
    gradients = trained.bytes
    whole, one_layer = shapes.replays(checkpointed, length)
    if config.gradient_accumulation_steps > 1:  # the first micro-batch's gradients are there in the second's forward
        moving = whole.total
    else:  # backward frees layer by layer while gradients appear: the higher end counts
        moving = max(whole.total - gradients, one_layer.total)
    moving = max(moving, _step_scratch(config.optim, trained, shapes.device.type))
    logits = min(whole.logits, moving)
    return MemoryPlan(
        weights=shapes.frozen_bytes(),
        adapters=trained.bytes,
        gradients=gradients,
        optimizer=_optimizer_bytes(config.optim, trained),
        activations=moving - logits,
        logits=logits,
        runtime=CUDA_RUNTIME if shapes.device.type != "cpu" else CPU_RUNTIME,
        activation_checkpointing=checkpointed,
        reason=reason,
        device=str(shapes.device),
        capacity_bytes=capacity,
    )


def _optimizer_bytes(name: str, trained: Trainable) -> int:
    if name not in OPTIMIZER_STATE:
        notice("optimizer_memory", f"the memory of optim: {name} is not known; planning with AdamW's two fp32 states")
    copies, other = OPTIMIZER_STATE.get(name, (0, 8))
    return int(copies * trained.bytes + other * trained.numel)


def _step_scratch(name: str, trained: Trainable, device_type: str) -> int:
    """torch's unfused optimizers work on lists of all parameters on accelerators: one copy of them is scratch."""
    return trained.bytes if name in ("adamw_torch", "rmsprop", "adagrad") and device_type != "cpu" else 0


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
