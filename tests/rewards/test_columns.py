"""Columns that reward functions compare with are checked before sampling."""

import pytest

from halfbyte.rewards.specs import RewardSpec, check_columns, read_specs
from halfbyte.utils.errors import ConfigError, DataError

TEST = {"input": "1", "output": "2"}
CODE = [RewardSpec("code", options={"column": "tests"}, function_name="code")]


def rows(*tests):
    return [{"prompt": "add one", "columns": {"tests": each}} for each in tests]


def test_tests_of_programs():
    check_columns(CODE, rows([TEST], None, '[{"input": 1, "output": 2}]'))
    for tests, words in (
        ("what", "'tests'"),
        ({"input": "1"}, None),
        ([TEST, {"input": "1"}], "test 2"),
        ([3], "test 1"),
    ):
        with pytest.raises(DataError, match=words) as error:
            check_columns(CODE, rows([TEST], tests))
        assert "prompt 2" in str(error.value).replace("'", "")


def test_empty_column_is_refused():
    specs = read_specs(["exact"], ["solution"])
    check_columns(specs, [{"prompt": "a", "columns": {"solution": each}} for each in (None, "b")])
    with pytest.raises(DataError, match="'solution'"):
        check_columns(specs, [{"prompt": "a", "columns": {"solution": None}}])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"repetition": {"ngram_size": 0}}, "ngram_size"),
        ({"repetition": {"max_penalty": 0.5}}, "max_penalty"),
        ({"repetition": {"max_penalty": float("nan")}}, "max_penalty"),
        ({"length": -1}, None),
        ({"soft_overlong": {"cache": -1}}, "soft_overlong"),
        ({"soft_overlong": {"max": 4, "cache": 5}}, "max 4"),
    ],
)
def test_options_out_of_range(entry, words):
    with pytest.raises(ConfigError, match=words):
        read_specs([entry], [])


def test_a_column_named_as_what_functions_are_called_with():
    with pytest.raises(ConfigError, match="'completions'"):
        read_specs(["repetition"], ["answer", "completions"])
