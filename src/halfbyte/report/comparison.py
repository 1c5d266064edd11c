"""The comparison of several adapters that one run trained: adapters.json, a page, and a table on the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ..config.yaml import dump_value
from ..runs.layout import ADAPTERS, COMPARISON, REPORT
from ..utils.console import Console
from ..utils.files import write_json, write_text
from ..utils.text import one_line
from .page import document
from .run import Run, read_run
from .sections import table, text

Comparison = dict[str, dict[str, Any]]


def compare(
    output: Path, differing: Mapping[str, Mapping[str, Any]], errors: Mapping[str, BaseException], same_rows: bool
) -> Comparison:
    """Compare the runs of several adapters, and write adapters.json and report.html into the folder of all.

    Args:
        differing: adapter → the keys in which it differs.
        errors: adapter → the error that ended it.
        same_rows: whether all were evaluated on the same rows, so that one of them is the best.

    Returns:
        Adapter → its keys, folder and last numbers, or its error; as in adapters.json.
    """
    runs = {name: read_run(output / ADAPTERS / name) for name in differing}
    comparison: Comparison = {}
    for name, run in runs.items():
        facts = {"keys": dict(differing[name]), "folder": f"{ADAPTERS}/{name}", **_numbers(run)}
        if name in errors:
            facts["error"] = getattr(errors[name], "message", str(errors[name]))
        comparison[name] = facts
    finished = {name: facts["eval_loss"] for name, facts in comparison.items() if "eval_loss" in facts}
    if same_rows and len(finished) > 1:
        for name, facts in comparison.items():
            facts["best"] = name == min(finished, key=lambda name: finished[name])
    write_json(output / COMPARISON, comparison)
    write_text(output / REPORT, _page(output, runs, comparison))
    return comparison


def _numbers(run: Run) -> dict[str, Any]:
    """Return the last numbers of a run: loss, steps, and those of its last evaluation."""
    numbers: dict[str, Any] = {}
    if run.train:
        numbers |= {"steps": run.train[-1]["step"], "loss": run.final_loss}
    if run.evals:
        final = run.final_evaluation
        numbers |= {
            f"eval_{metric.name}": final[metric.name] for metric in run.numbers.evaluated if metric.name in final
        }
        numbers["eval_step"] = final["step"]
    return numbers


COLUMNS = {"steps": "steps", "loss": "training loss", "eval_loss": "held-out loss", "eval_step": "held-out at step"}


def _rows(comparison: Comparison) -> list[list[str]]:
    """Return a row per adapter: its name, the keys in which it differs, its numbers, and a remark."""
    rows = []
    for name, facts in comparison.items():
        keys = ", ".join(dump_value(key, value) for key, value in facts["keys"].items())
        values = [facts.get(key) for key in COLUMNS]
        shown = [
            "–" if value is None else f"{value:.4f}" if isinstance(value, float) else f"{value:,}" for value in values
        ]
        rows.append([name, keys, *shown, facts.get("error") or ("best" if facts.get("best") else "")])
    return rows


def print_comparison(console: Console, comparison: Comparison, output: Path) -> None:
    """Print a row per adapter, and where its files are."""
    grid = Table(box=None)
    for column in ("adapter", "keys", *COLUMNS.values(), ""):
        grid.add_column(column, overflow="fold")
    for row in _rows(comparison):
        grid.add_row(*map(one_line, row))
    console.print(grid)
    console.print(one_line(f"saved: {output / ADAPTERS}/NAME · report: {output / REPORT}"), soft_wrap=True)


def _page(output: Path, runs: Mapping[str, Run], comparison: Comparison) -> str:
    """Return the report of all adapters as HTML; each row links to the adapter's own report."""
    head = ("adapter", "keys", *COLUMNS.values(), "")
    body = [
        [f'<a href="{text(comparison[name]["folder"])}/{REPORT}">{text(name)}</a>', *map(text, cells)]
        for name, *cells in _rows(comparison)
    ]
    title = f"{len(runs)} adapters on {Path(next(iter(runs.values())).model).name}"
    return document(title, f"<h1>{text(title)}</h1><section>{table(head, body)}</section>")
