"""The forwards and backwards of one optimizer step: eager, or replayed as CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..batch import LOOK_AHEAD, LOSS_COUNT, SYNCED_SHAPE, Batch
from ..mesh.mesh import SINGLE_PROCESS, Mesh
from ..methods.base import Method
from ..modeling.compute_dtype import compute_autocast
from ..parallel.rank_sync import RankSync
from ..utils.hardware import free_cached_memory, is_out_of_memory
from .graph import SINGLE_RANK, GraphedBackward

Sums = Callable[[Batch], Mapping[str, Tensor]]  # micro-batch → named sums, 0-d; "loss" is differentiated
Result = TypeVar("Result")


def sums_of(method: Method, model: Any, compute_dtype: torch.dtype) -> Sums:
    """Return the function that computes the method's named sums of a micro-batch, in `compute_dtype`."""

    def sums(batch: Batch) -> Mapping[str, Tensor]:
        with compute_autocast(model, compute_dtype):
            return method.sums(model, batch)

    return sums


def loss_scaler(device: torch.device, compute_dtype: torch.dtype) -> torch.amp.GradScaler | None:
    """Return the loss scaler that float16 needs, or None."""
    return torch.amp.GradScaler(device.type) if compute_dtype == torch.float16 else None


class Stepper:
    """Runs the micro-batches of a step eagerly.

    Args:
        sums: micro-batch → named sums, 0-d; the sum called "loss" is differentiated.
        scaler: loss scaler of float16.

    Call with the micro-batches, the count (0-d, on their device) that the step's summed loss is divided by, and
    whether the step may be captured. Gradients of that mean are added to `.grad`. Returns the sums over all
    micro-batches [n], in the order of the names.
    """

    evaluation_batches = 1  # number of batches that `evaluate` takes in one call
    captures = False  # whether steps are captured in CUDA graphs
    has_all_layers = True  # False: this rank has some stages of a pipeline
    pipeline: Any = None  # the pipeline that steps run through
    holds_graphs = False
    peak_graph_bytes = 0  # peak device memory of captured graphs, bytes; set by `close`
    sync = SINGLE_RANK  # the ranks that share this rank's collectives

    def __init__(self, sums: Sums, scaler: torch.amp.GradScaler | None = None):
        self.sums, self.scaler, self.may_capture = sums, scaler, False
        self.before_backward: Callable[[Tensor], None] | None = None  # takes the loss, 0-d

    def __call__(self, batches: Iterable[Batch], count: Tensor, may_capture: bool = False) -> Tensor:
        self.may_capture = may_capture
        first, *others = (self.micro_batch({**batch, LOSS_COUNT: count}) for batch in batches)
        for sums in others:
            first = first + sums
        return first

    def micro_batch(self, batch: Batch) -> Tensor:
        return self.backward(batch)

    def backward(self, batch: Batch) -> Tensor:
        """Run forward and backward of a micro-batch and return its sums [n]. A CUDA graph can capture this."""
        sums = self.sums({key: value for key, value in batch.items() if key not in (LOSS_COUNT, SYNCED_SHAPE)})
        loss = sums["loss"] / batch[LOSS_COUNT]
        if self.before_backward is not None:
            self.before_backward(loss.detach())
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return torch.stack([value.detach() for value in sums.values()])

    def pad_across_ranks(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a step's micro-batches, on the device, with the shapes that all ranks compute; a collective."""
        return list(batches)

    def evaluate(self, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        """Return the sums of each batch, without gradients."""
        return [self.sums(batch) for batch in batches]

    def retry_without_graphs(self, work: Callable[[], Result]) -> Result:
        """Run `work` (evaluation or sampling). On out-of-memory, free the captured CUDA graphs and retry once."""
        return work()

    def close(self) -> None:
        """Free what training held."""


class GraphedStepper(Stepper):
    """Runs the micro-batches of a step as CUDA graphs, without loss scaling.

    Args:
        sums: as in `Stepper`; its forward and backward can be captured.
        parameters: the trained parameters.
        sync: the ranks that share this rank's collectives.
    """

    captures = True

    def __init__(self, sums: Sums, parameters: Sequence[Tensor], sync: RankSync = SINGLE_RANK):
        super().__init__(sums)
        self.sync = sync
        self.graphs = GraphedBackward(self.backward, parameters, sync)

    def pad_across_ranks(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.sync.pad(batches)

    def micro_batch(self, batch: Batch) -> Tensor:
        # runs on the capture stream even if eager: another stream would cache as much memory again
        return self.graphs(batch, self.may_capture)

    @property
    def holds_graphs(self) -> bool:  # type: ignore[override]
        return self.graphs.holds_graphs

    def evaluate(self, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        return self.retry_without_graphs(partial(super().evaluate, batches))

    def retry_without_graphs(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except RuntimeError as error:
            if not (self.holds_graphs and self.sync.is_alone and is_out_of_memory(error)):
                raise
        self.graphs.give_up()  # outside the handler, whose error references the tensors of `work`
        return work()

    def close(self) -> None:
        self.peak_graph_bytes = self.graphs.peak_pool_bytes
        self.graphs.close()


@contextlib.contextmanager
def free_stream_caches(stepper: Stepper, device: torch.device) -> Iterator[None]:
    """Free torch's cached memory before and after the block, while CUDA graphs are held.

    The allocator caches memory per stream, so the capture stream and the current stream cannot use each other's.
    """
    if stepper.holds_graphs:
        free_cached_memory(device)
    try:
        yield
    finally:
        if stepper.holds_graphs:
            free_cached_memory(device)


class LookAhead:
    """Computes the numbers that a method shares among the micro-batches of a step, from counts or an extra forward.

    Args:
        model: the model that trains.
        dtype: compute dtype of the forward; default: see `compute_autocast`.
    """

    def __init__(self, method: Method, model: nn.Module, dtype: torch.dtype | None = None, mesh: Mesh = SINGLE_PROCESS):
        self.method, self.model, self.dtype, self.mesh = method, model, dtype, mesh

    def add_numbers(self, taken: list[dict[str, Any]], counts: Mapping[str, float]) -> list[dict[str, Any]]:
        """Return a step's micro-batches with its numbers, without the columns that only the look-ahead reads."""
        looks = self.method.looks_ahead and (self.mesh.size > 1 or self.method.needs_ahead(taken))
        numbers = self.method.shared(counts, self._forward(taken) if looks else {})
        return [with_numbers(batch, numbers) for batch in taken]

    def numbers(self, batches: Iterable[Batch]) -> dict[str, float | Tensor]:
        """Return the numbers of an evaluation over `batches`; methods without look-ahead consume no batch."""
        return self.method.shared({}, self._forward(batches)) if self.method.looks_ahead else {}

    @torch.no_grad()
    def _forward(self, batches: Iterable[Batch]) -> dict[str, Tensor]:
        """Sum the results of the method's `ahead` over the batches of all ranks."""
        found: dict[str, Tensor] = {}
        for batch in batches:
            with compute_autocast(self.model, self.dtype):
                sums = self.method.ahead(self.model, batch)
            found = {name: found.get(name, 0) + value for name, value in sums.items()}
        return {name: self.mesh.sum(value) for name, value in found.items()}


def with_numbers(batch: Batch, numbers: Mapping[str, float | Tensor]) -> dict[str, Any]:
    """Return a batch with `numbers`, 0-d on its device, in place of the columns that only the look-ahead reads."""
    if not numbers:
        return dict(batch)
    device = next(value for value in batch.values() if isinstance(value, Tensor)).device
    found = {key: value for key, value in batch.items() if not key.startswith(LOOK_AHEAD)}
    for name, value in numbers.items():  # torch.full is a kernel launch; a copy from the host could block
        found[name] = value if isinstance(value, Tensor) else torch.full((), value, device=device)
    return found
