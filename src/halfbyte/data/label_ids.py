"""Labels of rows as numbers: names and ids of classes, indicators of several labels, numbers to predict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..config.schema import RunKeys
from ..utils.errors import ConfigError, DataError
from ..utils.notices import notice
from ..utils.text import brief
from .task_rows import score_in

UNLABELLED = -100  # label of a word that is not trained, as in transformers
NAME = "LABEL_{}"  # transformers' name of a label that has none
TRUTHS = ["false", "true"]
MOST_NAMED = 10
MOST_LABELS = 100_000  # a larger id is a measurement or a key, and no label


@dataclass(frozen=True)
class LabelIds:
    """The labels of a run.

    Attributes:
        names: in the order of their ids; one for a regression.
        problem: `problem_type`, or "tokens".
        indicators: whether several labels are written as a 0 or 1 for each.
    """

    names: list[str]
    problem: str
    indicators: bool = False

    @classmethod
    def of(cls, config: RunKeys, targets: Sequence[Any], locations: Sequence[str]) -> LabelIds:
        """Return the labels of a run from its keys and its training rows.

        Args:
            targets: of the training rows, as `task_rows` yields them.

        Raises:
            DataError: labels of different types, or a single one.
            ConfigError: `num_labels` contradicts the rows.
        """
        problem = config.problem_type if config.method == "sequence_classification" else "tokens"
        if problem == "regression":
            return cls([NAME.format(0)], problem)
        indicators = problem == "multi_label_classification" and _are_indicators(targets)
        if indicators:
            width = len(targets[0])
            names = config.labels or [NAME.format(number) for number in range(width)]
            _check_number(config, len(names), width)
            return cls(names, problem, indicators=True)
        labels = cls([], problem)
        located = [(value, at) for row, at in labels._rows(targets, locations) for value in row if value != UNLABELLED]
        values = [value for value, _ in located]
        if config.labels is not None:
            names = config.labels
        elif values and isinstance(values[0], bool):
            names = TRUTHS
        elif values and isinstance(values[0], str):
            names = sorted(set(values))
        else:
            largest, location = max(located, default=(0, ""))
            if largest >= MOST_LABELS:
                wrong = f"{location}: the label {largest} needs a head of {largest + 1:,} outputs"
                raise DataError(wrong, "write labels as texts, or set problem_type: regression to predict numbers")
            names = [NAME.format(number) for number in range(max(largest + 1, config.num_labels or 0))]
        _check_number(config, len(names), len(names))
        return cls(names, problem)

    def numbers(self, targets: Sequence[Any], locations: Sequence[str]) -> list[list[float]]:
        """Return the target of each row as numbers: an id, an id per word, 0 or 1 per label, or the number to predict.

        Raises:
            DataError: a label of another type, or one that training has not seen.
        """
        if self.problem == "regression":
            return [[_number(target, location)] for target, location in zip(targets, locations, strict=True)]
        if self.indicators:
            return [self._checked(target, location) for target, location in zip(targets, locations, strict=True)]
        ids = {name: number for number, name in enumerate(self.names)}
        rows = []
        for values, location in self._rows(targets, locations):
            row = [self._id(value, ids, location) for value in values]
            if self.problem == "multi_label_classification":
                row = [float(number in row) for number in range(len(self.names))]
            rows.append(row)
        return rows

    def counts(self, rows: Sequence[Sequence[float]]) -> dict[str, int]:
        """Return how many rows (or words) have each label; empty for a regression."""
        if self.problem == "regression":
            return {}
        if self.problem == "multi_label_classification":
            return {name: int(sum(row[number] for row in rows)) for number, name in enumerate(self.names)}
        counts = Counter(int(number) for row in rows for number in row)
        return {name: counts[number] for number, name in enumerate(self.names)}

    def _rows(self, targets: Sequence[Any], locations: Sequence[str]) -> Iterator[tuple[list[Any], str]]:
        """Yield the labels of each row as a list of texts, numbers or truths, all of the first one's type."""
        first: tuple[type, Any] | None = None
        for target, location in zip(targets, locations, strict=True):
            several = self.problem != "single_label_classification"
            if isinstance(target, list) != several:
                raise _other_shape(target, location, self.problem)
            values = [_label(value, location) for value in (target if several else [target])]
            for value in values:
                if value == UNLABELLED and self.problem == "tokens":
                    continue
                first = first or (type(value), value)
                if type(value) is not first[0]:
                    wrong = f"{location}: the label {brief(value)} has another type than {brief(first[1])}"
                    raise DataError(wrong, "write all labels as texts, or all as whole numbers")
            yield values, location

    def _id(self, value: Any, ids: dict[str, int], location: str) -> float:
        if isinstance(value, str):
            number = ids.get(value)
        else:
            number = int(value) if value == UNLABELLED or 0 <= value < len(self.names) else None
        if number is None or (number == UNLABELLED and self.problem != "tokens"):
            named = ", ".join(self.names[:MOST_NAMED]) + (", ..." if len(self.names) > MOST_NAMED else "")
            wrong = (
                f"{location}: the label {brief(value)} is none of the {len(self.names)} labels of training ({named})"
            )
            raise DataError(wrong, "correct the row, or name all labels in `labels`")
        return float(number)

    def _checked(self, target: Any, location: str) -> list[float]:
        """Return the indicators of a row."""
        if not _are_indicators([target]) or len(target) != len(self.names):
            wrong = f"{location}: the labels {brief(target)} are not {len(self.names)} numbers 0 or 1"
            raise DataError(wrong, "give a 0 or 1 for each label")
        return [float(value) for value in target]


