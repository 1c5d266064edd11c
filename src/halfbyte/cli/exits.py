"""Exit codes and error messages: every exception that ends a command becomes one message on stderr.

0: success. 1: an error. 2: wrong usage. 130: Ctrl-C. 143 and 129: SIGTERM and SIGHUP. 141: closed output pipe.
`serve` exits with 0 after a signal. Any exception that is not a `HalfbyteError` is a bug: its traceback goes to a file
that the message names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from ..utils.errors import HalfbyteError, UsageError
from ..utils.hardware import is_out_of_memory
from ..utils.processes import Stopped, is_main_rank, raise_on_signals, was_launched
from ..utils.streams import discard_stdout
from ..utils.text import visible

FAILED = 1
WRONG_USAGE = 2
UNREAD = 141
TYPERS_USAGE_ERROR: Any = typer.BadParameter.__base__  # typer does not export it
RUN_FOLDER = "halfbyte.run_folder"  # key of a context's meta: folder for bug reports, if it exists
LONGEST = 300  # characters of the message of a bug
SECRETS = ("--api-key", "--hub-token", "--hub_token")
_NO_TYPE = re.compile(r"'(.*)' is not a valid ((?:int|float).*)\.")  # messages of click
_OUT_OF_RANGE = re.compile(r"(\S+) is not in the range .*")


class Commands(TyperGroup):
    """The group of commands; with `--debug` it also shows tracebacks."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _errors_as_exit_codes("--debug" in args, {}):
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_exit_codes(ctx.params.get("debug", False), ctx.meta), raise_on_signals():
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()
            return result


@contextlib.contextmanager
def _errors_as_exit_codes(debug: bool, meta: dict[str, Any]) -> Iterator[None]:
    """Convert every exception raised within into a message and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, SystemExit):
        raise
    except BaseException as error:
        if debug:
            sys.excepthook(type(error), error, error.__traceback__)
        raise typer.Exit(_exit_code(error, meta)) from None


def _exit_code(error: BaseException, meta: dict[str, Any]) -> int:
    if isinstance(error, KeyboardInterrupt):
        return _print_stopped(error)
    if isinstance(error, TYPERS_USAGE_ERROR):
        return _print_usage_error(error)
    if isinstance(error, BrokenPipeError):
        discard_stdout()
        return UNREAD
    expected = error if isinstance(error, HalfbyteError) else _expected_error(error)
    shown = expected or _bug_report(error, meta)
    reported = False  # to the launcher, which prints an error once for all ranks
    if was_launched():
        from ..mesh.ranks import report_error

        reported = report_error(shown, error, bug=expected is None)
    if not reported:
        print_error(shown)
    return WRONG_USAGE if isinstance(expected, UsageError) else FAILED


def _expected_error(error: BaseException) -> HalfbyteError | None:
    """Return the message for an expected error of another library (no memory, disk full, missing folder), or None."""
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        from ..utils.errors import explain_os_error

        discard_stdout()
        return HalfbyteError(f"cannot write the output: {explain_os_error(error)}", "write it to another place")
    if isinstance(error, FileNotFoundError) and error.filename is None:  # os.getcwd's
        return HalfbyteError("the current folder no longer exists", "change to another folder")
    if isinstance(error, MemoryError) or ("torch" in sys.modules and is_out_of_memory(error)):
        return HalfbyteError("out of memory", "end other programs, or use a machine with more memory")
    if was_launched():
        from ..mesh.ranks import lost_peer_error

        return lost_peer_error(error)
    return None


def _print_stopped(stop: KeyboardInterrupt) -> int:
    number = stop.number if isinstance(stop, Stopped) else signal.SIGINT
    if was_launched() and not is_main_rank():
        return 128 + int(number)
    by = "" if number == signal.SIGINT else f" by {number.name}"
    typer.echo(f"\nstopped{by}{f': {visible(str(stop))}' if str(stop) else ''}", err=True)
    return 128 + int(number)


def _print_usage_error(error: Any) -> int:
    """Print typer's error about a command line like all other errors; without a command, print the help."""
    ctx = error.ctx
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)
        return WRONG_USAGE
    problem, _, near = error.message.partition(" Did you mean ")
    near = ", ".join(getattr(error, "possibilities", None) or []) or near.strip("'?")
    if isinstance(error, typer.BadParameter):
        problem = _wrong_value(error)
    if near:
        fix = f"did you mean {near}?"
    elif ctx:
        fix = f"write {' '.join(ctx.get_usage().split()[1:])} (`{ctx.command_path} -h` explains)"
    else:
        option = getattr(error, "option_name", "")
        fix = f"write {option} VALUE" if option else "see `halfbyte -h`"
    print_error(UsageError(problem[:1].lower() + problem[1:].rstrip("."), fix))
    return WRONG_USAGE


