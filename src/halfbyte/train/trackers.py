"""Experiment trackers of `report_to`: transformers' callbacks, which get configuration, plan, answers and report too.

A tracker whose service or library fails is left out from then on, with a notice; the run goes on.
"""

from __future__ import annotations

import json
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
from ..reading import read_text
from ..utils.errors import ConfigError, first_line
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
    wandb.config.update({f"halfbyte/{name}": document for name, document in details.documents.items()})
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


SENDERS: dict[str, Callable[[Any, Details], None]] = {
    "TensorBoardCallback": _to_tensorboard,
    "WandbCallback": _to_wandb,
    "MLflowCallback": _to_mlflow,
    "TrackioCallback": _to_trackio,
}


class Trackers:
    """The trackers of a run.

    Args:
        names: `report_to`.
        model: that callbacks may describe.

    Attributes:
        first: details that are sent when training begins.
    """

    def __init__(self, names: list[str] | str, model: Any):
        self.model = model
        self._callbacks = [callback() for callback in get_reporting_integration_callbacks(names)]
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
        self._each(lambda callback: getattr(callback, name)(*arguments, model=self.model, **keys))
        if name == "on_train_begin" and self.first is not None:
            self.send(self.first)

    def send(self, details: Details) -> None:
        """Send `details` to the trackers that can show them."""
        self._each(lambda callback: SENDERS.get(type(callback).__name__, _send_nothing)(callback, details))

    def finish(self, details: Details) -> None:
        """Send the last `details`, and end."""
        self.send(details)
        if (arguments := self._end) is not None:
            self._end = None
            self._each(lambda callback: callback.on_train_end(*arguments, model=self.model))

    def _each(self, work: Callable[[Any], Any]) -> None:
        """Call `work` with each callback, and drop a callback that fails."""
        for callback in list(self._callbacks):
            try:
                work(callback)
            except Exception as error:  # any error of a tracker's library
                self._callbacks.remove(callback)
                name = type(callback).__name__.removesuffix("Callback")
                notice(f"tracker {name}", f"report_to: {name} gets nothing more of this run: {first_line(error)}")


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
