"""Score completions with all reward functions of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from ..utils.errors import ConfigError, TrainingError
from ..utils.notices import notice
from ..utils.waiting import waiting
from .process import LOADING, Failed, RewardProcess, WrongRewards, call, check_arguments
from .specs import CALLED_WITH, MODEL, RewardSpec

RewardModel = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[float | None]]
FIX = f"correct the function: it must take **kwargs, and its file must import within {LOADING:.0f} s"
BATCHES, SHARE = 20, 0.05  # a run stops if more than SHARE of the rows of the last BATCHES batches have failed


@dataclass(frozen=True)
class Scored:
    """The rewards of N completions.

    Attributes:
        rewards: a list [N] for each function, with None for no reward.
        extra: columns [N] that functions logged.
        metrics: means of numbers that functions logged.
        failed: function name to completions without a reward because it hung, crashed, exited or raised.
    """

    rewards: dict[str, list[float | None]]
    extra: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


class Rewards:
    """All reward functions of a run, called on each batch; those in processes run in parallel.

    Attributes:
        models: the reward models by name; set by the caller that loads them, before `score`.

    Args:
        timeout: seconds that a function may take per batch; functions given in Python have no timeout.
        longest: maximal tokens of a completion.
    """

    def __init__(self, specs: Sequence[RewardSpec], columns: Sequence[str], timeout: float, longest: int):
        self.specs = specs
        self.columns = columns
        self.timeout = timeout
        names = [*CALLED_WITH, *columns]
        self._processes = {
            spec.name: RewardProcess(_request(spec, longest) | {"names": names})
            for spec in specs
            if spec.function is None and spec.function_name != MODEL
        }
        self._on_texts = {spec.name for spec in specs if spec.function_name == "format" and spec.file is None}
        self.models: dict[str, RewardModel] = {}
        self._failures = {spec.name: deque[int]([], BATCHES) for spec in specs}

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each user's file and of each reward model's adapter."""
        return {str(spec.file): spec.sha256 for spec in self.specs if spec.file is not None}

    def check(self) -> None:
        """Load every function.

        Raises:
            ConfigError: a function does not load, or does not take the columns.
        """
        for spec in self.specs:
            if spec.function_name == MODEL:
                continue
            try:
                if spec.function is not None:
                    check_arguments(spec.function, [*CALLED_WITH, *self.columns])
                    continue
                wrong = self._processes[spec.name].start()
            except (Failed, ValueError) as error:
                wrong = str(error)
            if wrong is not None:
                function_name = f"{spec.file}:{spec.name}" if spec.file else spec.name
                raise ConfigError(f"reward_funcs: {function_name}: {wrong}", FIX)

    @waiting("scoring answers")
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
        """Return the rewards of N completions.

        Args:
            columns: further columns of the data, [N] each.
            prompt_ids: token ids of each prompt, for reward models.
            prompt_texts: the text that the model read for each prompt, for functions that check how an answer starts;
                default: `prompts`.

        Raises:
            TrainingError: a function returned something else than rewards, or has failed for too many completions.
        """
        arguments = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
        scored = Scored({})
        sent: dict[str, str] = {}
        for name, process in self._processes.items():
            try:
                read = {"prompts": list(prompt_texts)} if prompt_texts and name in self._on_texts else {}
                process.ask({"arguments": arguments | read, "trainer_state": state})
            except Failed as error:
                sent[name] = str(error)
        end = time.monotonic() + self.timeout
        for spec in self.specs:
            if spec.function_name == MODEL:
                answer = {"rewards": self.models[spec.name](prompt_ids, completion_ids)}
            else:
                in_process = spec.function is None
                answer = self._receive(spec.name, sent, end) if in_process else self._call(spec, arguments, state)
            self._add(spec, answer, len(completions), scored)
        return scored

    def _receive(self, name: str, sent: Mapping[str, str], end: float) -> dict[str, Any]:
        if name in sent:
            return {"failed": sent[name]}
        try:
            return self._processes[name].answer(end)
        except Failed as error:
            return {"failed": str(error)}

    def _call(self, spec: RewardSpec, arguments: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        assert spec.function is not None
        try:
            return call(spec.function, dict(arguments), SimpleNamespace(**state))
        except WrongRewards as error:
            return {"wrong": str(error)}
        except Exception as error:  # fails the batch for this function only, as in a process
            return {"failed": f"{type(error).__name__}: {error}"}

    def _add(self, spec: RewardSpec, answer: Mapping[str, Any], rows: int, scored: Scored) -> None:
        """Add one function's result to `scored`."""
        if "wrong" in answer:
            raise TrainingError(f"reward function {spec.name} {answer['wrong']}", "correct the function")
        failed = "failed" in answer
        self._failures[spec.name].append(rows if failed else 0)
        if failed:
            scored.failed[spec.name] = rows
            notice(f"reward:{spec.name}:{answer['failed']}", f"reward function {spec.name} failed: {answer['failed']}")
            lost = sum(self._failures[spec.name])
            if lost > SHARE * BATCHES * rows:
                raise TrainingError(
                    f"reward function {spec.name} gave no rewards for {lost} of its last completions, more than"
                    f" {SHARE:.0%} of {BATCHES} batches; the last failure: {answer['failed']}",
                    "correct the function, or raise reward_timeout_s if it is slow",
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


def _request(spec: RewardSpec, longest: int) -> dict[str, Any]:
    if spec.file is not None:
        return {"file": str(spec.file), "name": spec.function_name}
    return {"name": spec.function_name, "options": dict(spec.options), "longest": longest}