def _wrong_value(error: Any) -> str:
    """Describe which value of which argument or option is wrong, and why."""
    if error.param is None:
        return str(error.format_message())
    name = error.param.opts[0] if error.param.param_type_name == "option" else error.param.metavar
    details: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if details:  # from pydantic; earlier versions of typer use click
        why = error.message.partition(",")[0].replace("Input should be", "it must be")
        return f"{name} {details[0]['input']}: {why}"
    if match := _NO_TYPE.fullmatch(error.message):
        return f"{name} {match[1]}: it must be a valid {'integer' if match[2].startswith('int') else 'number'}"
    if match := _OUT_OF_RANGE.fullmatch(error.message):
        low, high = error.param.type.min, error.param.type.max
        below = low is not None and float(match[1]) < low
        bound = f"greater than or equal to {low:g}" if below else f"less than or equal to {high:g}"
        return f"{name} {match[1].removesuffix('.0')}: it must be {bound}"
    return str(error.format_message())


def _bug_report(error: BaseException, meta: dict[str, Any]) -> HalfbyteError:
    first = (str(error).strip() or "no message").splitlines()[0]
    summary = f"this is a bug in halfbyte: {type(error).__name__}: {first[:LONGEST]}"
    text = _full_text(error)
    file = _write_report(text, meta.get(RUN_FOLDER))
    return HalfbyteError(
        summary, f"report it with {file}, which has the full text" if file else f"report this text:\n{text}"
    )


def _full_text(error: BaseException) -> str:
    """Return the command, the versions and the traceback."""
    import platform
    import traceback
    from importlib import metadata

    def version(package: str) -> str:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            return f"no {package}"

    words = without_secrets(sys.argv)
    versions = [version(name) for name in ("halfbyte", "torch", "transformers", "peft")]
    return "\n".join(
        [
            f"command: {' '.join(words)}",
            f"versions: python {platform.python_version()} on {platform.platform()}, {', '.join(versions)}",
            "",
            "".join(traceback.format_exception(error)),
        ]
    )


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command with `***` in place of the values of keys and tokens."""
    shown = [
        "***" if previous in SECRETS else word for previous, word in zip(["", *arguments], arguments, strict=False)
    ]
    return [re.sub(r"^((--)?hub[-_]token=|--api-key=).*", r"\1***", word, flags=re.DOTALL) for word in shown]


def _write_report(text: str, run_folder: Path | None) -> Path | None:
    """Write the text to the first writable of: the run's folder, the cache, the folder for temporary files."""
    import tempfile
    import time

    from ..utils.files import cache_folder, write_text

    name = f"halfbyte-bug-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    candidates = [lambda: run_folder if run_folder and run_folder.is_dir() else None, cache_folder, tempfile.gettempdir]
    for folder_of in candidates:
        with contextlib.suppress(HalfbyteError, OSError):
            if folder := folder_of():
                return write_text(Path(folder) / name, visible(text))
    return None


def print_error(error: HalfbyteError) -> None:
    """Print the message and its fix on stderr."""
    from rich.text import Text

    from ..utils.console import Console

    message = Text.assemble(("error: ", "bold red"), error.message)
    if error.fix:
        message.append("\n  fix: ", "bold green").append(error.fix)
    Console(stderr=True, soft_wrap=True).print(message)
