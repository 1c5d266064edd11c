"""Estimate a run's memory, component by component, from the model's config, and choose activation levels.

Resident components (weights, adapters, gradients, optimizer state) are counted on the model, built without storage as
it will be loaded (`plan.shapes`). Transient ones (activations, logits, workspace) are measured by replaying one step on
fake tensors (`plan.replay`). The plan describes the rank that needs most (`plan.rank`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ..config import Level, Parallel, Sliced
from ..config.policy import DISTILLING, SAMPLING
from ..config.schema import RunKeys
from ..data.batch_shapes import Batches, Shape
from ..data.rows import collating_threads
from ..memory import allocators
from ..mesh.reduction import BUCKET
from ..modeling.packed_forwards import MIN_LENGTH_RATIO
from ..optim import memory_choices, optimizer_row, state_key, trained_parameters
from ..parallel.pipeline.model import partition_model
from ..parallel.pipeline.schedules import Seconds
from ..parallel.shard.model import has_static_gradients
from ..parallel.shard.optimizer import AT_ONCE, TOGETHER, optimizer_shards
from ..utils.caching import cached_method
from ..utils.hardware import best_device, free_bytes, has_expandable_segments
from ..utils.notices import notice
from .auxiliary import find_auxiliary
from .cards import H200, Card
from .costs import (
    REPLAYED,
    Gathers,
    LayerCost,
    extra_seconds,
    head_seconds,
    micro_seconds,
    replayed_level,
    step_seconds,
    vocabulary_seconds,
)
from .experts import RESIDENT, OffloadedExperts, with_experts
from .memory_plan import GIB, SINGLE, MemoryPlan
from .policy import (
    OFFLOADED,
    Choice,
    choose,
    describe_levels,
    evenly_spaced,
    peak,
    pinned_bytes,
    shards_to_offload,
)
from .rank import IN_FLIGHT, Pipeline, Stage, gathered_bytes, in_context, in_slices, pipeline_of, rank_config
from .replay import Step
from .rollouts import with_rollouts
from .shapes import ModelShapes, Trainable, dtype_named

MARGIN = 0.9  # share of device memory to plan for: allocators fragment, and sequence lengths vary
EXPANDABLE_MARGIN = 0.96  # the same with expandable CUDA segments: at most 1.7% were unused (docs/benchmarks.md)
HOST_MARGIN = 0.9  # share of host memory to plan for offloads
CAPTURED = {"data", "shard"}  # axes whose collectives within a micro-batch can be captured in a CUDA graph
GRAPH_RUNTIME = 80 * 2**20  # cuBLAS workspaces of the graphs' stream, and gradients to be accumulated


def estimate(
    config: RunKeys,
    model_config: Any,
    *,
    device: str | torch.device | None = None,
    capacity_bytes: int | None = None,
    batches: Batches | None = None,
    shapes: ModelShapes | None = None,
    layout: Parallel = SINGLE,
    card: Card = H200,
    ranks_per_host: int | None = None,
    answered: tuple[str, int] | None = None,
) -> MemoryPlan:
    """Predict the memory of a run and choose each layer's activation level, and how the optimizer updates.

    If `optim_in_backward` or `optim_offload` is "auto", the state is in host memory only if the run does not fit
    otherwise, and the optimizer updates in the backward if the run fits only so, or is faster so since more activations
    are saved. If nothing fits the device, the plan that needs least is returned, of those that fit the host if any do.

    Args:
        config: the run.
        model_config: the transformers config of its model; no weights are read.
        device: training device, which may be absent; default: `config.device`, else the best device.
        capacity_bytes: usable device bytes; default: bytes free on `device` now. `memory_limit_gib` lowers it.
        batches: the micro-batches of its data; default: `per_device_train_batch_size` rows of `max_length` tokens.
        shapes: the model of exactly this run, device and tensor-parallel degree, if it was built before.
        layout: how the run is distributed.
        card: the GPU whose rates predicted seconds use.
        ranks_per_host: ranks that share one host's memory; default: all.
        answered: GEMM path and page bytes that a resumed run samples with, see `plan.rollouts`.

    Returns:
        The plan of the rank that needs most. Compare its total with `torch.cuda.max_memory_allocated` on CUDA, and on
        a CPU with the process's growth after importing its libraries.

    Raises:
        ModelError: transformers cannot build a causal LM from `model_config`, or the adapter finds no module.
        ConfigError: packed documents cannot be separated.
    """
    target = torch.device(device or config.device or best_device())
    ranks_per_host = ranks_per_host or layout.size
    alone = layout.size == 1 and dtype_named(config.precision.compute, target) != torch.float16
    plans: list[MemoryPlan] = []
    for choice in memory_choices(config, alone, has_host=target.type != "cpu"):
        if choice["optim_offload"] is True and any(plan.fits for plan in plans):
            break
        chosen = config.model_copy(update=choice)
        plan = _estimate_of_choice(
            chosen, model_config, target, capacity_bytes, batches, shapes, layout, card, ranks_per_host, answered
        )
        plans.append(replace(plan, optimizer_choice=choice))
        if plan.fits and not plan.activation_checkpointing:
            break
    if fitting := [plan for plan in plans if plan.fits]:
        return min(fitting, key=lambda plan: plan.seconds or 0.0)
    return min([plan for plan in plans if plan.fits_host] or plans, key=lambda plan: plan.total)


def _estimate_of_choice(
    config: RunKeys,
    model_config: Any,
    device: torch.device,
    capacity_bytes: int | None,
    batches: Batches | None,
    shapes: ModelShapes | None,
    layout: Parallel,
    card: Card,
    ranks_per_host: int,
    answered: tuple[str, int] | None,
) -> MemoryPlan:
    """Return the plan of a run whose `optim_in_backward` and `optim_offload` are chosen; "auto" is no."""
    free = free_bytes(device, ranks_per_host) if capacity_bytes is None else capacity_bytes
    capacity = free if config.memory_limit_gib is None else min(free, int(config.memory_limit_gib * GIB))
    shapes = shapes or ModelShapes(config, rank_config(model_config, layout), device, layout.tensor)
    auxiliary = find_auxiliary(config, device, shapes.dtype.itemsize)
    capacity -= auxiliary.bytes
    batches = (batches or Batches.of_full_rows(config)).longer(1 / layout.context)
    if shapes.document_separation == "unpacked":  # packed rows become padded sequences
        batches = batches.longer(1 / MIN_LENGTH_RATIO)
    planner = functools.partial(
        _Planner, shapes, batches, capacity, config=config, card=card, ranks_per_host=ranks_per_host
    )
    graphs = shapes.packed_in_graphs
    resident = planner(layout=layout, graphs=graphs)

    def plan_with(experts: OffloadedExperts) -> MemoryPlan:
        return (planner(layout=layout, graphs=graphs, experts=experts) if experts.layers else resident).plan()

    plan = with_experts(
        config, shapes.expert_bytes(), shapes.device, single=layout.size == 1, host=resident.host,
        budget=resident.budget, plan=plan_with,
    )  # fmt: skip
    if layout.pipeline > 1 and not plan.activation_checkpointing:  # recomputation changes the partition
        plan = planner(layout=layout, graphs=graphs, recomputed=False).plan()
    if not plan.fits and {*layout.axes} in ({"context"}, {"data", "context"}):
        sliced = planner(layout=Sliced(**vars(layout)), graphs=graphs).plan()
        plan = min(plan, sliced, key=lambda plan: plan.total)
    plan = replace(plan, rough=shapes.rough)
    if config.method not in SAMPLING:
        return plan
    return with_rollouts(
        plan, lambda: planner(layout=layout, graphs=False).plan(), shapes, batches, answered, auxiliary
    )


def may_capture(config: RunKeys, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether micro-batches may run as CUDA graphs.

    Excludes fp16 (loss scaling), QAT (quantizers read values) and distillation (the teacher's forward runs in between).
    """
    kernels = config.use_kernels and device.type == "cuda" and dtype != torch.float16
    return kernels and not config.storage.rounds and config.method not in DISTILLING


