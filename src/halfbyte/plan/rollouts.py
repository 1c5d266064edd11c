"""What sampling answers takes, in a run that trains on them.

Nothing of a rollout is left when a step begins (on a GPU and on a CPU its pages and decoded weights go), and nothing of
a step when a rollout does. So the peak of a run is the higher of both phases. Only CUDA graphs keep what a step takes,
so a run has them where rollouts lack nothing beside; and where a step has room beside all that a rollout takes as well,
that stays, too, with the graphs of its own steps. Pages and the way of the products are chosen here, once, to fit
beside what stays: they decide how numbers are rounded, so a resumed run takes those that it began with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..config import RunConfig
from ..config.policy import POLICY
from ..generation.delta_net import is_delta_net, state_bytes
from ..generation.engine import CACHES
from ..generation.rollouts import PACKED_MAX_ROWS, PREFILL_TOKENS, pages_needed
from ..generation.schedule import RESERVED_SEATS, Group, Row, page_count
from ..layers import QuantizedLinear
from ..memory.activations import Batches
from ..modeling.config_facts import layer_sizes, max_layer_sizes
from ..ops.delta_rule import Rows, delta_rule, parts_of
from ..ops.paged_attention import PAGE
from ..utils.errors import ConfigError
from ..utils.terminal import size
from .beside import Beside
from .ledger import Ledger

if TYPE_CHECKING:
    from .memory_plan import MemoryPlan
    from .shapes import ModelShapes

FILLED = 0.9  # share of what is free that pages may fill


@dataclass(frozen=True)
class RolloutPlan:
    """Bytes while answers are sampled, beyond weights, adapters, gradients and optimizer.

    Attributes:
        weights: how products read quantized weights, as `generation.Rollouts` takes it.
        decoded: of weights that are decoded, all (unpacked) or one at a time, and of the adapter beside them.
        pages: of keys and values, and of layers' states.
        moving: of a step's, or of the prompts', activations and logits.
        stays: whether all of that stays while the model trains.
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
        parts = {"pages": self.pages, f"{self.weights} weights": self.decoded, "prompts and logits": self.moving}
        return f"{size(self.total)} ({', '.join(f'{name} {size(count)}' for name, count in parts.items())})"


def with_rollouts(
    plan: MemoryPlan,
    eager: Callable[[], MemoryPlan],
    shapes: ModelShapes,
    batches: Batches,
    answered: tuple[str, int] | None = None,
    others: Beside = Beside(),  # noqa: B008 (immutable)
) -> MemoryPlan:
    """`plan`, of a step, with the phase in which answers are sampled.

    Args:
        eager: the plan without CUDA graphs.
        answered: `RolloutPlan.weights` and `pages` of the run that is resumed.
        others: models whose bytes `plan` was not allowed to fill.
    """
    found = _in_turn(others.with_plan(plan, shapes, batches), shapes, batches, answered)
    if not plan.use_graphs:
        return found
    without = others.with_plan(replace(eager(), rough=plan.rough), shapes, batches)
    without = _in_turn(without, shapes, batches, answered)
    alike = found.answering and replace(found.answering, stays=False)
    roomy = alike == without.answering and found.total <= FILLED * found.capacity_bytes
    return found if roomy else without


def _in_turn(plan: MemoryPlan, shapes: ModelShapes, batches: Batches, answered: tuple[str, int] | None) -> MemoryPlan:
    """`plan` with rollouts beside what stays, a pool of graphs too."""
    config = shapes.config
    if config.adapter_path and config.beta and config.method in POLICY:  # the reference's
        plan = replace(plan, adapters=plan.adapters + shapes.trainable().bytes)
    if config.rollout == "vllm":  # answers take nothing here
        return plan
    stays = plan.weights + plan.adapters + plan.gradients + plan.optimizer + plan.runtime
    moving = plan.activations + plan.logits
    pool = moving if plan.use_graphs else 0
    answering = _Answering(shapes, config, batches).plan(plan.capacity_bytes - stays - pool, answered)
    beyond = max(answering.total - (plan.graphs if plan.use_graphs else moving), 0)
    if plan.use_graphs and plan.total + answering.total <= FILLED * plan.capacity_bytes:
        beyond, answering = answering.total, replace(answering, stays=True)
    return replace(plan, rollouts=beyond, answering=answering)


