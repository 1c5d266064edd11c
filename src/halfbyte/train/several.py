"""Several adapters in one run: one frozen base, and a separate run over it for each adapter.

Each adapter has its own model over the frozen tensors of the base, and everything else that a run has: rows, schedule,
optimizer, evaluations, checkpoints, records and a folder in `output_dir/adapters`. The runs advance together, a step of
each at a time, and each has its own random state. So an adapter's numbers do not depend on the other adapters, a
diverged adapter ends alone, and a resumed run continues each adapter from its own checkpoint.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from ..config import RunConfig, dump_config, dump_given
from ..config.several import adapter_runs, have_equal_plans
from ..mesh.mesh import present_mesh
from ..modeling.patch import patch
from ..plan.memory_plan import MemoryPlan
from ..report.comparison import compare, print_comparison
from ..runs.inputs import check_output
from ..runs.layout import GIVEN_CONFIG, RESOLVED_CONFIG
from ..runs.lock import run_lock
from ..runs.status import Progress, report_status
from ..utils.console import Console
from ..utils.errors import ConfigError, HalfbyteError, TrainingError
from ..utils.files import write_text
from ..utils.hardware import chosen_device
from ..utils.notices import notice
from ..utils.processes import Stopped, request_on_signals
from ..utils.text import one_line
from ..utils.waiting import showing_waits
from .checkpoint import random_states, set_random_states
from .guards import announce_signal
from .joint_steps import JointSteps, MemberStepper, obstacle
from .loop import Accumulation, Steps, TrainingLoop, run_step
from .preflight import PreparedRun, prepare_run
from .run_folder import HEADER, OpenRun, finished_measures, is_generated, open_run
from .setup import ModelSource, load_base, process_settings, with_adapter
from .stepper import Stepper
from .verify import Verified

Result = TypeVar("Result")


def prepare_adapters(
    config: RunConfig, resume: str | bool | None, console: Console, writes: bool = True
) -> dict[str, PreparedRun]:
    """Prepare the run of each adapter, by its name; each has the memory plan of all of them.

    Arguments and errors as in `prepare_run`; an error names the adapter.
    """
    runs = adapter_runs(config)
    console.print(one_line(f"adapters {len(runs)} on one base: {', '.join(runs)}"), soft_wrap=True)
    prepared: dict[str, PreparedRun] = {}
    together = list(runs.values())
    for name, run in runs.items():
        plan = next((other.plan for other in prepared.values() if have_equal_plans(other.written, run)), None)
        try:
            prepared[name] = prepare_run(run, resume, console, writes=writes, together=together, plan=plan)
        except HalfbyteError as error:
            error.message = f"adapter {name}: {error.message}"
            raise
        console = Console(quiet=True)  # all adapters have the model and machine that the first one prints
    largest = max((run.plan for run in prepared.values()), key=lambda plan: plan.total)
    return {name: _with_plan(run, largest) for name, run in prepared.items()}


def _with_plan(run: PreparedRun, plan: MemoryPlan) -> PreparedRun:
    """Return a run with the plan of all adapters, whose layers save the same activations."""
    return replace(run, plan=plan, config=run.config.model_copy(update=dict(plan.optimizer_choice)))


def train_adapters(
    config: RunConfig,
    resume: str | bool | None,
    console: Console | None,
    steps_of: Callable[[OpenRun, Console, ModelSource], Steps[Result]],
    finished: Callable[[PreparedRun, dict[str, int], Console, Progress], Result],
) -> dict[str, Any]:
    """Train the adapters of a run, and compare them in its folder.

    Args:
        resume, console: as in `train`.
        steps_of: returns the steps of an open run.
        finished: returns the result of a run that has finished before, with its measured memory and its progress.

    Returns:
        The last numbers of each adapter, by its name.

    Raises:
        HalfbyteError: as in `train`; a TrainingError names the adapters that ended with an error, after all others.
        Stopped: the process received a signal; a checkpoint of each unfinished adapter is saved.
    """
    console = console or Console(quiet=True)
    with present_mesh(config.layout, chosen_device(config.device).type) as mesh, showing_waits(console):
        if mesh.size > 1:
            wrong = f"adapters and sweep train on one device, and this run has {mesh.size} processes"
            raise ConfigError(wrong, "start it with `halfbyte train` in one process")
        check_output(config, resume)
        with contextlib.ExitStack() as stack:
            stack.enter_context(run_lock(config.output_path))
            folders = {name: run.output_path for name, run in adapter_runs(config).items()}
            progress = {name: stack.enter_context(report_status(folder)) for name, folder in folders.items()}
            runs = prepare_adapters(config, resume, console)
            results = _train(config, runs, resume, steps_of, finished, progress)
            errors = {name: result for name, result in results.items() if isinstance(result, BaseException)}
            for error in errors.values():
                if isinstance(error, Stopped):
                    raise error
            differing = {name: _changes(config, run.config) for name, run in runs.items()}
            held_out = {run.identity["eval_dataset"] for run in runs.values()}
            comparison = compare(config.output_path, differing, errors, same_rows=len(held_out) == 1)
    print_comparison(console, comparison, config.output_path)
    if errors:
        wrong = "; ".join(f"adapter {name}: {getattr(error, 'message', error)}" for name, error in errors.items())
        raise TrainingError(wrong, "the other adapters are finished; change these and train them in another output_dir")
    return comparison


def _train(
    config: RunConfig,
    runs: Mapping[str, PreparedRun],
    resume: str | bool | None,
    steps_of: Callable[[OpenRun, Console, ModelSource], Steps[Result]],
    finished: Callable[[PreparedRun, dict[str, int], Console, Progress], Result],
    progress: Mapping[str, Progress],
) -> dict[str, Result | TrainingError | Stopped]:
    """Train the adapters that have not finished; return the result of each, or the error that ended it."""
    quiet = Console(quiet=True)
    results: dict[str, Any] = {}
    for name, run in runs.items():
        if (measured := finished_measures(run)) is not None:
            results[name] = finished(run, measured, quiet, progress[name])
            progress[name].end("finished")
    remaining = {name: run for name, run in runs.items() if name not in results}
    if remaining:
        with contextlib.ExitStack() as stack:
            jobs = {name: stack.enter_context(open_run(run, resume, progress[name])) for name, run in remaining.items()}
            _write_configuration(config)
            stack.enter_context(process_settings(next(iter(remaining.values()))))
            stack.enter_context(request_on_signals(announce_signal))
            results |= _run_together(jobs, quiet, steps_of)
    return {name: results[name] for name in runs}


def _run_together(
    jobs: Mapping[str, OpenRun], console: Console, steps_of: Callable[[OpenRun, Console, ModelSource], Steps[Result]]
) -> dict[str, Result | TrainingError | Stopped]:
    """Run the steps of open runs over one base, which nothing references afterwards; return as `Together.run`."""
    base = SharedBase()
    return Together({name: steps_of(job, console, base) for name, job in jobs.items()}, base.joint_steps).run()


def _write_configuration(config: RunConfig) -> None:
    """Write the keys of the run of all adapters; a run.yaml that a user wrote is not replaced."""
    write_text(config.output_path / RESOLVED_CONFIG, dump_config(config))
    file = config.output_path / GIVEN_CONFIG
    if not file.exists() or is_generated(file):
        write_text(file, f"{HEADER}\n{dump_given(config)}")


def _changes(config: RunConfig, run: RunConfig) -> dict[str, Any]:
    """Return the values of an adapter's run for the keys that differ between adapters."""
    keys = dict.fromkeys(key for entry in config.adapters or [config.sweep or {}] for key in entry if key != "name")
    return {key: getattr(run, key) for key in keys}


