"""Activation checkpointing: activations that the backward recomputes.

`recompute` saves only the input of a function. It differs from `torch.utils.checkpoint` in three ways. Recomputation
skips the last GEMM: the gradients of a block y = r + W·h need h, not y. It can process rows in tiles, so that inner
tensors exist for one tile at a time. It saves the random state only if the function draws random numbers, so that a
CUDA graph can capture it.

While a pipeline stage is idle before its backward, it can recompute ahead: `pending_recomputes` collects the pending
recomputations, and `run_ahead` runs one.

`recompute_from` recomputes a single tensor that several functions save, such as the output of a norm.

Source: Chen et al. 2016 (arXiv:1604.06174) for checkpointing; Korthikanti et al. 2022 (arXiv:2205.05198) for selecting
activations by bytes and time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..dispatch import autocast_dtype

# (x [B, T, H], whether the values of the last part are needed) → one or two summands of the same shape
Parts = Callable[[Tensor, bool], tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Context:
    """Autocast dtype and, if needed, random state of the forward, restored for recomputation."""

    device: torch.device
    autocast: torch.dtype | None
    random: Tensor | None

    @classmethod
    def of(cls, device: torch.device, random: bool) -> _Context:
        return cls(device, autocast_dtype(device.type), _random_state(device) if random else None)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        now = None if self.random is None else _random_state(self.device)
        if self.random is not None:
            _set_random_state(self.random, self.device)
        try:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                yield
        finally:
            if now is not None:
                _set_random_state(now, self.device)


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def recompute(
    function: Parts,
    x: Tensor,
    parameters: Sequence[Tensor],
    *,
    rows: int | None = None,
    random: bool = False,
    output: bool = True,
) -> Tensor:
    """The sum of `function(x, True)`, saving only x; the backward runs `function(x, False)` to build its graph.

    Args:
        function: x and a flag → one or two summands. If the flag is False, it may leave the values of the last summand
            unwritten, but must save the same tensors for backward.
        x: [B, T, H].
        parameters: tensors read by `function` that require gradients; other tensors that it reads get none.
        rows: process this many of the B·T rows at a time, as [1, rows, H]; for functions without mixing of rows.
        random: whether `function` draws random numbers; the backward then draws the same ones.
        output: False if the caller is being recomputed itself: run nothing and return unwritten memory.

    Returns:
        [B, T, H].
    """
    return _Recompute.apply(function, rows, random, output, x, *parameters)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, rows, random, output, x, *parameters):
        ctx.function = function
        ctx.rows = rows
        ctx.context = _Context.of(x.device, random)
        ctx.save_for_backward(x)
        # An attribute, not save_for_backward: hooks that offload saved activations must not offload parameters.
        ctx.parameters = parameters
        ctx.graph = None
        if _pending is not None and rows is None:
            _pending.append(ctx)
        if not output:
            return torch.empty_like(x)
        if rows is None:
            return _sum(function(x, True))
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        for tile, out in zip(_tiles(x, rows), _tiles(result, rows), strict=True):
            out.copy_(_sum(function(tile, True)))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        need_x = ctx.needs_input_grad[4]
        parameters = [p for p, need in zip(ctx.parameters, ctx.needs_input_grad[5:], strict=True) if need]
        with ctx.context.restored():
            if ctx.rows is None:
                graph, ctx.graph = ctx.graph or _graph(ctx.function, ctx.saved_tensors[0], need_x), None
                dx, parameter_gradients = _gradients(graph, grad, need_x, parameters)
            else:
                x = ctx.saved_tensors[0]
                rows = ctx.rows
                dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
                sums: list[Tensor | None] = [None] * len(parameters)
                outs = _tiles(x if dx is None else dx, rows)
                for tile, tile_grad, out in zip(_tiles(x, rows), _tiles(grad, rows), outs, strict=True):
                    tile_dx, tile_gradients = _gradients(
                        _graph(ctx.function, tile, need_x), tile_grad, need_x, parameters
                    )
                    if dx is not None:
                        out.copy_(tile_dx)
                    pairs = zip(sums, tile_gradients, strict=True)
                    sums = [new if old is None else old if new is None else old.add_(new) for old, new in pairs]
                dx, parameter_gradients = dx, sums
        gradients = iter(parameter_gradients)
        gradients_by_input = [next(gradients) if need else None for need in ctx.needs_input_grad[5:]]
        return None, None, None, None, dx, *gradients_by_input


def _sum(terms: tuple[Tensor, ...]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.add(*terms)


def _tiles(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    return x.reshape(1, -1, x.shape[-1]).split(rows, dim=1)


Graph = tuple[Tensor, list[Tensor]]  # input of a recomputation, and its summands that require gradients


def _graph(function: Parts, x: Tensor, need_x: bool) -> Graph:
    x = x.detach().requires_grad_(need_x)
    with torch.enable_grad():
        return x, [term for term in function(x, False) if term.requires_grad]


def _gradients(graph: Graph, grad: Tensor, need_x: bool, parameters: list[Tensor]):
    """Gradients of x and of the parameters from one recomputation."""
    x, outputs = graph
    inputs = [x, *parameters] if need_x else parameters
    gradients = torch.autograd.grad(outputs, inputs, [grad] * len(outputs), allow_unused=True)
    return (gradients[0], gradients[1:]) if need_x else (None, gradients)


_pending: list[Any] | None = None


@contextlib.contextmanager
def pending_recomputes() -> Iterator[list[Any]]:
    """Collect the pending recomputations of all untiled `recompute` calls within the context, in forward order."""
    global _pending
    outer, _pending = _pending, []
    try:
        yield _pending
    finally:
        _pending = outer


def run_ahead(pending: Any) -> None:
    """Run a pending recomputation before its backward, which then uses the graph; the graph's tensors stay alive."""
    with pending.context.restored():
        pending.graph = _graph(pending.function, pending.saved_tensors[0], pending.needs_input_grad[4])


class Store(Protocol):
    """Storage of saved tensors, as pack and unpack hooks of autograd."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, packed: Any) -> Tensor: ...


@dataclass(frozen=True)
class _Versioned:
    tensor: Tensor
    version: int


class OnDevice:
    """The default store: saved tensors remain on their device."""

    def pack(self, tensor: Tensor) -> _Versioned:
        return _Versioned(tensor.detach(), tensor._version)

    def unpack(self, packed: _Versioned) -> Tensor:
        if packed.tensor._version != packed.version:  # autograd skips this check when hooks are installed
            raise RuntimeError("a saved tensor was modified by an in-place operation: backward ran already")
        return packed.tensor


@dataclass(frozen=True)
class _Recomputable:
    source: Any
    shape: torch.Size


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    """Key shared by a contiguous tensor and its reshaped views; fake tensors have one too, unlike an address."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype


@contextlib.contextmanager
def recompute_from(
    value: Tensor, source: Tensor, function: Callable[[Tensor], Tensor], store: Store | None = None
) -> Iterator[None]:
    """Within the context, save `source` wherever `value` = function(source), or a reshaped view of it, would be saved.

    Args:
        value: contiguous, and not modified in place afterwards.
        function: recomputes the value bit by bit.
        store: storage of `source` and of all other tensors saved in the context; default: `OnDevice`.
    """
    store = store or OnDevice()
    key, packed_source = _memory_key(value), store.pack(source)

    def pack(tensor: Tensor) -> Any:
        if _memory_key(tensor) == key:
            return _Recomputable(packed_source, tensor.shape)
        return store.pack(tensor)

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _Recomputable):
            return store.unpack(packed)
        with torch.no_grad():
            return function(store.unpack(packed.source)).view(packed.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
