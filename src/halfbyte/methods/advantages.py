"""Advantages of sampled answers: what each one's reward says beside those of its group.

Rewards are fp32 [N, F], of N answers, a prompt's `group` of them one behind the other, by F functions; NaN where a
function has nothing to say. An answer that no function has scored has no part in its group's baseline, and the
advantage 0. Names are TRL's (1.16), whose trainers are the oracle of tests/methods/test_advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 1e-4  # added to a standard deviation that something is divided by


def combined(rewards: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum [N] over what functions say of an answer; NaN where none says anything."""
    total = (rewards * weights).nansum(1)
    return total.masked_fill(rewards.isnan().all(1), torch.nan)


def group_relative(
    rewards: Tensor, weights: Tensor, group: int, scale: str = "group", aggregation: str = "sum_then_normalize"
) -> Tensor:
    """Advantages [N] of GRPO (arXiv:2402.03300, section 4.1.2): r minus its group's mean, over a standard deviation.

    Args:
        scale: by the deviation of the "group", or of the "batch" (arXiv:2508.08221); "none": not scaled (Dr. GRPO,
            arXiv:2503.20783).
        aggregation: "sum_then_normalize", or "normalize_then_sum": each function's rewards are normalized in their
            group, and their weighted sum over the batch (GDPO, arXiv:2601.05242).
    """
    if aggregation == "normalize_then_sum":
        grouped = rewards.view(-1, group, rewards.shape[1])
        each = (grouped - grouped.nanmean(1, keepdim=True)) / (deviation(grouped, 1) + LEAST)
        total = (each.view_as(rewards) * weights).nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)
        return ((total - total.nanmean()) / (deviation(total, 0) + LEAST)).nan_to_num(0.0)
    total = combined(rewards, weights)
    grouped = total.view(-1, group)
    advantages = (grouped - grouped.nanmean(1, keepdim=True)).flatten()
    if scale != "none":
        spread = deviation(grouped, 1).expand_as(grouped).flatten() if scale == "group" else deviation(total, 0)
        advantages = advantages / (spread + LEAST)
    return advantages.nan_to_num(0.0)


def leave_one_out(rewards: Tensor, group: int, normalize: bool = False) -> Tensor:
    """Advantages [N] of RLOO (arXiv:2402.14740): r [N] minus the mean of the others of its group.

    Args:
        normalize: over the batch, to mean 0 and standard deviation 1.
    """
    grouped = rewards.view(-1, group)
    scored = (~grouped.isnan()).sum(1, keepdim=True)
    others = (grouped.nansum(1, keepdim=True) - grouped) / (scored - 1)
    advantages = (grouped - others).flatten()
    if normalize:
        advantages = (advantages - advantages.nanmean()) / (deviation(advantages, 0) + LEAST)
    return advantages.nan_to_num(0.0, 0.0, 0.0)


def deviation(x: Tensor, dim: int) -> Tensor:
    """The standard deviation along `dim`, which stays, over the n numbers there are (divided by n − 1; one: NaN)."""
    count = (~x.isnan()).sum(dim, keepdim=True)
    variance = (x - x.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True) / (count - 1).clamp(min=1)
    return variance.sqrt().masked_fill(count <= 1, torch.nan)


def without_spread(rewards: Tensor, group: int) -> Tensor:
    """bool [groups]: whether all of a group have one (combined) reward [N], so that it teaches nothing."""
    spread = deviation(rewards.view(-1, group), 1).flatten()
    return torch.isclose(spread, torch.zeros_like(spread))
