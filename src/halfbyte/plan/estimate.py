"""How much memory a run will take, part by part, from the model's config alone; and what layers keep for backward.

What stays (weights, adapters, gradients, optimizer state) is counted on the model, built without storage as it will be
loaded (`plan.shapes`). What comes and goes (activations, the loss's logits, scratch) is found by running one step on
shapes (`plan.replay`). A plan is one process's: of several, the one that needs most (`plan.rank`).
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from ..config import Level, Parallel, RunConfig, Sliced
from ..config.policy import DISTILLING, SAMPLING
from ..memory import allocators
from ..memory.activations import Batches, Shape
from ..modeling.packed_forwards import MIN_LENGTH_RATIO
from ..optim import OPTIMIZERS, trained_parameters
from ..parallel.pipeline.model import cut_model
from ..parallel.pipeline.simulation import Seconds
from ..parallel.reduction import BUCKET
from ..parallel.shard.model import trains_alike
from ..parallel.shard.trained import AT_ONCE, TOGETHER, optimizer_shards
from ..utils.hardware import best_device, free_bytes, segments_grow
from ..utils.notices import notice
from .beside import beside
from .cards import H200, Card
from .experts import RESIDENT, Waiting, with_experts
from .memory_plan import GIB, MemoryPlan
from .policy import (
    OFFLOADED,
    REPLAYED,
    Choice,
    Gathers,
    LayerCost,
    choose,
    cost,
    hosted,
    in_words,
    peak,
    replayed_level,
    staying,
)
from .rank import IN_FLIGHT, ONE, Line, Stage, gathered_bytes, in_context, in_slices, line, rank_config
from .replay import Step
from .rollouts import with_rollouts
from .seconds import head_seconds, micro_seconds, step_seconds, vocabulary_seconds
from .shapes import ModelShapes, Trainable

MARGIN = 0.9  # plan to fill at most this share: allocators fragment, and rows differ
GROWING_MARGIN = 0.96  # the same where a CUDA allocator's segments grow: at most 1.7% were unused (docs/log.md)
HOST_MARGIN = 0.9  # the same of the host's memory for offloads
CAPTURED = {"data", "shard"}  # axes along which what is exchanged within a micro-batch can be part of a CUDA graph
GRAPH_RUNTIME = 80 * 2**20  # cuBLAS workspaces of the stream of graphs, and gradients that wait to be added up


def estimate(
    config: RunConfig,
    model_config: Any,
    *,
    device: str | torch.device | None = None,
    capacity_bytes: int | None = None,
    batches: Batches | None = None,
    shapes: ModelShapes | None = None,
    layout: Parallel = ONE,
    card: Card = H200,
    on_host: int | None = None,
    answered: tuple[str, int] | None = None,
) -> MemoryPlan:
    """Predict the memory of a run and choose what each layer keeps for backward.

    Args:
        config: the run.
        model_config: the transformers config of its model; no weights are read.
        device: where it will train (it need not be here); default: `config.device`, else the best device.
        capacity_bytes: what may be used; default: what is free on `device` now. `memory_limit_gib` lowers it.
        batches: the micro-batches of its data; default: `per_device_train_batch_size` rows of `max_length` tokens.
        shapes: the model of just this run on just this device, divided as just this layout divides products, where it
            was built before.
        layout: how the run is divided.
        card: whose rates planned seconds go by.
        on_host: processes that share a host's memory; default: all.
        answered: products and bytes of pages that a resumed run samples with, see `plan.rollouts`.

    Returns:
        The plan of the process that needs most. On CUDA its total is to be compared with
        `torch.cuda.max_memory_allocated`; on a CPU with the growth of the process over what it takes after importing
        its libraries.

    Raises:
        ModelError: transformers cannot build a causal LM from `model_config`, or the adapter finds no module.
        ConfigError: packed documents cannot be kept apart.
    """
    target = torch.device(device or config.device or best_device())
    on_host = on_host or layout.size
    free = free_bytes(target, on_host) if capacity_bytes is None else capacity_bytes
    capacity = free if config.memory_limit_gib is None else min(free, int(config.memory_limit_gib * GIB))
    shapes = shapes or ModelShapes(config, rank_config(model_config, layout), target, layout.tensor)
    capacity -= (others := beside(config, target, shapes.dtype.itemsize)).bytes
    batches = (batches or Batches.of_full_rows(config)).longer(1 / layout.context)
    if shapes.packed_way == "unpacked":  # into rows that are padded
        batches = batches.longer(1 / MIN_LENGTH_RATIO)
    options: Any = {"config": config, "card": card, "on_host": on_host, "graphs": shapes.packed_in_graphs}
    plan = _with_experts(shapes, batches, capacity, layout, options)
    if layout.pipeline > 1 and not plan.activation_checkpointing:  # which changes where the model is cut
        plan = _Planner(shapes, batches, capacity, layout=layout, **options, recomputed=False).plan()
    if not plan.fits and {*layout.axes} in ({"context"}, {"data", "context"}):
        sliced = _Planner(shapes, batches, capacity, layout=Sliced(**vars(layout)), **options).plan()
        plan = min(plan, sliced, key=lambda each: each.total)
    plan = replace(plan, rough=shapes.rough)
    eager = functools.partial(_Planner, shapes, batches, capacity, layout=layout, **options | {"graphs": False})
    rolled = config.method in SAMPLING
    return with_rollouts(plan, lambda: eager().plan(), shapes, batches, answered, others) if rolled else plan


def _with_experts(
    shapes: ModelShapes, batches: Batches, capacity: int, layout: Parallel, options: dict[str, Any]
) -> MemoryPlan:
    """The plan with a mixture's experts where `expert_offload` has them; `options`: of a `_Planner`."""
    first = _Planner(shapes, batches, capacity, layout=layout, **options)

    def plan(waiting: Waiting) -> MemoryPlan:
        planner = _Planner(shapes, batches, capacity, layout=layout, **options, waiting=waiting)
        return (planner if waiting.layers else first).plan()

    room: dict[str, Any] = {"alone": layout.size == 1, "host": first.host, "budget": first.budget}
    return with_experts(options["config"], shapes.expert_bytes(), shapes.device, plan=plan, **room)