def check_contrast(counts: Mapping[str, int], documents: int, problem: str) -> None:
    """Check that training rows have several labels.

    Args:
        counts: of each label, see `LabelIds.counts`.
        documents: number of rows.
        problem: as in `LabelIds`.

    Raises:
        DataError: all rows have the same label or labels.
    """
    used = [name for name, count in counts.items() if count]
    if problem == "multi_label_classification":
        if all(count in (0, documents) for count in counts.values()):
            raise DataError("all training rows have the same labels: there is no contrast to learn", "add others")
    elif len(used) < 2:
        wrong = f"all training rows have the label {brief(used[0])}" if used else "no training row has a label"
        raise DataError(f"{wrong}: there is no contrast to learn", "add rows with another label")
    if missing := [name for name in counts if name not in used]:
        notice("labels-without-rows", f"no training row has the label {', '.join(missing[:MOST_NAMED])}")


def _label(value: Any, location: str) -> Any:
    """Return a label: a text, a whole number (pandas writes 1.0), or a truth."""
    if isinstance(value, bool | str | int):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    fix = "set problem_type: regression to predict numbers" if isinstance(value, float) else "write it as a text"
    raise DataError(f"{location}: the label {brief(value)} is neither a text nor a whole number", fix)


def _number(value: Any, location: str) -> float:
    if isinstance(value, bool | list):
        raise _other_shape(value, location, "regression")
    return score_in(value, "label", location)


def _are_indicators(targets: Sequence[Any]) -> bool:
    """Return whether lists have a 0 or 1 for each label: equally many, at least two, some of them repeated."""
    first = targets[0] if targets else None
    if not isinstance(first, list) or len(first) < 2:
        return False
    return all(isinstance(row, list) and len(row) == len(first) for row in targets) and all(
        isinstance(value, int | float) and value in (0, 1) for row in targets for value in row
    )


def _other_shape(target: Any, location: str, problem: str) -> DataError:
    if isinstance(target, list):
        fix = "set problem_type: multi_label_classification, or give one label per row"
        return DataError(f"{location}: a row has the list of labels {brief(target)}", fix)
    wrong = f"{location}: the label {brief(target)} does not fit {problem}"
    return DataError(wrong, "give a number" if problem == "regression" else "give a list of labels in every row")


def _check_number(config: RunKeys, names: int, in_rows: int) -> None:
    """Check the number of labels against `num_labels` and the rows."""
    if config.num_labels is not None and config.num_labels != names:
        wrong = f"num_labels: {config.num_labels}, and there are {names} labels"
        raise ConfigError(wrong, f"set num_labels: {names}, or name the others in labels")
    if names != in_rows:
        raise ConfigError(f"labels: {names} names, and rows have {in_rows} labels", "name each of them")
