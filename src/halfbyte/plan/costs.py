"""Bytes and seconds of a decoder layer at each activation level, and seconds of a step on a mesh.

Bytes come from a replay (`plan.replay`). Seconds are arithmetic over rates measured on an H200; other cards scale them
by their data sheets (`plan.cards`). Every figure is per rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import Level, Parallel
from ..data.batch_shapes import Shape
from ..modeling.checkpointing import OFFLOADED, TILE_ROWS
from ..modeling.config_facts import max_layer_sizes
from ..modeling.routers import EXPERT_COUNTS, TOP_K
from .cards import H200, Card
from .replay import LayerBytes

REPLAYED = ("keep", "recompute", "recompute_mlp", "checkpoint", "tiled")  # the other levels' bytes follow from these
SPACED: Level = "offload_kept"  # the level that a mix may give to every n-th layer
KEEPS_STREAM = ("checkpoint", "tiled")  # levels that save the layer's input only

# H200 rates per second (docs/benchmarks.md, rates that the plan uses).
GEMM_FLOPS = {"bf16": 700e12, "fp8-hybrid": 1250e12, "nvfp4": 700e12}
ATTENTION_FLOPS = 400e12
COPY_BYTES = 4.0e12
DEQUANTIZE_BYTES = 3.1e12
LORA_SLOWDOWN = 1.16  # time of a GEMM with its adapter over one without
ATTENTION_BACKWARD = 2.5  # FLOPs of attention's backward over its forward
LATENCY = 30e-6  # fixed seconds of a collective
# Seconds that a concurrent all-gather adds to the computation, as a share of its own duration, by "in a CUDA graph".
GATHER_SLOWDOWN = {False: 0.75, True: 0.2}
# Seconds of Python per decoder layer and step outside of CUDA graphs, and each level's factor. Hosts differ: the 28
# layers of Qwen3-0.6B take 90 to 190 ms.
LAUNCH_SECONDS = 5e-3
# At least so much for a decoder layer's kernels replayed by a CUDA graph, forward and backward: 40 of 2.5 µs; and for
# Python's share of a step in graphs (0.6 ms for Qwen3-30B-A3B's shape at 1×2048 on an H200).
REPLAY_SECONDS, HOST_SECONDS = 1e-4, 6e-4
LAUNCH_FACTOR = {"keep": 1.0, "recompute": 1.1, "recompute_mlp": 1.3, "checkpoint": 1.5}
OFFLOAD_LAUNCH_FACTOR = 1.2


def replayed_level(level: Level) -> str:
    """Return the level of `REPLAYED` with the computation of `level`; an offloaded one saves the same on the host."""
    return level if level in REPLAYED else OFFLOADED[level]


@dataclass(frozen=True)
class LayerCost:
    """Bytes and seconds of one decoder layer for one micro-batch, per rank, at each activation level.

    Args:
        tokens: sequences · length of the micro-batch.
        length: tokens that attend to one another.
        hidden, inner: widths of the residual stream and of the MLP; for a mixture, of the experts active per token.
        stored: width of the MLP's weights; for a mixture, of all experts.
        queries, keys: total width of the query heads, and of the key heads.
        replayed: level of `REPLAYED` → its bytes, all on the device.
        itemsize: bytes of one activation element.
        recipe: GEMM precision recipe, a key of `GEMM_FLOPS`.
        trains_all: whether the weights have gradients (full fine-tuning).
        card: the GPU whose rates apply.
    """

    tokens: int
    length: int
    hidden: int
    inner: int
    stored: int
    queries: int
    keys: int
    replayed: Mapping[str, LayerBytes]
    itemsize: int = 2
    recipe: str = "bf16"
    trains_all: bool = False
    card: Card = H200

    @classmethod
    def of(
        cls,
        text_config: Any,
        *,
        rows: int,
        length: int,
        replayed: Mapping[str, LayerBytes],
        itemsize: int = 2,
        recipe: str = "bf16",
        trains_all: bool = False,
        card: Card = H200,
    ) -> LayerCost:
        """Build from a transformers text config for `rows` sequences of `length` tokens."""
        sizes = max_layer_sizes(text_config)
        return cls(
            tokens=rows * length,
            length=length,
            hidden=text_config.hidden_size,
            inner=mlp_width(text_config, active=True),
            stored=mlp_width(text_config, active=False),
            queries=sizes.heads * sizes.head_dim,
            keys=sizes.key_heads * sizes.head_dim,
            replayed=replayed,
            itemsize=itemsize,
            recipe=recipe,
            trains_all=trains_all,
            card=card,
        )

    def scaled_to(self, batch: Shape) -> LayerCost:
        """The same layer for a smaller batch, with saved bytes scaled by its tokens."""
        share = batch.tokens / self.tokens
        replayed = {level: LayerBytes(0, 0, 0).line(layer_bytes, share) for level, layer_bytes in self.replayed.items()}
        return replace(self, tokens=batch.tokens, length=batch.length, replayed=replayed)

    # --- bytes -------------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """Bytes of one residual-stream tensor [tokens, hidden]: a layer's input."""
        return self.tokens * self.hidden * self.itemsize

    def bytes(self, level: Level) -> LayerBytes:
        """Device bytes of the layer's activations at `level`, excluding in-flight offload buffers."""
        if level not in OFFLOADED:
            return self.replayed[level]
        on_device = self.replayed[replayed_level(level)]
        # Saved tensors that the running layer still holds: gate and up at most, or its input.
        held = on_device.widest if level == SPACED else self.stream
        return LayerBytes(0, on_device.forward + held, on_device.backward + held)

    def host_bytes(self, level: Level) -> int:
        """Bytes of host memory that the layer's offloaded activations take at `level`."""
        return self.replayed[replayed_level(level)].saved if level in OFFLOADED else 0

    # --- time --------------------------------------------------------------------------------------------------------

    def extra_seconds(self, level: Level) -> float:
        """Seconds that `level` adds to a micro-batch compared with `keep`, excluding time blocked on host copies."""
        norm = 2 * self._copy_seconds(self.stream)
        if level == "keep":
            return 0.0
        if level in OFFLOADED:
            weights = self._dequantize_seconds(3 * self.hidden * self.stored)
            tiles = 2 * weights * (self.tokens // TILE_ROWS) + 4 * norm if level == "tiled" else 0.0
            return self.extra_seconds(OFFLOADED[level]) + 2 * self._copy_seconds(self.host_bytes(level)) + tiles
        if level == "recompute":
            return 2 * norm
        if level == "recompute_mlp":
            return self._mlp_recompute_seconds() + 2.5 * norm  # the first norm, and an add that no kernel fuses
        return self._mlp_recompute_seconds() + self._attention_seconds()

    def offload_seconds(self, levels: Sequence[Level]) -> float:
        """Seconds by which host copies outlast the layers' forward. Backward has more time for the copies back."""
        copied = sum(count * self.host_bytes(level) for level, count in Counter(levels).items())
        return max(0.0, copied / self.card.host - len(levels) * self.forward_seconds)

    @property
    def forward_seconds(self) -> float:
        """Seconds of the layer's forward."""
        return self._attention_seconds() + self._mlp_recompute_seconds() + self._mlp_gemm_seconds(1)

    @property
    def backward_seconds(self) -> float:
        """Seconds of backward at `keep`: each GEMM once for its input's gradient, and once for trained weights."""
        gemms = self._mlp_gemm_seconds(3) + self._gemm_seconds(2 * self.hidden * (self.queries + self.keys))
        passes = self._norm_and_rope_seconds() + self._activation_seconds()
        return (1 + self.trains_all) * gemms + ATTENTION_BACKWARD * self._score_seconds() + 2 * passes

    def _gemm_seconds(self, weights: int, stored: int | None = None) -> float:
        """Seconds for GEMMs over `weights` parameters, dequantizing `stored` of them (default: all)."""
        flops = 2 * self.tokens * weights * LORA_SLOWDOWN / (GEMM_FLOPS[self.recipe] * self.card.compute)
        return flops + self._dequantize_seconds(weights if stored is None else stored)

    def _mlp_gemm_seconds(self, count: int) -> float:
        """Seconds for `count` of the MLP's three GEMMs."""
        return self._gemm_seconds(count * self.hidden * self.inner, count * self.hidden * self.stored)

    def _dequantize_seconds(self, weights: int) -> float:
        return weights * self.itemsize / (DEQUANTIZE_BYTES * self.card.memory)

    def _copy_seconds(self, size: int) -> float:
        return size / (COPY_BYTES * self.card.memory)

    def _score_seconds(self) -> float:
        """Seconds of the attention kernel's forward."""
        return 2 * self.tokens * self.length * self.queries / (ATTENTION_FLOPS * self.card.compute)

    def _activation_seconds(self) -> float:
        """Seconds of the memory-bound kernels of the MLP."""
        return self._copy_seconds(3 * self.tokens * self.inner * self.itemsize + 2 * self.stream)

    def _norm_and_rope_seconds(self) -> float:
        """Seconds of the memory-bound kernels of the attention block."""
        return self._copy_seconds(2 * self.tokens * (self.queries + self.keys) * self.itemsize + 4 * self.stream)

    def _mlp_recompute_seconds(self) -> float:
        """Seconds of the MLP's forward without the down projection, which backward does not need."""
        return self._mlp_gemm_seconds(2) + self._activation_seconds()

    def _attention_seconds(self) -> float:
        """Seconds of the attention block's forward."""
        gemms = self._gemm_seconds(2 * self.hidden * (self.queries + self.keys))
        return gemms + self._score_seconds() + self._norm_and_rope_seconds()


def mlp_width(text_config: Any, *, active: bool) -> int:
    """Width of a layer's MLP. For a mixture: of all its experts, or only of the experts `active` per token."""
    experts = next((count for key in EXPERT_COUNTS if (count := getattr(text_config, key, None) or 0) > 1), 1)
    if experts == 1:
        return max_layer_sizes(text_config).mlp_width
    width = getattr(text_config, "moe_intermediate_size", None) or max_layer_sizes(text_config).mlp_width
    top_k = next((getattr(text_config, key) for key in TOP_K if hasattr(text_config, key)), 1)
    return width * (top_k if active else experts) + (getattr(text_config, "shared_expert_intermediate_size", None) or 0)


@dataclass(frozen=True)
class Gathers:
    """All-gathers of sharded decoder layers (FSDP).

    Args:
        degree: ranks that each hold one shard.
        block: bytes of one unsharded layer.
        link: bytes/s that a rank receives.
    """

    degree: int
    block: int
    link: float

    @property
    def seconds(self) -> float:
        """Seconds of one all-gather."""
        return LATENCY + self.block * (self.degree - 1) / self.degree / self.link

    def exposed_seconds(
        self, layer: LayerCost, levels: Sequence[Level], resident: int, graphs: bool, hosted: int = 0
    ) -> float:
        """Seconds that all-gathers add to a micro-batch.

        One layer's gather runs while the previous layer computes. The sum has the first gather, which nothing hides;
        the time by which the others outlast the layers; and the slowdown of layers that share the GPU with a gather.

        Args:
            layer: one decoder layer.
            levels: of this rank's layers.
            resident: layers that stay unsharded and need no gather.
            graphs: whether the layers run in a CUDA graph.
            hosted: layers whose shard is first copied from the host.
        """
        moved = len(levels) - resident
        if not moved:
            return 0.0
        forward = len(levels) * layer.forward_seconds
        backward = len(levels) * layer.backward_seconds + sum(map(layer.extra_seconds, levels))
        backward_gathers = (moved - 1) * self.seconds  # the last layer is still gathered when its backward starts
        exposed = self.seconds + max(0.0, moved * self.seconds - forward) + max(0.0, backward_gathers - backward)
        fetch = self.seconds + self.block / self.degree / layer.card.host  # hidden by one layer, in both directions
        late = max(0.0, fetch - forward / len(levels)) + max(0.0, fetch - backward / len(levels))
        concurrent = max(0.0, moved * self.seconds + backward_gathers - exposed)
        return exposed + GATHER_SLOWDOWN[graphs] * concurrent + hosted * late


# --- steps -----------------------------------------------------------------------------------------------------------


def extra_seconds(layer: LayerCost, levels: Sequence[Level], graphs: bool = True) -> float:
    """Seconds that a micro-batch takes longer than one at `keep`, whose backward takes about as long as its forward.

    Args:
        graphs: whether micro-batches that offload nothing run as CUDA graphs; else Python launches every kernel.
    """
    extra = sum(count * layer.extra_seconds(level) for level, count in Counter(levels).items())
    extra += layer.offload_seconds(levels)
    if graphs and OFFLOADED.keys().isdisjoint(levels):
        return extra
    launches = sum(count * _launch_seconds(level) for level, count in Counter(levels).items())
    return max(extra, launches - 2 * len(levels) * layer.forward_seconds)


def _launch_seconds(level: Level) -> float:
    """Seconds of Python for one layer's kernel launches."""
    if level in OFFLOADED:
        return OFFLOAD_LAUNCH_FACTOR * _launch_seconds(OFFLOADED[level])
    return LAUNCH_SECONDS * LAUNCH_FACTOR[level]


def head_seconds(layer: LayerCost, vocabulary: int) -> float:
    """Seconds of the head and the loss, forward and backward: the logits and the gradient of the hidden states."""
    multiplications = (2 + layer.trains_all) * layer.tokens * layer.hidden * vocabulary
    return 2 * multiplications / (GEMM_FLOPS["bf16"] * layer.card.compute)


def micro_seconds(
    layer: LayerCost, levels: Sequence[Level], layout: Parallel, *, graphs: bool, gathers: Gathers | None,
    resident: int, hosted: int = 0,
) -> float:  # fmt: skip
    """Seconds of one rank's decoder layers for one micro-batch, forward and backward, with exposed communication.

    Args:
        layer: one layer as this rank computes it.
        levels: of this rank's layers.
        gathers: the layers' all-gathers; `resident` layers need none, the shards of `hosted` come from the host.
    """
    computed = len(levels) * (layer.forward_seconds + layer.backward_seconds) + extra_seconds(layer, levels, graphs)
    computed = max(computed, len(levels) * REPLAY_SECONDS)
    exposed = gathers.exposed_seconds(layer, levels, resident, graphs, hosted) if gathers else 0.0
    recomputed = sum(_recompute_exchange_seconds(layer, layout, level) for level in levels)
    # One layer's blocking collectives of tensor and context parallelism, forward and backward.
    seconds = 0.0
    if layout.tensor > 1:  # outputs of attention and MLP are all-reduced; in backward, the gradients of their inputs
        seconds += 4 * _all_reduce_seconds(layer.stream, layout.tensor, layer.card.link)
    if layout.context > 1:  # all-to-all of q, k, v and the output; in backward, of their gradients
        moved = 2 * layer.tokens * (layer.queries + layer.keys) * layer.itemsize
        degree = layout.context
        seconds += 2 * (moved * (degree - 1) / degree / layer.card.link + 4 * LATENCY)
    return computed + exposed + len(levels) * seconds + recomputed


def _recompute_exchange_seconds(layer: LayerCost, layout: Parallel, level: Level) -> float:
    """Seconds of a recomputed layer's collectives: its input is gathered, attention's output all-reduced again."""
    if layout.tensor == 1 or replayed_level(level) not in KEEPS_STREAM:
        return 0.0
    gathered = LATENCY + layer.stream * (layout.tensor - 1) / layout.tensor / layer.card.link
    return gathered + _all_reduce_seconds(layer.stream, layout.tensor, layer.card.link)


def _all_reduce_seconds(size: int, degree: int, link: float) -> float:
    """Seconds of an all-reduce of `size` bytes over `degree` ranks."""
    return LATENCY + 2 * size * (degree - 1) / degree / link


def vocabulary_seconds(layer: LayerCost, degree: int) -> float:
    """Seconds of exchanging hidden states and gradients of a vocabulary sharded over ranks with different tokens.

    There are three exchanges: for the embedding, the head, and the head's backward.
    """
    return 3 * (LATENCY + (degree - 1) * layer.stream / layer.card.link) if degree > 1 else 0.0


def step_seconds(
    micro: Sequence[float], idle: float, layout: Parallel, window: int, trained: int, link: float
) -> float:
    """Seconds of a step: `window` micro-batches and the all-reduce of gradients.

    Args:
        micro: seconds of one micro-batch on each pipeline rank.
        idle: share of the time that a rank idles in the pipeline's bubble.
        trained: bytes of the gradients that a rank reduces with others.
    """
    ranks = layout.size // layout.pipeline
    reduction = _all_reduce_seconds(trained, ranks, link) if ranks > 1 else 0.0
    return max(window * sum(micro) / len(micro) / (1 - idle) + reduction, HOST_SECONDS)
