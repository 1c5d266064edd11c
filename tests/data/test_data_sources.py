"""Every kind of file is read, and errors name file and line."""

import errno
import functools
import gzip
import json
import os
import random
import re

import datasets
import pyarrow
import pytest
import tqdm
from pyarrow import parquet

from halfbyte.data.sources import read_sources
from halfbyte.utils.errors import DataError
from halfbyte.utils.notices import notices_so_far

ROWS = [{"question": "1+1?", "answer": "2"}, {"question": '2, "or"\n3?', "answer": "both"}]


def rows_of(*names):
    return [source.rows for source in read_sources(list(names))]


COMPRESSORS = {".gz": "gzip", ".zst": "zstd"}


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("d.jsonl", '{"a": "ü"}\n\n{"a": 2}\n', [{"a": "ü"}, {"a": 2}]),
        ("d.json", '[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
        ("d.csv", "a,b\n1,2\n", [{"a": "1", "b": "2"}]),
        ("D.TSV", "a\tb\n1\t2\n", [{"a": "1", "b": "2"}]),
        ("d.txt", "one\n\ntwo", [{"text": "one"}, {"text": "two"}]),
    ],
)
def test_compressed_text_files(name, text, rows, suffix, tmp_path):
    path = tmp_path / (name + suffix)
    with pyarrow.CompressedOutputStream(str(path), COMPRESSORS[suffix]) as stream:
        stream.write(text.encode())
    for read in (str(path), str(tmp_path)):
        [source] = read_sources(read)
        assert source.rows == rows
        assert source.path == str(path)


def test_splits_are_found_in_the_names_of_compressed_files(tmp_path):
    for name in ("train_sft", "test_sft"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(json.dumps({"a": name}).encode()))
    assert [source.rows for source in read_sources(str(tmp_path), "test_sft")] == [[{"a": "test_sft"}]]
    assert [source.rows for source in read_sources(str(tmp_path))] == [[{"a": "train_sft"}]]


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("damage", ["truncated", "not compressed", "not UTF-8"])
def test_damaged_compressed_files_are_named(damage, suffix, tmp_path):
    path = tmp_path / f"d.jsonl{suffix}"
    with pyarrow.CompressedOutputStream(str(path), COMPRESSORS[suffix]) as stream:
        stream.write(
            b'{"a": "\xff"}'
            if damage == "not UTF-8"
            else b'{"a": "%s"}' % random.Random(0).randbytes(5000).hex().encode()
        )
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-900])
    if damage == "not compressed":
        path.write_text('{"a": 1}')
    with pytest.raises(DataError, match=re.escape(str(path))):
        read_sources(str(path))


def test_jsonl_skips_blank_lines_and_numbers_the_others(write):
    [source] = read_sources(write('{"a": 1}\n\n  \n{"a": 2}\n'))
    assert source.rows == [{"a": 1}, {"a": 2}]
    assert source.location(1).endswith("data.jsonl:4")


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: {"data": rows}])
def test_json_array_or_data(write, wrap):
    assert rows_of(write(json.dumps(wrap(ROWS)), "d.json")) == [ROWS]


def test_json_and_jsonl_are_recognised_by_content(write):
    lines = "\n".join(map(json.dumps, ROWS))
    assert rows_of(write(lines, "lines.json")) == [ROWS]
    assert rows_of(write(json.dumps(ROWS, indent=1), "array.jsonl")) == [ROWS]


def test_csv_with_quotes_and_newlines(write):
    text = 'question,answer\n1+1?,2\n"2, ""or""\n3?",both\n'
    [source] = read_sources(write(text, "d.csv"))
    assert source.rows == ROWS
    assert source.location(1).endswith("d.csv:3")


def test_parquet_drops_the_nulls_that_arrow_adds(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "tool", "content": "b", "name": "f"}]},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema([("messages", pyarrow.list_(pyarrow.struct(
        {"role": pyarrow.string(), "content": pyarrow.string(), "name": pyarrow.string()}))
    )])), tmp_path / "d.parquet")  # fmt: skip
    assert rows_of(str(tmp_path / "d.parquet")) == [rows]


