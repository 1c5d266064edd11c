"""The forwards and backwards of one optimizer step: launched from Python, or replayed as CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from halfbyte.methods.base import Method
from halfbyte.modeling.adapters import compute_autocast
from halfbyte.utils.hardware import free_cached_memory, is_out_of_memory

from ..batch import LOSS_COUNT, SYNCED_SHAPE, Batch
from ..parallel.rank_sync import RankSync
from .graph import ONE, GraphedBackward

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
    """Runs the micro-batches of a step, launched from Python.

    Args:
        sums: micro-batch → named sums, 0-d; the one called "loss" is differentiated.
        scaler: of the loss, in float16.

    Call with the micro-batches, the count (0-d, on their device) that the step's summed loss is divided by, and
    whether the step may be captured. Gradients of that mean are added to `.grad`. Returns the sums over all
    micro-batches [n], in their order.
    """

    together = 1  # number of batches that are evaluated in one call
    captures = False  # whether steps are captured in CUDA graphs
    has_all_layers = True  # False: this process has some stages of a pipeline
    pipeline: Any = None  # the pipeline that steps run through
    holds_graphs = False
    most_graph_bytes = 0  # peak device memory of captured graphs, bytes
    sync = ONE  # the processes that this one computes together with

    def __init__(self, sums: Sums, scaler: torch.amp.GradScaler | None = None):
        self.sums, self.scaler, self.steady = sums, scaler, False

    def __call__(self, batches: Iterable[Batch], count: Tensor, steady: bool = False) -> Tensor:
        self.steady = steady
        first, *others = (self.micro_batch({**batch, LOSS_COUNT: count}) for batch in batches)
        for sums in others:
            first = first + sums
        return first

    def micro_batch(self, batch: Batch) -> Tensor:
        return self.backward(batch)

    def backward(self, batch: Batch) -> Tensor:
        """Forward and backward of a micro-batch, which a graph can capture: its sums [n]."""
        sums = self.sums({key: value for key, value in batch.items() if key not in (LOSS_COUNT, SYNCED_SHAPE)})
        loss = sums["loss"] / batch[LOSS_COUNT]
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return torch.stack([value.detach() for value in sums.values()])

    def synced(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The micro-batches of a step, on the device, as all processes are to compute them, which all call it."""
        return list(batches)

    def evaluate(self, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        """The sums of each of `batches`."""
        return [self.sums(batch) for batch in batches]

    def with_room(self, work: Callable[[], Result]) -> Result:
        """What `work` gives, which is no step; where there is no room beside graphs, they go, and it is done again."""
        return work()

    def close(self) -> None:
        """The training is over."""


class GraphedStepper(Stepper):
    """The same as CUDA graphs, for a model whose forward and backward can be captured; without loss scaling.

    Args:
        parameters: the trained parameters.
        sync: the processes that this one computes together with.
    """

    captures = True

    def __init__(
        self, sums: Sums, parameters: Sequence[Tensor], sync: RankSync = ONE
    ):
        super().__init__(sums)
        self.sync = sync
        self.graphs = GraphedBackward(self.backward, parameters, sync)

    def synced(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        return self.sync.pad(batches)

    def micro_batch(self, batch: Batch) -> Tensor:
        return self.graphs(batch, self.steady)  # on the stream of captures: another would cache as much again

    @property
    def holds_graphs(self) -> bool:  # type: ignore[override]
        return self.graphs.holds_graphs

    def evaluate(self, batches: Sequence[Batch]) -> list[Mapping[str, Tensor]]:
        return self.with_room(partial(super().evaluate, batches))

    def with_room(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except RuntimeError as error:
            if not (self.holds_graphs and self.sync.is_alone and is_out_of_memory(error)):
                raise
        self.graphs.give_up()  # out of the handler, whose error keeps what the work has made
        return work()

    def close(self) -> None:
        self.most_graph_bytes = self.graphs.most_pool_bytes
        self.graphs.close()


@contextlib.contextmanager
def beside_graphs(stepper: Stepper, device: torch.device) -> Iterator[None]:
    """Around what is launched while graphs are held: what the allocator caches is of one stream, theirs or the current
    one, and no use to the other."""
    if stepper.holds_graphs:
        free_cached_memory(device)
    try:
        yield
    finally:
        if stepper.holds_graphs:
            free_cached_memory(device)
