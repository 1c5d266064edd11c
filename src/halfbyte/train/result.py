"""The result of a run, as Python callers and notebooks get it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        output_dir: the run's folder, with the adapter, metrics and report.
        metrics: the last numbers: `loss`, `eval_loss`, `perplexity`, `peak_bytes`, ...
    """

    output_dir: Path
    metrics: dict[str, Any]

    def _repr_html_(self) -> str:
        """Return the headline figures of the run's report, as notebooks show it."""
        from ..report.page import summary

        return summary(self.output_dir)

    def merge(self, out_dir: Path | str, **options: Any) -> Any:
        """Merge the adapter into its base model and write the result to `out_dir`, as `halfbyte merge` does.

        Args:
            out_dir: a new folder.
            options: further arguments of `halfbyte.export.merge.merge`.
        """
        from ..export.merge import merge

        return merge(self.output_dir, out_dir, **options)