class SharedBase(ModelSource):
    """The models of all adapters, over the frozen tensors of one base, which the first run loads."""

    def __init__(self) -> None:
        self._base: nn.Module | None = None
        self._measured: dict[str, int] = {}
        self._digests: Future[dict[str, Any]] | None = None
        self._obstacle: str | None = None  # why one forward cannot compute all adapters
        self._levels: Sequence[str] = ()
        self._captures = False

    def load(self, run: PreparedRun, measured: dict[str, int]) -> Any:
        if self._base is None:
            self._base = load_base(run, self._measured)
        measured |= self._measured
        return with_adapter(run, with_same_tensors(self._base))

    def stepper(self, run: PreparedRun, model: Any, verified: Verified) -> Stepper:
        self._obstacle = self._obstacle or obstacle(run, verified)
        if self._obstacle is not None:
            return Stepper()
        self._levels, self._captures = run.plan.levels, verified.graphs
        return MemberStepper()

    def joint_steps(self, loops: Mapping[str, TrainingLoop]) -> JointSteps | None:
        """Return a computation of the steps of all runs as one batch; None, with a notice, if it is not possible."""
        assert self._base is not None
        reason = self._obstacle
        if reason is None:
            model: Any = with_same_tensors(self._base)
            patch(model.train(), self._levels or None)
            joint = JointSteps(model, loops, self._captures)
            if joint.obstacle is None:
                return joint
            reason = joint.obstacle
        notice("adapters-in-turn", f"the adapters compute their steps in turn, not as one batch: {reason}")
        return None

    def digests(self, run: PreparedRun) -> Future[dict[str, Any]]:
        if run.checkpoint is not None:
            return super().digests(run)
        if self._digests is None:
            self._digests = super().digests(run)
        return self._digests


