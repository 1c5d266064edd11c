"""Read rows: JSONL, JSON, CSV, Parquet, Arrow and text files, folders of them, and datasets of the Hub.

Text files may be compressed (.gz, .zst).

Every reader returns plain dictionaries and the place of each row, so that later errors can name file and line. In a
folder, a file belongs to a split by its name (`train.jsonl`, `train-00000-of-00002.parquet`, `squad_dev.json`), or by
the name of the nearest folder (`test/data.csv`), as in datasets.load_dataset; only names below the dataset's folder
count. A folder that datasets' `save_to_disk` wrote is represented by its `state.json`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ..config.datasets import DatasetEntry
from ..reading import look, open_bytes, open_text, parse_json
from ..utils.errors import DataError, explain_os_error, first_line
from ..utils.hub import id_of_url, is_local, nearest_path
from ..utils.notices import notice
from ..utils.streams import no_dataset_bars
from ..utils.text import brief

Row = dict[str, Any]

END_OF_TEXT = "<|endoftext|>"
OTHER_UNICODE = " (there is one with the same letters in another Unicode normalization)"
MOST_FILES = 10_000  # in a data folder, pictures aside; one with more files, such as `/`, is a mistake
PICTURES = {".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
# datasets' layout "imagefolder": a table of this name beside the images, whose columns (image_)file_name(s) name them.
IMAGE_TABLE, FILE_NAMES = "metadata", re.compile(r"(?:(?P<column>.+)_)?file_names?")
LONG, SHOWN_AFTER = 2**26, 1.0  # a progress bar is shown for files of at least LONG bytes, after SHOWN_AFTER seconds
TRAIN = "train"
KINDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
# Files that datasets' `save_to_disk` writes: of a dataset, of its columns, and of a folder of splits.
SAVED = "state.json"
DESCRIPTION, SAVED_SPLITS = "dataset_info.json", "dataset_dict.json"
SHARD = re.compile(r"-\d+-of-\d+$")
SUFFIX = re.compile(r"(?<=.)(set|data|split)$")  # as in trainset, testdata
MOST_NAMED = 10
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}  # suffix of a compressed text file → its name in Arrow
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt")
# pandas writes 1.0 for float labels.
TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
LISTS = ("messages", "completions", "labels")


@dataclass(frozen=True)
class Source:
    """The rows of one file or Hub dataset, in order.

    Attributes:
        path: the file, or the Hub id.
        file_format: jsonl, json, csv, parquet, arrow, text or hub.
        rows: column name to value, one dictionary per row.
        lines: the line where each row starts (1-based), for kinds with lines.
        note: how plain text was split into documents; empty for the other kinds.
        dataset: number of its dataset, among several.
        first: number of the first row in its dataset, for a part of a stream.
    """

    path: str
    file_format: str
    rows: list[Row]
    lines: Sequence[int] | None = None
    note: str = ""
    dataset: int = 0
    first: int = 0

    def location(self, index: int) -> str:
        """Return the place of row `index`: `file:line`, or `file, row N` (1-based)."""
        return f"{self.path}:{self.lines[index]}" if self.lines else f"{self.path}, row {self.first + index + 1}"


def read_sources(
    names: str | Sequence[str | DatasetEntry], split: str = TRAIN, *, evaluating: bool = False
) -> list[Source]:
    """Read one or several datasets, each a file, a folder of files, or (if no such path exists) a Hub id.

    Args:
        split: the split of a Hub dataset, or of a folder whose files are named for splits; for entries without one.
        evaluating: prefer a folder's validation or test files to its training files.

    Raises:
        DataError: a file is missing, malformed or of an unknown kind, or there are no rows at all.
    """
    named = [names] if isinstance(names, str) else names
    entries = [DatasetEntry(name) if isinstance(name, str) else name for name in named]
    sources: list[Source] = []
    for number, entry in enumerate(entries):
        left = entry.max_samples
        for source in _read(entry.path, entry.split or split, evaluating):
            source = replace(source, rows=source.rows[:left], dataset=number)
            left = None if left is None else left - len(source.rows)
            sources += [source] if source.rows else []
    if not sources:
        paths = ", ".join(entry.path for entry in entries)
        raise DataError(f"the dataset is empty: {paths} holds no rows", "put at least one row into it")
    return sources


def files_to_read(name: str, split: str, evaluating: bool = False) -> list[Path] | None:
    """Return the files of a dataset that belong to `split`; None for a Hub id. The other arguments and the errors are
    those of `read_sources`."""
    files = files_of(name)
    if files is None:
        return None
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        return files_of_split(files, folder, split_to_evaluate(name, split) if evaluating else split)
    if split != TRAIN:
        notice("dataset_split", f"dataset_split: {split} does not apply to the file {name}: reading all its rows")
    return files


def _read(name: str, split: str, evaluating: bool) -> list[Source]:
    files = files_to_read(name, split, evaluating)
    if files is None:
        import datasets

        try:
            with no_dataset_bars():
                dataset = datasets.load_dataset(name, split=split)
        except Exception as error:  # from datasets, huggingface_hub, httpx, Arrow or the files' contents
            reason = first_line(error)
            raise DataError(
                f"dataset {name!r} is not a local file or folder{closest(Path(name))}, and the Hub answers: {reason}",
                "give an existing path, or the id of a Hub dataset (`dataset_split` picks its split) while online",
            ) from error
        return [
            Source(
                name, "hub", [without_null(row) for row in _undecoded(dataset)], note=f"split {split} of a Hub dataset"
            )
        ]
    return [_read_arrow(file) if file.name == SAVED else _with_images(READERS[suffix_of(file)](file)) for file in files]


def _with_images(source: Source) -> Source:
    """Return the rows of a table of an image folder with columns of images in place of names of files; another source
    unchanged."""
    if suffix_of(Path(source.path)) == ".txt" or Path(source.path).name.partition(".")[0] != IMAGE_TABLE:
        return source
    columns = {
        name: match
        for name in dict.fromkeys(name for row in source.rows for name in row)
        if (match := FILE_NAMES.fullmatch(name))
    }
    new = {name: match["column"] or ("images" if name.endswith("s") else "image") for name, match in columns.items()}
    new = {name: column for name, column in new.items() if not any(column in row for row in source.rows)}
    rows = [{new.get(name, name): value for name, value in row.items()} for row in source.rows]
    return replace(source, rows=rows)


def split_to_evaluate(name: str, split: str) -> str:
    """Return the split of a dataset to evaluate on: a folder's validation or test files, unless `split` names
    another split."""
    files, folder = files_of(name), Path(os.path.expanduser(name))
    return evaluation_split(files, folder, split) if files and folder.is_dir() else split


def files_of(name: str) -> list[Path] | None:
    """Return the files of a dataset without reading them; None for a Hub id.

    Raises:
        DataError: the file does not exist or is of an unknown kind, or a folder has no file of a known kind.
    """
    path = Path(os.path.expanduser(name))
    match look(path, DataError, "check the path"):
        case "folder":
            return _files_in(path)
        case "file":
            if suffix_of(path) not in READERS:
                raise DataError(f"{path} is of an unknown kind", f"use one of {KNOWN}")
            return [path]
    if not is_local(name):
        return None
    if "://" in name:
        hub_id = id_of_url(name)
        fix = f"write {hub_id}" if hub_id else "download it, and give the file's path"
        raise DataError(f"{name}: halfbyte does not read data from URLs", fix)
    fix = "give the folder, or a list of files" if "*" in name else "check the path"
    names = [entry.strip() for entry in name.split(",")]
    if len(names) > 1 and os.path.exists(os.path.expanduser(names[0])):
        fix = f"write several as a list: [{', '.join(names)}]"
    if (near := closest(path)) == OTHER_UNICODE:
        fix = "rename that file, or give its folder"
    raise DataError(f"no such file: {name}{near}", fix)


def closest(path: Path) -> str:
    """Return the existing neighbour with the most similar name, as the end of a message."""
    near = nearest_path(path)
    if near and unicodedata.normalize("NFC", str(near)) == unicodedata.normalize("NFC", str(path)):
        return OTHER_UNICODE
    return f" (the closest existing one is {near})" if near else ""


def _files_in(folder: Path) -> list[Path]:
    files: list[Path] = []
    other_files = 0  # files that are no pictures

    def refuse(error: OSError) -> None:
        raise DataError(
            f"cannot read {error.filename}: {explain_os_error(error)}", "change its permissions, or give another path"
        )

    for directory, inner, names in os.walk(folder, onerror=refuse):
        inner[:] = [name for name in inner if not name.startswith(".")]
        if SAVED in names and DESCRIPTION in names:
            names, inner[:] = [SAVED], []
        elif any(name.endswith(".arrow") for name in names) or SAVED_SPLITS in names:
            names = [name for name in names if name not in (DESCRIPTION, SAVED_SPLITS)]
        paths = (Path(directory, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file()]
        other_files += sum(Path(name).suffix.lower() not in PICTURES for name in names)
        if other_files > MOST_FILES:
            raise DataError(f"{folder} holds more than {MOST_FILES:,} files", "give a folder that contains only data")
    files.sort()
    data_files = [file for file in files if suffix_of(file) in READERS]
    if not data_files:
        raise DataError(f"no data files in {folder}", f"add files of these kinds: {KNOWN}")
    if len(data_files) < len(files):
        unread = [file for file in files if suffix_of(file) not in READERS]
        pictures = sum(file.suffix.lower() in PICTURES for file in unread)
        skipped = [str(file.relative_to(folder)) for file in unread if file.suffix.lower() not in PICTURES]
        skipped += [f"{pictures:,} pictures, which rows may name"] * (pictures > 0)
        remainder = f" and {len(skipped) - 10:,} more" if len(skipped) > 10 else ""
        left_out = ", ".join(skipped[:10]) + remainder
        notice(f"data-folder:{folder}", f"{folder}: skipping {left_out} (known kinds: {KNOWN})")
    return data_files


def suffix_of(path: Path) -> str:
    """Return the suffix of a file that names its kind, in lower case; for a compressed text file the one before."""
    suffix = path.suffix.lower()
    plain = Path(path.stem).suffix.lower()
    return plain if suffix in COMPRESSIONS and plain in TEXT_SUFFIXES else suffix


@contextlib.contextmanager
def _open_text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """Open a text file, decompressed, for reading.

    Raises:
        DataError: it cannot be read, is damaged, or is not UTF-8.
    """
    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        with open_text(path, DataError, newline=newline) as file:
            yield file
        return
    import pyarrow

    with open_bytes(path, DataError) as packed:
        try:
            with pyarrow.CompressedInputStream(packed, compression) as stream:
                yield io.TextIOWrapper(stream, "utf-8-sig", newline=newline)
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8: {error.reason}", "save the file as UTF-8") from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise DataError(f"{path} is not a complete {compression} file: {error}", "copy the file again") from None


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of an open file, with a progress bar."""
    with _bar(path, path.stat().st_size, "B") as further:
        for line in file:
            further(len(line))
            yield line


