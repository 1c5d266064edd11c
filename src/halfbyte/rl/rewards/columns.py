"""Whether the further columns of prompts suit the functions that read them, before anything is answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...reading import parse_json
from ...utils.errors import DataError
from ...utils.text import brief
from .functions import COLUMN
from .specs import RewardSpec

TESTS = 'write a list of tests, [{"input": TEXT, "output": TEXT}], or that as JSON text; null for none'


def check_columns(specs: Sequence[RewardSpec], rows: Iterable[Mapping[str, Any]]) -> None:
    """Whether the columns that halfbyte's own functions compare with hold what they read.

    Args:
        rows: prepared prompts, with `prompt` and `columns`.

    Raises:
        DataError: a column says nothing in any row, or holds no tests where programs are tested.
    """
    compared = {str(spec.options["column"]): spec.kind for spec in specs if spec.kind in COLUMN and spec.file is None}
    if not compared:
        return
    silent = set(compared)
    for number, row in enumerate(rows, 1):
        for column, kind in compared.items():
            value = row["columns"].get(column)
            if value is None:
                continue
            silent.discard(column)
            if kind == "code":
                where = f"prompt {number} ({brief(row['prompt'])}): column {column!r}"
                _check_tests(parse_json(value, where, DataError, TESTS) if isinstance(value, str) else value, where)
    for column in sorted(silent):
        said = f"column {column!r} is empty in every row, and reward {compared[column]} compares answers with it"
        raise DataError(said, "give what is right for each prompt, or take another column")


def _check_tests(tests: Any, where: str) -> None:
    if not isinstance(tests, list):
        raise DataError(f"{where} holds {brief(tests)}, no list of tests", TESTS)
    for number, test in enumerate(tests, 1):
        lacking = [key for key in ("input", "output") if not isinstance(test, Mapping) or key not in test]
        if lacking:
            raise DataError(f"{where}: test {number} has no {' and no '.join(lacking)}", TESTS)
