"""Reading rows: JSONL, JSON, CSV, Parquet and text files, folders of them, and datasets of the hub.

Every reader gives plain dictionaries and remembers where each row came from, so that whatever is found wrong with a row
later can be named by file and line.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ..reading import look, open_bytes, open_text, parse_json, why
from ..utils.errors import DataError
from ..utils.hub import id_in, is_local, nearest
from ..utils.notices import notice
from ..utils.text import brief
from .splits import TRAIN, evaluation_split, files_of_split

Row = dict[str, Any]

END_OF_TEXT = "<|endoftext|>"
ALIKE = " (there is one that looks alike, whose letters are composed otherwise)"
MOST_FILES = 10_000  # in a folder of data; one with more, such as `/`, was not meant
LONG, SHOWN_AFTER = 2**26, 1.0  # bytes; reading as many shows how far it is, after so many seconds


@dataclass(frozen=True)
class Source:
    """The rows of one file or hub dataset, in order.

    Attributes:
        path: the file, or the hub id.
        kind: jsonl, json, csv, parquet, text or hub.
        rows: column name to value, one dictionary per row.
        lines: the line each row starts at (1-based), where the kind has lines.
        note: how documents were told apart in plain text; empty for the other kinds.
    """

    path: str
    kind: str
    rows: list[Row]
    lines: Sequence[int] | None = None
    note: str = ""

    def where(self, index: int) -> str:
        """The place of row `index`: `file:line`, or `file, row N` counted from 1."""
        return f"{self.path}:{self.lines[index]}" if self.lines else f"{self.path}, row {index + 1}"


def read_sources(names: str | Sequence[str], split: str = TRAIN, *, evaluating: bool = False) -> list[Source]:
    """Read one or several datasets, each a file, a folder of files, or (when nothing local matches) a hub id.

    Args:
        split: of a hub dataset, or of a folder whose files are named for splits.
        evaluating: prefer a folder's validation or test files to those of its training split.

    Raises:
        DataError: a file is missing, malformed or of an unknown kind, or no rows are left at all.
    """
    names = [names] if isinstance(names, str) else list(names)
    sources = [source for name in names for source in _read(name, split, evaluating)]
    if not any(source.rows for source in sources):
        raise DataError(f"the dataset is empty: {', '.join(names)} holds no rows", "put at least one row into it")
    return [source for source in sources if source.rows]


def _read(name: str, split: str, evaluating: bool) -> list[Source]:
    files = files_of(name)
    if files is None:
        return [_read_hub(name, split)]
    folder = Path(os.path.expanduser(name))
    if folder.is_dir():
        files = files_of_split(files, folder, split_to_evaluate(name, split) if evaluating else split)
    elif split != TRAIN:
        notice("dataset_split", f"dataset_split: {split} is of datasets and folders; of {name} all rows are read")
    return [READERS[file.suffix.lower()](file) for file in files]


def split_to_evaluate(name: str, split: str) -> str:
    """The split of a dataset to evaluate on: of a folder its validation or test files, unless `split` asks for more."""
    files, folder = files_of(name), Path(os.path.expanduser(name))
    return evaluation_split(files, folder, split) if files and folder.is_dir() else split


def files_of(name: str) -> list[Path] | None:
    """The files of a dataset, unread; None for what can only be a hub id.

    Raises:
        DataError: there is no such file, it is of an unknown kind, or a folder holds none of a known one.
    """
    path = Path(os.path.expanduser(name))
    match look(path, DataError, "check the path"):
        case "folder":
            return _files_in(path)
        case "file":
            if path.suffix.lower() not in READERS:
                raise DataError(f"{path} is of an unknown kind", f"use one of {', '.join(READERS)}")
            return [path]
    if not is_local(name):
        return None
    if "://" in name:
        there = id_in(name)
        fix = f"write {there}" if there else "download it, and name the file"
        raise DataError(f"{name}: data is not read from addresses", fix)
    fix = "name the folder, or a list of files" if "*" in name else "check the path"
    parts = [part.strip() for part in name.split(",")]
    if len(parts) > 1 and os.path.exists(os.path.expanduser(parts[0])):
        fix = f"write several as a list: [{', '.join(parts)}]"
    if (closest := _closest(path)) == ALIKE:
        fix = "rename that one, or name the folder it is in"
    raise DataError(f"no such file: {name}{closest}", fix)


def _closest(path: Path) -> str:
    """The existing neighbour whose name is nearest to `path`'s, as the tail of a message."""
    near = nearest(path)
    if near and unicodedata.normalize("NFC", str(near)) == unicodedata.normalize("NFC", str(path)):
        return ALIKE
    return f" (the closest existing one is {near})" if near else ""


