"""Held-out loss of a run or a model, computed as in its training method: the mean over all rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..methods import METHODS, method_of
from ..report.terminal import storage
from ..utils.errors import ConfigError, DataError, ModelError
from ..utils.waiting import waiting

if TYPE_CHECKING:
    import torch

    from ..methods.base import Collate, Method, Rows


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`.

    Attributes:
        numbers: the method's numbers by name; for supervised fine-tuning `loss` (mean cross-entropy per trained token,
            in nats), `perplexity` and `tokens`.
        shown: the numbers as text.
        tokens: number of trained tokens that the loss averages over.
        rows: of the prepared dataset (packed rows hold several documents).
        seconds: of the forward passes.
        precision: format of the weights and dtype of the matrix products, of a loaded model.
    """

    numbers: dict[str, float]
    shown: str
    tokens: int
    rows: int
    seconds: float
    precision: str = ""

    @property
    def loss(self) -> float:
        return self.numbers["loss"]

    @property
    def perplexity(self) -> float:
        return self.numbers["perplexity"]


def evaluate(name: str, dataset: str, overrides: Iterable[str] = ()) -> Evaluation:
    """Return the loss of a saved run, adapter or model on every row of `dataset`.

    Rows are prepared as in training (template, masks, max_length), so the numbers compare with the evaluations in
    metrics.jsonl.

    Raises:
        HalfbyteError: the model or the data cannot be read, no token is trained on, or this model cannot isolate packed
            documents.
    """
    from ..runs.inputs import check_datasets
    from ..runs.saved import load_saved

    check_datasets(dataset)
    saved = load_saved(name, overrides, dataset, scores=True)
    from ..data.collate import make_collator
    from ..data.sources import split_to_evaluate
    from ..loading.load import resolve_dtype
    from ..modeling.layer import causal_lm_of
    from ..modeling.packing import isolate_for_run

    split = split_to_evaluate(dataset, saved.config.dataset_split)
    keys = {"dataset": dataset, "dataset_split": split, "eval_dataset": None, "eval_split_size": 0.0}
    keys |= {"mixing": "concat", "max_samples": None, "streaming": False}
    config = saved.config.model_copy(update=keys)
    method = method_of(config)
    if method.rows == "prompts":
        raise ConfigError(
            f"{name} was trained by {config.method}, which is evaluated on sampled answers",
            "set eval_dataset to evaluate during training",
        )
    if method.reference:
        # The adapter that the run started from is its reference; other runs use the base model.
        from ..adapters.lora import load_adapter
        from ..batch import REFERENCE

        if config.adapter_path:
            load_adapter(saved.model, Path(config.adapter_path), config.model_name_or_path, REFERENCE)
        elif saved.initial is not None:
            folder = saved.initial.folder
            load_adapter(saved.model, folder, config.model_name_or_path, REFERENCE, initial=saved.initial)
        elif config.storage.rounds or not config.use_peft:
            raise ModelError(
                f"method: {config.method} compares with the model before training, which this run did not save",
                "the run's own evaluations are in its metrics.jsonl",
            )
    rows = method.ready(config, saved.tokenizer, causal_lm_of(saved.model).config).train
    size = config.per_device_eval_batch_size or config.per_device_train_batch_size
    isolate_for_run(saved.model, config, make_collator(config, saved.tokenizer), rows)
    result = measure(saved.model, rows, method.collator(config, saved.tokenizer), size, method)
    dtype = resolve_dtype(config.precision.compute, next(saved.model.parameters()).device)
    computed = f"{storage(config.model_dump())} weights, computed in {str(dtype).removeprefix('torch.')}"
    return replace(result, precision=computed)


@waiting("evaluating")
def measure(
    model: torch.nn.Module, rows: Rows, collate: Collate, size: int, method: Method = METHODS["sft"]
) -> Evaluation:
    """Return the numbers of `method` for `model` over `rows`, `size` rows per forward, without full logits.

    Raises:
        DataError: no row has a counted token.
    """
    import torch

    from ..mesh.mesh import SINGLE_PROCESS
    from ..methods.base import RowOutputs
    from ..modeling.compute_dtype import compute_autocast, no_input_casts
    from ..modeling.routers import track_routers
    from ..train.stepper import SharedNumbers, with_numbers

    device, metrics = next(model.parameters()).device, method.numbers.trained
    sums = dict.fromkeys((metric.name for metric in metrics), 0.0)
    counts, started = dict.fromkeys((metric.over for metric in metrics), 0.0), time.perf_counter()
    outputs = RowOutputs(metrics)

    def batches() -> Iterator[dict[str, Any]]:
        for first in range(0, len(rows), size):
            batch = collate([rows[index] for index in range(first, min(first + size, len(rows)))])
            yield {key: value.to(device) if hasattr(value, "to") else value for key, value in batch.items()}

    balanced = bool(getattr(method, "balance", 0.0))
    with torch.no_grad(), no_input_casts(model), track_routers(model, balanced=balanced) as routers:
        sums_of: Callable[[Any], Any] = partial(method.evaluate, model)
        if balanced and routers is not None:
            sums_of = routers.counted(sums_of)
        shared = SharedNumbers(method, model).of_evaluation(batches())
        for batch in batches():
            counted = method.counts(batch)
            counts = {name: count + counted[name] for name, count in counts.items()}
            batch = with_numbers(batch, shared)
            with compute_autocast(model):
                values = sums_of(batch)
            for name in sums:
                sums[name] += float(values[name])
            outputs.add(values)
    if not counts[metrics[0].over]:
        raise DataError("no token of this data is trained on, so it has no loss", "see `halfbyte preview`")
    means = {metric.name: sums[metric.name] / counts[metric.over] for metric in metrics}
    numbers = method.evaluation(means, counts) | method.over_all_rows(outputs.all(SINGLE_PROCESS))
    shown = " · ".join(f"{metric.label} {metric.shown(numbers)}" for metric in method.numbers.evaluated)
    return Evaluation(numbers, shown, int(counts[metrics[0].over]), len(rows), time.perf_counter() - started)
