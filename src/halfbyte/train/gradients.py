"""One set of gradients for all micro-batches of a run, launched from Python or replayed as CUDA graphs.

A graph writes where it was captured to. Were that memory of its own, every captured shape would hold a set of all
gradients. So gradients are added into buffers that are made once: hooks take each from autograd as it comes, and add
them up in a few launches, where autograd would take one for each parameter. What waits for that is `PENDING` bytes, or
one gradient that is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfbyte.autograd.lora import gradient_dtype

PENDING = 16 * 2**20  # bytes of gradients that may wait to be added


class Gradients:
    """The gradients of `parameters`, in buffers of their shapes and devices, and of the dtypes of gradients.

    `begin`, then a backward, then `flush`, which is part of a capture, then `hand_over`. What `.grad` holds at
    `begin` is added to; buffers and hooks are there from the first `begin` to `close`.

    Attributes:
        written: indices of the parameters whose gradients were added since `begin`, which a replay does unseen.
    """

    def __init__(self, parameters: Sequence[Tensor]):
        self.parameters = list(parameters)
        self.buffers: list[Tensor] = []
        self.written: set[int] = set()
        self._before: set[int] = set()  # whose `.grad` was there at `begin`
        self._pending: list[tuple[int, Tensor]] = []
        self._bytes = 0  # of those
        self._hooks: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    @torch.no_grad()
    def begin(self) -> None:
        """Before a micro-batch: buffers hold what `.grad` held, or zeros, and `.grad` is None."""
        if not self.buffers:
            wide = [gradient_dtype(parameter) for parameter in self.parameters]
            self.buffers = [torch.empty_like(p, dtype=dtype) for p, dtype in zip(self.parameters, wide, strict=True)]
            hooked = enumerate(self.parameters)
            self._hooks = [p.register_post_accumulate_grad_hook(partial(self._take, i)) for i, p in hooked]
        fresh = []
        self._before = set()
        for i, (parameter, buffer) in enumerate(zip(self.parameters, self.buffers, strict=True)):
            if parameter.grad is None:
                fresh.append(buffer)
                continue
            if parameter.grad is not buffer:  # of a backward before these buffers
                buffer.copy_(parameter.grad)
            self._before.add(i)
            parameter.grad = None
        if fresh:
            torch._foreach_zero_(fresh)
        self.written = set()

    def _take(self, i: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or i in self.written:  # added before backward ran out of memory, and computed again
            return
        self._pending.append((i, gradient))
        self._bytes += gradient.nbytes
        if self._bytes >= PENDING:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Add what waits to the buffers."""
        if self._pending:
            indices, gradients = zip(*self._pending, strict=True)
            torch._foreach_add_([self.buffers[i] for i in indices], list(gradients))
            self.written.update(indices)
        self._pending, self._bytes = [], 0

    def forget(self) -> None:
        """Drop what waits, of a backward that failed; what was added before stays, and is not added again."""
        self._pending, self._bytes = [], 0
        for parameter in self.parameters:
            parameter.grad = None

    def hand_over(self) -> None:
        """Set `.grad` to the buffers where there is a gradient, now or from before."""
        for i in self._before | self.written:
            self.parameters[i].grad = self.buffers[i]

    def close(self) -> None:
        """Take the hooks off and let the buffers go, also as `.grad`."""
        for hook in self._hooks:
            hook.remove()
        self.forget()
        self._hooks, self.buffers = [], []
