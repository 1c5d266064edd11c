"""Numbers of a generation, by TRL's names: rewards, their spread, lengths."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch

from halfbyte.generation import Completion
from halfbyte.methods.policy_losses import combined, without_spread
from halfbyte.rl.rewards.score import Scored


def numbers_of(
    completions: Sequence[Completion], scored: Scored, weights: Sequence[float], group: int
) -> dict[str, float]:
    """What is recorded of answers and their rewards; a number that is not there (no answer ended) is left out.

    Args:
        group: answers to a prompt, which stand behind each other.
    """
    found: dict[str, float] = {}
    for name, values in scored.rewards.items():
        known = [value for value in values if value is not None]
        found[f"rewards/{name}/mean"] = _mean(known)
        found[f"rewards/{name}/std"] = _deviation(known)
        if failed := scored.failed.get(name):
            found[f"rewards/{name}/failed"] = failed
    columns = [[math.nan if value is None else value for value in values] for values in scored.rewards.values()]
    total = combined(torch.tensor(columns, dtype=torch.float32).T, torch.tensor(weights))
    known = [value for value in total.tolist() if not math.isnan(value)]
    found |= {"reward": _mean(known), "reward_std": _deviation(known)}
    found["frac_reward_zero_std"] = float(without_spread(total, group).float().mean()) if group > 1 else math.nan
    found |= lengths_of(completions) | scored.metrics
    return {name: value for name, value in found.items() if math.isfinite(value)}


def passes(rewards: Sequence[float | None], each: int) -> dict[str, float]:
    """pass@1 and pass@k, of k = `each` answers to a prompt, a prompt's behind each other: an answer passes where its
    reward is 1. Nothing for rewards outside of 0 to 1, which do not say whether an answer is right.

    pass@k is the share of prompts with an answer that passes: Chen et al. 2021, arXiv:2107.03374, equation 1, for as
    many samples as k.
    """
    values = [0.0 if value is None else value for value in rewards]
    if not all(0 <= value <= 1 for value in values):
        return {}
    right = [value == 1 for value in values]
    some = [any(right[at : at + each]) for at in range(0, len(right), each)]
    return {"pass@1": _mean(right), f"pass@{each}": _mean(some)}


def lengths_of(completions: Sequence[Completion]) -> dict[str, float]:
    """Of answers in tokens; NaN of those that ended, where none has."""
    every = [len(each.ids) for each in completions]
    ended = [len(each.ids) for each in completions if each.ended]
    found = {"completions/clipped_ratio": 1 - len(ended) / len(every)}
    for name, lengths in (("", every), ("terminated_", ended)):
        for kind, of in (("mean", _mean), ("min", min), ("max", max)):
            found[f"completions/{kind}_{name}length"] = float(of(lengths)) if lengths else math.nan
    return found


def means_of(several: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each number over those that have it."""
    names = dict.fromkeys(name for each in several for name in each)
    return {name: _mean([each[name] for each in several if name in each]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan
