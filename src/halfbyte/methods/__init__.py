"""Training methods: `METHODS` maps each value of the key `method` to its implementation.

To add a method, add a row: `METHODS["mine"] = Mine()`, an instance of a subclass of `Method`.
"""

from ..config.methods import LOSS_TYPES
from ..config.schema import RunKeys
from ..config.section import respelled
from ..utils.errors import ConfigError
from .base import Method, Metric, Numbers
from .gkd import Distillation
from .grpo import PolicyOptimization
from .preference import (
    ContrastivePreferenceOptimization,
    DirectPreferenceOptimization,
    KahnemanTverskyOptimization,
    OddsRatioPreferenceOptimization,
)
from .reward import ProcessRewardModelling, RewardModelling
from .sft import SupervisedFineTuning
from .tasks import Embedding, Reranker, SequenceClassification, TokenClassification

METHODS: dict[str, Method] = {
    "sft": SupervisedFineTuning(),
    "dpo": DirectPreferenceOptimization(),
    "orpo": OddsRatioPreferenceOptimization(),
    "simpo": ContrastivePreferenceOptimization(),
    "cpo": ContrastivePreferenceOptimization(),
    "grpo": PolicyOptimization(),
    "rloo": PolicyOptimization(),
    "gkd": Distillation(),
    "kto": KahnemanTverskyOptimization(),
    "reward": RewardModelling(),
    "prm": ProcessRewardModelling(),
    "sequence_classification": SequenceClassification(),
    "token_classification": TokenClassification(),
    "embedding": Embedding(),
    "reranker": Reranker(),
}


def method_of(config: RunKeys) -> Method:
    """Return the method of a run, configured with its keys.

    Raises:
        ConfigError: no method has that name.
    """
    if config.method not in METHODS:
        with_loss = next((name for name, losses in LOSS_TYPES.items() if config.method in losses), None)
        near = respelled(config.method, METHODS)
        fix = f"did you mean {near}?" if near else f"one of {', '.join(sorted(METHODS))}"
        if with_loss is not None:
            fix = f"set method: {with_loss} and loss_type: {config.method}"
        raise ConfigError(f"method: there is no {config.method!r}", fix)
    return METHODS[config.method].of(config)


__all__ = ["METHODS", "Method", "Metric", "Numbers", "method_of"]
