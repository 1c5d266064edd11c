"""The times of a decoder layer at each level of `memory.activations`, and the fastest mix of levels within a budget.

A step's peak is the highest of its moments: each layer's forward, the loss, each layer's backward, over what is stored
at that moment; `plan.replay` says how many bytes those are. Times are arithmetic over rates measured on an H200, and
other cards' in proportion (`plan.cards`).

Where the bytes of frozen blocks are divided among processes, each block is gathered before its forward and again before
its backward, unless it stays: the room that levels leave is filled with blocks that stay, and the choice is the fastest
of both together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from ..config import Level
from ..memory.activations import LEVELS, OFFLOADED, TILE_ROWS, Shape
from ..modeling.config_facts import max_layer_sizes
from ..modeling.routers import EXPERT_COUNTS, TOP_K
from .cards import H200, Card
from .replay import LayerBytes

SPREAD: Level = "offload_kept"
SPACINGS = (2, 3, 4, 6)
REPLAYED = ("keep", "recompute", "recompute_mlp", "checkpoint", "tiled")  # of which every level's bytes follow

# Rates of an H200 (docs/log.md), per second; LORA: a product with its adapter over one without.
GEMM_FLOPS = {"bf16": 700e12, "fp8-hybrid": 1250e12, "nvfp4": 700e12}
ATTENTION_FLOPS, COPY_BYTES, DEQUANTIZED_BYTES = 400e12, 4.0e12, 3.1e12
LORA = 1.16
ATTENTION_BACKWARD = 2.5  # products of attention's backward for each of its forward
LATENCY = 30e-6  # seconds of a collective beside its bytes
# What a gather beside a layer makes that take longer, of the gather's time: as Python launches it, and in a CUDA graph.
SLOWED = {False: 0.75, True: 0.2}
# A layer of a step as Python launches it outside of a CUDA graph, and what levels launch more. Hosts differ:
# Qwen3-0.6B's 28 layers take 90 to 190 ms.
LAUNCHES = 5e-3
MORE_LAUNCHES = {"keep": 1.0, "recompute": 1.1, "recompute_mlp": 1.3, "checkpoint": 1.5}
OFFLOAD_LAUNCHES = 1.2


def replayed_level(level: Level) -> str:
    """The one of `REPLAYED` that computes as `level` does; what it saves is on the host, where `level` says so."""
    return level if level in REPLAYED else OFFLOADED[level]


@dataclass(frozen=True)
class LayerCost:
    """A decoder layer and its micro-batch: what it takes at each level.

    Args:
        tokens: rows · length.
        length: tokens that attend to one another.
        hidden, inner: widths of the residual stream and of the MLP; of a mixture, of all experts that a token goes to.
        stored: width of the MLP's weights; of a mixture, of all experts.
        queries, keys: width of all query heads, and of all key heads.
        replayed: level of `REPLAYED` → its bytes, all of them on the device.
        itemsize: bytes of an activation.
        recipe: what its products are computed in.
        trains_all: whether its weights have gradients.
        card: what it runs on.
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
    def of(cls, text_config: Any, *, rows: int, length: int, **keys: Any) -> LayerCost:
        """From a transformers config of a text model; `keys`: the other fields."""
        sizes = max_layer_sizes(text_config)
        return cls(
            tokens=rows * length,
            length=length,
            hidden=text_config.hidden_size,
            inner=mlp_width(text_config, chosen=True),
            stored=mlp_width(text_config, chosen=False),
            queries=sizes.query_width,
            keys=sizes.key_width,
            **keys,
        )

    def of_share(self, batch: Shape) -> LayerCost:
        """The same layer for a smaller batch, of whose bytes only what is saved counts."""
        share = batch.tokens / self.tokens
        replayed = {level: LayerBytes(0, 0, 0).line(found, share) for level, found in self.replayed.items()}
        return replace(self, tokens=batch.tokens, length=batch.length, replayed=replayed)

    # --- bytes -------------------------------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """One tensor [tokens, hidden]: a layer's input."""
        return self.tokens * self.hidden * self.itemsize

    def bytes(self, level: Level) -> LayerBytes:
        """On the device, beside what is on its way to the host or back."""
        if level not in OFFLOADED:
            return self.replayed[level]
        own = self.replayed[replayed_level(level)]
        # of what is saved, some is in hand: gate and up at most, or the stream
        hand = own.widest if level == SPREAD else self.stream
        return LayerBytes(0, own.forward + hand, own.backward + hand)

    def on_host(self, level: Level) -> int:
        """Bytes that wait in the host's memory."""
        return self.replayed[replayed_level(level)].saved if level in OFFLOADED else 0

    # --- time --------------------------------------------------------------------------------------------------------

    def seconds(self, level: Level) -> float:
        """Time that a level adds to `keep`'s, copies to the host apart."""
        norm = 2 * self._copied(self.stream)
        if level == "keep":
            return 0.0
        if level in OFFLOADED:
            weights = self._dequantized(3 * self.hidden * self.stored)
            tiles = 2 * weights * (self.tokens // TILE_ROWS) + 4 * norm if level == "tiled" else 0.0
            return self.seconds(OFFLOADED[level]) + 2 * self._copied(self.on_host(level)) + tiles
        if level == "recompute":
            return 2 * norm
        if level == "recompute_mlp":
            return self._mlp_again() + 2.5 * norm  # the first norm, and a sum that no kernel takes along
        return self._mlp_again() + self._attention_again()

    def waiting(self, levels: Sequence[Level]) -> float:
        """Time that copies to the host take longer than the layers' forward; backward leaves them more."""
        leaving = sum(count * self.on_host(level) for level, count in Counter(levels).items())
        return max(0.0, leaving / self.card.host - len(levels) * self.forward_seconds)

    @property
    def forward_seconds(self) -> float:
        return self._attention_again() + self._mlp_again() + self._mlp(1)

    @property
    def backward_seconds(self) -> float:
        """Where all is kept: each product once more for its input, and once for its weights where they are trained."""
        attention = self._scores()
        products = self._mlp(3) + self._product(2 * self.hidden * (self.queries + self.keys))
        passes = self._rotated() + self._activated()
        return (1 + self.trains_all) * products + ATTENTION_BACKWARD * attention + 2 * passes

    def _product(self, weights: int, stored: int | None = None) -> float:
        """With so many weights, of as many that are stored; None: all of them."""
        flops = 2 * self.tokens * weights * LORA / (GEMM_FLOPS[self.recipe] * self.card.compute)
        return flops + self._dequantized(weights if stored is None else stored)

    def _mlp(self, count: int) -> float:
        """So many of the MLP's three products."""
        return self._product(count * self.hidden * self.inner, count * self.hidden * self.stored)

    def _dequantized(self, weights: int) -> float:
        return weights * self.itemsize / (DEQUANTIZED_BYTES * self.card.memory)

    def _copied(self, size: int) -> float:
        return size / (COPY_BYTES * self.card.memory)

    def _scores(self) -> float:
        return 2 * self.tokens * self.length * self.queries / (ATTENTION_FLOPS * self.card.compute)

    def _activated(self) -> float:
        return self._copied(3 * self.tokens * self.inner * self.itemsize + 2 * self.stream)

    def _rotated(self) -> float:
        return self._copied(2 * self.tokens * (self.queries + self.keys) * self.itemsize + 4 * self.stream)

    def _mlp_again(self) -> float:
        return self._mlp(2) + self._activated()

    def _attention_again(self) -> float:
        return self._product(2 * self.hidden * (self.queries + self.keys)) + self._scores() + self._rotated()


def mlp_width(text_config: Any, *, chosen: bool) -> int:
    """Width of a layer's MLP; of a mixture that of all its experts, or of those alone that a token goes to."""
    experts = next((count for key in EXPERT_COUNTS if (count := getattr(text_config, key, None) or 0) > 1), 1)
    if experts == 1:
        return max_layer_sizes(text_config).mlp_width
    each = getattr(text_config, "moe_intermediate_size", None) or max_layer_sizes(text_config).mlp_width
    top_k = next((getattr(text_config, key) for key in TOP_K if hasattr(text_config, key)), 1)
    return each * (top_k if chosen else experts) + (getattr(text_config, "shared_expert_intermediate_size", None) or 0)


@dataclass(frozen=True)
class Gathers:
    """Of the frozen bytes of decoder layers that are divided.

    Args:
        ways: processes that hold a share each.
        block: bytes of a layer, whole.
        link: bytes/s that a process receives.
    """

    ways: int
    block: int
    link: float

    @property
    def seconds(self) -> float:
        """Of one gather."""
        return LATENCY + self.block * (self.ways - 1) / self.ways / self.link

    def waiting(self, shape: LayerCost, levels: Sequence[Level], stays: int, graphs: bool, hosted: int = 0) -> float:
        """Time that gathers add to a micro-batch: where the next comes while one computes, what they take longer than
        the layers beside them, and what those take longer; and the first, which nothing hides. Slices of `hosted`
        layers come from the host before."""
        moved = len(levels) - stays
        if not moved:
            return 0.0
        forward = len(levels) * shape.forward_seconds
        backward = len(levels) * shape.backward_seconds + sum(map(shape.seconds, levels))
        again = (moved - 1) * self.seconds  # the last layer's are still there when its backward begins
        alone = self.seconds + max(0.0, moved * self.seconds - forward) + max(0.0, again - backward)
        coming = self.seconds + self.block / self.ways / shape.card.host  # beside one layer, in forward and backward
        late = max(0.0, coming - forward / len(levels)) + max(0.0, coming - backward / len(levels))
        return alone + SLOWED[graphs] * max(0.0, moved * self.seconds + again - alone) + hosted * late


def staying(layers: int, count: int) -> tuple[int, ...]:
    """Which `count` of the layers stay gathered, or come from the host, all if it is as many: spread evenly, so that
    several compute while one is gathered."""
    count = min(count, layers)
    return tuple(index for index in range(layers) if (index + 1) * count // layers > index * count // layers)


def hosted(lacking: int, slices: Sequence[int], room: int) -> int:
    """Of how many layers the slices leave the device, for as many bytes as it lacks and the host has room for.

    Args:
        slices: bytes of each layer's.
    """
    pinned = 1 << (max(slices) - 1).bit_length()  # torch rounds what it pins up to a power of two
    return min(-(-lacking // min(slices)), max(room, 0) // pinned)


def peak(
    layers: Sequence[LayerBytes], *, before: int, head: int, gradients: Sequence[int], others: int, accumulated: bool
) -> int:
    """Bytes of the highest moment of a step, all gradients included.

    Args:
        layers: of the model.
        before: what is there as the first layer begins.
        head: beyond what is saved, at the highest moment of the head and the loss.
        gradients: of each layer; they appear layer by layer in backward.
        others: gradients of the head and the embeddings, there when the layers' backward begins.
        accumulated: all gradients, of an earlier micro-batch, are there from the start.
    """
    everything = sum(gradients) + others
    stored, there = before, everything if accumulated else 0
    highest = stored + there
    for layer in layers:
        stored += layer.saved
        highest = max(highest, stored + layer.forward + there)
    highest = max(highest, stored + head + there)
    there = max(there, others)
    for layer, own in zip(reversed(layers), reversed(gradients), strict=True):
        there = min(there + own, everything)
        highest = max(highest, stored + layer.backward + there)
        stored -= layer.saved
    return highest


def mixes(layers: int) -> Iterator[tuple[Level, ...]]:
    """Every split of the layers between two levels, the later ones keeping more: their memory is free again before
    the earlier ones need scratch to recompute. Each also with every n-th layer of `SPREAD`."""
    levels = [level for level in LEVELS if level != SPREAD]
    splits = [(level,) * layers for level in levels]
    for late, early in combinations(levels, 2):
        splits += [(early,) * count + (late,) * (layers - count) for count in range(1, layers)]
    for split in splits:
        yield split
        for every in SPACINGS:
            yield tuple(SPREAD if i % every == every - 1 else level for i, level in enumerate(split))


@dataclass(frozen=True)
class Choice:
    """What each layer keeps; whether micro-batches run as CUDA graphs, which hold their activations in a pool; how many
    layers' divided bytes stay gathered, and of how many the process's slice waits in the host's memory."""

    levels: tuple[Level, ...]
    graphs: bool
    stays: int = 0
    hosted: int = 0


def cost(shape: LayerCost, levels: Sequence[Level], graphs: bool = True) -> float:
    """Seconds that a step takes longer than one that keeps all, whose backward takes about as long as its forward.

    Args:
        graphs: whether steps that offload nothing are CUDA graphs; else Python launches them.
    """
    extra = sum(count * shape.seconds(level) for level, count in Counter(levels).items()) + shape.waiting(levels)
    if graphs and OFFLOADED.keys().isdisjoint(levels):
        return extra
    launches = sum(count * _launches(level) for level, count in Counter(levels).items())
    return max(extra, launches - 2 * len(levels) * shape.forward_seconds)


def _launches(level: Level) -> float:
    """Seconds that Python needs for a layer."""
    if level in OFFLOADED:
        return OFFLOAD_LAUNCHES * _launches(OFFLOADED[level])
    return LAUNCHES * MORE_LAUNCHES[level]


def choose(
    layers: int, budget: int, need: Callable[[Choice], int], *, usual: LayerCost, largest: LayerCost, host: int,
    graphs: bool = True, gathers: Gathers | None = None,
) -> Choice:  # fmt: skip
    """The fastest choice that `need`s at most `budget` bytes and offloads at most `host`; failing that, the one that
    needs least.

    Args:
        usual: the micro-batch whose time counts.
        largest: the one whose offloads count.
        graphs: whether steps may be CUDA graphs.
        gathers: of divided layers; each that stays needs its bytes once more.
    """
    on_host = {level: largest.on_host(level) for level in LEVELS}
    possible = [levels for levels in mixes(layers) if sum(map(on_host.__getitem__, levels)) <= host]
    choices = [Choice(levels, False) for levels in possible]
    if graphs:
        choices = [Choice(each, True) for each in possible if OFFLOADED.keys().isdisjoint(each)] + choices
    times = {choice: cost(usual, choice.levels, choice.graphs) for choice in choices}
    best, best_time = None, float("inf")
    for choice in sorted(choices, key=times.__getitem__):
        if times[choice] >= best_time:
            break
        room = budget - need(choice)
        if room < 0:
            continue
        if gathers is None:
            return choice
        stays = min(layers, room // gathers.block)
        time = times[choice] + gathers.waiting(usual, choice.levels, stays, choice.graphs)
        if time < best_time:
            best, best_time = replace(choice, stays=stays), time
    return best or min(choices, key=need)


def in_words(levels: Sequence[Level]) -> str:
    """Such as "12 layers checkpoint, 20 layers keep"."""
    return ", ".join(f"{count} layers {level}" for level, count in Counter(levels).items())