@contextlib.contextmanager
def _bar(path: Path, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar for a long file on a terminal; yields the function that advances it."""
    if path.stat().st_size < LONG or not sys.stderr.isatty():
        yield lambda amount: None
        return
    from tqdm import tqdm

    name = f"reading {path.name}"
    with tqdm(total=total, desc=name, unit=unit, unit_scale=True, delay=SHOWN_AFTER, leave=False) as bar:
        yield bar.update


def _read_jsonl(path: Path) -> Source:
    try:
        return _source_of("jsonl", path, jsonl_rows(path))
    except _IsArrayError:
        return _read_json(path)


def _source_of(file_format: str, path: Path, numbered: Iterator[tuple[int, Row]]) -> Source:
    rows, lines = [], []
    for line, row in numbered:
        rows.append(row)
        lines.append(line)
    return Source(str(path), file_format, rows, lines)


class _IsArrayError(DataError):
    """A file of JSON lines is one JSON array."""


def jsonl_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file of JSON lines with their line numbers (from 1).

    Raises:
        DataError: the file cannot be read, a line is not a JSON object, or the file is one JSON array.
    """
    with _open_text(path) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith("["):
                raise _IsArrayError(f"{path} is one JSON array", "write one row per line (JSONL)")
            row = parse_json(line, str(path), DataError, "correct this line", line=number, unique=True)
            yield number, _checked(row, f"{path}:{number}")


def _read_json(path: Path) -> Source:
    with _open_text(path) as file:
        text = "".join(_lines(file, path))
    if not text.strip():
        return Source(str(path), "json", [])
    first_line, _, later_lines = text.strip().partition("\n")
    if (
        first_line.startswith("{") and first_line.rstrip().endswith("}") and later_lines
    ):  # one object per line: JSONL named .json
        return _read_jsonl(path)
    value = parse_json(text, str(path), DataError, "correct the file", unique=True)
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    rows = value if isinstance(value, list) else [value]
    return Source(str(path), "json", [_checked(row, f"{path}, row {i}") for i, row in enumerate(rows, 1)])


def _checked(row: Any, location: str) -> Row:
    if isinstance(row, dict):
        return row
    raise DataError(f"{location}: the row is a {type(row).__name__}, not an object", 'write rows as {"column": value}')


def _read_csv(path: Path) -> Source:
    return _source_of("csv", path, csv_rows(path))


def csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a CSV or TSV file with the lines where they start (from 1).

    Raises:
        DataError: the file cannot be read, or is malformed.
    """
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is shorter than a long document
    with _open_text(path, newline="") as file:
        start = 1  # a row's first line: quoted fields may contain newlines
        try:
            delimiter = "\t" if suffix_of(path) == ".tsv" else ","
            reader = csv.DictReader(_lines(file, path), delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            _check_delimiter(names, delimiter, f"{path}:1")
            _check_columns(names, f"{path}:1")
            start = reader.line_num + 1
            for row in reader:
                if None in row or None in row.values():
                    fields = sum(value is not None for key, value in row.items() if key) + len(row.get(None) or [])
                    fix = "put fields that hold commas or quotes in quotes"
                    raise DataError(f"{path}:{start}: {fields} fields, but the header has {len(names)}", fix)
                yield start, dict(row)
                start = reader.line_num + 1
        except csv.Error as error:
            wrong = f"{path}:{start}: malformed CSV in the row that starts here: {error}"
            raise DataError(wrong, "close its quotes, and double quotes inside fields") from None


def _check_delimiter(names: Sequence[str], delimiter: str, location: str) -> None:
    """Raise a DataError if the header is a single name that contains another delimiter."""
    delimiter_names = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
    actual = next(
        (mark for mark in delimiter_names if mark != delimiter and len(names) == 1 and mark in names[0]), None
    )
    if actual is not None:
        wrong = f"{location}: the header is {brief(names[0])}: its fields are separated by {delimiter_names[actual]}"
        fix = {"\t": "name it .tsv", ",": "name it .csv"}.get(actual, f"separate them by {delimiter_names[delimiter]}")
        raise DataError(wrong, fix)


def _check_columns(names: Sequence[str], location: str) -> None:
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise DataError(f"{location}: two columns are named {brief(twice[0])}", "rename or remove one of them")


def _read_parquet(path: Path) -> Source:
    from pyarrow import parquet

    with open_bytes(path, DataError):
        pass  # raises for a missing, unreadable or special file
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, str(path))
            rows: list[Row] = []
            with _bar(path, file.metadata.num_rows, " rows") as further:
                for batch in file.iter_batches():
                    rows += map(without_null, batch.to_pylist())
                    further(len(batch))
    except DataError:
        raise
    except OSError as error:
        if error.errno is None:  # Arrow raises OSError for damaged files, too
            raise DataError(f"{path} is not a readable Parquet file: {error}", "copy the file again") from None
        raise DataError(f"cannot read {path}: {explain_os_error(error)}", "check the file, or give another") from None
    except Exception as error:  # Arrow's own, or Python's for a value that Python cannot represent
        reason = first_line(error)
        raise DataError(f"{path} is not a readable Parquet file: {reason}", "copy the file again") from None
    return Source(str(path), "parquet", rows)


def without_null(row: Row) -> Row:
    """Drop nulls inside nested values: Arrow gives every struct the union of all keys, with nulls for missing ones."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {key: clean(value) for key, value in row.items()}


def _undecoded(dataset: Any) -> Any:
    """Return a dataset whose `Image` columns give files and bytes in place of pixels."""
    import datasets

    for name, feature in dataset.features.items():
        inner = getattr(feature, "feature", feature)  # of a list
        if isinstance(inner, datasets.Image):
            encoded: Any = datasets.Image(decode=False)
            with no_dataset_bars():
                dataset = dataset.cast_column(name, encoded if inner is feature else datasets.List(encoded))
    return dataset


def _read_arrow(path: Path) -> Source:
    """Read an Arrow file, or the folder of a state.json, which datasets' `save_to_disk` wrote."""
    import datasets

    with open_bytes(path, DataError):
        pass  # raises for a missing, unreadable or special file
    load: Callable[[str], Any] = datasets.load_from_disk if path.name == SAVED else datasets.Dataset.from_file
    path = path.parent if path.name == SAVED else path
    try:
        with no_dataset_bars():
            dataset = load(str(path))
        _check_columns(dataset.column_names, str(path))
        return Source(str(path), "arrow", [without_null(row) for row in _undecoded(dataset)])
    except DataError:
        raise
    except Exception as error:  # Arrow's own, the library's, or Python's for a damaged description
        reason = first_line(error)
        raise DataError(f"{path} is not a readable Arrow dataset: {reason}", "save or copy it again") from None


def _read_text(path: Path) -> Source:
    """Read plain text: documents end at <|endoftext|> if the file has it, else at blank lines, else at every line."""
    with _open_text(path) as file:
        text = "".join(_lines(file, path))
    if END_OF_TEXT in text:
        documents, unit = text.split(END_OF_TEXT), f"up to each {END_OF_TEXT}"
    elif re.search(r"\n[ \t]*\n", text.strip()):
        documents, unit = re.split(r"\n(?:[ \t]*\n)+", text), "per block between blank lines"
    else:
        documents, unit = text.split("\n"), "per line"
    rows = [{"text": document.strip("\n")} for document in documents if document.strip()]
    return Source(str(path), "text", rows, note=f"plain text, one document {unit}")


READERS: dict[str, Callable[[Path], Source]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".txt": _read_text,
}
KNOWN = f"{', '.join(READERS)}, text also with {' or '.join(COMPRESSIONS)}"


# --- splits of a folder -----------------------------------------------------------------------------------------------


def files_of_split(files: Sequence[Path], folder: Path, split: str) -> list[Path]:
    """Return the files of `folder` that belong to `split`, with one notice about the others.

    If no file is named for a split, all files are returned.

    Args:
        split: a key of KINDS or one of its names, a name that files have (train_sft), or several joined by +.

    Raises:
        DataError: all files belong to other splits.
    """
    names = {file: _split_of(file, folder) for file in files}
    if not any(names.values()):
        if split != TRAIN:
            notice(
                "dataset_split", f"dataset_split: {split}: no file of {folder} is named for a split: reading all rows"
            )
        return list(files)
    splits = [entry.partition("[")[0].strip() for entry in split.split("+")]
    if "[" in split:
        notice(
            "dataset_split",
            f"dataset_split: {split}: slices do not apply to files: reading all rows of {' and '.join(splits)}",
        )
    selected = [file for file in files if any(_is_of(names[file], entry) for entry in splits)]
    if not selected and splits == [TRAIN]:
        selected = [file for file in files if not names[file]]
        if not selected and len({_split_name(name) for name in names.values()}) == 1:
            selected = list(files)
    if not selected:
        present = ", ".join(dict.fromkeys(name for name in names.values() if name))
        raise DataError(
            f"{folder} has no files of dataset_split {split}; it has files of: {present}",
            f"set dataset_split to one of these, or give files, e.g. {files[0]}",
        )
    if left_out := [str(file.relative_to(folder)) for file in files if file not in selected]:
        remainder = f" and {len(left_out) - MOST_NAMED:,} more" if len(left_out) > MOST_NAMED else ""
        notice(
            f"splits:{folder}:{split}",
            f"{folder}: reading the {len(selected):,} files of split {split} and skipping"
            f" {', '.join(left_out[:MOST_NAMED])}{remainder}; dataset_split picks another split, and eval_dataset:"
            f" {folder} evaluates on its validation or test files",
        )
    return selected


def evaluation_split(files: Sequence[Path], folder: Path, split: str) -> str:
    """Return the split to evaluate on: `split` unless it is the default, else validation or test, the first one with
    files."""
    names = [_split_of(file, folder) for file in files]
    held_out_splits = [
        split_name for split_name in KINDS if split_name != TRAIN and any(_is_of(name, split_name) for name in names)
    ]
    return held_out_splits[0] if held_out_splits and split == TRAIN else split


def _split_of(file: Path, folder: Path) -> str:
    """Return the part of a file's path that names its split, or ""."""
    *folders, _ = file.relative_to(folder).parts
    stem = Path(file.stem).stem if file.suffix.lower() in COMPRESSIONS else file.stem
    return next((name for name in (SHARD.sub("", stem), *reversed(folders)) if _split_name(name)), "")


def _split_name(name: str) -> str:
    """Return the key of KINDS that a name refers to; empty for none or several."""
    words = [SUFFIX.sub("", word) for word in re.split(r"[^a-z]+", name.lower())]
    split_names = [split_name for split_name, names in KINDS.items() if any(word in names for word in words)]
    return split_names[0] if len(split_names) == 1 else ""


def _is_of(name: str, split: str) -> bool:
    """Return whether a file of split `name` belongs to the split `split`, by any name of its kind or literally."""
    if any(split in names for names in KINDS.values()):
        return _split_name(name) == _split_name(split)
    return name == split


# --- values of CSV files ----------------------------------------------------------------------------------------------


def parse_csv_values(source: Source, columns: Mapping[str, str], numbers: Collection[str] = ()) -> Source:
    """Parse the columns of a CSV file whose part is not text; return other sources unchanged.

    Args:
        columns: part to column.
        numbers: further columns that hold numbers.

    Raises:
        DataError: a label is neither true nor false, or a list is not JSON. The message names file, row and column.
    """
    if source.file_format != "csv":
        return source
    rows = []
    for index, row in enumerate(source.rows):
        parsed = {
            column: _parsed(field, row[column], column, source.location(index)) for field, column in columns.items()
        }
        parsed |= {column: _number(row[column]) for column in numbers if column in row}
        rows.append({**row, **parsed})
    return replace(source, rows=rows)


def _parsed(field: str, text: Any, column: str, location: str) -> Any:
    if field == "label":
        return _truth(text, column, location)
    if field == "margin":
        return _number(text)
    if field not in LISTS:
        return text
    values = parse_json(text, f"{location}, column {column!r}", DataError, "write the list as JSON")
    if field == "labels" and isinstance(values, list):
        return [label if isinstance(label, bool) else _truth(str(label), column, location) for label in values]
    return values


def _truth(text: str, column: str, location: str) -> bool:
    truth = TRUTHS.get(text.strip().casefold())
    if truth is None:
        wrong = f"{location}: column {column!r} holds {brief(text)}, not true or false"
        raise DataError(wrong, "write true (or 1) for a good answer or step and false (or 0) for a bad one")
    return truth


def _number(text: str) -> float | str:
    """Return the number in a text. Other text is returned unchanged; `number_in` raises for it later."""
    with contextlib.suppress(ValueError):
        return float(text)
    return text
