"""What runs are trained for. A method is a row of `METHODS`, by the name that the key `method` gives.

To add one, add a row: `METHODS["mine"] = Mine()`, an instance of a subclass of `Method`.
"""

from ..config import RunConfig
from ..config.section import nearest
from ..utils.errors import ConfigError
from .base import Method, Metric, Numbers
from .gkd import Distillation
from .grpo import PolicyOptimization
from .kto import KahnemanTverskyOptimization
from .preference import (
    ContrastivePreferenceOptimization,
    DirectPreferenceOptimization,
    OddsRatioPreferenceOptimization,
)
from .reward import ProcessRewardModelling, RewardModelling
from .sft import SupervisedFineTuning

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
}


def method_of(config: RunConfig) -> Method:
    """The method that a run asks for, with the keys of that run.

    Raises:
        ConfigError: there is none of that name.
    """
    if config.method not in METHODS:
        near = nearest(config.method, METHODS)
        fix = f"did you mean {near}?" if near else f"one of {', '.join(sorted(METHODS))}"
        raise ConfigError(f"method: there is no {config.method!r}", fix)
    return METHODS[config.method].of(config)


__all__ = ["METHODS", "Method", "Metric", "Numbers", "method_of"]
