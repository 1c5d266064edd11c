"""The entries of the key `dataset`, and the rules between the keys that mix and stream them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pydantic_core import PydanticCustomError

from ..utils.text import brief
from .policy import SAMPLING
from .section import Contradiction, nearest

if TYPE_CHECKING:
    from .schema import RunKeys


@dataclass(frozen=True)
class DatasetEntry:
    """One dataset of a run.

    Attributes:
        path: a file, a folder or a hub id.
        weight: share of the rows drawn from it, relative to the other weights; None: no weight is given.
        split: its split; None: `dataset_split`.
        max_samples: number of its first rows to read; None: all.
    """

    path: str
    weight: float | None = None
    split: str | None = None
    max_samples: int | None = None


def entries_of(dataset: Any, max_samples: int | None = None) -> list[DatasetEntry]:
    """Return the entries of a value of `dataset` or `eval_dataset`; empty for None.

    Args:
        max_samples: limit of entries without their own.
    """
    values = dataset if isinstance(dataset, list) else [] if dataset is None else [dataset]
    mappings = [value if isinstance(value, dict) else {"path": value} for value in values]
    return [DatasetEntry(**{"max_samples": max_samples, **mapping}) for mapping in mappings]


def check_entries(dataset: Any) -> None:
    """Check the mappings of a list of datasets.

    Raises:
        PydanticCustomError: an unknown key, a missing path, a value of another type, a negative weight, weights that
            are all 0, or that only some entries have.
    """
    mappings = [each for each in dataset if isinstance(each, dict)] if isinstance(dataset, list) else []
    for mapping in mappings:
        _check_mapping(mapping)
    weights = [mapping["weight"] for mapping in mappings if "weight" in mapping]
    if not weights:
        return
    if len(weights) < len(dataset):
        raise _invalid("needs a weight for every entry, or for none: {value} has some", brief(dataset))
    if not any(weights):
        raise _invalid("needs a weight above 0: all weights of {value} are 0", brief(dataset))


def _check_mapping(mapping: dict[str, Any]) -> None:
    known = [field.name for field in fields(DatasetEntry)]
    for name, value in mapping.items():
        if name not in known:
            near = nearest(name, known)
            raise _invalid(f"has an entry with the unknown key {{value}}; its keys: {', '.join(known)}", name, near)
        number = isinstance(value, int | float)
        if name in ("path", "split") and not (isinstance(value, str) and value.strip()):
            raise _invalid(f"must name a {name} in text, not {{value}}", repr(value))
        if name == "weight" and not (number and value >= 0):
            raise _invalid("has a weight of {value}: write a number from 0", repr(value))
        if name == "max_samples" and not (isinstance(value, int) and value > 0):
            raise _invalid("has max_samples of {value}: write a whole number above 0", repr(value))
    if "path" not in mapping:
        raise _invalid("has an entry without a path: {value}", brief(mapping))


def _invalid(message: str, value: str, near: str = "") -> PydanticCustomError:
    context = {"value": value} | ({"near": near} if near else {})
    return PydanticCustomError("format", message, context)


def dataset_contradictions(config: RunKeys) -> Iterator[Contradiction]:
    """Yield contradictions between keys that mix, limit and stream datasets."""
    weighted = config.weighted
    if config.mixing != "temperature" and not config.is_default("mixing_temperature"):
        wrong = f"{config.written('mixing_temperature')} with {config.written('mixing')}"
        yield "mixing_temperature", f"{wrong}, which does not read it", "set mixing: temperature, or remove it"
    if config.mixing == "temperature" and weighted:
        wrong = "weights of dataset with mixing: temperature, which derives them from the sizes"
        yield "mixing", wrong, "remove the weights, or set mixing: interleave"
    if config.mixing == "concat" and not config.is_default("stopping"):
        wrong = f"{config.written('stopping')} with mixing: concat, whose rows are as many as those of all datasets"
        yield "stopping", wrong, "set mixing: interleave or temperature, or remove it"
    if config.train_on == "last" and not config.assistant_only_loss:
        wrong = "train_on: last with assistant_only_loss: false, which trains every turn"
        yield "train_on", wrong, "remove one of the two"
    if config.streaming:
        yield from _streaming_contradictions(config, weighted)
    elif not config.is_default("shuffle_buffer_size"):
        wrong = f"{config.written('shuffle_buffer_size')} without streaming: true, where all rows are shuffled"
        yield "shuffle_buffer_size", wrong, "set streaming: true, or remove it"


def _streaming_contradictions(config: RunKeys, weighted: bool) -> Iterator[Contradiction]:
    chosen = "streaming: true"
    if config.method in SAMPLING:
        wrong = f"{chosen} with method: {config.method}, whose prompts are drawn from all rows"
        yield "streaming", wrong, "remove streaming"
    if config.max_steps < 1:
        yield "max_steps", f"{chosen} needs max_steps: the length of a stream is not known", "set max_steps"
    if not config.is_default("num_train_epochs"):
        wrong = f"{config.written('num_train_epochs')} with {chosen}, which reads its rows once"
        yield "num_train_epochs", wrong, "remove it; max_steps says how long the run trains"
    if config.eval_split_size:
        wrong = f"{config.written('eval_split_size')} with {chosen}: rows of a stream cannot be held out in advance"
        yield "eval_split_size", wrong, "name held-out data in eval_dataset"
    if config.mixing == "temperature":
        wrong = f"mixing: temperature with {chosen}: the sizes of streams are not known"
        yield "mixing", wrong, "set mixing: interleave, with weights"
    if config.mixing == "concat" and weighted:
        wrong = f"weights of dataset with mixing: concat and {chosen}: the sizes of streams are not known"
        yield "mixing", wrong, "set mixing: interleave"
    if config.precompute_ref_log_probs is True:
        wrong = f"precompute_ref_log_probs: true with {chosen}, whose rows are not known before training"
        yield "precompute_ref_log_probs", wrong, "remove it; each step computes its own"
