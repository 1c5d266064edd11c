"""The interface of a training method; the loop, metrics, report and terminal use nothing else.

Nothing here imports torch at module level, because reports read the names, too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ..batch import COUNTS, Batch
from ..ops import IGNORE_INDEX
from ..utils.notices import notice

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase

    from ..config.schema import RunKeys
    from ..data.prepare import Prepare, PreparedData
    from ..data.sources import Source
    from ..mesh.mesh import Mesh

Rows = Sequence[dict[str, Any]]
Collate = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True)
class Metric:
    """A number in the records of a run.

    Attributes:
        name: key in the records.
        label: name for people.
        format: format specification, as in `format(value, ".4f")`.
        over: name of the count that its sum is divided by.
        brief: whether the terminal shows it during training.
    """

    name: str
    label: str
    format: str = ".4f"
    over: str = "trained_tokens"
    brief: bool = True

    def shown(self, record: Mapping[str, Any]) -> str:
        """Return the formatted number of a record, or a dash without one."""
        value = record.get(self.name)
        return "–" if value is None else format(value, self.format)


LOSS = Metric("loss", "loss")
TOKENS = "tokens"  # count of processed tokens, without padding


@dataclass(frozen=True)
class Numbers:
    """The metrics of a method.

    Attributes:
        trained: in training records, the loss first.
        evaluated: in evaluations, the most informative one first.
        beside: in training records, computed on the host from the step's rows.
    """

    trained: tuple[Metric, ...] = (LOSS,)
    evaluated: tuple[Metric, ...] = (LOSS,)
    beside: tuple[Metric, ...] = ()

    def document(self) -> dict[str, list[dict[str, Any]]]:
        """Return the metrics as environment.json stores them."""
        return {name: [asdict(metric) for metric in getattr(self, name)] for name in ("trained", "evaluated", "beside")}

    @classmethod
    def of_document(cls, document: Mapping[str, Sequence[Mapping[str, Any]]]) -> Numbers:
        return cls(**{name: tuple(Metric(**metric) for metric in metrics) for name, metrics in document.items()})


class Method(ABC):
    """A training method.

    Attributes:
        rows: kind of rows: text (`input_ids`, `labels` and number columns); pairs, unpaired, prompts or stepwise (see
            `data.prepare_answers`); or labelled (see `data.prepare_tasks`).
        numbers: metrics of its records.
        scores: task type (a key of `config.methods.SCORES`) if the model scores or embeds texts and generates none.
        looks_ahead: whether its losses need sums over the complete step first, see `ahead`.
        reference: whether its losses compare the model with its state before training.
        shares_numbers: whether its losses need numbers of the complete step, see `shared`.
        shares: whether the answers of a row can share their prompt, see `data.shared_prefix`.
        skips_rows: whether its losses read the logits before trained tokens only, by `batch.HEAD_ROWS`.
        columns: for text, number columns of the data; a prepared row has them as lists, one number per document.
    """

    rows: Literal["text", "pairs", "unpaired", "prompts", "stepwise", "labelled"] = "text"
    numbers = Numbers()
    reference = False
    looks_ahead = False
    shares_numbers = False
    scores: str | None = None
    shares = False
    skips_rows = False
    columns: tuple[str, ...] = ()

    def of(self, config: RunKeys) -> Method:
        """Return this method configured with the keys of `config`."""
        return self

    def prepare(self, config: RunKeys, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
        """Return the prepared rows of a run, with the data report."""
        from ..data.streaming import prepared

        return prepared(config, self.preparer(config, tokenizer))

    def preparer(self, config: RunKeys, tokenizer: PreTrainedTokenizerBase) -> Prepare:
        """Return the function that prepares rows."""
        if self.rows == "text":
            from ..data.prepare import preparer

            return preparer(config, tokenizer, self.columns)
        from ..data.prepare_answers import preparer_of_answers

        assert self.rows != "labelled"  # `tasks.Task` has its own
        return preparer_of_answers(config, tokenizer, self.rows)

    def check_training(self, config: RunKeys, data: PreparedData) -> None:
        """Check that the training rows of a run leave something to learn; evaluations have no such condition.

        Raises:
            DataError: they do not.
        """
        return

    def documents(self, config: RunKeys, data: PreparedData) -> PreparedData:
        """Convert prepared rows to documents, one or several per row, with `input_ids` and `labels`."""
        return data

    def ready(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, model_config: Any | None = None
    ) -> PreparedData:
        """Return the result of `prepare`, converted by `documents`.

        Args:
            model_config: transformers' config, which decides whether answers share prompts; None: they do not.
        """
        from ..data.streaming import prepared

        prepare, shared = self.preparer(config, tokenizer), False
        if self.shares and model_config is not None:
            from ..modeling.shared_prefix import unshared_reason

            if why := unshared_reason(config, model_config):
                notice("prompts-apart", f"computing the prompt once per answer instead of once per row: {why}")
            shared = not why

        def documents_of(sources: Sequence[Source] | None = None, later: bool = False) -> PreparedData:
            return self.documents(config, replace(prepare(sources, later), shared=shared))

        return prepared(config, documents_of)

    def micro_batches(self, config: RunKeys, rows: int) -> int:
        """Return the micro-batches in an epoch of `rows`, over all ranks."""
        return math.ceil(rows / config.per_device_train_batch_size)

    def collator(
        self, config: RunKeys, tokenizer: PreTrainedTokenizerBase, device: torch.device | None = None
    ) -> Collate:
        """Return the collator from prepared rows to a batch of host tensors (and numbers).

        Args:
            device: the training device; None: no device, so the batch need not suit its kernels.
        """
        from ..data.collate import make_collator

        return make_collator(config, tokenizer, device)

    def tokens(self, rows: Rows) -> int:
        """Return the tokens that training on `rows` processes."""
        return sum(len(row["input_ids"]) for row in rows)

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, float]:
        """Return the divisors of a batch's sums by name, known before its forward."""

    def blank(self, batch: Batch) -> dict[str, Any]:
        """Return the batch with nothing to train, for a rank that has no rows left while others do."""
        return {**batch, "labels": batch["labels"].new_full(batch["labels"].shape, IGNORE_INDEX)}

    def ahead(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return sums over all micro-batches that the losses of a step need (if `looks_ahead`), without a gradient."""
        return {}

    def needs_ahead(self, micro_batches: Sequence[Batch]) -> bool:
        """Return whether a step of these micro-batches needs a separate look-ahead forward."""
        return self.looks_ahead

    def shared(self, counts: Mapping[str, float], ahead: Mapping[str, Tensor]) -> dict[str, float | Tensor]:
        """Return numbers that every micro-batch of a step gets, by their keys in the batch.

        They let a loss weigh means over different counts, so that accumulated gradients equal those of one large batch.

        Args:
            counts: of the complete step; empty in evaluations, whose counts are known only at their end.
            ahead: results of `ahead`, summed over the step or over all held-out rows.
        """
        return {}

    @abstractmethod
    def sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Run the forward and return the sums of a batch, 0-d float32, by name in the order of `numbers.trained`.

        The sum "loss" is differentiable. The forward of a frozen 16-bit model runs inside `compute`.

        Args:
            batch: on the model's device.
        """

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the `sums` of a held-out batch and, by further names, outputs of its rows for `over_all_rows`."""
        return self.sums(model, batch)

    def over_all_rows(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        """Return the numbers of an evaluation that are no means over batches.

        Args:
            outputs: of `evaluate`, concatenated over all held-out rows, on the CPU.
        """
        return {}

    def evaluation(self, means: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers of an evaluation from the means and counts over all its rows."""
        return {**means, **counts}


class RowOutputs:
    """The outputs of the rows of an evaluation: what `Method.evaluate` returns in addition to sums.

    Args:
        metrics: whose sums are no outputs.
    """

    def __init__(self, metrics: Sequence[Metric]):
        self._sums = {metric.name for metric in metrics}
        self._batches: list[dict[str, Tensor]] = []

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the result of `Method.evaluate` for a batch; a copy on the CPU."""
        self._batches.append({name: value.cpu() for name, value in values.items() if name not in self._sums})

    def all(self, mesh: Mesh) -> dict[str, Tensor]:
        """Return the outputs of all ranks, concatenated by name; a collective."""
        import torch

        if not any(self._batches):  # of no rank: they evaluate the same method
            return {}
        batches = [batch for rank in mesh.gather(self._batches) for batch in rank]
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


class CountingCollator:
    """A collator that adds the counts of its rows as Python numbers, which stay on the host."""

    def __init__(self, method: Method, collate: Collate):
        self.method, self.collate = method, collate

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch = self.collate(rows)
        return {**batch, COUNTS: {TOKENS: self.method.tokens(rows), **self.method.counts(batch)}}

    def blank(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of the same shapes without trained tokens, whose counts are 0."""
        batch = self.method.blank(batch)
        return {**batch, COUNTS: {TOKENS: 0, **self.method.counts(batch)}}
