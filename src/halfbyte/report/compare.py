"""Comparison of runs in Python and in notebooks; `halfbyte board` compares with curves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..utils.errors import ConfigError
from .page import headline
from .run import read_run
from .sections import table, text

OUTPUTS = ("output_dir", "resume_from_checkpoint")  # keys in which all runs differ


@dataclass(frozen=True)
class Comparison:
    """Figures and differing keys of some runs.

    Attributes:
        runs: names of the runs.
        figures: name → the figure of each run, as its report shows it; "–" if a run has none.
        keys: key → its value in each run, of the keys that are not equal in all.
    """

    runs: list[str]
    figures: dict[str, list[str]]
    keys: dict[str, list[Any]]

    def _repr_html_(self) -> str:
        """Return both tables, as notebooks show them."""
        head = ["", *map(text, self.runs)]
        figures = table(head, ([text(name), *map(text, values)] for name, values in self.figures.items()))
        keys = table(head, ([text(name), *map(text, values)] for name, values in self.keys.items()))
        return figures + (keys if self.keys else "<p>No key differs.</p>")


def compare(*runs: Any) -> Comparison:
    """Compare runs.

    Args:
        runs: folders of at least two runs, or results of `finetune`.

    Raises:
        ConfigError: there are fewer than two, or a folder is no run.
    """
    folders = [Path(getattr(run, "output_dir", run)) for run in runs]
    if len(folders) < 2:
        raise ConfigError("compare needs at least two runs", "name the output_dir of each")
    contents = [read_run(folder) for folder in folders]
    for run in contents:
        if not run.config:
            raise ConfigError(f"{run.path} is no run", "name the output_dir of a run")
    figures = [{name: figure for name, figure, _ in headline(run)} for run in contents]
    names = dict.fromkeys(name for run in figures for name in run)
    keys = dict.fromkeys(key for run in contents for key in run.config if key not in OUTPUTS)
    values = {key: [run.config.get(key) for run in contents] for key in keys}
    return Comparison(
        [str(folder) for folder in folders],
        {name: [run.get(name, "–") for run in figures] for name in names},
        {key: several for key, several in values.items() if any(value != several[0] for value in several)},
    )
