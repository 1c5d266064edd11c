"""Steppers: the steps that CUDA graphs and pipelines replace, and the numbers that a step's micro-batches share.

`TrainingLoop.train_step` runs a step eagerly, unless its stepper does: `GraphedStepper` replays forwards, backwards and
the optimizer as CUDA graphs, and `train.pipeline_stepper.PipelinedStepper` runs them through the stages of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..batch import LOOK_AHEAD, LOSS_COUNT, SYNCED_SHAPE, Batch
from ..memory.allocators import GraphMemory, Result
from ..mesh.mesh import SINGLE_PROCESS, Mesh
from ..mesh.reduction import is_norm_distributed
from ..methods.base import Method
from ..modeling.compute_dtype import compute_autocast
from ..modeling.language_inputs import LanguageInputs
from ..optim.fused import FusedOptimizer
from ..parallel.padding import pad_to_longest
from ..parallel.shard.optimizer import ReplicatedOptimizer
from ..utils.hardware import is_out_of_memory
from ..utils.notices import notice
from .graph import GraphedBackward, GraphedOptimizer
from .guards import skip_if_not_finite

if TYPE_CHECKING:
    from ..parallel.pipeline.runtime import Pipeline

Sums = Callable[[Batch], Mapping[str, Tensor]]  # micro-batch → named sums, 0-d
Forward = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]  # see `TrainingLoop.forward`


class Stepper(GraphMemory):
    """The hook of CUDA graphs and pipelines; this one replaces nothing, so that the loop runs a step eagerly."""

    is_eager = True  # whether the loop runs forwards and backwards itself; else it calls `forward_backward`
    captures = False  # whether steps are captured in CUDA graphs
    captures_optimizer = False  # whether the loop calls `clip_and_step` in place of clipping, guard and optimizer
    peak_graph_bytes = 0  # peak device memory of captured graphs, bytes; set by `close`
    evaluation_batches = 1  # number of batches that `evaluate` takes in one call
    has_all_layers = True  # False: this rank has some stages of a pipeline
    pipeline: Pipeline | None = None  # the pipeline that steps run through

    def forward_backward(
        self, forward: Forward, batches: Iterable[Batch], loss_count: Tensor, may_capture: bool = False
    ) -> Tensor:
        """Add the gradients of a step's micro-batches to `.grad`; return the sums of `forward` over them, fp32 [n].

        Args:
            forward: the same function in all steps.
            loss_count: 0-d, on the device: the divisor of the step's summed loss.
            may_capture: whether the step may be captured in CUDA graphs.
        """
        raise NotImplementedError

    def clip_and_step(self, sums: Tensor, may_capture: bool) -> Tensor:
        """Clip the gradients, step the optimizer unless a number is NaN or Inf, and zero the gradients.

        Returns:
            The reduced `sums` [n] and the gradients' norm before clipping, fp32 [n + 1].
        """
        raise NotImplementedError

    def capture_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_shards: ReplicatedOptimizer,
        max_norm: float,
        before_step: Callable[[], object],
    ) -> None:
        """Let `clip_and_step` end the steps of a run from here on, if graphs can hold the optimizer.

        Args:
            max_norm: 2-norm to clip to; math.inf: the norm is only computed.
            before_step: called at the beginning of each `clip_and_step`.
        """

    def pad_across_ranks(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a step's micro-batches, on the device, with the shapes that all ranks compute; a collective."""
        return list(batches)

    def evaluate(self, sums: Sums, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        """Return the sums of each batch, without gradients."""
        return [sums(batch) for batch in batches]

    def close(self) -> None:
        """Free the memory that is needed for training only."""


class GraphedStepper(Stepper):
    """Runs the micro-batches of a step as CUDA graphs, and the end of a step as another one, without loss scaling.

    Several hundred adapter matrices would cost the host a millisecond at the end of a step. Its graph is apart from
    those of micro-batches, so that each of their shapes is captured once, however a step combines them.

    Args:
        parameters: the trained parameters.
        mesh: of the run.
        language_inputs: replaces the images of a micro-batch before its graph; None: the rows have none.
    """

    is_eager = False
    captures = True

    def __init__(
        self, parameters: Sequence[Tensor], mesh: Mesh = SINGLE_PROCESS, language_inputs: LanguageInputs | None = None
    ):
        self.mesh = mesh
        self.language_inputs = language_inputs
        self.graphs = GraphedBackward(self._micro_batch, parameters, mesh)
        self.optimizer_graph: GraphedOptimizer | None = None
        self._forward: Forward
        self._before_step: Callable[[], object]

    def forward_backward(
        self, forward: Forward, batches: Iterable[Batch], loss_count: Tensor, may_capture: bool = False
    ) -> Tensor:
        self._forward = forward
        results = (self.graphs(self._graph_inputs(batch, loss_count), may_capture) for batch in batches)
        total = next(results)
        for sums in results:
            total = total + sums
        return total

    def _graph_inputs(self, batch: Batch, loss_count: Tensor) -> dict[str, Any]:
        """Return the columns that a graph reads; images are computed for them here."""
        if self.language_inputs is not None:
            compute = partial(self.language_inputs, batch, lambda batch: self._forward(batch, loss_count))
            batch = self.retry_without_graphs(partial(self.graphs.on_stream, compute))
        return {**batch, LOSS_COUNT: loss_count}

    def _micro_batch(self, batch: Batch) -> Tensor:
        """Run forward and backward of a micro-batch and return its sums [n]. A CUDA graph can capture this."""
        columns = {key: value for key, value in batch.items() if key not in (LOSS_COUNT, SYNCED_SHAPE)}
        loss, sums = self._forward(columns, batch[LOSS_COUNT])
        loss.backward()
        return sums

    @property
    def captures_optimizer(self) -> bool:  # type: ignore[override]
        return self.optimizer_graph is not None

    def capture_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_shards: ReplicatedOptimizer,
        max_norm: float,
        before_step: Callable[[], object],
    ) -> None:
        self._before_step = before_step
        if not isinstance(optimizer, FusedOptimizer):
            reason = f"{type(optimizer).__name__} needs memory or numbers that a graph cannot hold"
        elif any(group["offload"] for group in optimizer.param_groups):
            reason = "its state is in host memory"
        elif type(optimizer_shards) is not ReplicatedOptimizer or is_norm_distributed(
            optimizer_shards.mesh, optimizer_shards.parameters
        ):
            reason = "its state or gradients are divided among processes"
        else:

            def clip_and_step(sums: Tensor) -> Tensor:
                numbers = torch.cat([sums, optimizer_shards.clip(max_norm).to(sums).reshape(1)])
                skip_if_not_finite(optimizer, numbers)
                optimizer.step()
                optimizer.found_inf = None  # type: ignore[attr-defined]  # it must not keep memory of the graph alive
                self.graphs.gradients.zero()
                return numbers

            self.optimizer_graph = GraphedOptimizer(clip_and_step, optimizer)
            return
        notice("optimizer-graph", f"the optimizer runs outside of the CUDA graphs of a step: {reason}")

    def clip_and_step(self, sums: Tensor, may_capture: bool) -> Tensor:
        assert self.optimizer_graph is not None
        self._before_step()
        numbers = self.optimizer_graph(sums, may_capture)
        self.graphs.gradients.are_zero = True
        return numbers

    def pad_across_ranks(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return pad_to_longest(self.mesh, batches)

    @property
    def holds_graphs(self) -> bool:  # type: ignore[override]
        return self.graphs.holds_graphs

    def evaluate(self, sums: Sums, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        return self.retry_without_graphs(partial(super().evaluate, sums, batches))

    def retry_without_graphs(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except RuntimeError as error:
            if not (self.holds_graphs and not self.mesh.shares_collectives and is_out_of_memory(error)):
                raise
        self.graphs.give_up()  # outside the handler, whose error references the tensors of `work`
        return work()

    def close(self) -> None:
        if self.optimizer_graph is not None:
            self.optimizer_graph.drop()
        self.peak_graph_bytes = self.graphs.peak_pool_bytes
        self.graphs.close()


class SharedNumbers:
    """Computes the numbers that a method shares among the micro-batches of a step, from counts or an extra forward.

    Args:
        model: the model that trains.
        dtype: compute dtype of the forward; default: see `compute_autocast`.
    """

    def __init__(self, method: Method, model: nn.Module, dtype: torch.dtype | None = None, mesh: Mesh = SINGLE_PROCESS):
        self.method = method
        self.model = model
        self.dtype = dtype
        self.mesh = mesh

    def add(self, batches: list[dict[str, Any]], counts: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return a step's micro-batches with its numbers, without the columns that only the look-ahead reads."""
        looks_ahead = self.method.looks_ahead and (self.mesh.size > 1 or self.method.needs_ahead(batches))
        numbers = self.method.shared(counts, self._look_ahead(batches) if looks_ahead else {})
        return [with_numbers(batch, numbers) for batch in batches]

    def of_evaluation(self, batches: Iterable[Batch]) -> dict[str, float | Tensor]:
        """Return the numbers of an evaluation over `batches`; methods without look-ahead consume no batch."""
        return self.method.shared({}, self._look_ahead(batches)) if self.method.looks_ahead else {}

    @torch.no_grad()
    def _look_ahead(self, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Sum the results of the method's `ahead` over the batches of all ranks."""
        totals: dict[str, Tensor] = {}
        for batch in batches:
            with compute_autocast(self.model, self.dtype):
                sums = self.method.ahead(self.model, batch)
            totals = {name: totals.get(name, 0) + value for name, value in sums.items()}
        return {name: self.mesh.sum(value) for name, value in totals.items()}


def with_numbers(batch: Batch, numbers: Mapping[str, float | Tensor]) -> dict[str, Any]:
    """Return a batch with `numbers`, 0-d on its device, in place of the columns that only the look-ahead reads."""
    if not numbers:
        return dict(batch)
    device = next(value for value in batch.values() if isinstance(value, Tensor)).device
    columns = {key: value for key, value in batch.items() if not key.startswith(LOOK_AHEAD)}
    for name, value in numbers.items():  # torch.full is a kernel launch; a copy from the host could block
        columns[name] = value if isinstance(value, Tensor) else torch.full((), value, device=device)
    return columns
