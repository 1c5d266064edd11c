"""The quality tables of the documents are those of the results, and llama2.c's weights become the same model."""

import json
import struct

import pytest
import torch

from benchmarks import tables
from benchmarks.harness import provenance, write_result
from benchmarks.llama2c import read_model, read_tokenizer
from benchmarks.quality import IGNORE_INDEX, documents, elsewhere, split, stored
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


def test_a_table_follows_its_result(tmp_path):
    run = {"model": "m", "text": "t", "tokens": 1, "length": 2, "dtype": "float32", "steps": 3, "batch": [4, 5]}
    rows = {"nf4": {"spec": "a:b", "bits_per_weight": 4.5, "sqnr_db": 20.7142, "perplexity": 24.0}, "kbit:9": {}}
    (tmp_path / "r.json").write_text(json.dumps({**run, "rank": 6, "device": "d", "stored_as": rows}))
    text = "before\n<!-- quality: r.json all -->\nold\n<!-- end -->\nafter <!-- quality: r.json short -->\n<!-- end -->"
    made = tables.updated(text, tmp_path)
    assert "| nf4 (`a:b`) | 4.500 | 20.71 | 24.000 |  |" in made
    assert made.count("kbit:9") == 1  # not in the short one
    assert "old" not in made
    assert tables.updated(made, tmp_path) == made


def test_rows_that_are_added_elsewhere_keep_the_others_and_say_where(tmp_path):
    """A row added on another device threw the file's others away, or gave them its own device."""
    file, run = tmp_path / "r.json", {"model": "m", "tokens": 1, "on": "cpu"}
    here = provenance()
    assert stored(file, run) == {}
    assert elsewhere({}) == {}
    write_result(file, run | {"device": "another", "commit": "c", "on": "cuda", "stored_as": {"nf4": {"sqnr_db": 1.0}}})
    kept = stored(file, run)
    assert kept == {**here, "device": "another", "commit": "c", "on": "cuda", "stored_as": {"nf4": {"sqnr_db": 1.0}}}
    assert elsewhere(kept) == {"device": here["device"], "commit": here["commit"]}
    assert elsewhere(kept | {"device": here["device"]}) == {}
    assert stored(file, run | {"tokens": 2}) == {}
    row = {"spec": "hqq:4:64:range", **elsewhere(kept)}
    assert tables._label("int4", row) == f"int4 (`hqq:4:64:range`), on {here['device']}"


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


def test_stories260k_tells_its_story(shared):
    """The first words of llama2.c's documentation of the model, greedily."""
    folder = shared / "data" / "weights"
    model = read_model(folder / "stories260K.bin").eval()
    tokenizer = read_tokenizer(folder / "tok512.bin", model.config.vocab_size)
    story = model.generate(torch.tensor([[tokenizer.bos_token_id]]), max_new_tokens=60, do_sample=False)
    text = tokenizer.decode(story[0], skip_special_tokens=True)
    assert text.strip() in (folder / "stories260K.doc.md").read_text()
    ids = tokenizer(text.strip(), add_special_tokens=False)["input_ids"]
    assert ids == story[0, 1:].tolist()


def test_a_truncated_model_is_refused(tmp_path):
    (tmp_path / "m.bin").write_bytes(struct.pack("7i", 8, 16, 1, 2, 2, 32, 8) + bytes(4 * 200))
    with pytest.raises(SystemExit, match="holds 200 weights, fewer than its header"):
        read_model(tmp_path / "m.bin")
