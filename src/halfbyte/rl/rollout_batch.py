"""Answers to prompts with what reward functions said of them, before they are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.generation import Completion
from halfbyte.methods.policy_losses import combined, without_spread
from halfbyte.rl.rewards.score import Scored
from halfbyte.utils.notices import notice

from ..utils.text import brief

SAME = 20  # generations in which a function gives one number, after which that is said


@dataclass
class Answered:
    """Answers to some prompts, a prompt's behind each other.

    Attributes:
        prompts: the prompt of each.
        scored: their rewards.
        numbers: what is recorded of them.
    """

    prompts: list[dict[str, Any]]
    completions: list[Completion]
    texts: list[str]
    scored: Scored
    numbers: dict[str, float]

    @property
    def rewards(self) -> Tensor:
        """fp32 [N, F], NaN where a function says nothing."""
        columns = [[math.nan if value is None else value for value in each] for each in self.scored.rewards.values()]
        return torch.tensor(columns, dtype=torch.float32).T.contiguous()

    def dull(self, weights: Sequence[float], group: int) -> list[int]:
        """The groups of so many answers in which all are as good."""
        total = combined(self.rewards, torch.tensor(weights))
        return without_spread(total, group).nonzero().flatten().tolist()

    def exchange(self, own: int, other: Answered, theirs: int, group: int) -> None:
        """Put a group of `other` in the place of one of these; the numbers stay as they are."""
        mine, at = slice(own * group, (own + 1) * group), slice(theirs * group, (theirs + 1) * group)
        self.prompts[mine], self.completions[mine] = other.prompts[at], other.completions[at]
        self.texts[mine] = other.texts[at]
        for values, others in ((self.scored.rewards, other.scored.rewards), (self.scored.extra, other.scored.extra)):
            for name in values.keys() & others.keys():
                values[name][mine] = others[name][at]


class Monotony:
    """Says of a reward function, once, that it gives no number, or `SAME` generations long the same one.

    Attributes:
        seen: of each function the number that it gave last, and in how many generations it has given no other.
    """

    def __init__(self) -> None:
        self.seen: dict[str, tuple[float, int]] = {}

    def look_at(self, answered: Answered) -> None:
        for name, values in answered.scored.rewards.items():
            known = {value for value in values if value is not None}
            example = f"such as {brief(answered.texts[0])} to {brief(answered.prompts[0]['prompt'])}"
            if not known:
                if name not in answered.scored.failed:
                    said = (
                        f"reward function {name} says nothing of all {len(values)} answers of a generation, {example}"
                    )
                    notice(f"reward-none:{name}", said)
            elif len(known) > 1:
                self.seen.pop(name, None)
            else:
                (value,) = known
                before, times = self.seen.get(name, (value, 0))
                self.seen[name] = value, times + 1 if value == before else 1
                if self.seen[name][1] >= SAME:
                    said = f"reward function {name} gave {value:g} to each answer of {SAME} generations, {example}"
                    notice(f"reward-constant:{name}", f"{said}: it teaches nothing")
