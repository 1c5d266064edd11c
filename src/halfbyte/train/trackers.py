"""Experiment trackers of `report_to`: transformers' callbacks, which get configuration, plan, answers and report too.

The ids of the run in its trackers are in trackers.json, so that a resumed run continues there. A tracker whose service
or library fails is left out from then on, with a notice; the run goes on.
"""

from __future__ import annotations

import copy
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from transformers.integrations import get_reporting_integration_callbacks

from ..config import RunConfig, dump_config
from ..config.run_config import with_specs
from ..formats import KBit
from ..plan.memory_plan import MemoryPlan
from ..reading import read_json, read_text
from ..runs.layout import TRACKERS
from ..utils.errors import ConfigError, HalfbyteError, first_line
from ..utils.files import write_json
from ..utils.notices import notice

ANSWERS = ("step", "prompt", "answer", "reference")  # columns of the table of answers


@dataclass(frozen=True)
class Details:
    """Texts and tables that a tracker gets in addition to numbers.

    Attributes:
        documents: name → contents of a JSON file.
        answers: rows of `ANSWERS`.
        report: the run's report; None at its start.
    """

    documents: Mapping[str, Any]
    answers: Sequence[Sequence[Any]] = ()
    report: Path | None = None


def described(config: RunConfig, plan: MemoryPlan) -> dict[str, Any]:
    """Return the documents that trackers get first: the configuration without secrets, and the plan in bytes."""
    return {
        "configuration": yaml.safe_load(dump_config(with_specs(config, KBit.names))),
        "memory_plan": plan.predicted(),
    }


def _to_tensorboard(callback: Any, details: Details) -> None:
    writer = callback.tb_writer
    for name, document in details.documents.items():
        writer.add_text(name, f"```json\n{json.dumps(document, indent=1, default=str)}\n```")
    if details.answers:
        lines = [ANSWERS, ["---"] * len(ANSWERS), *details.answers]
        cells = [[str(value).replace("|", "\\|").replace("\n", "<br>") for value in line] for line in lines]
        writer.add_text("answers", "\n".join(f"| {' | '.join(line)} |" for line in cells))
    if details.report is not None:
        writer.add_text("report", str(details.report))
    writer.flush()


def _to_wandb(callback: Any, details: Details) -> None:
    wandb = callback._wandb
    documents = {f"halfbyte/{name}": document for name, document in details.documents.items()}
    wandb.config.update(documents, allow_val_change=True)  # a resumed run may have other keys
    if details.answers:
        wandb.log({"answers": wandb.Table(columns=[*ANSWERS], data=[[*map(str, row)] for row in details.answers])})
    if details.report is not None:
        wandb.log({"report": wandb.Html(read_text(details.report), inject=False)})


def _to_mlflow(callback: Any, details: Details) -> None:
    mlflow = callback._ml_flow
    for name, document in details.documents.items():
        mlflow.log_dict(document, f"{name}.json")
    if details.answers:
        columns = zip(*details.answers, strict=True)
        mlflow.log_table(
            {name: [*map(str, column)] for name, column in zip(ANSWERS, columns, strict=True)}, "answers.json"
        )
    if details.report is not None:
        mlflow.log_artifact(str(details.report))


def _to_trackio(callback: Any, details: Details) -> None:
    trackio = callback._trackio
    for name, document in details.documents.items():
        trackio.log({name: trackio.Markdown(f"```json\n{json.dumps(document, indent=1, default=str)}\n```")})
    if details.answers:
        import pandas

        rows = [[*map(str, row)] for row in details.answers]
        trackio.log({"answers": trackio.Table(dataframe=pandas.DataFrame(rows, columns=[*ANSWERS]))})
    if details.report is not None:
        trackio.log({"report": trackio.Markdown(str(details.report))})


def _to_swanlab(callback: Any, details: Details) -> None:
    swanlab = callback._swanlab
    if details.documents:
        swanlab.config.update({f"halfbyte/{name}": document for name, document in details.documents.items()})
    if details.answers:
        texts = [swanlab.Text(f"{prompt}\n\n{answer}", f"step {step}") for step, prompt, answer, _ in details.answers]
        swanlab.log({"answers": texts})
    if details.report is not None:
        swanlab.log({"report": swanlab.Text(str(details.report))})


