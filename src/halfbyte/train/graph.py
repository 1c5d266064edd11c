"""Training steps as CUDA graphs: forward and backward, or the optimizer too, without a launch from Python.

Below about 4k tokens a step's time is that of its launches, not of its arithmetic; a graph replays them in one
(docs/design.md, decision 5). A graph holds for the shapes it was captured with, so there is one for each, in one memory
pool: they never run at the same time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import TrainingError
from halfbyte.notices import notice

WARMUP = 3  # steps in which kernels compile, autotune and make their buffers, which a capture does not allow
GRAPHS = 24  # shapes that get one: each holds its inputs, its results and its kernels' parameters
FAR = 2**40  # random numbers ahead, where nobody is

Batch = Mapping[str, Any]
Shapes = tuple[Any, ...]


class _Captured:
    """A graph, the tensors it reads, and the result it writes."""

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch, stream: torch.cuda.Stream, pool: Any):
        self.batch = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}
        self.gradients: list[Tensor | None] = []
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.result = step(self.batch)

    def replay(self, batch: Batch) -> Tensor:
        for key, value in self.batch.items():
            if isinstance(value, Tensor):
                value.copy_(batch[key], non_blocking=True)
        self.graph.replay()
        return self.result.clone()


class _Graphs:
    """Runs `step` on each batch: eagerly for the first `WARMUP` batches of a shape, then as a CUDA graph.

    Every call trains, the warm-up too. What a capture cannot hold (a wait for the device, a shape that depends on
    values) is said once, and that shape stays eager, as do shapes beyond the first `GRAPHS`.

    Args:
        step: batch → a tensor to report, such as the loss. What changes between steps it reads from the device.
        discard: drops the gradients that a failed capture may leave, which were never computed.

    Call with a batch of tensors on the device and plain numbers; a number is part of the shape. Returns the step's
    result, a tensor of its own.
    """

    def __init__(self, step: Callable[[Batch], Tensor], discard: Callable[[], Any]):
        self.step, self.discard = step, discard
        self.stream = torch.cuda.Stream()  # warm-up and capture share it: autograd remembers a leaf's stream
        self.pool = torch.cuda.graph_pool_handle()
        self._seen: dict[Shapes, int] = {}
        self._captured: dict[Shapes, _Captured | None] = {}

    def __call__(self, batch: Batch) -> Tensor:
        shapes = tuple((key, _shape(value)) for key, value in sorted(batch.items()))
        if shapes not in self._captured:
            if self._seen.get(shapes, 0) < WARMUP or len(self._captured) >= GRAPHS:
                self._seen[shapes] = self._seen.get(shapes, 0) + 1
                return self._eager(batch)
            self._captured[shapes] = self._capture(batch)
        captured = self._captured[shapes]
        return self._eager(batch) if captured is None else self._replay(captured, batch)

    def _eager(self, batch: Batch) -> Tensor:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = self.step(batch)
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def _capture(self, batch: Batch) -> _Captured | None:
        try:
            return _Captured(self.step, batch, self.stream, self.pool)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            notice("cuda-graph", f"the training step is launched from Python, not as a CUDA graph: {reason}")
            self.discard()
            captured_before = any(self._captured.values())
            _leave_failed_capture(self.stream.device.index, self.pool, FAR if captured_before else 0)
            return None

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        return captured.replay(batch)


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

    A graph writes its gradients where it was captured to. They are handed over as they are while `.grad` is None: a
    graph's next replay overwrites them, so an accumulating caller (`accumulates`) gets copies.

    Args:
        step: batch → a tensor to report; runs `backward` and nothing after it.
        parameters: those that get gradients.
        accumulates: several calls before the gradients are used.
    """

    def __init__(self, step: Callable[[Batch], Tensor], parameters: Sequence[Tensor], accumulates: bool):
        super().__init__(step, self._take)
        self.parameters, self.accumulates = list(parameters), accumulates

    def _take(self) -> list[Tensor | None]:
        """The gradients that are there, which are there no more."""
        found = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return found

    def _capture(self, batch: Batch) -> _Captured | None:
        before = self._take()
        captured = super()._capture(batch)
        if captured is not None:
            captured.gradients = self._take()
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient
        return captured

    def _replay(self, captured: _Captured, batch: Batch) -> Tensor:
        result = super()._replay(captured, batch)
        pairs = [(p, new) for p, new in zip(self.parameters, captured.gradients, strict=True) if new is not None]
        fresh = [(parameter, new) for parameter, new in pairs if parameter.grad is None]
        added = [(parameter.grad, new) for parameter, new in pairs if parameter.grad is not None]
        if added:
            torch._foreach_add_(*map(list, zip(*added, strict=True)))
        handed = [new for _, new in fresh]
        if self.accumulates and handed:
            handed = list(torch._foreach_add(handed, 0.0))
        for (parameter, _), new in zip(fresh, handed, strict=True):
            parameter.grad = new
        return result


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
