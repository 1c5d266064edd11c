"""Rollouts of distillation (`gkd`): answers without rewards, on which the teacher's distributions are learned."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..batch import take_counts, to_device
from ..generation import Completion
from ..generation.sampling import turn_end
from ..methods.gkd import given_answer
from ..rewards.score import Scored
from ..runs.metrics import Window
from .rollout_batch import RolloutBatch, completion_lengths
from .rollouts import EVALUATION, shuffled_groups
from .sampler import AnswerSampler, Row, as_row

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass
class DistillationRollouts:
    """Samples the answers of `gkd`, whose training rows are prompts with answers only.

    Attributes:
        prompts: rows of the training set.
        end_token: ends an answer of the data.
    """

    sampler: AnswerSampler
    prompts: Dataset
    end_token: int = field(init=False)

    def __post_init__(self) -> None:
        self.policy = self.sampler.policy
        self.config = self.policy.config
        tokenizer = self.policy.tokenizer
        ends = turn_end(tokenizer) if tokenizer.chat_template else []
        self.end_token = tokenizer.convert_tokens_to_ids(ends[0]) if ends else tokenizer.eos_token_id

    def answer(
        self, indices: list[int], prompts: list[Row], n: int, number: int, progress: Mapping[str, Any]
    ) -> RolloutBatch:
        """Sample `n` answers to every prompt, as `PolicyRollouts.answer` does."""
        answers = self.sampler.sample(prompts, n, indices, number)
        repeated = [row for row in prompts for _ in range(n)]
        numbers = _finite_lengths(answers.completions) | {"rollout_seconds": answers.seconds}
        return RolloutBatch(repeated, answers.completions, answers.texts, Scored({}), numbers)

    def generation(self, indices: list[int], number: int, progress: Mapping[str, Any]) -> RolloutBatch:
        """Return the model's answers to these prompts with probability `lmbda`, else the data's answers.

        Algorithm 1 of arXiv:2306.13649; the run's seed and the generation's number seed the choice.
        """
        prompts = [self.prompts[index] for index in indices]
        generator = torch.Generator().manual_seed(self.config.seed + number)
        is_on_policy = float(torch.rand((), generator=generator)) < self.config.lmbda
        if is_on_policy:
            batch = self.answer(indices, prompts, self.config.group_size, number, progress)
        else:
            # The data's answers, with the token that ends an answer.
            texts = [
                given_answer(self.config, row["columns"], index) for index, row in zip(indices, prompts, strict=True)
            ]
            limit = self.config.max_completion_length
            completions = []
            for text in texts:
                ids = [*self.policy.tokenizer(text, add_special_tokens=False)["input_ids"], self.end_token]
                completions.append(Completion(ids[:limit], torch.empty(0), len(ids) <= limit))
            batch = RolloutBatch(prompts, completions, texts, Scored({}), _finite_lengths(completions))
        batch.numbers["on_policy"] = float(is_on_policy)
        return batch

    def training_rows(self, batch: RolloutBatch, corrected: bool) -> list[Row]:
        """Return the answers as training rows, which have no importance weights to correct."""
        pairs = zip(batch.prompts, batch.completions, strict=True)
        return [as_row(prompt["prompt_ids"], completion.ids) for prompt, completion in pairs]

    def in_training_order(self, rows: Sequence[Row], number: int) -> list[Row]:
        return shuffled_groups(rows, self.config.group_size, self.config.seed + number)

    @torch.no_grad()
    def evaluate(self, held_out: Dataset, progress: Mapping[str, Any]) -> dict[str, float]:
        """Return the divergence from the teacher over answers to the held-out prompts; every evaluation uses the same
        seeds."""
        policy = self.policy
        prompts = [held_out[index] for index in range(len(held_out))]
        sampled = self.answer(list(range(len(prompts))), prompts, 1, EVALUATION, {})
        rows = self.training_rows(sampled, corrected=False)
        window = Window.of(policy.method.numbers.trained)
        policy.model.eval()
        batch_size = self.config.per_device_train_batch_size
        for begin in range(0, len(rows), batch_size):
            batch = to_device(policy.collate(rows[begin : begin + batch_size]), policy.device)
            counts = take_counts([batch])
            with policy.autocast():
                sums = policy.method.sums(policy.model, batch)
            window.add({name: float(value) for name, value in sums.items()}, counts, 0.0)
        lengths = {name: value for name, value in sampled.numbers.items() if not name.endswith("seconds")}
        return window.means(policy.method.numbers.trained) | lengths

    def close(self) -> None:
        self.sampler.close()


def _finite_lengths(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the lengths of answers in tokens, without those of finished answers if none finished."""
    return {name: value for name, value in completion_lengths(completions).items() if not math.isnan(value)}
