"""A folder with files of several splits trains on one of them and names the others."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from halfbyte.data.prepare import prepare
from halfbyte.data.sources import read_sources, split_to_evaluate
from halfbyte.utils.errors import DataError
from halfbyte.utils.notices import notices_so_far


@pytest.fixture
def folder(tmp_path):
    """Make a folder whose files each hold one row that names them."""

    def _folder(*names):
        for name in names:
            path = tmp_path / "d" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            row = {"text": name}
            if path.suffix == ".parquet":
                parquet.write_table(pyarrow.Table.from_pylist([row]), path)
            else:
                written = {".csv": f"text\n{name}\n", ".json": json.dumps([row]), ".txt": name}
                path.write_text(written.get(path.suffix, json.dumps(row) + "\n"))
        return str(tmp_path / "d")

    return _folder


def read(name, *args, **keys):
    return [row["text"] for source in read_sources(name, *args, **keys) for row in source.rows]


@pytest.mark.parametrize(
    ("trained", "skipped"),
    [
        (["train.jsonl"], ["validation.jsonl", "test.jsonl"]),
        (["train.json"], ["eval.json", "valid.json"]),
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
         ["data/validation-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"]),
        (["train/a.jsonl", "train/b.csv"], ["test/a.jsonl"]),
        (["my_train.jsonl"], ["my_TEST.jsonl"]),
        (["traindata.jsonl", "trainset2.jsonl"], ["testset.jsonl", "devset.jsonl"]),
        (["test/train.jsonl"], ["test/test.jsonl"]),
        (["train_gen.jsonl", "train_sft.jsonl"], ["test_sft.jsonl"]),
        (["train.jsonl"], ["more.jsonl", "train_test.jsonl"]),
        (["a.jsonl", "latest.jsonl", "constraint.txt"], []),
        (["eval/a.jsonl", "eval/b.jsonl"], []),
    ],
)  # fmt: skip
def test_training_reads_the_files_of_its_split(folder, trained, skipped):
    name = folder(*trained, *skipped)
    assert sorted(read(name)) == sorted(trained)
    notices = [message for key, message in notices_so_far().items() if key.startswith("splits:")]
    assert bool(notices) == bool(skipped)
    assert all(name in notices[0] for name in skipped)


def test_another_split_can_be_asked_for(folder):
    name = folder("train.jsonl", "dev.jsonl", "test_gen.jsonl", "test_sft.jsonl")
    assert read(name, "validation") == ["dev.jsonl"]
    assert read(name, "dev") == ["dev.jsonl"]
    assert read(name, "test") == ["test_gen.jsonl", "test_sft.jsonl"]
    assert read(name, "test_sft") == ["test_sft.jsonl"]
    assert read(name, "train+validation") == ["dev.jsonl", "train.jsonl"]
    assert read(name, "train[:10%]") == ["train.jsonl"]
    assert "dataset_split" in notices_so_far()


def test_splits_without_training_rows_are_refused(folder):
    name = folder("validation.jsonl", "test.jsonl")
    with pytest.raises(DataError, match="dataset_split"):
        read(name)
    with pytest.raises(DataError, match="dataset_split train_sft"):
        read(name, "train_sft")


def test_a_file_is_read_whatever_its_name_is(folder):
    name = folder("train.jsonl", "test.jsonl")
    assert read(f"{name}/test.jsonl") == ["test.jsonl"]


@pytest.mark.parametrize(
    ("files", "evaluated", "trained"),
    [
        (["train.jsonl", "validation.jsonl", "test.jsonl"], ["validation.jsonl"], 1),
        (["train.jsonl", "test.jsonl"], ["test.jsonl"], 1),
        (["a.jsonl", "b.jsonl"], ["a.jsonl", "b.jsonl"], 2),
    ],
)
def test_evaluation_reads_validation_where_it_is_asked_for(config, make_tokenizer, folder, files, evaluated, trained):
    name = folder(*files)
    assert read(name, evaluating=True) == evaluated
    assert read(name, split_to_evaluate(name, "train")) == evaluated
    tokenizer = make_tokenizer("plain")
    assert prepare(config(name), tokenizer).eval is None
    data = prepare(config(name, eval_dataset=name), tokenizer)
    assert data.report["eval"]["documents"] == len(evaluated)
    assert data.report["train"]["documents"] == trained
