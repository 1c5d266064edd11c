"""Shares of several datasets in the rows of an epoch, and the rows that an epoch draws from each.

All numbers are exact: a dataset's rows in an epoch are its share of all rows, up to one row. The seed decides which
rows are repeated or left out; the same data and seed give the same rows. `data.rows` shuffles them in each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ..config.schema import RunKeys
from ..utils.errors import ConfigError

MOST_REPEATED = 1000  # rows of an epoch, relative to the rows of the data; more is a mistake in a weight


def shares_of(config: RunKeys, sizes: Sequence[int] | None = None) -> list[Fraction]:
    """Return each dataset's share of the rows that are drawn.

    Args:
        sizes: number of rows of each dataset; None: not known, as for streams.
    """
    weights = [Fraction(1 if entry.weight is None else entry.weight) for entry in config.datasets]
    if config.mixing == "temperature" and sizes is not None:
        weights = [Fraction(size ** (1 / config.mixing_temperature)) for size in sizes]
    elif config.mixing == "concat" and not config.weighted and sizes is not None:
        weights = [Fraction(size) for size in sizes]
    return [weight / sum(weights) for weight in weights]


def apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Return integers that add up to `total`, in proportion to `shares` (largest remainders, ties to the first)."""
    exact = [total * share for share in shares]
    counts = [math.floor(number) for number in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts


def draw_rows(config: RunKeys, origins: np.ndarray) -> np.ndarray:
    """Return the indices of the rows of an epoch.

    Args:
        origins: for each row, the number of its dataset.

    Raises:
        ConfigError: a dataset with a weight has no rows, or its weight would repeat rows without end.
    """
    sizes = np.bincount(origins, minlength=len(config.datasets)).tolist()
    if config.mixing == "concat" and not config.weighted:
        return np.arange(len(origins))
    shares = shares_of(config, sizes)
    counts = apportion(total_rows(config, sizes, shares), shares)
    drawn, positions = [], []
    for number, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        rows, random = np.flatnonzero(origins == number), np.random.default_rng([config.seed, number])
        passes, left = divmod(count, size or 1)
        sampled = np.sort(random.permutation(size)[:left])
        drawn.append(np.concatenate([np.tile(rows, passes), rows[sampled]]))
        positions.append((np.arange(count) + 0.5) / max(count, 1))  # spread evenly over the epoch
    indices = np.concatenate(drawn)
    return indices if config.mixing == "concat" else indices[np.argsort(np.concatenate(positions), kind="stable")]


def total_rows(config: RunKeys, sizes: Sequence[int], shares: Sequence[Fraction]) -> int:
    """Return the number of rows of an epoch, or of a stream.

    Raises:
        ConfigError: as in `draw_rows`.
    """
    for entry, size, share in zip(config.datasets, sizes, shares, strict=True):
        if share and not size:
            fix = "give it rows that can be trained on, set its weight to 0, or remove it"
            raise ConfigError(f"dataset: {entry.path} has no rows to draw from", fix)
    if config.mixing == "concat":
        total = sum(sizes)
    else:  # a dataset has no rows left after size / share rows of the epoch
        ends = [size / share for size, share in zip(sizes, shares, strict=True) if share]
        total = math.floor(min(ends)) if config.stopping == "first" else math.ceil(max(ends))
    if total > MOST_REPEATED * sum(sizes):
        wrong = f"dataset: with stopping: all an epoch has {total:,} rows drawn from {sum(sizes):,}"
        raise ConfigError(wrong, "raise the smallest weight, or set stopping: first")
    return total
