"""The best evaluation of a run, and when training stops because no evaluation is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config.schema import RunKeys
from ..config.section import nearest
from ..methods import Method
from ..optim import FOLLOW_METRIC
from ..rewards.specs import read_specs
from ..utils.errors import ConfigError
from ..utils.notices import notice

SMALLER_IS_BETTER = ("loss", "perplexity")  # ends of the names of metrics


@dataclass
class BestEvaluation:
    """The best evaluation so far, by one of its numbers; part of every checkpoint.

    Attributes:
        metric: name of the number.
        greater: whether a larger number is better.
        patience: evaluations without an improvement after which training stops; None: it does not stop.
        threshold: smallest change that counts as an improvement for `patience`.
        value, step: the best number so far, and the optimizer steps before its evaluation; None: no evaluation yet.
        waited: evaluations since the last improvement.
    """

    metric: str
    greater: bool
    patience: int | None
    threshold: float
    value: float | None = None
    step: int | None = None
    waited: int = 0

    @classmethod
    def of(cls, config: RunKeys, method: Method) -> BestEvaluation | None:
        """Return it for the start of a run; None if nothing compares evaluations.

        Raises:
            ConfigError: no evaluation has `metric_for_best_model`.
        """
        follows = config.lr_scheduler_type in FOLLOW_METRIC
        if not (follows or config.load_best_model_at_end or config.early_stopping_patience):
            return None
        names = [metric.name for metric in method.numbers.evaluated]
        for spec in read_specs(config.reward_funcs or (), None):
            names += [f"rewards/{spec.name}/mean", f"rewards/{spec.name}/std"]
        metric = (config.metric_for_best_model or names[0]).removeprefix("eval_")
        if metric not in names:
            near = nearest(metric, names)
            fix = f"did you mean {near}?" if near else f"one of {', '.join(names)}"
            wrong = f"metric_for_best_model: evaluations of method: {config.method} have no number {metric!r}"
            raise ConfigError(wrong, fix)
        greater = config.greater_is_better
        if greater is None:
            greater = not metric.endswith(SMALLER_IS_BETTER)
        return cls(metric, greater, config.early_stopping_patience, config.early_stopping_threshold)

    def add(self, step: int, value: float) -> bool:
        """Compare the evaluation after `step` steps; return whether it is the best so far."""
        change = None if self.value is None else (value - self.value) * (1 if self.greater else -1)
        self.waited = 0 if change is None or change > self.threshold else self.waited + 1
        if change is not None and change <= 0:
            return False
        self.value, self.step = value, step
        return True

    @property
    def is_exhausted(self) -> bool:
        """Whether training stops."""
        return self.patience is not None and self.waited >= self.patience

    def result(self, steps: int, loaded: bool) -> dict[str, Any]:
        """Return the facts of a finished run for environment.json.

        Args:
            steps: optimizer steps that the run did.
            loaded: whether the run ends with the weights of this evaluation.
        """
        stopped = steps if self.is_exhausted else None
        return {"metric": self.metric, "value": self.value, "step": self.step, "loaded": loaded, "stopped": stopped}

    def document(self) -> dict[str, Any]:
        """Return it as a checkpoint stores it."""
        return {"metric": self.metric, "value": self.value, "step": self.step, "waited": self.waited}

    def load(self, document: Mapping[str, Any] | None) -> None:
        """Continue from the `document` of a checkpoint, if it compared the same number."""
        if document is None or document["metric"] != self.metric:
            notice("best-evaluation", f"evaluations before this step were not compared by {self.metric}")
            return
        self.value, self.step = document["value"], document["step"]
        self.waited = document["waited"]