class _Answering:
    """The arithmetic of `with_rollouts`."""

    def __init__(self, shapes: ModelShapes, config: RunConfig, batches: Batches):
        self.shapes, self.config, self.device = shapes, config, shapes.device
        self.text, self.itemsize = shapes.text_config, shapes.dtype.itemsize
        self.seats = config.answers_per_generation
        group = config.group_size
        evaluated = config.num_generations_eval or group
        lengths = batches.prompts or (batches.largest.length - config.max_completion_length,) * max(
            self.seats // group, 1
        )
        self.generations = [self._rows(lengths, group)]
        if batches.held_out_prompts:
            self.generations.append(self._rows(batches.held_out_prompts, evaluated))
        quantized = [module for module in shapes.causal_lm.modules() if isinstance(module, QuantizedLinear)]
        self.sizes = [module.in_features * module.out_features for module in quantized]
        self.nets: list[Any] = [module for module in shapes.causal_lm.modules() if is_delta_net(module)]

    def _rows(self, lengths: tuple[int, ...], each: int) -> list[Row]:
        groups = [Group(at, range(length), each) for at, length in enumerate(lengths)]
        return [Row(group, number, self.config.max_completion_length) for group in groups for number in range(each)]

    def plan(self, room: int, answered: tuple[str, int] | None) -> RolloutPlan:
        """What fits into `room` bytes, or the least there is.

        Raises:
            ConfigError: `rollout_memory_gib` is less than that.
        """
        wanted, least = self._pages()
        if self.config.rollout_memory_gib is not None:
            allowed, given = int(self.config.rollout_memory_gib * 2**30), self.config.rollout_memory_gib
            if allowed < least:
                raise ConfigError(
                    f"rollout_memory_gib: {given:g} has no room for one answer with its prompt,"
                    f" which takes {size(least)}",
                    "raise it, lower max_completion_length, or set kv_cache: fp8",
                )
            wanted = min(wanted, allowed)
        if answered is not None:
            weights, wanted = answered
        else:
            weights = self._weights(room, wanted)
        decoded, moving = self._decoded(weights), self._moving()
        if answered is None:
            wanted = max(min(wanted, int(FILLED * (room - decoded - moving))), least)
        return RolloutPlan(weights, decoded, wanted, moving)

    def _weights(self, room: int, pages: int) -> str:
        """The faster way that leaves room for `pages`, or the one that is asked for."""
        if self.config.rollout_weights != "auto":
            return self.config.rollout_weights
        many = self.device.type == "cpu" or self.seats > PACKED_MAX_ROWS
        fits = self._decoded("unpacked") + pages + self._moving() <= FILLED * room
        return "unpacked" if self.sizes and many and fits else "packed"

    def _pages(self) -> tuple[int, int]:
        """Bytes of pages, and of states, with which no row has to wait, and with which one row runs."""
        config, dtype = self.text, CACHES[self.config.kv_cache]
        widths = [each.key_width for each in layer_sizes(config)]
        itemsize = self.itemsize if dtype is None else dtype.itemsize
        seat = sum(state_bytes(net, self.shapes.dtype) for net in self.nets)
        attending = len(widths) - len(self.nets)  # delta nets keep no keys
        page = 2 * PAGE * itemsize * sum(widths) * attending // len(widths)
        longest = max(len(row.group.prompt) + row.most for rows in self.generations for row in rows)
        wanted = max(pages_needed(rows, self.seats) for rows in self.generations) + 1
        seats = min(self.seats, max(map(len, self.generations)))
        least = (page_count(longest) + 1) * page + (1 + RESERVED_SEATS) * seat
        return wanted * page + (seats + RESERVED_SEATS) * seat, least

    def _decoded(self, weights: str) -> int:
        """Of the adapter, factors beside each linear, and once more in place of those that share an input."""
        adapter = self.shapes.trainable().numel * self.itemsize if self.config.use_peft else 0
        if weights == "packed":
            return adapter + max(self.sizes, default=0) * self.itemsize
        return 2 * adapter + sum(self.sizes) * self.itemsize

    def _moving(self) -> int:
        """While prompts are read, or their rows begin; a step of one token each takes less."""
        config, vocabulary = self.text, self.shapes.text_config.vocab_size
        budget = PREFILL_TOKENS.get(self.device.type, PREFILL_TOKENS["cpu"])
        prompts = [len(row.group.prompt) for row in self.generations[0] if not row.generation]
        read = max(min(budget, sum(prompts)), max(prompts))
        inner = max_layer_sizes(config).mlp_width or 4 * config.hidden_size
        activations = read * (6 * config.hidden_size + 3 * inner) * self.itemsize
        activations += max((_of_rule(net, read, self.shapes.dtype) for net in self.nets[:1]), default=0)
        documents = min(len(prompts), max(1, budget // max(min(prompts), 1)))
        wide = 4 if self.itemsize == 4 else 4 + self.itemsize  # logits as the product gives them, and in fp32
        logits = (documents + self.seats) * vocabulary * 4
        return max(activations + documents * vocabulary * wide, logits, self.seats * vocabulary * wide)


def _of_rule(net: Any, tokens: int, dtype: torch.dtype) -> int:
    """Bytes at the highest moment while a gated delta net's rule reads so many tokens, beyond what it reads."""
    key = torch.empty(1, tokens, net.num_k_heads, net.head_k_dim, dtype=dtype, device="meta")
    value = torch.empty(1, tokens, net.num_v_heads, net.head_v_dim, dtype=dtype, device="meta")
    gates = torch.empty(value.shape[:3], device="meta")
    ledger = Ledger()
    ledger.ignore(iter((key, value, gates)))
    with ledger:
        for part in parts_of(Rows(key, key, value, gates, gates)):
            delta_rule(part)
    return ledger.peak
