"""A run is given by a file, or by a model and data; other arguments are refused with the line to write."""

import pytest

from halfbyte.cli.arguments import check_order, read_run
from halfbyte.utils.errors import ConfigError, UsageError


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model_name_or_path: m\ndataset: d.jsonl\nr: 4\n")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1" / "d.jsonl").touch()
    return tmp_path


def asked(line: str):
    config = read_run("train", line.split(), ["--resume"])
    return config.model_name_or_path, config.dataset, config.r


RUNS = {
    "run.yaml": ("m", "d.jsonl", 4),
    "run.yaml r=8": ("m", "d.jsonl", 8),
    "--r 8 run.yaml": ("m", "d.jsonl", 8),
    "m d.jsonl": ("m", "d.jsonl", 16),
    "m d.jsonl --r=8": ("m", "d.jsonl", 8),
    "owner/name lr=1/d.jsonl": ("owner/name", "lr=1/d.jsonl", 16),
    "m dataset=d.jsonl": ("m", "d.jsonl", 16),
    "model_name_or_path=m dataset=[a.jsonl,b.jsonl]": ("m", ["a.jsonl", "b.jsonl"], 16),
    "base_model=m dataset=d.jsonl": ("m", "d.jsonl", 16),
    "base.gguf 7": ("base.gguf", "7", 16),
}


@pytest.mark.parametrize("line", RUNS)
def test_a_run_is_a_file_or_a_model_and_data(line):
    assert asked(line) == RUNS[line]


WRONG = {
    "m": ("m is ", "write halfbyte train MODEL DATA, or RUN.YAML"),
    "r=4": ("model_name_or_path is missing", "MODEL DATA"),
    "model_name_or_path=m": ("dataset is missing", "MODEL DATA"),
    "m d.jsonl more": ("more is one name too many", "[KEY=VALUE]"),
    "m d.jsonl dataset=e.jsonl": ("dataset is given twice", "once"),
    "run.yaml d.jsonl": ("d.jsonl is not KEY=VALUE", "write dataset=d.jsonl"),
    "d.jsonl m": ("d.jsonl is a dataset", "write halfbyte train m d.jsonl"),
    "run.yaml --resum": ("there is no option --resum", "did you mean --resume?"),
    "run.yaml --res": ("there is no option --res", "did you mean --resume?"),
    "run.yaml --learning-rte 1": ("there is no option --learning-rte", "did you mean --learning_rate?"),
    "run.yaml -x": ("there is no option -x", "leave it out"),
    "run.yaml --r": ("command line: --r needs a value", "write --r VALUE"),
}


@pytest.mark.parametrize("line", WRONG)
def test_ambiguous_arguments_are_wrong_usage(line):
    with pytest.raises(UsageError) as error:
        asked(line)
    what, fix = WRONG[line]
    assert error.value.message.startswith(what)
    assert fix in error.value.fix


def test_missing_file_is_refused():
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        asked("other.yaml")


def test_two_folders_are_in_any_order():
    check_order("init", "m", "folder")
    check_order("init", "m", "m")