def with_same_tensors(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares all tensors with it, but no module."""
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        shared += [value for value in vars(module).values() if isinstance(value, Tensor)]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _send(steps: Steps[Any], sums: Tensor | BaseException) -> Accumulation:
    """Continue a run after its step, or raise the error of the step in it."""
    return steps.throw(sums) if isinstance(sums, BaseException) else steps.send(sums)


def _clear_frames(error: BaseException) -> None:
    """Clear the locals of the finished frames of an error and its causes, which reference a run's model."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__


class Together(Generic[Result]):
    """Drives several runs, a step of each at a time.

    Args:
        runs: the steps of each run, by its name.
        join: returns a computation of the steps of these loops as one batch, or None if each computes its own step.
    """

    def __init__(
        self, runs: Mapping[str, Steps[Result]], join: Callable[[Mapping[str, TrainingLoop]], JointSteps | None]
    ):
        self.runs = runs
        self.join = join
        self._joint: JointSteps | None = None
        self._steps: dict[str, Accumulation] = {}  # the step that each unfinished run has yielded
        self._results: dict[str, Result | TrainingError | Stopped] = {}
        self._random = dict.fromkeys(runs, random_states())

    def run(self) -> dict[str, Result | TrainingError | Stopped]:
        """Run all to their ends; return the result of each, or the error that ended it."""
        try:
            for name, steps in self.runs.items():
                self._advance(name, partial(next, steps))
            self._joint = self.join({name: step.loop for name, step in self._steps.items()}) if self._steps else None
            while self._steps:
                for name, to_next_step in self._next_steps().items():
                    self._advance(name, to_next_step)
        finally:
            if self._joint is not None:
                self._joint.close()
            for steps in self.runs.values():
                steps.close()
        return self._results

    def _next_steps(self) -> dict[str, Callable[[], Accumulation]]:
        """Return, for each unfinished run, a function that computes its step and continues it."""
        if self._joint is None:
            return {name: partial(run_step, self.runs[name], step) for name, step in self._steps.items()}
        computed = self._joint(self._steps, self._as)
        return {name: partial(_send, self.runs[name], sums) for name, sums in computed.items()}

    @contextlib.contextmanager
    def _as(self, name: str) -> Iterator[None]:
        """Within the context, use the random state of a run; a joint forward of all runs keeps the device's own."""
        states = self._random[name]
        set_random_states({key: states[key] for key in states if key != "cuda" or self._joint is None})
        try:
            yield
        finally:
            self._random[name] = random_states()

    def _advance(self, name: str, to_next_step: Callable[[], Accumulation]) -> None:
        """Run code of one run, up to its next step or its end, with its own random numbers."""
        with self._as(name):
            try:
                self._steps[name] = to_next_step()
            except StopIteration as end:
                self._results[name] = end.value
            except (TrainingError, Stopped) as error:
                del to_next_step  # this frame, too, is in the traceback
                _clear_frames(error)
                self._results[name] = error
        if name in self._results:
            self._steps.pop(name, None)