SENDERS: dict[str, Callable[[Any, Details], None]] = {
    "TensorBoardCallback": _to_tensorboard,
    "WandbCallback": _to_wandb,
    "MLflowCallback": _to_mlflow,
    "TrackioCallback": _to_trackio,
    "SwanLabCallback": _to_swanlab,
}


@dataclass(frozen=True)
class Opening:
    """Names of a run for a tracker, and the id of the run that it continues.

    Attributes:
        name: `run_name`.
        project: None: of the environment, or the tracker's own.
        folder: `output_dir`.
        id: the tracker's id of the run that is continued; empty: a new run.
        step: optimizer steps that the run has made.
    """

    name: str | None
    project: str | None
    folder: Path
    id: str
    step: int


@dataclass(frozen=True)
class Opened:
    """A run that was opened in a tracker.

    Attributes:
        id: with which it can be continued; empty: it cannot.
        close: takes whether training failed; None: the callback closes the run.
    """

    id: str
    close: Callable[[bool], Any] | None = None


def _open_wandb(callback: Any, opening: Opening) -> Opened | None:
    wandb = callback._wandb
    if wandb.run is not None:  # the user's
        return None
    number = os.getenv("WANDB_RUN_ID") or opening.id or secrets.token_hex(4)
    project = opening.project or os.getenv("WANDB_PROJECT", "huggingface")
    wandb.init(project=project, name=opening.name, id=number, resume=os.getenv("WANDB_RESUME") or "allow")
    return Opened(number, lambda failed: wandb.finish(exit_code=int(failed)))


