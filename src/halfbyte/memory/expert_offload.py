"""Packed experts that wait in the host's memory, and the layers of them that are on the device.

A layer's stacks lie one after the other in pinned memory of the host, which its parameters are views of. On the device
there is room for `WINDOW` layers. Whoever multiplies by a stack asks for it at that moment, in forward, in backward or
as a layer runs again; while its layer computes, the next one in the direction of the pass is on its way. The direction
is that of the last two layers that were asked for, so a forward ends with the layers that its backward begins with.

A layer's tiles of rows ask for the same layer one after the other, so it crosses the link once a pass.

A CUDA graph cannot hold this: its copies belong to a stream of their own, and what is on its way depends on what came
before.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.experts import HELD, HostStack, names_of
from ..modeling.architectures import runs_experts
from ..tensor import QuantizedTensor
from .pinned import HOST, whole_pages

WINDOW = 2  # layers on the device: the one that computes, and the one that comes
ALIGNED = 128  # bytes; where a stack begins


@dataclass(frozen=True)
class _Layer:
    """The stacks of one layer.

    Attributes:
        host: uint8 [n], of all of them; pinned where the device is a GPU.
        stacks: name → a tensor like it, without data, and where in `host` it begins.
    """

    host: Tensor
    stacks: dict[str, tuple[QuantizedTensor, int]]

    def of(self, raw: Tensor) -> dict[str, QuantizedTensor]:
        """The stacks, on bytes that `host` was copied to, or its own."""
        return {
            name: QuantizedTensor.from_bytes(raw[begin:], like.format, tuple(like.shape), like.dtype)
            for name, (like, begin) in self.stacks.items()
        }


@dataclass(eq=False)
class _Slot:
    """Room for a layer on the device.

    Attributes:
        layer: whose bytes are there, or on their way; None: nobody's.
        stacks: its stacks there.
        arrived, read: events: the copy is done; the last kernel that reads it is.
    """

    memory: Tensor
    layer: int | None = None
    stacks: dict[str, QuantizedTensor] = field(default_factory=dict)
    arrived: Any = None
    read: Any = None


class ExpertWindow:
    """The stacks of some layers, of which `WINDOW` are on the device at a time.

    Args:
        layers: in the order of the model.
        device: that multiplies; a CPU gets copies, too.

    Attributes:
        crossed: layers that were copied so far.
    """

    def __init__(self, layers: Sequence[_Layer], device: torch.device):
        self.layers, self.device, self.crossed = layers, device, 0
        size = max(each.host.nbytes for each in layers)
        self.slots = [
            _Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(min(WINDOW, len(layers)))
        ]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._current: int | None = None
        self._step = 1
        if self.stream is not None:
            pinned: list[Tensor] = []
            weakref.finalize(self, HOST.unpin, pinned)
            for each in layers:
                pinned.append(HOST.pin(each.host))

    @property
    def nbytes(self) -> int:
        """Of the device."""
        return sum(slot.memory.nbytes for slot in self.slots)

    @property
    def host_bytes(self) -> int:
        return sum(each.host.nbytes for each in self.layers)

    def arrive(self, at: int) -> dict[str, QuantizedTensor]:
        """The stacks of a layer on the device, to be read by what is launched on the current stream before another
        layer is asked for; the next layer sets out."""
        compute = None if self.stream is None else torch.cuda.current_stream(self.device)
        if compute is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("experts come from the host's memory on a stream of their own")
        if at != self._current:
            self._leave(compute)
            if self._current is not None:
                self._step = 1 if at > self._current else -1
            self._current = at
        coming = [at + self._step * ahead for ahead in range(len(self.slots))]
        wanted = [each for each in coming if 0 <= each < len(self.layers)]
        first, *_ = [self._fetch(each, wanted) for each in wanted]
        if compute is not None:
            compute.wait_event(first.arrived)
        return first.stacks

    def _leave(self, compute: Any) -> None:
        """What was launched so far is the last that reads the current layer, for now."""
        for slot in self.slots:
            if compute is not None and slot.layer is not None and slot.layer == self._current:
                slot.read = compute.record_event()

    def _fetch(self, at: int, wanted: Collection[int]) -> _Slot:
        """Where a layer is, or will be, in the place of one that is not wanted."""
        found = next((slot for slot in self.slots if slot.layer == at), None)
        if found is not None:
            return found
        slot = next(slot for slot in self.slots if slot.layer not in wanted)
        layer = self.layers[at]
        slot.layer, slot.stacks = at, layer.of(slot.memory)
        self._copy(layer.host, slot)
        self.crossed += 1
        return slot

    def _copy(self, host: Tensor, slot: _Slot) -> None:
        into = slot.memory[: host.numel()]
        if self.stream is None:
            into.copy_(host)
            return
        if slot.read is None:  # made on the computing stream, whose earlier work may still use this memory
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            self.stream.wait_event(slot.read)
        with torch.cuda.stream(self.stream):
            into.copy_(host, non_blocking=True)
            slot.arrived = self.stream.record_event()


def layers_of_experts(layers: Sequence[nn.Module]) -> Iterator[tuple[int, Any]]:
    """Number and experts of each decoder layer whose stacks are packed, all of them."""
    for at, layer in enumerate(layers):
        for module in filter(runs_experts, layer.modules()):
            if all(isinstance(getattr(module, name), QuantizedTensor) for name in names_of(module)):
                yield at, module


def offload_experts(layers: Sequence[nn.Module], chosen: Collection[int], device: torch.device) -> ExpertWindow | None:
    """Have the packed experts of the chosen decoder layers wait in the host's memory; None: they have none.

    Args:
        layers: of a model, in order.
        chosen: numbers of some of them.
        device: that multiplies; the stacks may be there, or in the host's memory already.

    Raises:
        TrainingError: the host has not that much memory, or may not pin it.
    """
    modules = [module for at, module in layers_of_experts(layers) if at in chosen]
    if not modules:
        return None
    packed = [_pack(module) for module in modules]  # a layer at a time is twice on the host
    window = ExpertWindow(packed, device)
    for at, module in enumerate(modules):
        stacks = packed[at].stacks
        module.__dict__[HELD] = {name: HostStack(like, name, at, window) for name, (like, _) in stacks.items()}
    return window


def _pack(module: Any) -> _Layer:
    """The stacks of a module, which are views of it from now on."""
    stacks: dict[str, tuple[QuantizedTensor, int]] = {}
    raws, end = [], 0
    for name in names_of(module):
        stack = getattr(module, name).detach()
        raw = stack.to_bytes()[0]
        stacks[name] = stack.map(lambda part: part.to("meta")), end
        raws.append(raw)
        end += -(-raw.numel() // ALIGNED) * ALIGNED
    layer = _Layer(whole_pages(end), stacks)
    for (_, begin), raw in zip(stacks.values(), raws, strict=True):
        layer.host[begin : begin + raw.numel()] = raw.cpu()
    for name, stack in layer.of(layer.host).items():
        setattr(module, name, nn.Parameter(stack, requires_grad=False))
    return layer
