"""`halfbyte merge`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..errors import ConfigError

BASES = ("auto", "original", "dequantized")


def merge_run(run: Path, out: Path | None, base: str, verify: bool) -> None:
    """Merge the adapter of `run` into `out`, say how close the result is, and add that to the run's report.

    Raises:
        ConfigError: an unknown base.
    """
    if base not in BASES:
        raise ConfigError(f"--base {base}: not one of {', '.join(BASES)}", "use auto")
    from ..export.merge import merge
    from ..report import write_report

    console = Console(soft_wrap=True)
    report = merge(run, out or run / "merged", base=base, verify=verify, console=console)
    console.print(str(report), highlight=False)
    console.print(f"merged model in {report.out_dir}")
    if report.run_dir and report.targets:
        console.print(f"report: {write_report(report.run_dir)}")
