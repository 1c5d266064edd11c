"""Answers to prompts with their rewards, and the numbers that are recorded of them, by TRL's names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..generation import Completion
from ..methods.policy_losses import combined, without_spread
from ..rewards.score import Scored
from ..utils.notices import notice
from ..utils.text import brief

CONSTANT_GENERATIONS = 20  # generations with one reward value after which a notice is given


@dataclass
class RolloutBatch:
    """Answers to some prompts; the answers to one prompt are adjacent.

    Attributes:
        prompts: prompt of each answer.
        completions: answers as tokens.
        texts: answers as texts.
        scored: rewards of the answers.
        numbers: numbers to record.
    """

    prompts: list[dict[str, Any]]
    completions: list[Completion]
    texts: list[str]
    scored: Scored
    numbers: dict[str, float]

    @property
    def rewards(self) -> Tensor:
        """Rewards fp32 [N, F]; NaN if a function returns None."""
        return _reward_columns(self.scored).contiguous()

    def without_spread(self, weights: Sequence[float], group: int) -> list[int]:
        """Return the indices of the groups, of `group` answers each, whose answers all have the same total reward."""
        total = combined(self.rewards, torch.tensor(weights))
        return without_spread(total, group).nonzero().flatten().tolist()

    def replace_group(self, target: int, source: RolloutBatch, source_group: int, group_size: int) -> None:
        """Replace group `target` with a group of `source`; `numbers` do not change."""
        target_rows = slice(target * group_size, (target + 1) * group_size)
        source_rows = slice(source_group * group_size, (source_group + 1) * group_size)
        self.prompts[target_rows] = source.prompts[source_rows]
        self.completions[target_rows] = source.completions[source_rows]
        self.texts[target_rows] = source.texts[source_rows]
        for columns, source_columns in (
            (self.scored.rewards, source.scored.rewards),
            (self.scored.extra, source.scored.extra),
        ):
            for name in columns.keys() & source_columns.keys():
                columns[name][target_rows] = source_columns[name][source_rows]


class RewardMonitor:
    """Gives one notice about a reward function that returns None, or one value for `CONSTANT_GENERATIONS` generations.

    Attributes:
        seen: by function, its last value and the number of generations in which it returned no other.
    """

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, int]] = {}

    def add(self, batch: RolloutBatch) -> None:
        for name, values in batch.scored.rewards.items():
            distinct = {value for value in values if value is not None}
            example = f"such as {brief(batch.texts[0])} to {brief(batch.prompts[0]['prompt'])}"
            if not distinct:
                if name not in batch.scored.failed:
                    problem = f"reward function {name} returns None for all {len(values)} answers of a generation"
                    notice(f"reward-none:{name}", f"{problem}, {example}")
            elif len(distinct) > 1:
                self.seen.pop(name, None)
            else:
                (value,) = distinct
                last_value, times = self.seen.get(name, (value, 0))
                self.seen[name] = value, times + 1 if value == last_value else 1
                if self.seen[name][1] >= CONSTANT_GENERATIONS:
                    problem = f"reward function {name} returned {value:g} for each answer"
                    during = f"of {CONSTANT_GENERATIONS} generations, {example}"
                    notice(f"reward-constant:{name}", f"{problem} {during}: it teaches nothing")


# --- numbers ---------------------------------------------------------------------------------------------------------


def rollout_numbers(
    completions: Sequence[Completion], scored: Scored, weights: Sequence[float], group: int
) -> dict[str, float]:
    """Return the numbers of answers and their rewards; numbers that do not exist (no answer ended) are left out.

    Args:
        group: number of answers to a prompt, which are adjacent.
    """
    numbers: dict[str, float] = {}
    for name, values in scored.rewards.items():
        rewards = [value for value in values if value is not None]
        numbers[f"rewards/{name}/mean"] = _mean(rewards)
        numbers[f"rewards/{name}/std"] = _deviation(rewards)
        if failed := scored.failed.get(name):
            numbers[f"rewards/{name}/failed"] = failed
    total = combined(_reward_columns(scored), torch.tensor(weights))
    rewards = [value for value in total.tolist() if not math.isnan(value)]
    numbers |= {"reward": _mean(rewards), "reward_std": _deviation(rewards)}
    numbers["frac_reward_zero_std"] = float(without_spread(total, group).float().mean()) if group > 1 else math.nan
    numbers |= completion_lengths(completions) | scored.metrics
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def _reward_columns(scored: Scored) -> Tensor:
    """Return rewards as fp32 [N, F]; NaN for None."""
    columns = [[math.nan if value is None else value for value in values] for values in scored.rewards.values()]
    return torch.tensor(columns, dtype=torch.float32).T


def pass_rates(rewards: Sequence[float | None], n: int) -> dict[str, float]:
    """Return pass@1 and pass@k, with k = `each` adjacent answers to a prompt; an answer passes if its reward is 1.

    Empty for rewards outside 0 to 1, which do not tell right from wrong. pass@k is the share of prompts with an answer
    that passes: Chen et al. 2021, arXiv:2107.03374, equation 1, with k samples.
    """
    values = [0.0 if value is None else value for value in rewards]
    if not all(0 <= value <= 1 for value in values):
        return {}
    right = [value == 1 for value in values]
    passed = [any(right[at : at + n]) for at in range(0, len(right), n)]
    return {"pass@1": _mean(right), f"pass@{n}": _mean(passed)}


def completion_lengths(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the lengths of answers in tokens; NaN for finished answers if none finished."""
    every = [len(completion.ids) for completion in completions]
    ended = [len(completion.ids) for completion in completions if completion.ended]
    numbers = {"completions/clipped_ratio": 1 - len(ended) / len(every)}
    for name, lengths in (("", every), ("terminated_", ended)):
        for statistic, of in (("mean", _mean), ("min", min), ("max", max)):
            numbers[f"completions/{statistic}_{name}length"] = float(of(lengths)) if lengths else math.nan
    return numbers


def mean_numbers(several: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the dicts that have it."""
    names = dict.fromkeys(name for numbers in several for name in numbers)
    return {name: _mean([numbers[name] for numbers in several if name in numbers]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan
