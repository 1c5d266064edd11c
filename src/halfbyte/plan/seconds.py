"""Seconds of a step on a mesh, by arithmetic over the rates of its cards (`plan.cards`)."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import Level, Parallel
from .policy import GEMM_FLOPS, LATENCY, Gathers, LayerCost, cost, replayed_level
from .rank import KEEPS_STREAM


def head_seconds(shape: LayerCost, vocabulary: int) -> float:
    """Of the head and the loss, forward and backward: logits, and the gradient of hidden states."""
    products = (2 + shape.trains_all) * shape.tokens * shape.hidden * vocabulary
    return 2 * products / (GEMM_FLOPS["bf16"] * shape.card.compute)


def micro_seconds(
    shape: LayerCost, levels: Sequence[Level], layout: Parallel, *, graphs: bool, gathers: Gathers | None, stays: int,
    hosted: int = 0,
) -> float:  # fmt: skip
    """Of the layers of one process, forward and backward of a micro-batch; exchanges between processes as far as
    nothing is computed beside them.

    Args:
        shape: of one layer, as this process computes it.
        levels: of its layers.
        gathers: of their bytes, and `stays` of them that are not gathered, `hosted` that come from the host.
    """
    computed = len(levels) * (shape.forward_seconds + shape.backward_seconds) + cost(shape, levels, graphs)
    waited = gathers.waiting(shape, levels, stays, graphs, hosted) if gathers else 0.0
    return (
        computed + waited + len(levels) * _in_layer(shape, layout) + sum(_again(shape, layout, each) for each in levels)
    )


def _in_layer(shape: LayerCost, layout: Parallel) -> float:
    """Exchanges that a layer waits for, forward and backward."""
    seconds = 0.0
    if layout.tensor > 1:  # attention's and the MLP's result are summed, and in backward the gradients of their inputs
        seconds += 4 * _reduced(shape.stream, layout.tensor, shape.card.link)
    if layout.context > 1:  # q, k, v and the result change owners, and in backward their gradients
        moved = 2 * shape.tokens * (shape.queries + shape.keys) * shape.itemsize
        ways = layout.context
        seconds += 2 * (moved * (ways - 1) / ways / shape.card.link + 4 * LATENCY)
    return seconds


def _again(shape: LayerCost, layout: Parallel, level: Level) -> float:
    """Exchanges of a layer that is computed again: its input is gathered, and attention's result summed once more."""
    if layout.tensor == 1 or replayed_level(level) not in KEEPS_STREAM:
        return 0.0
    gathered = LATENCY + shape.stream * (layout.tensor - 1) / layout.tensor / shape.card.link
    return gathered + _reduced(shape.stream, layout.tensor, shape.card.link)


def _reduced(size: int, ways: int, link: float) -> float:
    """Of a sum of `size` bytes that all get."""
    return LATENCY + 2 * size * (ways - 1) / ways / link


def vocabulary_seconds(shape: LayerCost, ways: int) -> float:
    """Of the exchange of hidden states and of their gradients where `ways` processes with rows of their own share a
    vocabulary: embedding, head, and head backward."""
    return 3 * (LATENCY + (ways - 1) * shape.stream / shape.card.link) if ways > 1 else 0.0


def step_seconds(
    micro: Sequence[float], idle: float, layout: Parallel, window: int, trained: int, link: float
) -> float:
    """Of `window` micro-batches and the sum of gradients.

    Args:
        micro: of one micro-batch, on each stage.
        idle: share of the time in which a stage waits for others.
        trained: bytes of the gradients that a process sums with others.
    """
    summed = layout.size // layout.pipeline
    reduction = _reduced(trained, summed, link) if summed > 1 else 0.0
    return window * sum(micro) / len(micro) / (1 - idle) + reduction
