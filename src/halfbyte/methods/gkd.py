"""Generalised knowledge distillation: minimise the divergence to a teacher on the model's own answers, over the
vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..utils.errors import DataError
from ..utils.text import brief
from .base import Batch, Method, Metric, Numbers
from .grpo import REWARD_METRICS, TOKENS, PolicyOptimization

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config.schema import RunKeys
    from ..data.prepare import PreparedData
    from .base import Collate

LENGTHS = tuple(metric for metric in REWARD_METRICS if metric.name.startswith("completions/"))
METRICS = (Metric("loss", "divergence", ".4f", TOKENS), Metric("entropy", "entropy", ".3f", TOKENS))


def given_answer(config: RunKeys, columns: Mapping[str, Any], number: int) -> str:
    """Return the answer in the data to prompt `number`, as text; `columns` are the row's columns without the prompt.

    Raises:
        DataError: there is no answer.
    """
    from ..data.preference import ANSWERS

    name = (config.column_mapping or {}).get("completion") or next((name for name in ANSWERS if name in columns), None)
    fix = "map the answers' column, column_mapping: {completion: COLUMN}, or set lmbda: 1"
    if name is None or name not in columns:
        missing = f"column {name!r}" if name else f"column of answers (columns {', '.join(columns) or 'none'})"
        raise DataError(f"lmbda: {config.lmbda:g} takes answers from the data, which has no {missing}", fix)
    answer = columns[name]
    if isinstance(answer, list) and all(isinstance(turn, Mapping) for turn in answer):
        answer = "".join(str(turn.get("content") or "") for turn in answer)
    if not isinstance(answer, str) or not answer.strip():
        wrong = f"in prompt {number + 1} column {name!r} is {brief(answer)}"
        raise DataError(f"lmbda: {config.lmbda:g} takes answers from the data, but {wrong}", fix)
    return answer


class Distillation(PolicyOptimization):
    """Generalised knowledge distillation (arXiv:2306.13649, algorithm 1): the mean of the divergence in
    `modeling.distillation` over the tokens of a step's answers.

    Prompts, generations and rows are those of policy optimization, with one answer per prompt and no rewards. A row of
    a micro-batch is a text: `input_ids`, and `labels` on the answer's tokens.
    """

    shares = False
    numbers = Numbers(METRICS, (*METRICS, *LENGTHS), LENGTHS)

    def __init__(self, config: RunKeys | None = None):
        if config is not None:
            self.config, self.longest = config, config.max_completion_length
            self.beta, self.temperature = config.beta or 0.0, config.temperature

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        """Convert rows as in policy optimization, and check that each prompt has an answer if any are taken from the
        data.

        Raises:
            DataError: a prompt has no answer.
        """
        if config.lmbda < 1:
            for number, columns in enumerate(data.train["columns"]):
                given_answer(config, columns, number)
        return super().documents(config, data)

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        """Return the collator from texts to tensors; `at` [N] are the positions whose next token belongs to an
        answer."""
        import torch

        from ..ops import IGNORE_INDEX

        base = Method.collator(self, config, tokenizer, device)

        def collate(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
            batch = base(rows)
            following = torch.nn.functional.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORE_INDEX).flatten()
            return {**batch, "at": (following != IGNORE_INDEX).nonzero().flatten()}

        return collate

    def counts(self, batch: Batch) -> dict[str, float]:
        return {TOKENS: len(batch["at"])}

    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        from ..modeling.distillation import teacher_divergence

        inputs = {name: value for name, value in batch.items() if name != "at"}
        loss, entropy = teacher_divergence(model, inputs, batch["at"], beta=self.beta, temperature=self.temperature)
        return {"loss": loss, "entropy": entropy}
