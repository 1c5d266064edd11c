"""Rewards of sampled answers: TRL's reward functions, run so that none of them can stop or hang a run."""

from .columns import check_columns
from .score import Rewards, Scored
from .specs import RewardSpec, named, read_specs

__all__ = ["RewardSpec", "Rewards", "Scored", "check_columns", "named", "read_specs"]