@pytest.mark.parametrize(
    ("text", "documents", "unit"),
    [
        ("one\n\nstill one<|endoftext|>\ntwo\n<|endoftext|>\n", ["one\n\nstill one", "two"], "up to each"),
        ("one\nmore\n\n \ntwo\n\n", ["one\nmore", "two"], "between blank lines"),
        ("one\ntwo\n", ["one", "two"], "per line"),
    ],
)
def test_text_documents(write, text, documents, unit):
    [source] = read_sources(write(text, "d.txt"))
    assert [row["text"] for row in source.rows] == documents
    assert unit in source.note


SAVED = [{"messages": [{"role": "user", "content": f"question {n}"}]} for n in range(5)]


def saved(rows, folder, **options):
    datasets.Dataset.from_list(rows).save_to_disk(str(folder), **options)
    return folder


def test_a_folder_of_save_to_disk_is_read_in_order_without_its_descriptions(tmp_path):
    (source,) = read_sources(str(saved(SAVED, tmp_path / "saved", num_shards=2)))
    assert (source.file_format, source.rows, source.path) == ("arrow", SAVED, str(tmp_path / "saved"))
    assert not notices_so_far()


@pytest.mark.parametrize(
    ("keys", "rows"), [({}, SAVED), ({"split": "test"}, SAVED[:2]), ({"evaluating": True}, SAVED[:2])]
)
def test_splits_of_save_to_disk(tmp_path, keys, rows):
    rows_saved = datasets.Dataset.from_list(SAVED)
    datasets.DatasetDict({"train": rows_saved, "test": rows_saved.select(range(2))}).save_to_disk(str(tmp_path))
    assert [row for source in read_sources(str(tmp_path), **keys) for row in source.rows] == rows


@pytest.mark.parametrize("as_file", [True, False])
def test_arrow_files_are_read(tmp_path, as_file):
    folder = saved(SAVED, tmp_path / "saved")
    (folder / "state.json").unlink()  # as in the library's cache
    (source,) = read_sources(str(next(folder.glob("*.arrow")) if as_file else folder))
    assert (source.file_format, source.rows) == ("arrow", SAVED)


@pytest.mark.parametrize("change", [
    lambda folder: (folder / "state.json").write_text("{}"),
    lambda folder: next(folder.glob("*.arrow")).write_bytes(b"no"),
    lambda folder: next(folder.glob("*.arrow")).unlink(),
])  # fmt: skip
def test_a_damaged_folder_of_save_to_disk_is_named(tmp_path, change):
    folder = saved(SAVED, tmp_path / "saved")
    change(folder)
    with pytest.raises(DataError, match=str(folder)):
        read_sources(str(folder))


def test_folder_reads_known_files_in_order_and_names_skipped_ones(write, tmp_path):
    write([{"text": "b"}], "folder/b.jsonl")
    write("a", "folder/a.txt")
    write("?", "folder/c.xlsx")
    assert rows_of(str(tmp_path / "folder")) == [[{"text": "a"}], [{"text": "b"}]]
    assert any("c.xlsx" in message for message in notices_so_far().values())


def test_several_sources_are_concatenated(write):
    assert rows_of(write([{"text": "a"}], "a.jsonl"), write([{"text": "b"}], "b.jsonl")) == [
        [{"text": "a"}],
        [{"text": "b"}],
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("d.jsonl", '{"a": 1}\n\n{"a": \n', r"d\.jsonl:3:.*JSON"),
        ("d.json", '[{"a": 1},\n{"a" 2}]', r"d\.json:2:.*JSON:.*6"),
        ("d.json", '[{"a": 1}, "b"]', r"d\.json, row 2:"),
        ("d.csv", "a,b\n1,2\n1,2,3\n", r"d\.csv:3: 3 .* 2"),
        ("d.csv", 'a,b\n1,"2\n', r"d\.csv:2:.*CSV"),
        ("d.csv", "prompt,prompt,completion\n1,2,3\n", r"d\.csv:1:.*'prompt'"),
        ("d.jsonl", '{"a": 1}\n{"n": ' + "9" * 5000 + "}\n", r"d\.jsonl:2:"),
        ("d.jsonl", '{"a": ' + "[" * 100_000, r"d\.jsonl:1:.*100 levels"),
        ("d.jsonl", '{"a": 1, "a": 2}', r"d\.jsonl:1:.*'a'"),
        ("d.parquet", "PAR1 and nothing that it says PAR1", r"d\.parquet"),
        ("d.xlsx", "?", r"d\.xlsx"),
        ("d.jsonl", "", None),
    ],
)
def test_malformed_files_are_named(write, name, content, message):
    with pytest.raises(DataError, match=message):
        read_sources(write(content, name))


