"""`halfbyte train`."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence

from ..config import Parallel, RunConfig
from ..config.several import adapter_runs
from ..report.terminal import print_run
from ..utils.console import Console
from ..utils.notices import print_remarks
from ..utils.processes import LAUNCHER, Stopped, is_main_rank, was_restarted
from ..utils.waiting import showing_waits
from .exits import without_secrets
from .startup import quick_imports


def train_run(config: RunConfig, resume: bool, arguments: Sequence[str] | None = None, verbose: bool = False) -> None:
    """Train; if a signal stops it, report the saved checkpoint and how to continue.

    On several devices this process starts one process per device, which runs the same command.

    Args:
        arguments: arguments of that command; default: `sys.argv`.
        verbose: print details as well.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    resume_from: str | bool | None = True if resume else config.resume_from_checkpoint
    resume_from = True if was_restarted() else resume_from
    console = Console(outlives_reader=True, quiet=not is_main_rank(), verbose=verbose)
    if LAUNCHER not in os.environ:
        print_run(console, config)
    if verbose:
        print_remarks()
    from ..runs.inputs import check_output, check_paths

    check_output(config, resume_from)
    check_paths(config)
    with showing_waits(console):
        _launch_or_train(config, resume_from, console, arguments)


def _launch_or_train(
    config: RunConfig, resume_from: str | bool | None, console: Console, arguments: Sequence[str]
) -> None:
    with quick_imports("torch"):
        from ..parallel.launch.launcher import launch, layout_to_launch

    if (layout := layout_to_launch(config)).size > 1:
        if config.report_to:  # reported before any process starts
            with quick_imports():
                from ..train.trackers import check_trackers

            check_trackers(config.report_to)
        imports_current_folder = sys.path[:1] in ([""], [os.getcwd()])
        command = [*([] if imports_current_folder else ["-P"]), "-m", "halfbyte", *arguments]

        def program(now: Parallel) -> list[str]:
            """Return the command for a layout; after a restart on fewer devices `auto` chooses again."""
            return [*command, *([] if now == layout or config.parallel == "auto" else [f"parallel={now}"])]

        return launch(program, layout, config.max_restarts)
    with quick_imports():
        from ..train.run import train

    try:
        train(config, resume=resume_from, console=console)
    except KeyboardInterrupt as stop:
        number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
        raise Stopped(number, _saved_message(config, arguments)) from None


def _saved_message(config: RunConfig, arguments: Sequence[str]) -> str:
    from ..runs.checkpoints import checkpoints

    folders = [run.output_path for run in adapter_runs(config).values()] or [config.output_path]
    saved = [path for folder in folders for path in checkpoints(folder)[-1:]]
    if not saved:
        return "no step is finished yet, so there is no checkpoint"
    command = shlex.join(
        ["halfbyte", *without_secrets([argument for argument in arguments if argument != "--resume"]), "--resume"]
    )
    return f"{', '.join(map(str, saved))} {'is' if len(saved) == 1 else 'are'} saved; continue with `{command}`"
