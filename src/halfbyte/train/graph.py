"""Training steps as CUDA graphs: forward and backward, and the optimizer, without a launch from Python.

Below about 4k tokens, kernel launches take longer than the arithmetic of a step; a graph replays them in one
(docs/design/memory-and-planning.md). A graph is valid for the shapes it was captured with, so there is one graph per
shape, and all share one memory pool, since they never run at the same time.

Ranks that share collectives warm up, capture and replay together (`parallel.padding`). A fallback that one of them
would take alone, such as repeating a step, ends the run.

- The first `WARMUP` steps of a run are eager: kernels are compiled and buffers allocated. After that a shape is
  captured when it first occurs. A capture takes as long as an eager step, and allocates in the pool only.
- A capture may leave a live tensor in the pool, such as a cached table for this length. Other graphs would overwrite
  it. Then all graphs are dropped, and from there on each shape's first steps are eager.
- The pool keeps the memory of the largest captured shape; evaluation and sampling allocate outside the pool. A larger
  shape starts a new pool, and the other shapes are captured again when they occur.
- When memory runs out, all graphs are dropped and training continues eagerly.

There is one set of gradients for all micro-batches (`Gradients`). A graph writes to the memory it was captured with; if
that were a graph's own, every captured shape would hold a full set of gradients. So gradients are added into buffers
that are allocated once: hooks take each gradient from autograd, and add `PENDING_BYTES` of them in a few launches,
where autograd would need one launch per parameter.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..autograd.gemms import gradient_dtype
from ..batch import SYNCED_SHAPE, Batch
from ..data.batch_shapes import MAX_GRAPHS
from ..memory.allocators import Result
from ..memory.pinned import AFTER_CAPTURE
from ..mesh.mesh import SINGLE_PROCESS, Mesh
from ..optim.fused import FusedOptimizer
from ..utils.errors import first_line
from ..utils.hardware import capture_stream, free_cached_memory, is_out_of_memory, reservable_bytes
from ..utils.notices import notice

WARMUP = 3  # steps in which kernels are compiled and allocate their buffers
UNUSED_OFFSET = 2**40  # offset in the random number stream that no run reaches
PENDING_BYTES = 16 * 2**20  # bytes of gradients that are added together

Shapes = tuple[Any, ...]


class Gradients:
    """The gradients of `parameters`, in buffers of their shapes and devices, and of the dtypes of gradients.

    Call `start`, run a backward, call `flush`, which a capture includes, then `publish`. A `.grad` that exists at
    `start` is added to. Buffers and hooks exist from the first `start` to `close`.

    Attributes:
        written: indices of the parameters whose gradients were added since `start`. A replay runs no hook, so the
            caller sets them.
        are_zero: whether all buffers hold zeros, so that `start` need not zero them. A replay of `zero` does not set
            it, so the caller does.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = list(parameters)
        self.buffers: list[Tensor] = []
        self.written: set[int] = set()
        self.are_zero = False
        self._accumulated: set[int] = set()  # indices of the parameters that had a gradient at `start`
        self._pending: list[tuple[int, Tensor]] = []
        self._pending_bytes = 0
        self._hooks: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @torch.no_grad()
    def start(self) -> None:
        """Prepare a micro-batch: buffers hold what `.grad` held, or zeros, and `.grad` is None."""
        if not self.buffers:
            wide = [gradient_dtype(parameter) for parameter in self.parameters]
            self.buffers = [torch.empty_like(p, dtype=dtype) for p, dtype in zip(self.parameters, wide, strict=True)]
            hooked = enumerate(self.parameters)
            self._hooks = [p.register_post_accumulate_grad_hook(partial(self._collect, i)) for i, p in hooked]
        fresh = []
        self._accumulated = set()
        for i, (parameter, buffer) in enumerate(zip(self.parameters, self.buffers, strict=True)):
            if parameter.grad is None:
                fresh.append(buffer)
                continue
            if parameter.grad is not buffer:  # of a backward before the buffers existed
                buffer.copy_(parameter.grad)
            self._accumulated.add(i)
            parameter.grad = None
        if fresh and not self.are_zero:
            torch._foreach_zero_(fresh)
        self.written, self.are_zero = set(), False

    def _collect(self, i: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or i in self.written:  # added before backward ran out of memory, and computed again
            return
        self._pending.append((i, gradient))
        self._pending_bytes += gradient.nbytes
        if self._pending_bytes >= PENDING_BYTES:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Add the pending gradients to the buffers."""
        if self._pending:
            indices, gradients = zip(*self._pending, strict=True)
            torch._foreach_add_([self.buffers[i] for i in indices], list(gradients))
            self.written.update(indices)
        self._pending, self._pending_bytes = [], 0

    def zero(self) -> None:
        """Zero all buffers. A CUDA graph can capture this."""
        if self.buffers:
            torch._foreach_zero_(self.buffers)

    def discard_pending(self) -> None:
        """Drop the pending gradients of a failed backward. Gradients already added remain, and are not added again."""
        self._pending, self._pending_bytes = [], 0
        for parameter in self.parameters:
            parameter.grad = None

    def publish(self) -> None:
        """Set `.grad` to the buffer of each parameter with a gradient, from this micro-batch or before."""
        for i in self._accumulated | self.written:
            self.parameters[i].grad = self.buffers[i]

    def close(self) -> None:
        """Remove the hooks, and free the buffers, also as `.grad`."""
        for hook in self._hooks:
            hook.remove()
        self.discard_pending()
        self._hooks = []
        self.buffers = []
        self.are_zero = False


class _Captured:
    """A graph, the tensors it reads (`batch`), the result it writes, and the indices of the gradients it adds to."""

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch, stream: torch.cuda.Stream, pool: Any):
        self.batch = batch
        self.written: set[int] = set()
        self.graph = torch.cuda.CUDAGraph()
        # A capture first writes, on its stream, the random state that all graphs read; no graph may run meanwhile.
        launched = torch.cuda.current_stream(stream.device)
        stream.wait_stream(launched)
        with torch.cuda.stream(stream), _without_garbage_collection():
            # relaxed: a kernel that this shape needs first may be loaded during the capture
            self.graph.capture_begin(pool=pool, capture_error_mode="relaxed")
            try:
                self.result = step(self.batch)
            finally:
                self.graph.capture_end()
        launched.wait_stream(stream)
        AFTER_CAPTURE.settle()  # free host memory that was garbage collected during the capture

    def replay(self, batch: Batch) -> Tensor:
        for key, value in self.batch.items():
            if isinstance(value, Tensor):
                value.copy_(batch[key], non_blocking=True)
        self.graph.replay()
        return self.result.clone()


class ShapeGraphs:
    """Runs `step` on each batch: eagerly for the first `WARMUP` batches, then as the CUDA graph of its shape.

    Every call trains, including the warm-up. A shape whose first capture fails is warmed up on its own and captured
    again; if that fails too (a device synchronization, a shape that depends on values), one notice gives the reason and
    the shape stays eager. A shape beyond `MAX_GRAPHS` is eager until it has occurred more than `WARMUP` times; then it
    replaces the least recently used graph. Ranks that share collectives warm up every shape.

    Args:
        step: batch → a tensor to report, such as the loss. It reads values that change between steps from the device.
        discard: drops the gradients, never computed, that a failed capture may leave.
        mesh: its ranks that share collectives capture together; `parallel.padding` pads their micro-batches.

    Attributes:
        pool_bytes: device bytes of the pool, for results and intermediate tensors.
        peak_pool_bytes: largest `pool_bytes` so far.

    Call with a batch of tensors on the device and Python numbers (a number is part of the shape), and whether it may be
    captured. Returns a copy of the step's result.
    """

    steps_name = "training steps of this shape"  # in notices

    def __init__(self, step: Callable[[Batch], Tensor], discard: Callable[[], Any], mesh: Mesh = SINGLE_PROCESS):
        self.step = step
        self.discard = discard
        self.mesh = mesh
        # warm-ups and captures use one stream, since autograd remembers a leaf's stream
        self.stream = capture_stream(torch.cuda.current_device())
        self.pool = torch.cuda.graph_pool_handle()
        self.pool_bytes = self.peak_pool_bytes = 0
        self._calls = 0
        self._seen: dict[Shapes, int] = {}
        self._captured: dict[Shapes, _Captured | None] = {}  # least recently used first; None: stays eager
        self._to_warm_up: set[Shapes] = set()
        self._warm_up_each = mesh.shares_collectives
        self._largest = 0  # size of the largest captured shape
        self._inputs: dict[tuple[str, torch.dtype], Tensor] = {}  # memory of the graphs' inputs, [elements]
        self._eager_only = False

    def __call__(self, batch: Batch, may_capture: bool = True) -> Tensor:
        shapes = tuple((key, _shape(value)) for key, value in sorted(batch.items()))
        self._calls += 1
        self._seen[shapes] = self._seen.get(shapes, 0) + 1
        warm = self._seen[shapes] > WARMUP
        if may_capture and shapes not in self._captured and self._is_due(shapes, warm):
            self._add_graph(shapes, batch, warm)
        captured = self._captured.get(shapes)
        if captured is None:
            return self._eager(batch)
        self._captured[shapes] = self._captured.pop(shapes)
        result = self._replay(captured, batch)
        if not warm and self._live_blocks() > self._graphs:  # the capture left a tensor alive in the pool
            self.drop()
            self._warm_up_each = True
        return result

    def _is_due(self, shapes: Shapes, warm: bool) -> bool:
        if self._eager_only or self._calls <= WARMUP:
            return False
        return warm or not (self._warm_up_each or shapes in self._to_warm_up or self._graphs >= MAX_GRAPHS)

    def _add_graph(self, shapes: Shapes, batch: Batch, warm: bool) -> None:
        """Capture a shape; at `MAX_GRAPHS` it replaces the least recently used graph."""
        if self._graphs >= MAX_GRAPHS:
            torch.cuda.synchronize(self.stream.device)  # a graph must not be freed while it runs
            del self._captured[next(shapes for shapes, captured in self._captured.items() if captured is not None)]
        captured = self._capture(batch, warm)
        if captured is None and not warm:
            self._to_warm_up.add(shapes)
        else:
            self._captured[shapes] = captured

    @property
    def _graphs(self) -> int:
        return sum(captured is not None for captured in self._captured.values())

    def _live_blocks(self) -> int:
        """Return the number of live tensors in the pool; each graph's result is one."""
        segments = pool_segments(self.pool)
        return sum(block["state"] == "active_allocated" for segment in segments for block in segment["blocks"])

    def _eager(self, batch: Batch) -> Tensor:
        return self.on_stream(lambda: self.step(batch))

    def on_stream(self, work: Callable[[], Result]) -> Result:
        """Run `work` eagerly on the capture stream; another stream would cache as much memory again.

        Returns:
            Its result. The current stream may read the tensors in it.
        """
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = work()
        current.wait_stream(self.stream)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                tensor.record_stream(current)  # it reads the result later
        return result

    def _capture(self, batch: Batch, warm: bool) -> _Captured | None:
        """Capture the step, or return None if that fails; for a `warm` shape a notice gives the reason."""
        size = max(value.numel() for value in batch.values() if isinstance(value, Tensor))
        size = batch[SYNCED_SHAPE].size if SYNCED_SHAPE in batch else size
        if size > self._largest:
            self.drop()
            if self.mesh.shares_collectives and self.mesh.any(not self._has_headroom()):
                self.give_up()
                return None
        elif reservable_bytes(self.stream.device) < self.pool_bytes:  # the most that a smaller shape takes
            free_cached_memory(self.stream.device)  # synchronizes, so it is called only if memory is short
        inputs = {key: self._input(key, value) if isinstance(value, Tensor) else value for key, value in batch.items()}
        reserved_bytes = torch.cuda.memory_reserved(self.stream.device)
        try:
            captured = _Captured(self.step, inputs, self.stream, self.pool)
        except RuntimeError as error:
            reason, no_memory = first_line(error), is_out_of_memory(error)
        else:
            self.pool_bytes += torch.cuda.memory_reserved(self.stream.device) - reserved_bytes
            self.peak_pool_bytes = max(self.peak_pool_bytes, self.pool_bytes)
            self._largest = max(self._largest, size)
            return captured
        if no_memory and self.mesh.shares_collectives:
            context = "while capturing a CUDA graph; other ranks are in a collective, so the step cannot be repeated"
            raise torch.OutOfMemoryError(f"{reason} ({context})")
        self.discard()
        _reset_after_failed_capture(self.stream.device.index, self.pool, UNUSED_OFFSET if self.holds_graphs else 0)
        if no_memory:
            self.give_up()
        elif warm:
            notice("cuda-graph", f"{self.steps_name} run eagerly, not as a CUDA graph: {reason}")
        return None

    def _input(self, key: str, value: Tensor) -> Tensor:
        """Return a copy of a batch's tensor that a graph will read, in memory that the graphs of all shapes share."""
        memory = self._inputs.get((key, value.dtype))
        if memory is None or memory.numel() < value.numel():  # graphs of other shapes keep the smaller memory
            memory = self._inputs[key, value.dtype] = value.new_empty(value.numel())
        return memory[: value.numel()].view(value.shape).copy_(value)

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        return captured.replay(batch)

    def _has_headroom(self) -> bool:
        """Return whether the device has enough free bytes for the largest step so far."""
        device = self.stream.device
        step_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        return reservable_bytes(device) >= step_bytes

    @property
    def holds_graphs(self) -> bool:
        return self._graphs > 0

    def drop(self) -> None:
        """Free all graphs and their pool; shapes that occur again are captured again."""
        if self.holds_graphs:
            torch.cuda.synchronize(self.stream.device)  # graphs must not be freed while they run
            self._captured = {shapes: None for shapes, captured in self._captured.items() if captured is None}
        self.pool = torch.cuda.graph_pool_handle()
        self.pool_bytes = 0
        self._largest = 0
        self._inputs = {}
        free_cached_memory(self.stream.device)

    def give_up(self) -> None:
        """Free all graphs and stop capturing, since memory ran out."""
        notice(
            "cuda-graph-memory",
            "the GPU ran out of memory while CUDA graphs of the training step held some: from here on steps are eager",
        )
        self._eager_only = True
        self.drop()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which could free pinned memory of an earlier run that was last used on this stream.

    torch would record an event for it in the capture, and later copies would fail ("invalid argument").
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def pool_segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """Segments of a memory pool, as `torch.cuda.memory_snapshot` returns them.

    torch drops a reference to each argument that it does not own (pytorch/pytorch#196366). From the 257th pool of a
    process on, that frees the pool's number while it is in use, and the process crashes some time later. So the
    arguments get the references that torch drops; a torch that drops none leaks a few bytes a call.
    """
    arguments = *pool, False
    for argument in arguments:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(argument))
    return torch.cuda.memory_snapshot(pool, include_traces=False)


