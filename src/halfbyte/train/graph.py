"""Training steps as CUDA graphs: forward and backward, or the optimizer too, without a launch from Python.

Below about 4k tokens a step's time is that of its launches, not of its arithmetic; a graph replays them in one
(docs/design.md, decision 5). A graph holds for the shapes it was captured with, so there is one for each, in one memory
pool: they never run at the same time.

Ranks that share collectives do all of this together (`parallel.rank_sync`): what one of them would do by itself, such as
running a step again, ends the run.

The first steps of a run are launched from Python: kernels are compiled, and buffers made. After that a shape is
captured as it first comes, and runs as its graph: Python does for a capture what it does for a step, and what a step
takes is taken in the pool alone. What such a capture leaves alive in the pool, such as a table that somebody keeps for
this length, other graphs would overwrite; then all go, and from there on each shape's first steps are launched from
Python.

The pool keeps what the largest captured shape needs, and whatever runs beside it (evaluation) takes its own. So the
pool is made by the largest shape: a larger one starts it anew, and those that were there are captured again as they
come. When memory runs out all graphs go, and training goes on from Python.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.memory.activations import MAX_GRAPHS
from halfbyte.memory.pinned import AFTER_CAPTURE
from halfbyte.utils.errors import TrainingError
from halfbyte.utils.hardware import capture_stream, free_cached_memory, is_out_of_memory, reservable_bytes
from halfbyte.utils.notices import notice

from ..batch import SYNCED_SHAPE, Batch
from ..parallel.mesh import SINGLE_PROCESS
from ..parallel.rank_sync import RankSync
from .gradients import Gradients

WARMUP = 3  # steps in which kernels compile and make their buffers
FAR = 2**40  # random numbers ahead, where nobody is
ONE = RankSync(SINGLE_PROCESS)



Shapes = tuple[Any, ...]


class _Captured:
    """A graph, the tensors it reads (`batch`), the result it writes, and the indices of the gradients it adds to."""

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch, stream: torch.cuda.Stream, pool: Any):
        self.batch = batch
        self.written: set[int] = set()
        self.graph = torch.cuda.CUDAGraph()
        # A capture begins by writing, on its stream, where all graphs read their random numbers: not while one runs.
        launched = torch.cuda.current_stream(stream.device)
        stream.wait_stream(launched)
        with torch.cuda.stream(stream):
            # relaxed: a kernel that this shape is the first to need may be loaded meanwhile
            self.graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            try:
                self.result = step(self.batch)
            finally:
                self.graph.capture_end()
        launched.wait_stream(stream)
        AFTER_CAPTURE.settle()  # what garbage collection let go of meanwhile

    def replay(self, batch: Batch) -> Tensor:
        for key, value in self.batch.items():
            if isinstance(value, Tensor):
                value.copy_(batch[key], non_blocking=True)
        self.graph.replay()
        return self.result.clone()


class _Graphs:
    """Runs `step` on each batch: eagerly for the first `WARMUP` batches, then as the CUDA graph of its shape.

    Every call trains, the warm-up too. A shape whose first capture fails is warmed up alone, and what a capture cannot
    hold then (a wait for the device, a shape that depends on values) is said once: that shape stays eager. So does a
    shape beyond `MAX_GRAPHS` until it has come as often as a warm-up: then the least recently used graph goes.
    Processes that compute together warm up every shape.

    Args:
        step: batch → a tensor to report, such as the loss. What changes between steps it reads from the device.
        discard: drops the gradients that a failed capture may leave, which were never computed.
        sync: the processes that compute together with this one, whose micro-batches `RankSync.pad` pads.

    Attributes:
        pool_bytes: of device memory that the graphs hold, for results and all in between.
        most_pool_bytes: that they ever held.

    Call with a batch of tensors on the device and plain numbers (a number is part of the shape), and with whether it
    may be captured. Returns the step's result, a tensor of its own.
    """

    def __init__(self, step: Callable[[Batch], Tensor], discard: Callable[[], Any], sync: RankSync = ONE):
        self.step, self.discard, self.sync = step, discard, sync
        # for warm-ups and captures, since autograd remembers a leaf's stream
        self.stream = capture_stream(torch.cuda.current_device())
        self.pool = torch.cuda.graph_pool_handle()
        self.pool_bytes = self.most_pool_bytes = 0
        self._calls = 0
        self._seen: dict[Shapes, int] = {}
        self._captured: dict[Shapes, _Captured | None] = {}  # those used last at the end; None: stays eager
        self._to_warm_up: set[Shapes] = set()
        self._warm_up_each = not sync.is_alone
        self._largest = 0  # captured
        self._eager_only = False

    def __call__(self, batch: Batch, ready: bool = True) -> Tensor:
        shapes = tuple((key, _shape(value)) for key, value in sorted(batch.items()))
        self._calls += 1
        self._seen[shapes] = self._seen.get(shapes, 0) + 1
        warm = self._seen[shapes] > WARMUP
        if ready and shapes not in self._captured and self._is_due(shapes, warm):
            self._take(shapes, batch, warm)
        captured = self._captured.get(shapes)
        if captured is None:
            return self._eager(batch)
        self._captured[shapes] = self._captured.pop(shapes)
        result = self._replay(captured, batch)
        if not warm and self._live_blocks() > self._graphs:  # whose values the replay has computed
            self.drop()
            self._warm_up_each = True
        return result

    def _is_due(self, shapes: Shapes, warm: bool) -> bool:
        if self._eager_only or self._calls <= WARMUP:
            return False
        return warm or not (self._warm_up_each or shapes in self._to_warm_up or self._graphs >= MAX_GRAPHS)

    def _take(self, shapes: Shapes, batch: Batch, warm: bool) -> None:
        """Capture a shape, which may take another's place."""
        if self._graphs >= MAX_GRAPHS:
            torch.cuda.synchronize(self.stream.device)  # before a graph goes
            del self._captured[next(each for each, captured in self._captured.items() if captured is not None)]
        captured = self._capture(batch, warm)
        if captured is None and not warm:
            self._to_warm_up.add(shapes)
        else:
            self._captured[shapes] = captured

    @property
    def _graphs(self) -> int:
        return sum(captured is not None for captured in self._captured.values())

    def _live_blocks(self) -> int:
        """How many tensors the pool holds; of each graph, its result."""
        segments = torch.cuda.memory_snapshot(self.pool, include_traces=False)
        return sum(block["state"] == "active_allocated" for segment in segments for block in segment["blocks"])

    def _eager(self, batch: Batch) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        result.record_stream(torch.cuda.current_stream())  # which reads it while the next step is launched
        return result

    def _capture(self, batch: Batch, warm: bool) -> _Captured | None:
        """None where it fails, which is said of a shape that is `warm`."""
        size = max(value.numel() for value in batch.values() if isinstance(value, Tensor))
        size = batch[SYNCED_SHAPE].size if SYNCED_SHAPE in batch else size
        if size > self._largest:
            self.drop()
            if not self.sync.is_alone and self.sync.any(not self._has_room()):
                self.give_up()
                return None
        elif reservable_bytes(self.stream.device) < self.pool_bytes:  # than which no smaller shape takes more
            free_cached_memory(self.stream.device)  # else this capture need not wait for the step before it
        inputs = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}
        before = torch.cuda.memory_reserved(self.stream.device)
        try:
            captured = _Captured(self.step, inputs, self.stream, self.pool)
        except RuntimeError as error:
            reason, no_memory = str(error).splitlines()[0], is_out_of_memory(error)
        else:
            self.pool_bytes += torch.cuda.memory_reserved(self.stream.device) - before
            self.most_pool_bytes = max(self.most_pool_bytes, self.pool_bytes)
            self._largest = max(self._largest, size)
            return captured
        if no_memory and not self.sync.is_alone:
            raise torch.OutOfMemoryError(f"{reason} (as a CUDA graph was captured; others wait for this process)")
        self.discard()
        _leave_failed_capture(self.stream.device.index, self.pool, FAR if self.holds_graphs else 0)
        if no_memory:
            self.give_up()
        elif warm:
            notice("cuda-graph", f"the training step is launched from Python, not as a CUDA graph: {reason}")
        return None

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        return captured.replay(batch)

    def _has_room(self) -> bool:
        """Whether the device has as many bytes as any step so far has taken."""
        device = self.stream.device
        taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        return reservable_bytes(device) >= taken

    @property
    def holds_graphs(self) -> bool:
        return self._graphs > 0

    def drop(self) -> None:
        """Free all graphs and their pool; shapes that come again are captured again."""
        if self.holds_graphs:
            torch.cuda.synchronize(self.stream.device)  # before the graphs go
            self._captured = {shapes: None for shapes, captured in self._captured.items() if captured is None}
        self.pool, self.pool_bytes, self._largest = torch.cuda.graph_pool_handle(), 0, 0
        free_cached_memory(self.stream.device)

    def give_up(self) -> None:
        """Free all graphs and capture no more, since memory ran out."""
        notice(
            "cuda-graph-memory",
            "the GPU's memory ran out beside the CUDA graphs of the training step: from here on it is launched from"
            " Python",
        )
        self._eager_only = True
        self.drop()


