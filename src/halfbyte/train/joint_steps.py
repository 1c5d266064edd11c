"""Steps of several adapters as one: their micro-batches are ranges of rows of one batch, see `modeling.row_adapters`.

The number of micro-batches in a step is each run's own. The first micro-batches of all runs are computed as one batch,
then the second micro-batches of all runs that have one, and so on. Losses are divided by each run's own count, and
gradients reach each run's own parameters, so the runs differ from separate runs by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..batch import ADAPTERS, COLUMNS, LOSS_COUNT, Batch, joined
from ..memory.allocators import Result
from ..methods.sft import SupervisedFineTuning
from ..modeling.compute_dtype import compute_autocast
from ..modeling.row_adapters import RowAdapters
from ..optim import optimizer_row
from ..utils.errors import TrainingError
from ..utils.hardware import is_out_of_memory
from ..utils.processes import Stopped
from .graph import GraphedBackward
from .loop import Accumulation, TrainingLoop
from .preflight import PreparedRun
from .stepper import Stepper
from .verify import Verified

CHECKED = 8  # tokens of the forward that looks for linears with a forward of their own
ROW_LEVELS = ("tiled",)  # activation levels that split the rows of a batch


def obstacle(run: PreparedRun, verified: Verified) -> str | None:
    """Return why the steps of a run cannot be part of joint steps, or None."""
    if verified.report is None:
        return "layers run transformers' own forwards" if run.machine.device.type != "cpu" else "a CPU gains nothing"
    if run.config.precision.recipe != "bf16":
        return f"{run.config.written('recipe')} has the scales of one run"
    if verified.results.get("isolation", {}).get("method", "positions") != "positions":
        return "the model needs other means than positions to separate packed documents"
    if run.config.shift_attn:
        return "shift_attn selects the attention of one run's model"
    if arrays := [name for name in run.data.train[0] if name in COLUMNS and COLUMNS[name].in_data]:
        return f"rows have arrays of their own ({arrays[0]})"
    if levels := set(ROW_LEVELS) & set(run.plan.levels):
        return f"layers save activations at the level {levels.pop()}"
    if not isinstance(run.method, SupervisedFineTuning) or run.method.balance:
        return "the loss reads more than each token's logits"
    if optimizer_row(run.config).updates == "backward" or run.config.neftune_noise_alpha:
        return "the backward of one of them updates its weights, or its embeddings have noise"
    return None


class MemberStepper(Stepper):
    """The stepper of a run whose steps are part of joint steps.

    Attributes:
        joint: computes the steps; None before the first one.
    """

    joint: JointSteps | None = None

    @property
    def holds_graphs(self) -> bool:  # type: ignore[override]
        return self.joint is not None and self.joint.holds_graphs

    @property
    def peak_graph_bytes(self) -> int:  # type: ignore[override]
        return self.joint.peak_graph_bytes if self.joint is not None else 0

    def evaluate(self, sums: Any, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        return self.retry_without_graphs(lambda: super(MemberStepper, self).evaluate(sums, batches))

    def retry_without_graphs(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except RuntimeError as error:
            if not (self.holds_graphs and is_out_of_memory(error)):
                raise
        assert self.joint is not None
        self.joint.give_up_graphs()  # outside the handler, whose error references the tensors of `work`
        return work()


class JointSteps:
    """Computes a step of several runs.

    Args:
        model: a patched model of the frozen tensors that the runs' models share.
        loops: the loop of each run, by its name.
        captures: whether micro-batches are captured in CUDA graphs.

    Attributes:
        graphs: of micro-batches; None: they run eagerly.
        obstacle: why no step can be computed as one; None: it can.
    """

    def __init__(self, model: Any, loops: Mapping[str, TrainingLoop], captures: bool):
        self.loops = list(loops.values())
        self.numbers = {name: number for number, name in enumerate(loops)}
        first = self.loops[0]
        self.rows = RowAdapters(model, [loop.model for loop in self.loops])
        ids = torch.arange(CHECKED, device=first.device)[None]
        with compute_autocast(first.model, first.compute_dtype):
            self.obstacle = self.rows.unjoinable(ids)
        parameters = [parameter for loop in self.loops for parameter in loop.trained]
        self.graphs = GraphedBackward(self._micro_batch, parameters) if captures and self.obstacle is None else None
        for loop in self.loops:
            if isinstance(loop.stepper, MemberStepper):
                loop.stepper.joint = self

    def __call__(
        self, steps: Mapping[str, Accumulation], as_run: Callable[[str], AbstractContextManager[None]]
    ) -> dict[str, Tensor | BaseException]:
        """Compute the steps; return each run's sums, fp32 [n], or its error.

        Args:
            as_run: the context of a run's own random numbers.
        """
        errors: dict[str, BaseException] = {}
        totals = {name: torch.zeros(step.loop.metric_count, device=step.loop.device) for name, step in steps.items()}
        iterators = {name: iter(step.batches) for name, step in steps.items()}
        while iterators:
            batches: dict[str, Batch] = {}
            for name, iterator in list(iterators.items()):
                try:
                    with as_run(name):
                        batches[name] = next(iterator)
                except StopIteration:
                    del iterators[name]
                except (TrainingError, Stopped) as error:
                    errors[name] = error
                    del iterators[name]
            try:
                sums = self._compute(batches, steps) if batches else {}
            except (RuntimeError, MemoryError, KeyboardInterrupt) as error:
                return totals | errors | dict.fromkeys(iterators, error)
            for name, value in sums.items():
                totals[name] += value
        return totals | errors

    def _compute(self, batches: Mapping[str, Batch], steps: Mapping[str, Accumulation]) -> dict[str, Tensor]:
        """Add the gradients of one micro-batch of each run; return their sums, fp32 [n]."""
        batch = joined([*batches.values()])
        batch[ADAPTERS] = tuple(self.numbers[name] for name in batches)
        batch[LOSS_COUNT] = torch.stack([steps[name].loss_count for name in batches])
        if self.graphs is None:
            sums = self._micro_batch(batch)
        else:
            sums = self.graphs(batch, all(steps[name].loop.may_capture for name in batches))
        return {name: value.reshape(1) for name, value in zip(batches, sums.unbind(), strict=True)}

    def _micro_batch(self, batch: Batch) -> Tensor:
        """Run forward and backward of a joined micro-batch; return the loss sums [G]. A CUDA graph can capture this."""
        adapters = batch[ADAPTERS]
        columns = {key: value for key, value in batch.items() if key not in (ADAPTERS, LOSS_COUNT)}
        loops = [self.loops[number] for number in adapters]
        with self.rows.active(adapters):
            with compute_autocast(loops[0].model, loops[0].compute_dtype):
                losses = self.rows.losses(columns)
            pairs = zip(loops, losses, batch[LOSS_COUNT].unbind(), strict=True)
            torch.stack([loop.grad_scaler.scale(loss / count) for loop, loss, count in pairs]).sum().backward()
        return torch.stack([loss.detach() for loss in losses])

    @property
    def holds_graphs(self) -> bool:
        return self.graphs is not None and self.graphs.holds_graphs

    @property
    def peak_graph_bytes(self) -> int:
        return 0 if self.graphs is None else self.graphs.peak_pool_bytes

    def give_up_graphs(self) -> None:
        """Free all graphs and stop capturing, since memory ran out."""
        if self.graphs is not None:
            self.graphs.give_up()

    def close(self) -> None:
        """Free the memory of captured graphs."""
        if self.graphs is not None:
            self.graphs.close()
