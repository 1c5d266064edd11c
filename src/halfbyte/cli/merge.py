"""`halfbyte merge`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..errors import ConfigError

BASES = ("auto", "original", "dequantized")


def merge_run(run: Path, out: Path | None, base: str, verify: bool) -> None:
    """Merge the adapter of `run` into `out` and say how close the result is.

    Raises:
        ConfigError: an unknown base.
    """
    if base not in BASES:
        raise ConfigError(f"--base {base}: not one of {', '.join(BASES)}", "use auto")
    from ..export.merge import merge

    target = out or run / "merged"
    report = merge(run, target, base=base, verify=verify)
    console = Console(soft_wrap=True)
    console.print(str(report))
    console.print(f"merged model in {target}")
