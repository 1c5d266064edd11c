"""Rollouts of distillation (`gkd`): answers without rewards, on which the teacher's distributions are learned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..batch import take_counts, to_device
from ..generation import Completion
from ..generation.sampling import turn_end
from ..methods.gkd import given_answer
from ..rewards.score import Scored
from ..runs.metrics import Window
from ..train.sampler import CountingCollator
from .rollout_batch import RolloutBatch, completion_lengths
from .rollouts import EVALUATION, Generations, Row, as_row

if TYPE_CHECKING:
    from datasets import Dataset

    from ..train.callbacks import Callbacks


class DistilledGenerations(Generations):
    """Samples the generations of `gkd`, whose training rows are prompts with answers only."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        collate = self.method.collator(self.config, self.tokenizer, self.device)
        self.collate = CountingCollator(self.method, collate)
        ends = turn_end(self.tokenizer) if self.tokenizer.chat_template else []
        self.end = self.tokenizer.convert_tokens_to_ids(ends[0]) if ends else self.tokenizer.eos_token_id

    def answer(
        self, indices: list[int], prompts: list[Row], each: int, number: int, progress: Mapping[str, Any]
    ) -> RolloutBatch:
        completions, texts, seconds = self.draw(indices, prompts, each, number)
        numbers = completion_lengths(completions) | {"rollout_seconds": seconds}
        repeated = [row for row in prompts for _ in range(each)]
        return RolloutBatch(repeated, completions, texts, Scored({}), _without_nan(numbers))

    def _sample(self, chosen: list[int], number: int, progress: Mapping[str, Any]) -> RolloutBatch:
        """Return the model's answers to these prompts with probability `lmbda`, else the data's answers.

        Algorithm 1 of arXiv:2306.13649; the run's seed and the generation's number seed the choice.
        """
        drawn = torch.rand((), generator=torch.Generator().manual_seed(self.config.seed + number))
        own = float(drawn) < self.config.lmbda
        if own:
            found = super()._sample(chosen, number, progress)
        else:
            prompts = self._prompts(chosen)
            completions, texts = self._data_answers(chosen, prompts)
            numbers = _without_nan(completion_lengths(completions))
            found = RolloutBatch(prompts, completions, texts, Scored({}), numbers)
        found.numbers["on_policy"] = float(own)
        return found

    def _data_answers(self, chosen: list[int], prompts: list[Row]) -> tuple[list[Completion], list[str]]:
        """Return the data's answers with the token that ends an answer, truncated to `max_completion_length`."""
        completions, texts, most = [], [], self.config.max_completion_length
        for index, row in zip(chosen, prompts, strict=True):
            texts.append(given_answer(self.config, row["columns"], index))
            ids = [*self.tokenizer(texts[-1], add_special_tokens=False)["input_ids"], self.end]
            completions.append(Completion(ids[:most], torch.empty(0), len(ids) <= most))
        return completions, texts

    def _training_rows(self, batch: RolloutBatch, collate: CountingCollator) -> list[Row]:
        pairs = zip(batch.prompts, batch.completions, strict=True)
        return [as_row(prompt["prompt_ids"], completion.ids) for prompt, completion in pairs]

    def _with_divisors(self, rows: list[Row]) -> list[Row]:
        return rows

    @torch.no_grad()
    def evaluate(self, held_out: Dataset, callbacks: Callbacks) -> dict[str, float]:
        """Return the divergence from the teacher over answers to the held-out prompts; every evaluation uses the same
        seeds."""
        prompts = [held_out[index] for index in range(len(held_out))]
        sampled = self.answer(list(range(len(prompts))), prompts, 1, EVALUATION, {})
        rows, found = self._training_rows(sampled, self.collate), Window.of(self.method.numbers.trained)
        self.model.eval()
        for begin in range(0, len(rows), self.size):
            batch = to_device(self.collate(rows[begin : begin + self.size]), self.device)
            counts = take_counts([batch])
            with self.computing():
                sums = self.method.sums(self.model, batch)
            found.add({name: float(value) for name, value in sums.items()}, counts, 0.0)
        lengths = {name: value for name, value in sampled.numbers.items() if not name.endswith("seconds")}
        return found.means(self.method.numbers.trained) | lengths


def _without_nan(numbers: Mapping[str, float]) -> dict[str, float]:
    """Remove numbers that are NaN, such as lengths of finished answers if none finished."""
    return {name: value for name, value in numbers.items() if not math.isnan(value)}
