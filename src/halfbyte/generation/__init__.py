"""Text generation: decoding engines, continuous batching and sampling; LoRA adapters are applied without merging."""

from .engine import forget
from .rollouts import Completion, Rollouts
from .run import generate, stream
from .sampling import Sampling

__all__ = ["Completion", "Rollouts", "Sampling", "forget", "generate", "stream"]
