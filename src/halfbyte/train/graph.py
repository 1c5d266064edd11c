"""A training step as one CUDA graph: forward, backward and optimizer without a launch from Python.

Below about 4k tokens a step's time is that of its launches, not of its arithmetic; a graph replays them in one
(docs/design.md, decision 5). A graph holds for the shapes it was captured with, so there is one for each, in one memory
pool: they never run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import TrainingError
from halfbyte.notices import notice

WARMUP = 3  # steps in which kernels compile, autotune and make their buffers, which a capture does not allow

Batch = Mapping[str, Any]
Shapes = tuple[Any, ...]


class _Captured:
    """A graph, the tensors it reads, and the result it writes."""

    def __init__(self, step: Callable[[Batch], Tensor], batch: Batch, stream: torch.cuda.Stream, pool: Any):
        self.batch = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.result = step(self.batch)

    def replay(self, batch: Batch) -> Tensor:
        for key, value in self.batch.items():
            if isinstance(value, Tensor):
                value.copy_(batch[key], non_blocking=True)
        self.graph.replay()
        return self.result.clone()


class GraphedStep:
    """Runs `step` on each batch: eagerly for the first `WARMUP` batches of a shape, then as a CUDA graph.

    Every call trains, the warm-up too. What a capture cannot hold (a wait for the device, a shape that depends on
    values) is said once, and that shape stays eager.

    Args:
        step: batch → a tensor to report, such as the loss. It must leave no gradients behind (`zero_grad` at its end),
            read numbers that change between steps, such as the learning rate, from tensors on the device.
        optimizer: the one that `step` runs, made with `capturable=True`.

    Raises:
        TrainingError: the optimizer is not capturable.

    Call with a batch of tensors on the device and plain numbers; a number is part of the shape. Returns the step's
    result, a tensor of its own.
    """

    def __init__(self, step: Callable[[Batch], Tensor], optimizer: torch.optim.Optimizer):
        if not all(group.get("capturable") for group in optimizer.param_groups):
            raise TrainingError("a CUDA graph cannot hold this optimizer", "make it with capturable=True")
        self.step, self.optimizer = step, optimizer
        self.stream = torch.cuda.Stream()  # warm-up and capture share it: autograd remembers a leaf's stream
        self.pool = torch.cuda.graph_pool_handle()
        self._seen: dict[Shapes, int] = {}
        self._captured: dict[Shapes, _Captured | None] = {}

    def __call__(self, batch: Batch) -> Tensor:
        shapes = tuple((key, _shape(value)) for key, value in sorted(batch.items()))
        if shapes not in self._captured:
            if self._seen.get(shapes, 0) < WARMUP:
                self._seen[shapes] = self._seen.get(shapes, 0) + 1
                return self._eager(batch)
            self._captured[shapes] = self._capture(batch)
        captured = self._captured[shapes]
        return self._eager(batch) if captured is None else captured.replay(batch)

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
            self.optimizer.zero_grad(set_to_none=True)  # the capture may have left some that were never computed
            return None


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