def may_capture(config: RunConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether micro-batches may run as CUDA graphs: not with loss scaling, quantizing in every step (quantizers look
    at values), layers offloaded to the host, or a teacher, whose forwards come between."""
    kernels = config.use_kernels and device.type == "cuda" and dtype != torch.float16
    return kernels and config.qat_scheme is None and config.method not in DISTILLING


class _Planner:
    """Plans for one model and its data.

    Args:
        shapes: the model, as one process of `layout` computes it.
        batches: of its data, as one process gets them.
        capacity: bytes that may be used.
        graphs: whether micro-batches may be captured, as far as the data goes.
        config: the run; default: that of `shapes`.
        layout, card, on_host: as in `estimate`.
        recomputed: whether a pipeline is cut for layers that run again for backward.
        waiting: experts in the host's memory.
    """

    def __init__(
        self, shapes: ModelShapes, batches: Batches, capacity: int, graphs: bool = True, *,
        config: RunConfig | None = None, layout: Parallel = ONE, card: Card = H200, on_host: int = 1,
        recomputed: bool = True, waiting: Waiting = RESIDENT,
    ):  # fmt: skip
        self.shapes, self.config, self.batches, self.capacity = shapes, config or shapes.config, batches, capacity
        self.layout, self.card, self.on_host, self.waiting = layout, card, on_host, waiting
        self.trained, self.depth = shapes.trainable(), shapes.text_config.num_hidden_layers
        self.gradients, self.evaluated = shapes.layer_gradients(), shapes.evaluation(batches.evaluation)
        want = self.config.activation_checkpointing
        named = want if isinstance(want, str) else "checkpoint" if want else "keep"
        self.asked: Level | None = None if named == "auto" else named
        self.replayed = REPLAYED if self.asked is None else (replayed_level(self.asked),)
        self.frozen = shapes.frozen()
        row = OPTIMIZERS[self.config.optim]
        self.optimizer = row.state_bytes(shapes.model)
        self.scratch = row.scratch and shapes.device.type != "cpu"  # unfused ones work on lists of all parameters
        self.slices = optimizer_shards(layout, row.elementwise and shapes.dtype != torch.float16)
        self.factors = shapes.factors() if self.slices > 1 else (0, 0)
        captures = graphs and {*layout.axes} <= CAPTURED and not self._at_once  # which are reduced in backward
        captures = captures and not waiting.layers
        self.may_capture = captures and may_capture(self.config, shapes.device, shapes.dtype)
        self.vocabulary = shapes.text_config.vocab_size
        self.line = self._line(recomputed)
        self.stages = self.line.stages

    def plan(self) -> MemoryPlan:
        """Levels as the config says, or the fastest that fit."""
        plan = self._chosen()
        where = "; frozen weights are in slices" if isinstance(self.layout, Sliced) else ""
        where += f"; slices of {len(plan.hosted)} layers wait in the host's memory" if plan.hosted else ""
        return replace(plan, seconds=self._seconds(plan), reason=plan.reason + where)

    def _chosen(self) -> MemoryPlan:
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
        choices = [Choice(levels, False)]
        if self.may_capture and OFFLOADED.keys().isdisjoint(levels):
            choices.insert(0, Choice(levels, True))
        planned = {choice: self.planned(choice) for choice in choices}
        choice = next((choice for choice, plan in planned.items() if plan.fits), choices[-1])
        room = self.budget - planned[choice].total
        if self._gathered and room >= self._gathered.block:
            return self.planned(replace(choice, stays=min(self.depth, room // self._gathered.block)))
        return planned[choice] if choice.graphs else self.planned(self._hosting(choice))

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
        kept = self.planned(replace(choice, levels=("keep",) * self.depth))
        if plan.levels == kept.levels:
            return replace(plan, reason=f"activations are kept: the run needs {self._need(kept)}")
        extra = 1e3 * cost(usual, plan.levels, plan.use_graphs) * self.config.gradient_accumulation_steps
        reason = f"{in_words(plan.levels)}, about {extra:.0f} ms a step: keeping all would take {self._need(kept)}"
        return replace(plan, reason=reason + self._shortage(plan))

    @property
    def budget(self) -> int:
        """Bytes of the device to plan for."""
        grows = segments_grow() and self.shapes.device.type == "cuda"
        return int((GROWING_MARGIN if grows else MARGIN) * self.capacity)

    @functools.cached_property
    def host(self) -> int:
        """Bytes of the host's memory that this process may fill."""
        return int(HOST_MARGIN * allocators.available_bytes() / self.on_host)

    def _hosting(self, choice: Choice) -> Choice:
        """`choice`, with slices of as many layers in the host's memory as there is no room for on the device, which
        must hold them all while the model is loaded; of what fits, none."""
        plan = self.planned(choice)
        loaded = max(self.frozen.loaded(stage, self.layout) + self._trained(stage).bytes for stage in self.stages)
        if plan.total <= self.budget or self._gathered is None or loaded > self.capacity:
            return choice
        each = [self.frozen.slice(index, self.layout) for stage in self.stages for index in stage.layers]
        offloaded = sum(map(self.layer(self.batches.largest).on_host, choice.levels)) if self.shapes.fused else 0
        count = hosted(plan.total - self.budget, each, self.host - offloaded)
        return replace(choice, hosted=min(count, *(stage.depth for stage in self.stages)), graphs=False)

    @functools.cached_property
    def _gathered(self) -> Gathers | None:
        """The gathers that blocks which stay would save; None where there are none, and on a CPU, where what a process
        keeps is what the others lack."""
        if self.layout.slices == 1 or self.shapes.device.type == "cpu":
            return None
        return self.frozen.gathers(self.layout, max(self.stages, key=self._block), self.card.link)

    @functools.cache  # noqa: B019 (as long as the plan is made)
    def _block(self, stage: Stage) -> int:
        """Bytes that a decoder layer needs more where it is gathered; 0 where layers are not divided."""
        return self.frozen.largest(stage) if self.layout.slices > 1 else 0

    def _need(self, plan: MemoryPlan) -> str:
        return f"{plan.total / GIB:.2f} of {self.capacity / GIB:.2f} GiB"

    @staticmethod
    def _shortage(plan: MemoryPlan) -> str:
        return "" if plan.fits else f", and even so the run needs {plan.total / GIB:.2f} GiB"

    def planned(self, choice: Choice) -> MemoryPlan:
        """The plan with these levels: of the stage that needs most."""
        return max((self._of_stage(choice, stage) for stage in self.stages), key=lambda plan: plan.total)

    def _of_stage(self, choice: Choice, stage: Stage) -> MemoryPlan:
        trained, largest, device = self._trained(stage), self.batches.largest, self.shapes.device
        moving, graphs, evaluated = self._moving(largest, choice, stage), 0, self.evaluated * stage.ends
        if choice.graphs:  # beside the pool: evaluation, and steps of shapes without a graph (`train.graph`)
            launched = self.batches.many or "shard" in self.layout.axes
            graphs = max(evaluated, launched * self._moving(self.batches.second, choice, stage))
            graphs += IN_FLIGHT * self._block(stage)  # the pool has those of its own
        bucket = self._together if self._at_once else BUCKET
        summed = min(trained.bytes, bucket) * (1 + (self.slices > 1)) if self.layout.size > self.layout.pipeline else 0
        moving = max(moving, evaluated, summed, trained.bytes * self.scratch)
        logits = min(self._step(largest, choice).logits, moving) * stage.ends
        runtime = self.shapes.runtime(varied=self.batches.usual != self.batches.largest)
        return MemoryPlan(
            weights=self._share(stage) - self._hosted(stage, choice.hosted) - self.waiting.bytes,
            gathered=gathered_bytes(self._block(stage), stage, choice.stays) + self.waiting.window,
            adapters=self._kept(stage),
            gradients=trained.bytes // self._parts + 2 * self._together * self._at_once,
            optimizer=self.optimizer * trained.bytes // max(self.trained.bytes * self.slices, 1),
            activations=moving - logits,
            logits=logits,
            graphs=graphs,
            runtime=runtime + GRAPH_RUNTIME * choice.graphs,
            activation_checkpointing=set(choice.levels) != {"keep"},
            reason="as activation_checkpointing says",
            device=str(device),
            capacity_bytes=self.capacity,
            levels=choice.levels if self.shapes.fused else (),
            use_graphs=choice.graphs,
            layout=self.layout,
            stays=self._spread(self.stages, choice.stays),
            hosted=self._spread(self.stages, choice.hosted),
            gathers=self._gathers(choice, stage),
        )

    @functools.cache  # noqa: B019 (as long as the plan is made)
    def _share(self, stage: Stage) -> int:
        return self.frozen.share(stage, self.layout)

    @functools.cache  # noqa: B019 (as long as the plan is made)
    def _trained(self, stage: Stage) -> Trainable:
        """What a process of this stage trains."""
        beside = self._others if stage.begins or stage.ends else 0
        bytes_ = sum(self.gradients[index] for index in stage.layers[: len(self.gradients)]) + beside
        return Trainable(self.trained.numel * bytes_ // max(self.trained.bytes, 1), bytes_)

    def _kept(self, stage: Stage) -> int:
        """Bytes of what a process of this stage trains, beside gradients and the optimizer's state."""
        own, read = self.factors
        return self._trained(stage).bytes - own + own // self.slices + read

    @functools.cached_property
    def _at_once(self) -> bool:
        """Whether gradients are reduced in each backward as they come, which leaves slices of them."""
        return self.slices > 1 and self.trained.bytes >= AT_ONCE and trains_alike(self.shapes.model)

    @functools.cached_property
    def _together(self) -> int:
        """Bytes of gradients that are reduced together then: as they came, and beside one another."""
        return max([TOGETHER, *(each.nbytes for each in trained_parameters(self.shapes.model).values())])

    @property
    def _parts(self) -> int:
        """Of how many parts of all gradients a process keeps one."""
        return self.slices if self._at_once else 1

    @property
    def _others(self) -> int:
        """Bytes of what is trained beside the layers."""
        return self.trained.bytes - sum(self.gradients)

    @functools.cache  # noqa: B019 (as long as the plan is made)
    def _spread(self, stages: tuple[Stage, ...], count: int) -> tuple[int, ...]:
        """Decoder layers that stay gathered, or come from the host, so many of each stage."""
        return tuple(sorted(stage.layers[i] for stage in stages for i in staying(stage.depth, count)))

    @functools.cache  # noqa: B019 (as long as the plan is made)
    def _hosted(self, stage: Stage, count: int) -> int:
        """Bytes of so many layers' slices."""
        return sum(self.frozen.slice(index, self.layout) for index in self._spread((stage,), count))

    def _gathers(self, choice: Choice, stage: Stage) -> int:
        """Bytes that the gathers of a step come to: each block twice a micro-batch, the last once."""
        moved = stage.depth - min(choice.stays, stage.depth)
        passes = (2 * moved - 1) * self.config.gradient_accumulation_steps if moved else 0
        return passes * self._block(stage)

    def _moving(self, batch: Shape, choice: Choice, stage: Stage) -> int:
        """Bytes that come and go in a step."""
        if not batch.tokens:
            return 0
        step, on_their_way = self._step(batch, choice), 0
        layers = tuple(step.layers)
        layers *= 1 if len(layers) == self.depth else self.depth
        if self.shapes.fused:
            cost = self.layer(batch)
            each = {level: cost.bytes(level) for level in set(choice.levels)}
            layers = tuple(each[level] for level in choice.levels)
            on_their_way = max(map(cost.on_host, each))  # as much as one layer saves
        layers = tuple(layers[index] for index in stage.layers) if layers else ()
        trained = self._trained(stage)
        gradients = [self.gradients[index] // self._parts for index in stage.layers[: len(layers)]]
        here = 0 if any(self.factors) else sum(self.gradients[index] for index in stage.layers[: len(layers)])
        before = step.before - self.shapes.copied(self.trained.bytes - self._others - here)
        hidden = batch.tokens * self.shapes.text_config.hidden_size * self.shapes.dtype.itemsize
        head = step.head + 2 * (self.layout.shard - 1) * hidden  # of the others' rows, and their gradient
        highest = peak(
            layers,
            before=before,
            head=head if stage.ends else 2 * hidden,  # what is sent, and its gradient
            gradients=gradients,
            others=trained.bytes // self._parts - sum(gradients),
            accumulated=choice.graphs or self.config.gradient_accumulation_steps > 1,  # graphs add to what stays
        )
        waiting = int((stage.in_flight - 1) * (sum(layer.saved for layer in layers) + hidden))
        return max(highest + on_their_way + waiting - trained.bytes // self._parts, 0)

    # --- time --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def usual(self) -> LayerCost:
        """The micro-batch whose time counts, of a fused model."""
        largest, usual = self.layer(self.batches.largest), self.batches.usual
        return replace(largest.of_share(usual), length=usual.length * self.layout.context)

    def _seconds(self, plan: MemoryPlan) -> float | None:
        """Of a step."""
        if not self._timed:
            return None
        shape, layout, micro = self.usual, self.layout, []
        for stage in self.stages:
            gathers = self.frozen.gathers(layout, stage, self.card.link)
            levels, graphs = [plan.levels[index] for index in stage.layers], plan.use_graphs
            stays, waiting = (len({*each} & {*stage.layers}) for each in (plan.stays, plan.hosted))
            seconds = micro_seconds(shape, levels, layout, graphs=graphs, gathers=gathers, stays=stays, hosted=waiting)
            again = sum(map(shape.seconds, levels))
            passes = stage.depth * shape.forward_seconds, stage.depth * shape.backward_seconds + again
            seconds += self.waiting.seconds(*passes, self.card.host)
            if stage.ends:
                head = head_seconds(shape, self.vocabulary) / layout.tensor
                seconds += head + vocabulary_seconds(shape, layout.shard)
            micro.append(seconds)
        trained, window = self.trained.bytes // layout.pipeline, self.config.gradient_accumulation_steps
        return step_seconds(micro, self.line.idle, layout, window, trained, self.card.link)

    @property
    def _timed(self) -> bool:
        """Whether rates of these layers are known."""
        return self.shapes.fused and bool(self.batches.usual.tokens)

    def _line(self, recomputed: bool) -> Line:
        """Where a pipeline is cut, and what becomes of its schedule; layers of unknown rates take 1 forward."""
        layer, head, window = Seconds(1.0, 2.0), Seconds(0.0, 0.0), self.config.gradient_accumulation_steps
        if (ranks := self.layout.pipeline) == 1:
            return line(None, [layer] * self.depth, head, window)
        recomputed = recomputed and self.asked != "keep"
        if self._timed:
            again = self.usual.seconds(self.asked or "checkpoint") if recomputed else 0.0
            layer = Seconds(self.usual.forward_seconds, self.usual.backward_seconds + again, again)
            head = Seconds(head_seconds(self.usual, self.vocabulary), 0.0)
        cut = cut_model(self.shapes.causal_lm, self.config.pipeline_schedule, ranks, window, recomputed)
        return line(
            cut, [layer] * self.depth, head, window, ahead=self.layout.shard == 1
        )  # as `train.pipeline_run` has it

    def _step(self, batch: Shape, choice: Choice) -> Step:
        """A replay with one layer at each level that may be asked about."""
        return self.shapes.step(batch, self.replayed if self.shapes.fused else choice.levels[:1])

    @functools.cache  # noqa: B019 (as long as the plan is made)
    def layer(self, batch: Shape) -> LayerCost:
        """A layer of a fused model."""
        layers = self.shapes.step(batch, self.replayed).layers
        config = self.shapes.text_config
        options: dict[str, Any] = {"itemsize": self.shapes.dtype.itemsize, "recipe": self.config.recipe}
        options |= {"trains_all": not self.config.use_peft, "card": self.card}
        replayed = dict(zip(self.replayed, layers, strict=True))
        found = LayerCost.of(config, rows=batch.rows, length=batch.length, replayed=replayed, **options)
        return in_slices(in_context(found, self.layout.context), self.layout.tensor)