def test_not_utf8(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match="UTF-8"):
        read_sources(str(tmp_path / "d.jsonl"))


def test_duplicate_column_names_are_refused(tmp_path):
    column = pyarrow.array(["a"])
    parquet.write_table(pyarrow.Table.from_arrays([column, column], ["text", "text"]), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet:.*'text'"):
        read_sources(str(tmp_path / "d.parquet"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x" * 5000, None),
        ("a\0b.jsonl", None),
        ("pipe.jsonl", None),
        ("loop.jsonl", None),
        ("nowhere.jsonl", "gone.jsonl"),
        ("~nobody-of-this-name/x.jsonl", None),
    ],
)
def test_unusable_paths_are_named(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.jsonl")
    os.symlink("loop.jsonl", "loop.jsonl")
    os.symlink("gone.jsonl", "nowhere.jsonl")
    with pytest.raises(DataError, match=message):
        read_sources(name)


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    """The error is simulated, because tests run as root."""

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"{tmp_path}:"):
        read_sources(str(tmp_path))


def test_folder_with_too_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("halfbyte.data.sources.MOST_FILES", 3)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("a")
    with pytest.raises(DataError, match="3 files"):
        read_sources(str(tmp_path))


def test_hidden_folders_hold_no_data(write, tmp_path):
    write("a", "folder/a.txt")
    write("b", "folder/.cache/b.txt")
    assert rows_of(str(tmp_path / "folder")) == [[{"text": "a"}]]


def test_long_file_shows_progress(write, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("halfbyte.data.sources.LONG", 1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("tqdm.tqdm", functools.partial(tqdm.tqdm, mininterval=0))
    monkeypatch.setattr("halfbyte.data.sources.SHOWN_AFTER", 0)
    assert rows_of(write('{"a": 1}\n' * 50)) == [[{"a": 1}] * 50]
    assert "data.jsonl: 100%" in capsys.readouterr().err
    assert rows_of(write(json.dumps([{"a": 1}] * 50), "rows.json")) == [[{"a": 1}] * 50]
    assert "rows.json: 100%" in capsys.readouterr().err
    parquet.write_table(pyarrow.Table.from_pylist([{"a": 1}] * 50), tmp_path / "d.parquet", row_group_size=10)
    assert rows_of(str(tmp_path / "d.parquet")) == [[{"a": 1}] * 50]
    assert "d.parquet: 100%" in capsys.readouterr().err


def test_missing_file_names_the_closest(write, tmp_path):
    write([{"text": "a"}], "folder/train.jsonl")
    with pytest.raises(DataError, match=r"folder/train\.jsonl"):
        read_sources(str(tmp_path / "folder" / "trian.jsonl"))
    with pytest.raises(DataError, match=r"/folder\)"):
        read_sources(str(tmp_path / "foldr" / "train.jsonl"))


def test_hub_id_offline_is_one_clear_error(monkeypatch):
    import datasets

    def offline(name, split):
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub (OfflineModeIsEnabled)\nmore")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="'some-owner/some-set'"):
        read_sources("some-owner/some-set")


def test_hub_rows(monkeypatch):
    import datasets

    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, split: datasets.Dataset.from_dict({"text": [f"{name} {split}"]})
    )
    [source] = read_sources("some-owner/some-set", "test")
    assert source.rows == [{"text": "some-owner/some-set test"}]
    assert source.file_format == "hub"
