"""`halfbyte env`: the environment, or who computes what, as a table."""

from __future__ import annotations

from rich.table import Table

from ..utils.console import Console

WIDE = 240  # columns of a table that goes into a file or a pipe


def print_environment() -> None:
    """Print what `halfbyte.utils.environment.environment` finds, one line per fact."""
    from ..utils.environment import environment
    from ..utils.terminal import print_environment as show

    show(Console(), environment())


def print_kernels(name: str | None) -> None:
    """Print dispatch's table for a device, a line for each op and typical call.

    Args:
        name: of `halfbyte.kernels.device.KNOWN`; None: the device that a run here would take.

    Raises:
        UsageError: the name is not known.
    """
    import torch

    from ..kernels.device import KNOWN, device_of
    from ..kernels.selection import choices
    from ..utils.errors import UsageError
    from ..utils.hardware import chosen_device

    if name is not None and name not in KNOWN:
        raise UsageError(f"--device {name} is not known", f"choose from {', '.join(KNOWN)}")
    here = chosen_device(None)
    found = KNOWN[name or "cpu"] if name or here.type == "cpu" else device_of(torch.empty(0, device=here))
    table = Table(title=found.name, title_justify="left", box=None)
    for column in ("op", "call", "kernel", "why not others"):
        table.add_column(column, overflow="fold")
    for choice in choices(found):
        why = "; ".join(f"{kernel}: {reason}" for kernel, reason in choice.others.items())
        table.add_row(choice.op, choice.shapes, choice.kernel, why)
    Console(width=None if Console().is_terminal else WIDE).print(table)
