"""What a method of training says of itself; the loop, metrics, report and terminal ask for nothing else.

Nothing here imports torch before it is needed, because reports read the names, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..ops import IGNORE_INDEX
from ..utils.notices import notice

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config import RunConfig
    from ..data.prepare import PreparedData

Rows = Sequence[dict[str, Any]]
Batch = Mapping[str, Any]
Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Metric:
    """A number in the records of a run.

    Attributes:
        name: in the records.
        label: for people.
        format: how it is shown, as in `format(value, ".4f")`.
        over: the count that its sum is divided by.
        brief: whether the terminal shows it while a run trains.
    """

    name: str
    label: str
    format: str = ".4f"
    over: str = "trained_tokens"
    brief: bool = True

    def shown(self, record: Mapping[str, Any]) -> str:
        """The number of a record, in words; a dash where there is none."""
        value = record.get(self.name)
        return "–" if value is None else format(value, self.format)


LOSS = Metric("loss", "loss")


@dataclass(frozen=True)
class Numbers:
    """The numbers of a method.

    Attributes:
        trained: of training records, the loss first.
        evaluated: of evaluations, the most telling one first.
        beside: of training records, what the host knows of their rows.
    """

    trained: tuple[Metric, ...] = (LOSS,)
    evaluated: tuple[Metric, ...] = (LOSS,)
    beside: tuple[Metric, ...] = ()

    def document(self) -> dict[str, list[dict[str, Any]]]:
        """As environment.json has them."""
        return {name: [asdict(metric) for metric in getattr(self, name)] for name in ("trained", "evaluated", "beside")}

    @classmethod
    def of_document(cls, document: Mapping[str, Sequence[Mapping[str, Any]]]) -> Numbers:
        return cls(**{name: tuple(Metric(**metric) for metric in metrics) for name, metrics in document.items()})


class Method(ABC):
    """A method of training.

    Attributes:
        rows: what its rows are: text (`input_ids`, `labels` and the number columns that it asks for), or pairs,
            unpaired, prompts or stepwise (see `data.prepare_answers`).
        numbers: what its records hold.
        scores: of a method that trains a head that scores texts or tokens, so that the model answers nothing, which of
            `config.methods.SCORES`.
        looks_ahead: whether its losses need something of the whole step before any is taken, see `ahead`.
        reference: whether its losses compare the model with what it was before training.
        shares: whether the answers of a row can share its prompt, see `data.branches`.
        columns: of text, the columns of the data with a number in each row; a prepared row has them as lists, a number
            a document.
    """

    rows: Literal["text", "pairs", "unpaired", "prompts", "stepwise"] = "text"
    numbers = Numbers()
    reference = False
    looks_ahead = False
    scores: str | None = None
    shares = False
    columns: tuple[str, ...] = ()

    def of(self, config: RunConfig) -> Method:
        """This method as `config` asks for it: a method with keys of its own gives one that has read them."""
        return self

    def prepare(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
        """The rows of a run, and what became of its data."""
        if self.rows != "text":
            from ..data.prepare_answers import prepare_answers

            return prepare_answers(config, tokenizer, self.rows)
        from ..data.prepare import prepare

        return prepare(config, tokenizer, self.columns)

    def documents(self, config: RunConfig, data: PreparedData) -> PreparedData:
        """Prepared rows as a run sees them: documents, one or several in a row, with `input_ids` and `labels`."""
        return data

    def ready(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, model_config: Any | None = None
    ) -> PreparedData:
        """`prepare`, and `documents` of what it gives.

        Args:
            model_config: transformers', which says whether answers share prompts; None: they do not.
        """
        data = self.prepare(config, tokenizer)
        if self.shares and model_config is not None:
            from ..modeling.shared_prefix import unshared_reason

            if why := unshared_reason(config, model_config):
                notice("prompts-apart", f"each answer is computed with a prompt of its own: {why}")
            data = replace(data, shared=not why)
        return self.documents(config, data)

    def micro_batches(self, config: RunConfig, rows: int, ways: int = 1) -> int:
        """Micro-batches that an epoch of `rows` has, in all of `ways` processes."""
        return math.ceil(rows / config.per_device_train_batch_size)

    def collator(
        self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        """Prepared rows → a batch of tensors on the host (and numbers).

        Args:
            device: where a run trains; None: nowhere, so the batch need not suit its kernels.
        """
        from ..data.collate import make_collator

        return make_collator(config, tokenizer, device)

    def tokens(self, rows: Rows) -> int:
        """Tokens that training on `rows` processes."""
        return sum(len(row["input_ids"]) for row in rows)

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """What the sums of a batch are divided by, name → number, known before its forward."""

    def blank(self, batch: Batch) -> dict[str, Any]:
        """The batch with nothing left to train on: for a process that has no rows where others have."""
        return {**batch, "labels": batch["labels"].new_full(batch["labels"].shape, IGNORE_INDEX)}

    def ahead(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Sums that the losses of a step need of all its micro-batches, of those that `looks_ahead`; no gradient."""
        return {}

    def needs_ahead(self, taken: Sequence[Batch]) -> bool:
        """Whether the step of these micro-batches, all that it has, needs it."""
        return self.looks_ahead

    def shared(self, counts: Mapping[str, float], ahead: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        """Numbers that each micro-batch of a step gets, by their keys in the batch.

        So a loss can weigh means over different counts: accumulated they equal the large batch.

        Args:
            counts: of all the step; empty in evaluations, whose counts are known at their end.
            ahead: what `ahead` gave, summed over all the step, or all held-out rows.
        """
        return {}

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Forward: the sums of a batch, 0-d float32, by name and in the order of `numbers.trained`.

        The one called "loss" is differentiable. The forward of a frozen model in 16 bits runs inside `compute_autocast`.

        Args:
            batch: on the model's device.
        """

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """The numbers of an evaluation, from the means and counts over all its rows."""
        return {**means, **counts}
