"""Memory of the rollout phase, in which the run samples completions to train on.

A rollout frees its KV pages and dequantized weights before the step, and a step frees its activations before the next
rollout, so the run's peak is the higher of the two phases. CUDA graphs keep a step's activations allocated; a run uses
them only where the rollout phase still gets all the memory it wants. Where a step also fits next to a whole rollout,
the rollout's memory stays allocated, with the CUDA graphs of its decoding steps.

The number of pages and the GEMM path are chosen here once. They decide rounding, so a resumed run keeps its first
choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..config.policy import POLICY
from ..config.schema import RunKeys
from ..data.batch_shapes import Batches
from ..generation.cache_dtypes import CACHES, INT4, page_bytes
from ..generation.delta_net import is_delta_net, state_bytes
from ..generation.rollouts import PACKED_MAX_ROWS, PREFILL_TOKENS, pages_needed
from ..generation.schedule import RESERVED_SEATS, Group, Row, page_count
from ..layers import QuantizedLinear
from ..modeling.config_facts import layer_sizes, max_layer_sizes
from ..ops.delta_rule import delta_rule
from ..utils.errors import ConfigError
from ..utils.text import size
from .auxiliary import AuxiliaryModels
from .ledger import Ledger
from .memory_plan import GIB, MemoryPlan, RolloutPlan

if TYPE_CHECKING:
    from .shapes import ModelShapes

FILL = 0.9  # share of free memory that pages may fill


def with_rollouts(
    plan: MemoryPlan,
    eager: Callable[[], MemoryPlan],
    shapes: ModelShapes,
    batches: Batches,
    answered: tuple[str, int] | None = None,
    auxiliary: AuxiliaryModels = AuxiliaryModels(),  # noqa: B008 (immutable)
) -> MemoryPlan:
    """Add the rollout phase to the plan of a training step.

    Args:
        plan: of a step, for a capacity without the bytes of `auxiliary`.
        eager: makes the plan without CUDA graphs.
        answered: `RolloutPlan.weights` and `pages` of the resumed run.
        auxiliary: teacher and reward models.
    """
    with_graphs = _add_rollouts(auxiliary.with_plan(plan, shapes, batches), shapes, batches, answered)
    if not plan.use_graphs:
        return with_graphs
    without = auxiliary.with_plan(replace(eager(), rough=plan.rough), shapes, batches)
    without = _add_rollouts(without, shapes, batches, answered)
    freed = with_graphs.answering and replace(with_graphs.answering, stays=False)
    unrestricted = freed == without.answering and with_graphs.total <= FILL * with_graphs.capacity_bytes
    return with_graphs if unrestricted else without


def _add_rollouts(
    plan: MemoryPlan, shapes: ModelShapes, batches: Batches, answered: tuple[str, int] | None
) -> MemoryPlan:
    """Plan rollouts in the memory that a step's resident parts and its CUDA graph pool leave free."""
    config = shapes.config
    if config.adapter_path and config.beta and config.method in POLICY:  # the reference's adapter
        plan = replace(plan, adapters=plan.adapters + shapes.trainable().bytes)
    if config.rollout == "vllm":  # completions are sampled elsewhere
        return plan
    stays = plan.weights + plan.adapters + plan.gradients + plan.optimizer + plan.runtime
    moving = plan.activations + plan.logits
    pool = moving if plan.use_graphs else 0
    answering = _RolloutPlanner(shapes, config, batches).plan(plan.capacity_bytes - stays - pool, answered)
    beyond = max(answering.total - (plan.graphs if plan.use_graphs else moving), 0)
    if plan.use_graphs and plan.total + answering.total <= FILL * plan.capacity_bytes:
        beyond, answering = answering.total, replace(answering, stays=True)
    return replace(plan, rollouts=beyond, answering=answering)


