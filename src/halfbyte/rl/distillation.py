"""Answers that a model learns from by its teacher's distributions: nobody rewards or compares them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.batch import take_counts, to_device
from halfbyte.generation import Completion
from halfbyte.generation.sampling import turn_end
from halfbyte.methods.gkd import given_answer
from halfbyte.rl.rewards.score import Scored

from ..train.metrics import Window
from ..train.sampler import Counting
from .rollout_batch import Answered
from .rollouts import EVALUATION, Generations, Row, as_row
from .statistics import lengths_of

if TYPE_CHECKING:
    from datasets import Dataset

    from ..train.callbacks import Callbacks


class DistilledGenerations(Generations):
    """Generations of `gkd`: rows are prompts with their answers, and nothing else."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        collate = self.method.collator(self.config, self.tokenizer, self.device)
        self.collate = Counting(self.method, collate)
        ends = turn_end(self.tokenizer) if self.tokenizer.chat_template else []
        self.end = self.tokenizer.convert_tokens_to_ids(ends[0]) if ends else self.tokenizer.eos_token_id

    def answer(
        self, indices: list[int], prompts: list[Row], each: int, number: int, progress: Mapping[str, Any]
    ) -> Answered:
        completions, texts, seconds = self.draw(indices, prompts, each, number)
        numbers = lengths_of(completions) | {"rollout_seconds": seconds}
        return Answered([row for row in prompts for _ in range(each)], completions, texts, Scored({}), _known(numbers))

    def _sampled(self, chosen: list[int], number: int, progress: Mapping[str, Any]) -> Answered:
        """The model's answers to these prompts, or the data's: with a probability of `lmbda` the former (algorithm 1
        of arXiv:2306.13649), which the run's seed and the generation's number decide."""
        drawn = torch.rand((), generator=torch.Generator().manual_seed(self.config.seed + number))
        own = float(drawn) < self.config.lmbda
        if own:
            found = super()._sampled(chosen, number, progress)
        else:
            prompts = self._prompts(chosen)
            completions, texts = self._given(chosen, prompts)
            found = Answered(prompts, completions, texts, Scored({}), _known(lengths_of(completions)))
        found.numbers["on_policy"] = float(own)
        return found

    def _given(self, chosen: list[int], prompts: list[Row]) -> tuple[list[Completion], list[str]]:
        """The data's answers as the model would write them, with the token that ends an answer, or cut."""
        completions, texts, most = [], [], self.config.max_completion_length
        for index, row in zip(chosen, prompts, strict=True):
            texts.append(given_answer(self.config, row["columns"], index))
            whole = [*self.tokenizer(texts[-1], add_special_tokens=False)["input_ids"], self.end]
            completions.append(Completion(whole[:most], torch.empty(0), len(whole) <= most))
        return completions, texts

    def _compared(self, answered: Answered, collate: Counting) -> list[Row]:
        pairs = zip(answered.prompts, answered.completions, strict=True)
        return [as_row(prompt["prompt_ids"], completion.ids) for prompt, completion in pairs]

    def _weighed(self, rows: list[Row]) -> list[Row]:
        return rows

    @torch.no_grad()
    def evaluate(self, held_out: Dataset, callbacks: Callbacks) -> dict[str, float]:
        """The divergence from the teacher over answers to the held-out prompts, which are drawn alike each time."""
        prompts = [held_out[index] for index in range(len(held_out))]
        answered = self.answer(list(range(len(prompts))), prompts, 1, EVALUATION, {})
        rows, found = self._compared(answered, self.collate), Window.of(self.method.numbers.trained)
        self.model.eval()
        for begin in range(0, len(rows), self.size):
            batch = to_device(self.collate(rows[begin : begin + self.size]), self.device)
            counts = take_counts([batch])
            with self.computing():
                sums = self.method.sums(self.model, batch)
            found.add({name: float(value) for name, value in sums.items()}, counts, 0.0)
        lengths = {name: value for name, value in answered.numbers.items() if not name.endswith("seconds")}
        return found.means(self.method.numbers.trained) | lengths


def _known(numbers: Mapping[str, float]) -> dict[str, float]:
    """Without those that are NaN: none of the answers may have ended."""
    return {name: value for name, value in numbers.items() if not math.isnan(value)}