def _leave_failed_capture(device: int, pool: tuple[int, int], ahead: int) -> None:
    """Have random numbers, and memory that comes free, as if nothing had been captured.

    The numbers go on where they were, so that a resumed run, in which captures fail at other steps, draws the same;
    `ahead` of there where graphs of other shapes draw from the generator's old state.

    torch ends a capture for its generator and its allocator after the driver has, which for a capture that failed is an
    error: from then on the one would refuse random numbers ("Offset increment outside graph capture"), and the other
    would keep what a second stream has used.
    """
    generator = torch.cuda.default_generators[device]
    with contextlib.suppress(RuntimeError):  # a torch that cleans up by itself may refuse
        fresh = generator.clone_state()
        fresh.set_offset(fresh.get_offset() + ahead)
        generator.graphsafe_set_state(fresh)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)


class GraphedStep(_Graphs):
    """A whole training step: it must leave no gradients behind (`zero_grad` at its end).

    Args:
        step: batch → a tensor to report. Numbers that change, such as the learning rate, are tensors on the device.
        optimizer: the one that `step` runs, made with `capturable=True`.

    Raises:
        TrainingError: the optimizer is not capturable.
    """

    def __init__(self, step: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer):
        if not all(group.get("capturable") for group in optimizer.param_groups):
            raise TrainingError("a CUDA graph cannot hold this optimizer", "make it with capturable=True")
        super().__init__(step, optimizer.zero_grad)
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        result = super()._replay(captured, batch)
        torch.autograd.graph.increment_version(self.parameters)  # the step changed them, which only Python would note
        return result


