"""Activations that backward computes again instead of finding them saved.

`recompute` keeps the input of a function and nothing else. It differs from `torch.utils.checkpoint` in three ways that
count in a training step. The last product is left out the second time: a block y = r + W·h needs h for its gradients,
not y. The rows can go through in tiles, of whose inner tensors only one tile's exist at a time. And it keeps no random
state unless something draws numbers, so a CUDA graph can hold it.

A function that waits for a gradient from elsewhere need not wait with running again: what is left for backward is
`gathered`, and `run_ahead` runs it.

`computed_again` does the same for one tensor that several functions save: the result of a norm, say, which one
elementwise pass makes again.

Source: Chen et al. 2016 (arXiv:1604.06174) for checkpoints; Korthikanti et al. 2022 (arXiv:2205.05198) for choosing
what to recompute by its bytes and its time.
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

# (x [B, T, H], whether the last part is needed) → one or two parts of the same shape, to be added up
Parts = Callable[[Tensor, bool], tuple[Tensor, ...]]


@dataclass(frozen=True)
class _Surroundings:
    """Autocast, and the random state where it matters, as the forward found them."""

    device: torch.device
    autocast: torch.dtype | None
    random: Tensor | None

    @classmethod
    def of(cls, device: torch.device, random: bool) -> _Surroundings:
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
    """The sum of `function(x, True)`, of which only x is kept; backward runs `function(x, False)` for its graph.

    Args:
        function: x and a flag → one or two parts to be added up. With the flag False it may leave the values of the
            last part unwritten, but must save for backward whatever it saves otherwise.
        x: [B, T, H].
        parameters: tensors that `function` reads and that want gradients; those it reads beside them get none.
        rows: run as many rows (of B·T) at a time, as [1, rows, H]: for functions that treat each row alone.
        random: whether `function` draws random numbers; then backward draws the same.
        output: False where the caller is itself recomputed for its graph: returns unwritten memory and runs nothing.

    Returns:
        [B, T, H].
    """
    return _Recompute.apply(function, rows, random, output, x, *parameters)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, rows, random, output, x, *parameters):
        ctx.function, ctx.rows, ctx.surroundings = function, rows, _Surroundings.of(x.device, random)
        ctx.save_for_backward(x)
        # An attribute: hooks that offload what is saved must not carry parameters along.
        ctx.parameters = parameters
        ctx.graph = None
        if _gathering is not None and rows is None:
            _gathering.append(ctx)
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
        wanted = [p for p, need in zip(ctx.parameters, ctx.needs_input_grad[5:], strict=True) if need]
        with ctx.surroundings.restored():
            if ctx.rows is None:
                graph, ctx.graph = ctx.graph or _graph(ctx.function, ctx.saved_tensors[0], need_x), None
                dx, found = _gradients(graph, grad, need_x, wanted)
            else:
                dx, found = _tiled_gradients(ctx.function, ctx.saved_tensors[0], grad, need_x, wanted, ctx.rows)
        gradients = iter(found)
        rest = [next(gradients) if need else None for need in ctx.needs_input_grad[5:]]
        return None, None, None, None, dx, *rest


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.add(*parts)


def _tiles(x: Tensor, rows: int) -> tuple[Tensor, ...]:
    return x.reshape(1, -1, x.shape[-1]).split(rows, dim=1)


Graph = tuple[Tensor, list[Tensor]]  # of one run: its input, and the parts that want gradients


def _graph(function: Parts, x: Tensor, need_x: bool) -> Graph:
    x = x.detach().requires_grad_(need_x)
    with torch.enable_grad():
        return x, [part for part in function(x, False) if part.requires_grad]


def _gradients(graph: Graph, grad: Tensor, need_x: bool, wanted: list[Tensor]):
    """∂/∂x and ∂/∂parameters of one run."""
    x, parts = graph
    inputs = [x, *wanted] if need_x else wanted
    found = torch.autograd.grad(parts, inputs, [grad] * len(parts), allow_unused=True)
    return (found[0], found[1:]) if need_x else (None, found)


def _tiled_gradients(function: Parts, x: Tensor, grad: Tensor, need_x: bool, wanted: list[Tensor], rows: int):
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if need_x else None
    sums: list[Tensor | None] = [None] * len(wanted)
    places = _tiles(x if dx is None else dx, rows)
    for tile, tile_grad, place in zip(_tiles(x, rows), _tiles(grad, rows), places, strict=True):
        tile_dx, found = _gradients(_graph(function, tile, need_x), tile_grad, need_x, wanted)
        if dx is not None:
            place.copy_(tile_dx)
        pairs = zip(sums, found, strict=True)
        sums = [new if old is None else old if new is None else old.add_(new) for old, new in pairs]
    return dx, sums


_gathering: list[Any] | None = None


@contextlib.contextmanager
def gathered() -> Iterator[list[Any]]:
    """Inside, what each `recompute` leaves for backward, in the order of the forwards; not what runs in tiles."""
    global _gathering
    before, _gathering = _gathering, []
    try:
        yield _gathering
    finally:
        _gathering = before


def run_ahead(left: Any) -> None:
    """Run again now what `gathered` gave: its backward finds the graph, and holds until then what the graph saves."""
    with left.surroundings.restored():
        left.graph = _graph(left.function, left.saved_tensors[0], left.needs_input_grad[4])


class Store(Protocol):
    """Where saved tensors wait: `pack` gives what stands for one, `unpack` the tensor again."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, packed: Any) -> Tensor: ...


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor
    version: int


class InPlace:
    """The store that leaves tensors where they are."""

    def pack(self, tensor: Tensor) -> _Kept:
        return _Kept(tensor.detach(), tensor._version)

    def unpack(self, packed: _Kept) -> Tensor:
        if packed.tensor._version != packed.version:  # autograd's own check, which its hooks turn off
            raise RuntimeError("a saved tensor was modified by an in-place operation: backward ran already")
        return packed.tensor


@dataclass(frozen=True)
class _Again:
    source: Any
    shape: torch.Size


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What a contiguous tensor and its reshaped views have in common; not an address, which fake tensors lack."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype


@contextlib.contextmanager
def computed_again(
    value: Tensor, source: Tensor, function: Callable[[Tensor], Tensor], store: Store | None = None
) -> Iterator[None]:
    """Inside, whoever saves `value` = function(source) for backward, or a reshaped view of it, keeps `source` instead.

    Args:
        value: contiguous; what is saved of it must not change in place.
        function: makes it again, bit by bit.
        store: of `source` and all else that is saved inside; default: `InPlace`.
    """
    store = store or InPlace()
    where, kept = _place(value), store.pack(source)

    def pack(tensor: Tensor) -> Any:
        if _place(tensor) == where:
            return _Again(kept, tensor.shape)
        return store.pack(tensor)

    def unpack(packed: Any) -> Tensor:
        if not isinstance(packed, _Again):
            return store.unpack(packed)
        with torch.no_grad():
            return function(store.unpack(packed.source)).view(packed.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
