"""Text generation: decoding engines, continuous batching and sampling; LoRA adapters are applied without merging."""

from .engine import forget
from .grammar import Grammar
from .rollouts import Completion, Rollouts
from .run import generate, stream
from .sampling import Penalties, Sampling

__all__ = ["Completion", "Grammar", "Penalties", "Rollouts", "Sampling", "forget", "generate", "stream"]