class GraphedBackward(_Graphs):
    """A micro-batch's forward and backward: gradients are added to the parameters' `.grad`, as eager does.

    There is one set of gradients, for all shapes and for eager steps too (`Gradients`). `.grad` is that set while it is
    used; setting it to None begins a new sum. A step that runs out of memory beside graphs is run again without them,
    with the same random numbers.

    Args:
        step: batch → a tensor to report; runs `backward` and nothing after it.
        parameters: those that get gradients.
        sync: as in `_Graphs`.
    """

    def __init__(self, step: Callable[[Batch], Tensor], parameters: Sequence[Tensor], sync: RankSync = ONE):
        self.gradients = Gradients(parameters)

        def collected(batch: Batch) -> Tensor:
            result = step(batch)
            self.gradients.flush()
            return result

        super().__init__(collected, self.gradients.forget, sync)

    def __call__(self, batch: Batch, ready: bool = True) -> Tensor:
        self.gradients.begin()
        result = super().__call__(batch, ready)
        self.gradients.hand_over()
        return result

    def _eager(self, batch: Batch) -> Tensor:
        random = torch.cuda.get_rng_state(self.stream.device)
        try:
            return super()._eager(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not self.holds_graphs or not self.sync.is_alone:
                raise
        # out of the handler, whose error would keep the step's tensors
        self.gradients.forget()
        self.give_up()
        torch.cuda.set_rng_state(random, self.stream.device)
        return super()._eager(batch)

    def _capture(self, batch: Batch, warm: bool) -> _Captured | None:
        captured = super()._capture(batch, warm)
        if captured is not None:
            captured.written = self.gradients.written
        self.gradients.written = set()  # nothing was computed
        return captured

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        self.gradients.written = captured.written
        return super()._replay(captured, batch)

    def close(self) -> None:
        """Free all graphs and gradients; the next call begins anew."""
        self.drop()
        self.gradients.close()


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
