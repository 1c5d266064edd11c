"""Which files of a folder are which split of a dataset, by the names that published datasets have.

A file belongs to a split by its own name (`train.jsonl`, `train-00000-of-00002.parquet`, `squad_dev.json`), or by that
of the nearest folder (`test/data.csv`), as in datasets.load_dataset. Only names below the folder of the dataset count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..utils.errors import DataError
from ..utils.notices import notice

TRAIN = "train"
KINDS = {
    TRAIN: ("train", "training"),
    "validation": ("validation", "valid", "val", "dev", "eval", "evaluation"),
    "test": ("test", "testing"),
}
SHARD = re.compile(r"-\d+-of-\d+$")
WHOLE = re.compile(r"(?<=.)(set|data|split)$")  # of trainset, testdata
MOST_NAMED = 10


def files_of_split(files: Sequence[Path], folder: Path, split: str) -> list[Path]:
    """The files of `folder` that `split` asks for; names the others once.

    Where no file is named for a split, all are taken.

    Args:
        split: of KINDS or another name of it, a name that files have (train_sft), or several with + between.

    Raises:
        DataError: the files are of other splits alone.
    """
    names = {file: _split_of(file, folder) for file in files}
    if not any(names.values()):
        if split != TRAIN:
            said = f"dataset_split: {split}: no file of {folder} is named for a split, so all rows are read"
            notice("dataset_split", said)
        return list(files)
    asked = [part.partition("[")[0].strip() for part in split.split("+")]
    if "[" in split:
        notice("dataset_split", f"dataset_split: {split}: all rows of {' and '.join(asked)} are read")
    found = [file for file in files if any(_is_of(names[file], part) for part in asked)]
    if not found and asked == [TRAIN]:
        found = [file for file in files if not names[file]] or _only_kind(files, names.values())
    if not found:
        there = ", ".join(dict.fromkeys(name for name in names.values() if name))
        raise DataError(
            f"{folder} holds no files of dataset_split {split}, but of: {there}",
            f"set dataset_split to one of these, or name files, e.g. {files[0]}",
        )
    if left_out := [str(file.relative_to(folder)) for file in files if file not in found]:
        more = f" and {len(left_out) - MOST_NAMED:,} more" if len(left_out) > MOST_NAMED else ""
        notice(
            f"splits:{folder}:{split}",
            f"{folder}: read are the files of split {split} ({len(found):,}); left out are"
            f" {', '.join(left_out[:MOST_NAMED])}{more}; dataset_split picks another split, and eval_dataset: {folder}"
            " evaluates on its validation or test files",
        )
    return found


def evaluation_split(files: Sequence[Path], folder: Path, split: str) -> str:
    """The split to evaluate on: `split` if it is not the default, else validation or test, whichever has files."""
    names = [_split_of(file, folder) for file in files]
    others = [kind for kind in KINDS if kind != TRAIN and any(_is_of(name, kind) for name in names)]
    return others[0] if others and split == TRAIN else split


def _split_of(file: Path, folder: Path) -> str:
    """The name that says which split a file is of; empty where none does."""
    *folders, _ = file.relative_to(folder).parts
    return next((name for name in (SHARD.sub("", file.stem), *reversed(folders)) if _kind(name)), "")


def _kind(name: str) -> str:
    """The key of KINDS that a name speaks of; empty for none or several."""
    words = [WHOLE.sub("", word) for word in re.split(r"[^a-z]+", name.lower())]
    found = [kind for kind, those in KINDS.items() if any(word in those for word in words)]
    return found[0] if len(found) == 1 else ""


def _is_of(name: str, asked: str) -> bool:
    """Whether a file of split `name` is asked for: by any name of a kind, else by its own."""
    if any(asked in those for those in KINDS.values()):
        return _kind(name) == _kind(asked)
    return name == asked


def _only_kind(files: Sequence[Path], names: Iterable[str]) -> list[Path]:
    """All files where they are of one split, which whoever names their folder wants."""
    return list(files) if len({_kind(name) for name in names}) == 1 else []
