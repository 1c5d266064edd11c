"""`halfbyte check`: all that `halfbyte train` does before its first step, without a file written."""

from __future__ import annotations

import contextlib

from rich.text import Text

from ..config import RunConfig
from ..train.preflight_paths import look_over_run
from ..utils.console import Console
from .imports import quick_imports


def check_run(config: RunConfig) -> None:
    """Print what a run would use and do: in the processes of a launcher those, else as many as `halfbyte train` starts.

    Raises:
        HalfbyteError: what `halfbyte train` would raise before its first step.
    """
    look_over_run(config)
    with quick_imports():
        from ..parallel.launch.agreement import check_agreement
        from ..parallel.launch.launcher import layout_to_launch
        from ..parallel.launch.ranks import is_rank
        from ..parallel.mesh import present_mesh
        from ..train.preflight import prepare_run
        from ..utils.hardware import chosen_device
        from ..utils.notices import silent

    layout = layout_to_launch(config)
    asked = config.layout if is_rank() else None
    with present_mesh(asked, chosen_device(config.device).type) as mesh:
        console = Console(quiet=not mesh.is_main)
        with contextlib.nullcontext() if mesh.is_main else silent():
            check_agreement(mesh, config)
            prepare_run(config, console=console, mesh=mesh, layout=layout if mesh.size == 1 else None)
    console.print(Text.assemble(("ready:", "green"), " `halfbyte train` can start"))
