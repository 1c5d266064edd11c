"""All reward functions of a run, asked about a batch of completions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ...utils.errors import ConfigError, TrainingError
from ...utils.notices import notice
from .process import LOADING, Failed, RewardProcess
from .specs import CALLED_WITH, MODEL, RewardSpec
from .worker import WrongRewards, call, check_arguments

Judge = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[float | None]]
MEND = f"mend the function: it takes **kwargs, and its file is imported within {LOADING:.0f} s"
BATCHES, SHARE = 20, 0.05  # a run stops where more than this share of the rows of so many batches has failed


@dataclass(frozen=True)
class Scored:
    """What the functions said of N completions.

    Attributes:
        rewards: a list [N] for each function, None where it says nothing.
        extra: columns [N] that functions logged.
        metrics: numbers that functions logged, their mean.
        failed: completions that a function, by name, gave no answer about because it hung, crashed or exited.
    """

    rewards: dict[str, list[float | None]]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


class Rewards:
    """Asks every function about each batch, those in processes at once.

    Attributes:
        judges: the models among them, by name; whoever has them puts them here before rewards are asked for.

    Args:
        timeout: seconds that a function may take for a batch; one that is given in Python is not interrupted.
        longest: the most tokens of a completion.
    """

    def __init__(self, specs: Sequence[RewardSpec], columns: Sequence[str], timeout: float, longest: int):
        self.specs, self.columns, self.timeout = specs, columns, timeout
        names = [*CALLED_WITH, *columns]
        self._processes = {
            spec.name: RewardProcess(_asked(spec, longest) | {"names": names})
            for spec in specs
            if spec.function is None and spec.kind != MODEL
        }
        self._on_texts = {spec.name for spec in specs if spec.kind == "format" and spec.file is None}
        self.judges: dict[str, Judge] = {}
        self._failures = {spec.name: deque[int]([], BATCHES) for spec in specs}

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each user's file, and of each model's adapter."""
        return {str(spec.file): spec.sha256 for spec in self.specs if spec.file is not None}

    def check(self) -> None:
        """Load every function.

        Raises:
            ConfigError: one cannot be, or does not take the columns that there are.
        """
        for spec in self.specs:
            if spec.kind == MODEL:
                continue
            try:
                if spec.function is not None:
                    check_arguments(spec.function, [*CALLED_WITH, *self.columns])
                    continue
                wrong = self._processes[spec.name].start()
            except (Failed, ValueError) as error:
                wrong = str(error)
            if wrong is not None:
                where = f"{spec.file}:{spec.name}" if spec.file else spec.name
                raise ConfigError(f"reward_funcs: {where}: {wrong}", MEND)

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        state: Mapping[str, Any],
        prompt_ids: Sequence[Sequence[int]] = (),
        prompt_texts: Sequence[str] = (),
    ) -> Scored:
        """Rewards of N completions, each with its prompt, its token ids and what the further columns say.

        Args:
            prompt_ids: of each, for models.
            prompt_texts: what the model read of each, for what looks at how an answer was opened; default: `prompts`.

        Raises:
            TrainingError: a function gave something else than rewards, or has failed for too many completions.
        """
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        scored = Scored({})
        sent: dict[str, str] = {}
        for name, process in self._processes.items():
            try:
                read = {"prompts": list(prompt_texts)} if prompt_texts and name in self._on_texts else {}
                process.ask({"arguments": given | read, "trainer_state": state})
            except Failed as error:
                sent[name] = str(error)
        end = time.monotonic() + self.timeout
        for spec in self.specs:
            if spec.kind == MODEL:
                answer = {"rewards": self.judges[spec.name](prompt_ids, completion_ids)}
            else:
                answer = self._own(spec, given, state) if spec.function else self._theirs(spec.name, sent, end)
            self._take(spec, answer, len(completions), scored)
        return scored

    def _theirs(self, name: str, sent: Mapping[str, str], end: float) -> dict[str, Any]:
        if name in sent:
            return {"failed": sent[name]}
        try:
            return self._processes[name].answer(end)
        except Failed as error:
            return {"failed": str(error)}

    def _own(self, spec: RewardSpec, given: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        assert spec.function is not None
        try:
            return call(spec.function, dict(given), SimpleNamespace(**state))
        except WrongRewards as error:
            return {"wrong": str(error)}
        except Exception as error:  # what a user's function raises costs its rows, as in a process
            return {"failed": f"{type(error).__name__}: {error}"}

    def _take(self, spec: RewardSpec, answer: Mapping[str, Any], rows: int, scored: Scored) -> None:
        """Put one function's answer beside the others'."""
        if "wrong" in answer:
            raise TrainingError(f"reward function {spec.name} {answer['wrong']}", "mend the function")
        failed = "failed" in answer
        self._failures[spec.name].append(rows if failed else 0)
        if failed:
            scored.failed[spec.name] = rows
            notice(f"reward:{spec.name}:{answer['failed']}", f"reward function {spec.name} failed: {answer['failed']}")
            lost = sum(self._failures[spec.name])
            if lost > SHARE * BATCHES * rows:
                raise TrainingError(
                    f"reward function {spec.name} gave no rewards for {lost} of its last completions, more than"
                    f" {SHARE:.0%} of {BATCHES} batches; the last time: {answer['failed']}",
                    "mend the function, or raise reward_timeout_s where it is slow",
                )
        scored.rewards[spec.name] = [None] * rows if failed else list(answer["rewards"])
        for column, values in answer.get("extra", {}).items():
            if len(values) == rows:
                scored.extra[column] = values
        for name, numbers in answer.get("metrics", {}).items():
            scored.metrics[name] = sum(numbers) / len(numbers)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.close()


def _asked(spec: RewardSpec, longest: int) -> dict[str, Any]:
    if spec.file is not None:
        return {"file": str(spec.file), "name": spec.kind}
    return {"name": spec.kind, "options": dict(spec.options), "longest": longest}
