"""The quality tables of the documents are those of the results, and llama2.c's weights become the same model."""

import json

import pytest
import torch

from benchmarks import tables
from benchmarks.quality import IGNORE_INDEX, documents, split
from halfbyte.formats import named, names


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_up_to_date(path):
    text = path.read_text(encoding="utf-8")
    assert tables.updated(text, tables.ROOT / "benchmarks" / "results") == text, "run python -m benchmarks.tables"


RESULTS = sorted((tables.ROOT / "benchmarks" / "results").glob("quality_*.json"))


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_names_mean_what_they_meant_when_measured(file):
    for name, row in json.loads(file.read_text())["stored_as"].items():
        if name in names():
            assert row["spec"] == named(name).spec, name


def test_documents_and_held_out_windows(tmp_path):
    (tmp_path / "t.txt").write_text("one\n\nmore of one\ntwo\n")
    (tmp_path / "t.jsonl").write_text('{"text": "one"}\n{"text": "two\\nlines"}\n')
    assert documents(tmp_path / "t.txt") == ["one\nmore of one", "two"]
    assert documents(tmp_path / "t.jsonl") == ["one", "two\nlines"]
    rows = torch.arange(10 * 512).view(10, 512)
    rows[3, 300:] = IGNORE_INDEX
    held, others = split(rows, 1024)
    assert 512 <= len(held) * 512 <= 2048
    assert not set(held.flatten().tolist()) & set(others.flatten().tolist()) - {IGNORE_INDEX}
    assert torch.equal(others, split(rows, 1024)[1])  # the same order every time
    assert (others[:, 1] != IGNORE_INDEX).all()
