"""Choose an activation level for each decoder layer: the fastest mix of levels within a memory budget.

A step's peak is the highest of its moments: each layer's forward, the loss, and each layer's backward, on top of the
activations saved at that moment. `plan.costs` has the bytes and seconds of a layer at each level.

Sharded layers (FSDP) are all-gathered before forward and again before backward, unless they stay unsharded. The choice
is the fastest combination of levels and layers that stay unsharded in the memory which the levels leave free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ..config import Level
from ..modeling.checkpointing import LEVELS, OFFLOADED
from .costs import SPACED, Gathers, LayerCost, extra_seconds
from .replay import LayerBytes

SPACINGS = (2, 3, 4, 6)  # every n-th layer at level `SPACED`


def evenly_spaced(layers: int, count: int) -> tuple[int, ...]:
    """Indices of `count` of the layers (at most all), evenly spaced, so that several compute during one's transfer."""
    count = min(count, layers)
    return tuple(index for index in range(layers) if (index + 1) * count // layers > index * count // layers)


def shards_to_offload(missing: int, shards: Sequence[int], host_free: int) -> int:
    """Number of layers whose shard must move to the host to free `missing` device bytes, limited by `host_free` bytes.

    Args:
        shards: bytes of each layer's shard.
    """
    return min(-(-missing // min(shards)), max(host_free, 0) // pinned_bytes(max(shards)))


def pinned_bytes(shard: int) -> int:
    """Host bytes of a shard: torch rounds pinned allocations up to a power of two."""
    return 1 << (shard - 1).bit_length()


def peak(
    layers: Sequence[LayerBytes], *, initial: int, head: int, gradients: Sequence[int], table_gradients: int,
    accumulated: bool,
) -> int:  # fmt: skip
    """Bytes at the highest moment of a step: saved activations, workspace and gradients.

    Args:
        layers: activation bytes of each layer.
        initial: bytes allocated when the first layer starts.
        head: workspace bytes of the head and the loss.
        gradients: gradient bytes of each layer; backward allocates them layer by layer.
        table_gradients: gradient bytes of the head and the embeddings, allocated before the layers' backward.
        accumulated: whether all gradients exist from the start, from an earlier micro-batch.
    """
    everything = sum(gradients) + table_gradients
    stored, allocated = initial, everything if accumulated else 0
    highest = stored + allocated
    for layer in layers:
        stored += layer.saved
        highest = max(highest, stored + layer.forward + allocated)
    highest = max(highest, stored + head + allocated)
    allocated = max(allocated, table_gradients)
    for layer, gradient in zip(reversed(layers), reversed(gradients), strict=True):
        allocated = min(allocated + gradient, everything)
        highest = max(highest, stored + layer.backward + allocated)
        stored -= layer.saved
    return highest


def mixes(layers: int) -> Iterator[tuple[Level, ...]]:
    """Yield every split of the layers between two levels, each also with every n-th layer at level `SPACED`.

    Later layers save more: backward frees their activations before the earlier layers need workspace to recompute.
    """
    levels = [level for level in LEVELS if level != SPACED]
    splits = [(level,) * layers for level in levels]
    for late, early in combinations(levels, 2):
        splits += [(early,) * count + (late,) * (layers - count) for count in range(1, layers)]
    for split in splits:
        yield split
        for every in SPACINGS:
            yield tuple(SPACED if i % every == every - 1 else level for i, level in enumerate(split))


@dataclass(frozen=True)
class Choice:
    """Activation level of each layer, and how sharded layers and CUDA graphs are used.

    Attributes:
        graphs: whether micro-batches run as CUDA graphs, whose pool holds their activations.
        stays: number of sharded layers that stay gathered.
        hosted: number of layers whose shard is in host memory.
    """

    levels: tuple[Level, ...]
    graphs: bool
    stays: int = 0
    hosted: int = 0


def choose(
    layers: int, budget: int, need: Callable[[Choice], int], *, usual: LayerCost, largest: LayerCost, host: int,
    graphs: bool = True, gathers: Gathers | None = None,
) -> Choice:  # fmt: skip
    """Return the fastest choice within `budget` device bytes and `host` bytes of offloads; if none fits, the smallest.

    Args:
        need: device bytes of a choice.
        usual: a layer for the micro-batch that decides the time.
        largest: a layer for the micro-batch that decides the offloaded bytes.
        graphs: whether micro-batches may run as CUDA graphs.
        gathers: all-gathers of sharded layers; a layer that stays gathered needs its bytes once more.
    """
    host_bytes = {level: largest.host_bytes(level) for level in LEVELS}
    possible = [levels for levels in mixes(layers) if sum(map(host_bytes.__getitem__, levels)) <= host]
    choices = [Choice(levels, False) for levels in possible]
    if graphs:
        choices = [Choice(levels, True) for levels in possible if OFFLOADED.keys().isdisjoint(levels)] + choices
    times = {choice: extra_seconds(usual, choice.levels, choice.graphs) for choice in choices}
    best, best_time = None, float("inf")
    for choice in sorted(choices, key=times.__getitem__):
        if times[choice] >= best_time:
            break
        free = budget - need(choice)
        if free < 0:
            continue
        if gathers is None:
            return choice
        stays = min(layers, free // gathers.block)
        time = times[choice] + gathers.exposed_seconds(usual, choice.levels, stays, choice.graphs)
        if time < best_time:
            best, best_time = replace(choice, stays=stays), time
    return best or min(choices, key=need)


def describe_levels(levels: Sequence[Level]) -> str:
    """Count the layers of each level in words, such as "12 layers checkpoint, 20 layers keep"."""
    return ", ".join(f"{count} layers {level}" for level, count in Counter(levels).items())