def _open_mlflow(callback: Any, opening: Opening) -> Opened | None:
    mlflow = callback._ml_flow
    if os.getenv("MLFLOW_RUN_ID") or mlflow.active_run() is not None:  # the callback, or the user, opens it
        return None
    if experiment := opening.project or os.getenv("MLFLOW_EXPERIMENT_NAME"):
        mlflow.set_experiment(experiment)
    run = mlflow.start_run(run_id=opening.id) if opening.id else mlflow.start_run(run_name=opening.name)
    return Opened(run.info.run_id, lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"))


def _open_trackio(callback: Any, opening: Opening) -> Opened:
    """Choose the run's name, by which Trackio continues it; the callback opens it."""
    return Opened(opening.id or opening.name or f"{opening.folder.resolve().name}-{secrets.token_hex(2)}")


def _open_swanlab(callback: Any, opening: Opening) -> Opened | None:
    swanlab = callback._swanlab
    if swanlab.has_run() if hasattr(swanlab, "has_run") else swanlab.get_run() is not None:  # the user's
        return None
    names = {"project": opening.project or os.getenv("SWANLAB_PROJECT"), "experiment_name": opening.name}
    if os.getenv("SWANLAB_MODE", "cloud") not in ("cloud", "online"):  # such runs cannot be continued
        swanlab.init(**names)
        return Opened("", lambda failed: swanlab.finish())
    number = os.getenv("SWANLAB_RUN_ID") or opening.id or secrets.token_hex(11)[:21]
    swanlab.init(**names, id=number, resume=os.getenv("SWANLAB_RESUME") or "allow")
    return Opened(number, lambda failed: swanlab.finish())


def _open_tensorboard(callback: Any, opening: Opening) -> Opened:
    """Choose the folder of the event files; of a continued run, events after its checkpoint are hidden."""
    if opening.id:
        callback.logging_dir = str(opening.folder / opening.id)
        callback.tb_writer = callback._SummaryWriter(log_dir=callback.logging_dir, purge_step=opening.step + 1)
    elif opening.name is not None or callback.logging_dir is None:
        name = opening.name or f"{time.strftime('%b%d_%H-%M-%S')}_{socket.gethostname()}"  # transformers' default
        callback.logging_dir = str(Path(callback.logging_dir or opening.folder / "runs") / name)
    return Opened(os.path.relpath(callback.logging_dir, opening.folder))


OPENERS: dict[str, Callable[[Any, Opening], Opened | None]] = {
    "TensorBoardCallback": _open_tensorboard,
    "WandbCallback": _open_wandb,
    "MLflowCallback": _open_mlflow,
    "TrackioCallback": _open_trackio,
    "SwanLabCallback": _open_swanlab,
}


class Trackers:
    """The trackers of a run.

    Args:
        names: `report_to`.
        model: that callbacks may describe.
        folder: `output_dir`.
        project: of the run in its trackers.

    Attributes:
        first: details that are sent when training begins.
    """

    def __init__(self, names: list[str] | str, model: Any, folder: Path, project: str | None = None):
        self.model = model
        self.folder = folder
        self.project = project
        self._callbacks = [callback() for callback in get_reporting_integration_callbacks(names)]
        self._opened: dict[Any, Opened] = {}
        self.first: Details | None = None
        self._end: tuple[Any, ...] | None = None

    @property
    def is_used(self) -> bool:
        """Whether there is a tracker."""
        return bool(self._callbacks)

    def event(self, name: str, *arguments: Any, **keys: Any) -> None:
        """Pass an event on, with arguments, state and control; the end of training when `finish` is called."""
        if name == "on_train_end":
            self._end = arguments
            return
        if name == "on_train_begin" and self.is_used:
            self._open(*arguments[:2])
        self._each(lambda callback: getattr(callback, name)(*self._for(callback, arguments), model=self.model, **keys))
        if name == "on_train_begin" and self.first is not None:
            self.send(self.first)

    def send(self, details: Details) -> None:
        """Send `details` to the trackers that can show them."""
        self._each(lambda callback: SENDERS.get(type(callback).__name__, _send_nothing)(callback, details))

    def finish(self, details: Details) -> None:
        """Send the last `details`, and end; nothing if training had ended before this process began."""
        if (arguments := self._end) is None:
            return
        self._end = None
        self.send(details)
        self._each(lambda callback: callback.on_train_end(*self._for(callback, arguments), model=self.model))
        self.close()

    def _open(self, args: Any, state: Any) -> None:
        """Open the run in each tracker, the same one if the run is resumed, and write trackers.json."""
        file = self.folder / TRACKERS
        ids = _stored_ids(file) if state.global_step else {}

        def open_run(callback: Any) -> None:
            number = str(ids.get(_name_of(callback), ""))
            opening = Opening(args.run_name, self.project, self.folder, number, state.global_step)
            opener = OPENERS.get(type(callback).__name__)
            if opener is not None and (opened := opener(callback, opening)) is not None:
                self._opened[callback] = opened

        self._each(open_run)
        write_json(file, {_name_of(callback): opened.id for callback, opened in self._opened.items() if opened.id})

    def close(self, failed: bool = False) -> None:
        """Close the runs that were opened: the next run of this process is another one in the trackers."""

        def close_run(callback: Any) -> None:
            opened = self._opened.pop(callback, None)
            if opened is not None and opened.close is not None:
                opened.close(failed)

        self._each(close_run)

    def _for(self, callback: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an event; Trackio continues the run of the name in them."""
        if type(callback).__name__ != "TrackioCallback" or callback not in self._opened:
            return arguments
        args = copy.copy(arguments[0])
        args.run_name = self._opened[callback].id
        return args, *arguments[1:]

    def _each(self, work: Callable[[Any], Any]) -> None:
        """Call `work` with each callback, and drop a callback that fails."""
        for callback in list(self._callbacks):
            try:
                work(callback)
            except Exception as error:  # any error of a tracker's library
                self._callbacks.remove(callback)
                name = _name_of(callback)
                notice(f"tracker {name}", f"report_to: {name} gets nothing more of this run: {first_line(error)}")


def _stored_ids(file: Path) -> dict[str, Any]:
    """Return the ids in trackers.json; none if there is no such file, or it cannot be read."""
    if not file.exists():
        return {}
    try:
        ids = read_json(file)
    except HalfbyteError as error:
        notice("tracker ids", f"{error.message}. The run is a new one in its trackers")
        return {}
    return ids if isinstance(ids, dict) else {}


def _name_of(callback: Any) -> str:
    return type(callback).__name__.removesuffix("Callback")


def _send_nothing(callback: Any, details: Details) -> None:
    """Ignore details: this tracker gets only numbers."""


def check_trackers(names: list[str]) -> None:
    """Create the callbacks of `report_to` once.

    Raises:
        ConfigError: a tracker does not exist, or is not installed.
    """
    for name in names:
        try:
            # a single name may be "all" or "none"
            for callback in get_reporting_integration_callbacks(name if len(names) == 1 else [name]):
                callback()
        except Exception as error:  # any error of a tracker's library
            raise ConfigError(
                f"report_to: {name}: {first_line(error)}", f"install what it needs, or leave {name} out of report_to"
            ) from error
