"""Answers that a model learns from by its teacher's distributions: nobody rewards or compares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from halfbyte.rewards import Scored

from .answered import Answered
from .generations import EVALUATION, Generations, Row, as_row
from .metrics import Window
from .rewarded import lengths_of
from .rows import Counting, counts_of, on_device

if TYPE_CHECKING:
    from datasets import Dataset

    from .callbacks import Callbacks


class DistilledGenerations(Generations):
    """Generations of `gkd`: rows are prompts with their answers, and nothing else."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        collate = self.method.collator(self.config, self.tokenizer, self.device)
        self.collate = Counting(self.method, collate)

    def answer(
        self, indices: list[int], prompts: list[Row], each: int, number: int, progress: Mapping[str, Any]
    ) -> Answered:
        completions, texts, seconds = self.draw(indices, prompts, each, number)
        numbers = lengths_of(completions) | {"rollout_seconds": seconds}
        numbers = {name: value for name, value in numbers.items() if value == value}  # none of them may have ended
        return Answered([row for row in prompts for _ in range(each)], completions, texts, Scored({}), numbers)

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
            batch = on_device(self.collate(rows[begin : begin + self.size]), self.device)
            counts = counts_of([batch])
            with self.computing():
                sums = self.method.sums(self.model, batch)
            found.add({name: float(value) for name, value in sums.items()}, counts, 0.0)
        lengths = {name: value for name, value in answered.numbers.items() if not name.endswith("seconds")}
        return found.means(self.method.numbers.trained) | lengths
