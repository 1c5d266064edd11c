"""Rewrites the quality tables of docs/formats.md and README.md from benchmarks/results: `python -m benchmarks.tables`.

A table lies between `<!-- quality: FILE all -->`, or `short`, and `<!-- end -->`; FILE is that of a result. `all` has a
row for every one of the result; `short` those of SHORT.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "docs" / "formats.md", ROOT / "README.md")
BLOCK = re.compile(r"(<!-- quality: (\S+) (all|short) -->\n).*?(<!-- end -->)", re.DOTALL)
SHORT = (
    "as it is", "int8", "fp8", "kbit5", "hqq4", "int4", "nf4", "kbit4", "nvfp4-1d-46", "mxfp4", "fp4", "kbit3", "kbit2",
)  # fmt: skip
COLUMNS = {
    "bits per weight": ("bits_per_weight", ".3f"),
    "weight SQNR, dB": ("sqnr_db", ".2f"),
    "perplexity": ("perplexity", ".3f"),
    "after QLoRA": ("perplexity_after_qlora", ".3f"),
}


def quality_table(result: dict[str, Any], short: bool) -> str:
    """Markdown: a row per format, and what was run."""
    stored = result["stored_as"]
    rows = [name for name in SHORT if name in stored] if short else list(stored)
    lines = ["| stored as | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    for name in rows:
        cells = (_cell(stored[name].get(key), form) for key, form in COLUMNS.values())
        lines.append(f"| {_label(name, stored[name])} | {' | '.join(cells)} |")
    run = (
        f"{result['model']} on {result['text']}: about {result['tokens']:,} held-out tokens in windows of at most "
        f"{result['length']}; QLoRA: {result['steps']} steps of {result['batch'][0]}×{result['batch'][1]} tokens, "
        f"r = {result['rank']}; products in {result['dtype']}; {result['device']}."
    )
    return "\n".join([*lines, "", run]) + "\n"


def _label(name: str, row: dict[str, Any]) -> str:
    label = name if row.get("spec") in (None, name) else f"{name} (`{row['spec']}`)"
    return f"{label}, on {row['device']}" if "device" in row else label


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def updated(document: str, results: Path) -> str:
    """The document's text with its tables as the results say."""

    def table(found: re.Match[str]) -> str:
        begin, file, rows, end = found.groups()
        return begin + quality_table(json.loads((results / file).read_text()), rows == "short") + end

    return BLOCK.sub(table, document)


def main() -> None:
    for path in DOCUMENTS:
        path.write_text(updated(path.read_text(encoding="utf-8"), ROOT / "benchmarks" / "results"), encoding="utf-8")


if __name__ == "__main__":
    main()