class _RolloutPlanner:
    """Byte arithmetic of the rollout phase."""

    def __init__(self, shapes: ModelShapes, config: RunKeys, batches: Batches):
        self.shapes = shapes
        self.config = config
        self.device = shapes.device
        self.text = shapes.text_config
        self.itemsize = shapes.dtype.itemsize
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

    def _rows(self, lengths: tuple[int, ...], count: int) -> list[Row]:
        """Sequences of one generation call: `count` completions per prompt length."""
        groups = [Group(at, range(length), count) for at, length in enumerate(lengths)]
        return [Row(group, number, self.config.max_completion_length) for group in groups for number in range(count)]

    def plan(self, free: int, answered: tuple[str, int] | None) -> RolloutPlan:
        """Plan a rollout within `free` bytes; if it does not fit, the smallest one.

        Raises:
            ConfigError: `rollout_memory_gib` is less than one completion needs.
        """
        pages, minimum = self._pages()
        if self.config.rollout_memory_gib is not None:
            allowed, limit = int(self.config.rollout_memory_gib * GIB), self.config.rollout_memory_gib
            if allowed < minimum:
                raise ConfigError(
                    f"rollout_memory_gib: {limit:g} is too small for one completion with its prompt, which needs"
                    f" {size(minimum)}",
                    "raise it, lower max_completion_length, or set kv_cache: fp8 or int4",
                )
            pages = min(pages, allowed)
        if answered is not None:
            weights, pages = answered
        else:
            weights = self._weights(free, pages)
        decoded, moving = self._decoded(weights), self._moving()
        if answered is None:
            pages = max(min(pages, int(FILL * (free - decoded - moving))), minimum)
        return RolloutPlan(weights, decoded, pages, moving)

    def _weights(self, free: int, pages: int) -> str:
        """Return "unpacked" if it is faster and fits next to `pages` bytes, else "packed"; or the configured value."""
        if self.config.rollout_weights != "auto":
            return self.config.rollout_weights
        has_large_batch = self.device.type == "cpu" or self.seats > PACKED_MAX_ROWS
        fits = self._decoded("unpacked") + pages + self._moving() <= FILL * free
        return "unpacked" if self.sizes and has_large_batch and fits else "packed"

    def _pages(self) -> tuple[int, int]:
        """Bytes of KV pages and states with which all sequences run at once, and with which one runs."""
        dtype = CACHES[self.config.kv_cache] or self.shapes.dtype
        page = self._page(dtype)
        seat = sum(state_bytes(net, self.shapes.dtype) for net in self.nets)
        seat += self._page(self.shapes.dtype) if dtype is INT4 else 0  # open pages
        longest = max(len(row.group.prompt) + row.max_tokens for rows in self.generations for row in rows)
        pages = max(pages_needed(rows, self.seats) for rows in self.generations) + 1
        seats = min(self.seats, max(map(len, self.generations)))
        minimum = (page_count(longest) + 1) * page + (1 + RESERVED_SEATS) * seat
        return pages * page + (seats + RESERVED_SEATS) * seat, minimum

    def _page(self, dtype: torch.dtype) -> int:
        """Bytes of a page of all layers whose cache has this dtype; delta nets cache no keys."""
        sizes = layer_sizes(self.text)
        page = sum(page_bytes(layer.key_heads, layer.head_dim, dtype) for layer in sizes)
        return page * (len(sizes) - len(self.nets)) // len(sizes)

    def _decoded(self, weights: str) -> int:
        """Bytes of dequantized weights and of the adapter in the compute dtype.

        Unpacked weights need the adapter twice: each linear's factors, and the stacked factors of linears that share
        an input.
        """
        adapter = self.shapes.trainable().numel * self.itemsize if self.config.use_peft else 0
        if weights == "packed":
            return adapter + max(self.sizes, default=0) * self.itemsize
        return 2 * adapter + sum(self.sizes) * self.itemsize

    def _moving(self) -> int:
        """Activation and logit bytes of the prefill, or of the first token's sampling; later decoding needs less."""
        config, vocabulary = self.text, self.shapes.text_config.vocab_size
        budget = PREFILL_TOKENS.get(self.device.type, PREFILL_TOKENS["cpu"])
        prompts = [len(row.group.prompt) for row in self.generations[0] if not row.generation]
        read = max(min(budget, sum(prompts)), max(prompts))
        inner = max_layer_sizes(config).mlp_width or 4 * config.hidden_size
        activations = read * (6 * config.hidden_size + 3 * inner) * self.itemsize
        activations += max((delta_rule_bytes(net, read, self.shapes.dtype) for net in self.nets[:1]), default=0)
        documents = min(len(prompts), max(1, budget // max(min(prompts), 1)))
        wide = 4 if self.itemsize == 4 else 4 + self.itemsize  # logits in the GEMM's dtype, and in fp32
        logits = (documents + self.seats) * vocabulary * 4
        return max(activations + documents * vocabulary * wide, logits, self.seats * vocabulary * wide)


def delta_rule_bytes(net: Any, tokens: int, dtype: torch.dtype) -> int:
    """Workspace bytes of a gated delta net's rule over `tokens` tokens, excluding its inputs."""
    key = torch.empty(1, tokens, net.num_k_heads, net.head_k_dim, dtype=dtype, device="meta")
    value = torch.empty(1, tokens, net.num_v_heads, net.head_v_dim, dtype=dtype, device="meta")
    gates = torch.empty(value.shape[:3], device="meta")
    ledger = Ledger()
    ledger.ignore(iter((key, value, gates)))
    with ledger:
        delta_rule(key, key, value, gates, gates)
    return ledger.peak