def _files_in(folder: Path) -> list[Path]:
    files: list[Path] = []

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {why(error)}", "give yourself the right to, or name another")

    for place, inner, names in os.walk(folder, onerror=refuse):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found = (Path(place, name) for name in names if not name.startswith("."))
        files += [path for path in found if path.is_file()]
        if len(files) > MOST_FILES:
            raise DataError(f"{folder} holds more than {MOST_FILES:,} files", "name a folder with data alone in it")
    files.sort()
    known = [file for file in files if file.suffix.lower() in READERS]
    if not known:
        raise DataError(f"no data files in {folder}", f"put files of these kinds there: {', '.join(READERS)}")
    if len(known) < len(files):
        others = [str(file.relative_to(folder)) for file in files if file.suffix.lower() not in READERS]
        more = f" and {len(others) - 10:,} more" if len(others) > 10 else ""
        left_out = ", ".join(others[:10]) + more
        notice(f"data-folder:{folder}", f"{folder}: left out {left_out} (read are {', '.join(READERS)})")
    return known


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """The lines of an open file, with a bar."""
    with _bar(path, os.fstat(file.fileno()).st_size, "B") as further:
        for line in file:
            further(len(line))
            yield line


@contextlib.contextmanager
def _bar(path: Path, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Shows how far a long file is read, where somebody watches; yields what is called with how much more that is."""
    if path.stat().st_size < LONG or not sys.stderr.isatty():
        yield lambda more: None
        return
    from tqdm import tqdm

    name = f"reading {path.name}"
    with tqdm(total=total, desc=name, unit=unit, unit_scale=True, delay=SHOWN_AFTER, leave=False) as bar:
        yield bar.update


def _read_jsonl(path: Path) -> Source:
    rows, lines = [], []
    with open_text(path, DataError) as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            if number == 1 and line.lstrip().startswith("["):
                return _read_json(path)
            row = parse_json(line, str(path), DataError, "mend this line", line=number, unique=True)
            rows.append(_checked(row, f"{path}:{number}"))
            lines.append(number)
    return Source(str(path), "jsonl", rows, lines)


def _read_json(path: Path) -> Source:
    with open_text(path, DataError) as file:
        text = "".join(_lines(file, path))
    if not text.strip():
        return Source(str(path), "json", [])
    first, _, rest = text.strip().partition("\n")
    if first.startswith("{") and first.rstrip().endswith("}") and rest:  # one object per line: JSONL by another name
        return _read_jsonl(path)
    value = parse_json(text, str(path), DataError, "mend the file", unique=True)
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    rows = value if isinstance(value, list) else [value]
    return Source(str(path), "json", [_checked(row, f"{path}, row {i}") for i, row in enumerate(rows, 1)])


def _checked(row: Any, where: str) -> Row:
    if isinstance(row, dict):
        return row
    raise DataError(f"{where}: the row is a {type(row).__name__}, not an object", 'write rows as {"column": value}')


def _read_csv(path: Path) -> Source:
    csv.field_size_limit(sys.maxsize)  # the default of 128 KiB is less than one long document
    rows, lines = [], []
    with open_text(path, DataError, newline="") as file:
        start = 1  # a quoted field may hold newlines: a row is named by its first line
        try:
            delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
            reader = csv.DictReader(_lines(file, path), delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            _check_delimiter(names, delimiter, f"{path}:1")
            _check_columns(names, f"{path}:1")
            start = reader.line_num + 1
            for row in reader:
                if None in row or None in row.values():
                    found = sum(value is not None for key, value in row.items() if key) + len(row.get(None) or [])
                    fix = "put fields that hold commas or quotes in quotes"
                    raise DataError(f"{path}:{start}: {found} fields, but the header names {len(names)}", fix)
                rows.append(dict(row))
                lines.append(start)
                start = reader.line_num + 1
        except csv.Error as error:
            said = f"{path}:{start}: malformed CSV in the row that starts here: {error}"
            raise DataError(said, "close its quotes, and double those inside") from None
    return Source(str(path), "csv", rows, lines)


def _check_delimiter(names: Sequence[str], delimiter: str, where: str) -> None:
    """Whether a header is one name because its fields are divided by something else."""
    others = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
    found = next((each for each in others if each != delimiter and len(names) == 1 and each in names[0]), None)
    if found is not None:
        said = f"{where}: the header is {brief(names[0])}: its fields are divided by {others[found]}"
        fix = {"\t": "name it .tsv", ",": "name it .csv"}.get(found, f"divide them by {others[delimiter]}")
        raise DataError(said, fix)


def _check_columns(names: Sequence[str], where: str) -> None:
    twice = [name for number, name in enumerate(names) if name in names[:number]]
    if twice:
        raise DataError(f"{where}: two columns are called {brief(twice[0])}", "rename one of them, or remove it")


def _read_parquet(path: Path) -> Source:
    from pyarrow import parquet

    with open_bytes(path, DataError):
        pass  # what is wrong with the file itself is said of it
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, str(path))
            rows: list[Row] = []
            with _bar(path, file.metadata.num_rows, " rows") as further:
                for batch in file.iter_batches():
                    rows += map(_without_null, batch.to_pylist())
                    further(len(batch))
    except DataError:
        raise
    except OSError as error:
        if error.errno is None:  # of what Arrow calls one, too, such as a truncated file
            raise DataError(f"{path} is not a readable Parquet file: {error}", "copy the file again") from None
        raise DataError(f"cannot read {path}: {why(error)}", "check the file, or name another") from None
    except Exception as error:  # Arrow's own, or Python's from a value that Python cannot hold
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} is not a readable Parquet file: {said}", "copy the file again") from None
    return Source(str(path), "parquet", rows)


def _without_null(row: Row) -> Row:
    """Drop nulls inside nested values: Arrow gives every struct the union of all keys, null where a row had none."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items() if item is not None}
        return [clean(item) for item in value] if isinstance(value, list) else value

    return {key: clean(value) for key, value in row.items()}


def _read_text(path: Path) -> Source:
    """Documents end at <|endoftext|> where the file has it, else at blank lines, else at every line."""
    with open_text(path, DataError) as file:
        text = "".join(_lines(file, path))
    if END_OF_TEXT in text:
        documents, unit = text.split(END_OF_TEXT), f"up to each {END_OF_TEXT}"
    elif re.search(r"\n[ \t]*\n", text.strip()):
        documents, unit = re.split(r"\n(?:[ \t]*\n)+", text), "per block between blank lines"
    else:
        documents, unit = text.split("\n"), "per line"
    rows = [{"text": document.strip("\n")} for document in documents if document.strip()]
    return Source(str(path), "text", rows, note=f"plain text, one document {unit}")


def _read_hub(name: str, split: str) -> Source:
    import datasets

    try:
        dataset = datasets.load_dataset(name, split=split)
    except Exception as error:  # of datasets, huggingface_hub and httpx, of Arrow, of what the files hold
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"dataset {name!r} is no file or folder here{_closest(Path(name))}, and the hub says: {reason}",
            "give an existing path, or the id of a hub dataset (`dataset_split` picks its split) while online",
        ) from error
    return Source(name, "hub", [_without_null(row) for row in dataset], note=f"split {split} of a hub dataset")


READERS: dict[str, Callable[[Path], Source]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
