"""Generating text: a static key-value cache, one token a step, adapters applied without merging."""

from .engine_cache import forget
from .rollouts import Completion, Rollouts
from .run import generate, stream
from .sampling import Sampling

__all__ = ["Completion", "Rollouts", "Sampling", "forget", "generate", "stream"]