class _Planner:
    """Plans for one model and its data.

    Args:
        shapes: the model as one rank of `layout` computes it.
        batches: one rank's micro-batches.
        capacity: usable device bytes.
        graphs: whether the data allows capturing micro-batches.
        config: the run; default: `shapes.config`.
        layout, card, ranks_per_host: as in `estimate`.
        recomputed: whether the pipeline partition assumes that layers are recomputed in backward.
        experts: experts in host memory.
    """

    def __init__(
        self, shapes: ModelShapes, batches: Batches, capacity: int, graphs: bool = True, *,
        config: RunKeys | None = None, layout: Parallel = SINGLE, card: Card = H200, ranks_per_host: int = 1,
        recomputed: bool = True, experts: OffloadedExperts = RESIDENT,
    ):  # fmt: skip
        self.shapes = shapes
        self.config = config or shapes.config
        self.batches = batches
        self.capacity = capacity
        self.layout = layout
        self.card = card
        self.ranks_per_host = ranks_per_host
        self.experts = experts
        self.trained = shapes.trainable()
        self.depth = shapes.text_config.num_hidden_layers
        self.gradients = shapes.layer_gradients()
        self.evaluated = shapes.evaluation(batches.evaluation)
        want = self.config.activation_checkpointing
        named = want if isinstance(want, str) else "checkpoint" if want else "keep"
        self.level: Level | None = None if named == "auto" else named
        self.replayed = REPLAYED if self.level is None else (replayed_level(self.level),)
        self.frozen = shapes.frozen()
        row = optimizer_row(self.config)
        hosted = row.host_bytes and row.host_bytes(shapes.model, self.config)
        self.optimizer = row.state_bytes(shapes.model, self.config)
        self.optimizer += (hosted or 0) if shapes.device.type == "cpu" else 0
        # Bytes of gradients of an optimizer that does not hold all of them until the step; None: all are held.
        self.gradient_limit = row.gradient_bytes and row.gradient_bytes(shapes.model, self.config)
        self.scratch = row.scratch and shapes.device.type != "cpu"  # unfused optimizers copy all parameters
        self.slices = optimizer_shards(layout, row.block_of(self.config) if shapes.dtype != torch.float16 else 0)
        self.hosted_state = (hosted or 0) // self.slices  # bytes of optimizer state in host memory
        self.factors = shapes.factors() if self.slices > 1 else (0, 0)
        captures = graphs and row.updates == "all" and {*layout.axes} <= CAPTURED and not self._reduces_in_backward
        captures = captures and not experts.layers and may_capture(self.config, shapes.device, shapes.dtype)
        self.may_capture = captures and shapes.images_before_graphs
        self.vocabulary = shapes.text_config.vocab_size
        self.pipeline = self._pipeline(recomputed)
        self.stages = self.pipeline.stages

    def plan(self) -> MemoryPlan:
        """Plan with the configured activation level, or with the fastest levels that fit."""
        if self.level is not None:
            plan = self._at_level(self.level)
        elif self.shapes.fused:
            plan = self._fastest()
        else:
            plan = self._all_saved_or_recomputed()
        remarks = "; frozen weights are sharded" if isinstance(self.layout, Sliced) else ""
        remarks += f"; the shards of {len(plan.hosted)} layers are in host memory" if plan.hosted else ""
        return replace(plan, seconds=self._seconds(plan), reason=plan.reason + remarks)

    def _at_level(self, level: Level) -> MemoryPlan:
        """Plan with the configured level in every layer."""
        if not self.shapes.fused and level not in ("keep", "checkpoint"):
            notice(
                "activation-level",
                f"activation_checkpointing: {level} needs the fused forwards, which this run does not use. Each layer"
                " is recomputed from its input instead; set activation_checkpointing: true",
            )
            level = "checkpoint"
        return self._at_levels((level,) * self.depth)

    def _at_levels(self, levels: tuple[Level, ...]) -> MemoryPlan:
        """Plan with these levels, with CUDA graphs and gathered layers where they fit."""
        choices = [Choice(levels, False)]
        if self.may_capture and OFFLOADED.keys().isdisjoint(levels):
            choices.insert(0, Choice(levels, True))
        planned = {choice: self.planned(choice) for choice in choices}
        choice = next((choice for choice, plan in planned.items() if plan.fits), choices[-1])
        free = self.budget - planned[choice].total
        if self._gathered and free >= self._gathered.block:
            return self.planned(replace(choice, stays=min(self.depth, free // self._gathered.block)))
        return planned[choice] if choice.graphs else self.planned(self._hosting(choice))

    def _all_saved_or_recomputed(self) -> MemoryPlan:
        """Plan with one level for all layers: `keep` if it fits, else `checkpoint`."""
        saved = self._at_levels(("keep",) * self.depth)
        need = self._need(saved)
        if saved.total <= MARGIN * self.capacity:
            return replace(saved, reason=f"all activations are saved: the run needs {need}")
        recomputed = self._at_levels(("checkpoint",) * self.depth)
        reason = f"activations are recomputed in backward: saving all would need {need}"
        return replace(recomputed, reason=reason + self._shortage(recomputed))

    def _fastest(self) -> MemoryPlan:
        """Plan with the fastest mix of levels that fits."""
        largest, usual = self.layer(self.batches.largest), self.usual
        choice = choose(
            self.depth,
            self.budget,
            lambda choice: self.planned(choice).total,
            usual=usual,
            largest=largest,
            host=self.host,
            graphs=self.may_capture,
            gathers=self._gathered,
        )
        plan = self.planned(self._hosting(choice))
        saved = self.planned(replace(choice, levels=("keep",) * self.depth))
        if plan.levels == saved.levels:
            return replace(plan, reason=f"all activations are saved: the run needs {self._need(saved)}")
        extra = 1e3 * extra_seconds(usual, plan.levels, plan.use_graphs) * self.config.gradient_accumulation_steps
        levels = describe_levels(plan.levels)
        reason = f"{levels}, about {extra:.0f} ms a step: saving all activations would need {self._need(saved)}"
        return replace(plan, reason=reason + self._shortage(plan))

    @property
    def budget(self) -> int:
        """Device bytes to plan for."""
        grows = has_expandable_segments() and self.shapes.device.type == "cuda"
        return int((EXPANDABLE_MARGIN if grows else MARGIN) * self.capacity)

    @functools.cached_property
    def host(self) -> int:
        """Bytes of host memory that this rank may fill, besides the optimizer's state."""
        return max(0, int(HOST_MARGIN * self.host_share) - self.hosted_state)

    @functools.cached_property
    def host_share(self) -> int:
        """Free bytes of host memory for each of the ranks that share it."""
        return allocators.available_bytes() // self.ranks_per_host

    def _hosting(self, choice: Choice) -> Choice:
        """Move the shards of as few layers as needed to the host, if `choice` does not fit the device.

        Loading needs all shards on the device, so a model too large for that stays unchanged.
        """
        plan = self.planned(choice)
        loaded = max(self.frozen.loaded(stage, self.layout) + self._trained(stage).bytes for stage in self.stages)
        if plan.total <= self.budget or self._gathered is None or loaded > self.capacity:
            return choice
        shards = [self.frozen.slice(index, self.layout) for stage in self.stages for index in stage.layers]
        offloaded = sum(map(self.layer(self.batches.largest).host_bytes, choice.levels)) if self.shapes.fused else 0
        count = shards_to_offload(plan.total - self.budget, shards, self.host - offloaded)
        return replace(choice, hosted=min(count, *(stage.depth for stage in self.stages)), graphs=False)

    @functools.cached_property
    def _gathered(self) -> Gathers | None:
        """All-gathers that resident layers would save; None without sharding, and on a CPU: ranks share its memory."""
        if self.layout.slices == 1 or self.shapes.device.type == "cpu":
            return None
        return self.frozen.gathers(self.layout, max(self.stages, key=self._block), self.card.link)

    @cached_method
    def _block(self, stage: Stage) -> int:
        """Bytes of an unsharded decoder layer on top of its shard; 0 if layers are not sharded."""
        return self.frozen.largest(stage) if self.layout.slices > 1 else 0

    def _need(self, plan: MemoryPlan) -> str:
        return f"{plan.total / GIB:.2f} of {self.capacity / GIB:.2f} GiB"

    @staticmethod
    def _shortage(plan: MemoryPlan) -> str:
        return "" if plan.fits_device else f", and with that the run still needs {plan.total / GIB:.2f} GiB"

    def planned(self, choice: Choice) -> MemoryPlan:
        """The plan of a choice, on the pipeline rank that needs most."""
        plan = max((self._of_stage(choice, stage) for stage in self.stages), key=lambda plan: plan.total)
        if self.shapes.device.type == "cpu":
            return plan
        host = max((self._host_bytes(choice, stage) for stage in self.stages), key=lambda by_key: sum(by_key.values()))
        return replace(plan, host=host, host_share=self.host_share)

    def _host_bytes(self, choice: Choice, stage: Stage) -> dict[str, int]:
        """Configuration key → bytes of host memory that a rank of this stage pins for it."""
        state = self.hosted_state * self._trained(stage).bytes // max(self.trained.bytes, 1)
        by_key = {state_key(self.config): state, "expert_offload": self.experts.bytes}
        if self.shapes.fused and not OFFLOADED.keys().isdisjoint(choice.levels):
            cost = self.layer(self.batches.largest)
            saved = sum(cost.host_bytes(choice.levels[index]) for index in stage.layers)
            by_key["activation_checkpointing"] = int(stage.in_flight * saved)
        if choice.hosted:
            shards = (self.frozen.slice(index, self.layout) for index in self._spread((stage,), choice.hosted))
            by_key["parallel"] = sum(map(pinned_bytes, shards))
        return {key: nbytes for key, nbytes in by_key.items() if nbytes}

    def _of_stage(self, choice: Choice, stage: Stage) -> MemoryPlan:
        """The plan of a choice on one pipeline rank."""
        trained = self._trained(stage)
        largest = self.batches.largest
        transient = self._transient(largest, choice, stage)
        evaluated = self.evaluated * stage.has_head
        graphs = 0
        if choice.graphs:  # outside of the pool: evaluation, and steps of shapes without a graph (`train.graph`)
            launched = self.batches.many or "shard" in self.layout.axes
            graphs = max(evaluated, launched * self._transient(self.batches.second, choice, stage))
            graphs += IN_FLIGHT * self._block(stage)  # the pool has its own
        bucket = self._bucket if self._reduces_in_backward else BUCKET
        reduced = min(trained.bytes, bucket) * (1 + (self.slices > 1)) if self.layout.size > self.layout.pipeline else 0
        transient = max(transient, evaluated, reduced, trained.bytes * self.scratch) + self._image_bytes
        logits = min(self._step(largest, choice).logits, transient) * stage.has_head
        runtime = self.shapes.runtime(varied=self.batches.usual != self.batches.largest)
        hosted = sum(self.frozen.slice(index, self.layout) for index in self._spread((stage,), choice.hosted))
        # All-gathers of a step: each layer twice a micro-batch, the last one once.
        moved = stage.depth - min(choice.stays, stage.depth)
        gathered_blocks = (2 * moved - 1) * self.config.gradient_accumulation_steps if moved else 0
        return MemoryPlan(
            weights=self._share(stage) - hosted - self.experts.bytes,
            gathered=gathered_bytes(self._block(stage), stage, choice.stays) + self.experts.window,
            adapters=self._parameters(stage),
            gradients=self._gradients(trained.bytes) + 2 * self._bucket * self._reduces_in_backward,
            optimizer=self.optimizer * trained.bytes // max(self.trained.bytes * self.slices, 1),
            activations=transient - logits,
            logits=logits,
            vision=self.shapes.vision_bytes(
                largest,
                transient - self._image_bytes,
                {*choice.levels} != {"keep"},
                graphs if choice.graphs else None,
            ),
            graphs=graphs,
            runtime=runtime + GRAPH_RUNTIME * choice.graphs,
            activation_checkpointing=set(choice.levels) != {"keep"},
            reason="set by activation_checkpointing",
            device=str(self.shapes.device),
            capacity_bytes=self.capacity,
            levels=choice.levels if self.shapes.fused else (),
            trains_all=not self.config.use_peft,
            use_graphs=choice.graphs,
            layout=self.layout,
            stays=self._spread(self.stages, choice.stays),
            hosted=self._spread(self.stages, choice.hosted),
            gathers=gathered_blocks * self._block(stage),
        )

    @property
    def _image_bytes(self) -> int:
        """Bytes of the tower's inputs: a step's micro-batches are copied to the device together. On a CPU, threads also
        hold the batches that they collate ahead."""
        ahead = collating_threads() + 1 if self.shapes.device.type == "cpu" else 0
        return (self.config.gradient_accumulation_steps + ahead) * self.batches.image_bytes

    @cached_method
    def _share(self, stage: Stage) -> int:
        """Resident bytes of frozen weights on a rank of this stage."""
        return self.frozen.share(stage, self.layout)

    @cached_method
    def _trained(self, stage: Stage) -> Trainable:
        """Trained parameters on a rank of this stage, before their state is sharded."""
        outside = self._outside_layers if stage.has_embedding or stage.has_head else 0
        bytes_ = sum(self.gradients[index] for index in stage.layers[: len(self.gradients)]) + outside
        return Trainable(self.trained.numel * bytes_ // max(self.trained.bytes, 1), bytes_)

    def _parameters(self, stage: Stage) -> int:
        """Bytes of trained parameters on a rank of this stage: master weights and compute-dtype copies."""
        copied, read = self.factors
        return self._trained(stage).bytes - copied + copied // self.slices + read

    @functools.cached_property
    def _reduces_in_backward(self) -> bool:
        """Return whether gradients are reduce-scattered during each backward, so that each rank stores a shard."""
        return self.slices > 1 and self.trained.bytes >= AT_ONCE and has_static_gradients(self.shapes.model)

    @functools.cached_property
    def _bucket(self) -> int:
        """Bytes of gradients in one bucket of the reduction during backward."""
        return max([TOGETHER, *(parameter.nbytes for parameter in trained_parameters(self.shapes.model).values())])

    @property
    def _gradient_shards(self) -> int:
        """Number of shards that gradients are stored in."""
        return self.slices if self._reduces_in_backward else 1

    def _gradients(self, held: int) -> int:
        """Bytes of gradients between backward and step, of trained parameters of `held` bytes."""
        return held // self._gradient_shards if self.gradient_limit is None else min(held, self.gradient_limit)

    @property
    def _outside_layers(self) -> int:
        """Bytes of trained parameters outside of the decoder layers."""
        return self.trained.bytes - sum(self.gradients)

    @cached_method
    def _spread(self, stages: tuple[Stage, ...], count: int) -> tuple[int, ...]:
        """Pick `count` decoder layers of each stage, evenly spaced, to stay gathered or to be in host memory."""
        return tuple(sorted(stage.layers[i] for stage in stages for i in evenly_spaced(stage.depth, count)))

    def _transient(self, batch: Shape, choice: Choice, stage: Stage) -> int:
        """Bytes at a step's highest moment, on top of weights, gradients and optimizer state."""
        if not batch.tokens:
            return 0
        step, in_flight = self._step(batch, choice), 0
        layers = tuple(step.layers)
        layers *= 1 if len(layers) == self.depth else self.depth
        if self.shapes.fused:
            cost = self.layer(batch)
            by_level = {level: cost.bytes(level) for level in set(choice.levels)}
            layers = tuple(by_level[level] for level in choice.levels)
            in_flight = max(map(cost.host_bytes, by_level))  # offload buffers of one layer
        layers = tuple(layers[index] for index in stage.layers) if layers else ()
        trained = self._trained(stage)
        gradients = [self.gradients[index] // self._gradient_shards for index in stage.layers[: len(layers)]]
        accumulated = trained.bytes // self._gradient_shards
        if self.gradient_limit is not None:  # counted in full from the head's backward on
            gradients, accumulated = [0] * len(gradients), self._gradients(trained.bytes)
        layer_gradients = sum(self.gradients[index] for index in stage.layers[: len(layers)])
        if any(self.factors):
            layer_gradients = 0
        initial = step.initial - self.shapes.copied(self.trained.bytes - self._outside_layers - layer_gradients)
        hidden = batch.tokens * self.shapes.text_config.hidden_size * self.shapes.dtype.itemsize
        head = step.head + 2 * (self.layout.shard - 1) * hidden  # of the other ranks' sequences, and their gradient
        highest = peak(
            layers,
            initial=initial,
            head=head if stage.has_head else 2 * hidden,  # the sent hidden states, and their gradient
            gradients=gradients,
            table_gradients=accumulated - sum(gradients),
            accumulated=choice.graphs or self.config.gradient_accumulation_steps > 1,  # graphs accumulate in place
        )
        earlier = int((stage.in_flight - 1) * (sum(layer.saved for layer in layers) + hidden))
        return max(highest + in_flight + earlier - accumulated, 0)

    # --- time --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def usual(self) -> LayerCost:
        """A layer of a fused model for the usual micro-batch, which decides the time."""
        largest, usual = self.layer(self.batches.largest), self.batches.usual
        return replace(largest.scaled_to(usual), length=usual.length * self.layout.context)

    def _seconds(self, plan: MemoryPlan) -> float | None:
        """Predicted seconds of a step; None without measured rates."""
        if not self._timed:
            return None
        layer, layout = self.usual, self.layout
        micro = []
        for stage in self.stages:
            gathers = self.frozen.gathers(layout, stage, self.card.link)
            levels, graphs = [plan.levels[index] for index in stage.layers], plan.use_graphs
            resident, hosted = (len({*layers} & {*stage.layers}) for layers in (plan.stays, plan.hosted))
            seconds = micro_seconds(
                layer, levels, layout, graphs=graphs, gathers=gathers, resident=resident, hosted=hosted
            )
            recomputed = sum(map(layer.extra_seconds, levels))
            passes = stage.depth * layer.forward_seconds, stage.depth * layer.backward_seconds + recomputed
            seconds += self.experts.seconds(*passes, self.card.host)
            if stage.has_head:
                head = head_seconds(layer, self.vocabulary) / layout.tensor
                seconds += head + vocabulary_seconds(layer, layout.shard)
            micro.append(seconds)
        trained, window = self.trained.bytes // layout.pipeline, self.config.gradient_accumulation_steps
        return step_seconds(micro, self.pipeline.idle, layout, window, trained, self.card.link)

    @property
    def _timed(self) -> bool:
        """Return whether the layers have measured rates."""
        return self.shapes.fused and bool(self.batches.usual.tokens)

    def _pipeline(self, recomputed: bool) -> Pipeline:
        """Partition the model and simulate the schedule; layers without measured rates take 1 s forward, 2 s back."""
        layer = Seconds(1.0, 2.0)
        head = Seconds(0.0, 0.0)
        window = self.config.gradient_accumulation_steps
        if (ranks := self.layout.pipeline) == 1:
            return pipeline_of(None, [layer] * self.depth, head, window)
        recomputed = recomputed and self.level != "keep"
        if self._timed:
            recompute = self.usual.extra_seconds(self.level or "checkpoint") if recomputed else 0.0
            layer = Seconds(self.usual.forward_seconds, self.usual.backward_seconds + recompute, recompute)
            head = Seconds(head_seconds(self.usual, self.vocabulary), 0.0)
        cut = partition_model(self.shapes.causal_lm, self.config.pipeline_schedule, ranks, window, recomputed)
        ahead = self.layout.shard == 1  # as in `train.setup`
        return pipeline_of(cut, [layer] * self.depth, head, window, ahead=ahead)

    def _step(self, batch: Shape, choice: Choice) -> Step:
        """Replay a step, with one layer at each level under consideration if the model is fused."""
        return self.shapes.step(batch, self.replayed if self.shapes.fused else choice.levels[:1])

    @cached_method
    def layer(self, batch: Shape) -> LayerCost:
        """Cost of a layer of a fused model for `batch`."""
        layers = self.shapes.step(batch, self.replayed).layers
        cost = LayerCost.of(
            self.shapes.text_config,
            rows=batch.rows,
            length=batch.length,
            replayed=dict(zip(self.replayed, layers, strict=True)),
            itemsize=self.shapes.dtype.itemsize,
            recipe=self.config.recipe,
            trains_all=not self.config.use_peft,
            card=self.card,
        )
        return in_slices(in_context(cost, self.layout.context), self.layout.tensor)
