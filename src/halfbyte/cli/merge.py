"""`halfbyte merge`."""

from __future__ import annotations

from pathlib import Path

from ..runs.layout import merged_folder
from ..runs.saved import find_trained
from ..utils.console import Console
from ..utils.errors import UsageError
from ..utils.text import one_line
from .imports import quick_imports

BASES = ("auto", "original", "dequantized")


def merge_run(
    run: Path,
    out: Path | None,
    base: str,
    verify: bool,
    quantize: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Merge the adapter of `run` into `out`, say how close the result is, and add that to the run's report.

    Args:
        quantize: a target, or PATTERN=FORMAT pairs with commas between; None for 16 bits, or the run's `qat_scheme`.

    Raises:
        UsageError: an unknown base or target.
    """
    if base not in BASES:
        raise UsageError(f"--base {base}: not one of {', '.join(BASES)}", "use auto")
    find_trained(run)
    with quick_imports():
        from ..export.merge import merge, report_failure_is_a_notice, slug
    from ..report import write_report

    console = Console(soft_wrap=True)
    place = out or run / merged_folder(slug(quantize) if quantize else "")
    report = merge(
        run,
        place,
        base=base,
        quantize=_target(quantize),
        verify=verify,
        trust_remote_code=trust_remote_code,
        console=console,
    )
    console.print(str(report))
    console.print(one_line(f"merged model in {report.out_dir}"))
    if report.run_dir and report.targets:
        with report_failure_is_a_notice(report.out_dir):
            console.print(one_line(f"report: {write_report(report.run_dir)}"))


def _target(quantize: str | None) -> str | dict[str, str] | None:
    """The option as `merge` takes it: patterns as a mapping, in order."""
    if quantize is None or "=" not in quantize:
        return quantize
    pairs = [pair.partition("=") for pair in quantize.split(",")]
    if wrong := next((pattern for pattern, _, format_ in pairs if not pattern or not format_), None):
        raise UsageError(f"--quantize {quantize}: {wrong!r} has no format", "write PATTERN=FORMAT,PATTERN=FORMAT")
    return {pattern: format_ for pattern, _, format_ in pairs}
