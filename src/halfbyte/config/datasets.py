"""The entries of the key `dataset`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from pydantic_core import PydanticCustomError

from ..utils.text import brief
from .section import nearest


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
    mappings = [entry for entry in dataset if isinstance(entry, dict)] if isinstance(dataset, list) else []
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
    columns = [field.name for field in fields(DatasetEntry)]
    for name, value in mapping.items():
        if name not in columns:
            near = nearest(name, columns)
            raise _invalid(f"has an entry with the unknown key {{value}}; its keys: {', '.join(columns)}", name, near)
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