def _reset_after_failed_capture(device: int, pool: tuple[int, int], ahead: int) -> None:
    """Reset torch's random number generator and allocator after a failed capture.

    Random numbers continue where they were, so that a resumed run, in which captures fail at other steps, draws the
    same ones. If graphs of other shapes use the generator's old state, they continue `ahead` of it.

    torch ends a capture of its generator and allocator after the driver has ended it, which raises for a failed
    capture. Without this reset the generator would refuse random numbers ("Offset increment outside graph capture"),
    and the allocator would not reuse memory that a second stream has used.
    """
    generator = torch.cuda.default_generators[device]
    with contextlib.suppress(RuntimeError):  # a later torch may clean up itself and raise here
        fresh = generator.clone_state()
        fresh.set_offset(fresh.get_offset() + ahead)
        generator.graphsafe_set_state(fresh)
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)


class GraphedBackward(ShapeGraphs):
    """The forward and backward of micro-batches as CUDA graphs; gradients are added to the parameters' `.grad`.

    All shapes, and eager steps, use one set of gradients (`Gradients`). `.grad` references its buffers; setting it to
    None starts a new sum. An eager step that runs out of memory is repeated once, with the same random numbers, after
    all graphs were freed.

    Args:
        step: batch → a tensor to report; runs `backward` and nothing after it.
        parameters: the parameters that get gradients.
        mesh: as in `ShapeGraphs`.
    """

    def __init__(self, step: Callable[[Batch], Tensor], parameters: Sequence[Tensor], mesh: Mesh = SINGLE_PROCESS):
        self.gradients = Gradients(parameters)

        def step_and_flush(batch: Batch) -> Tensor:
            result = step(batch)
            self.gradients.flush()
            return result

        super().__init__(step_and_flush, self.gradients.discard_pending, mesh)

    def __call__(self, batch: Batch, may_capture: bool = True) -> Tensor:
        self.gradients.start()
        result = super().__call__(batch, may_capture)
        self.gradients.publish()
        return result

    def _eager(self, batch: Batch) -> Tensor:
        random = torch.cuda.get_rng_state(self.stream.device)
        try:
            return super()._eager(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not self.holds_graphs or self.mesh.shares_collectives:
                raise
        # outside the handler, whose error references the step's tensors
        self.gradients.discard_pending()
        self.give_up()
        torch.cuda.set_rng_state(random, self.stream.device)
        return super()._eager(batch)

    def _capture(self, batch: Batch, warm: bool) -> _Captured | None:
        captured = super()._capture(batch, warm)
        if captured is not None:
            captured.written = self.gradients.written
        self.gradients.written = set()  # a capture computes nothing
        return captured

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        self.gradients.written = captured.written
        return super()._replay(captured, batch)

    def close(self) -> None:
        """Free all graphs and gradients; the next call allocates them again."""
        self.drop()
        self.gradients.close()


class GraphedOptimizer(ShapeGraphs):
    """The end of a step with its optimizer as a CUDA graph, captured after `WARMUP` eager ones on the same tensors.

    When weights, gradients or state are other tensors (another set of gradients, a loaded state), the graph is dropped.

    Args:
        step: [n] → [m]; clips gradients and steps `optimizer`.
        optimizer: its state is on the device.

    Call with numbers [n] on the device, and whether the step may be captured.
    """

    steps_name = "optimizer steps"

    def __init__(self, step: Callable[[Tensor], Tensor], optimizer: FusedOptimizer):
        super().__init__(lambda batch: step(batch["numbers"]), lambda: None)
        self.optimizer, self._warm_up_each = optimizer, True
        self._tensors: int | None = None  # number of the tensors that the graph is valid for
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def __call__(self, numbers: Any, may_capture: bool = True) -> Tensor:
        tensors = self.optimizer.prepare_replay()
        if tensors != self._tensors:
            if self.holds_graphs:
                self.drop()
            self._seen = {}
            self._captured = {}
            self._tensors = tensors
        return super().__call__({"numbers": numbers}, may_capture and tensors is not None)

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        result = super()._replay(captured, batch)
        torch.autograd.graph.increment_version(self.parameters)  # only eager steps increment it
        return result


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
