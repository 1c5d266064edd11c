"""Offload of quantized experts: stacks in host memory, with a window of layers on the device.

A layer's stacks are contiguous in pinned host memory, and its parameters are views of it. The device has buffers for
`WINDOW` layers. `autograd.experts` fetches a stack right before its GEMM, in the forward, in the backward and in
recomputation. While a layer computes, the next layer in the direction of the pass is copied. The direction is given by
the last two fetched layers. A forward ends with the layers on the device that its backward starts with.

All row tiles of a layer fetch it in succession, so each layer is copied once per pass.

CUDA graphs cannot capture this: copies run on a separate stream and depend on which layers are on the device already.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..memory.pinned import HOST, whole_pages
from ..modeling.architectures import runs_experts
from ..modeling.experts import HOST_STACKS, HostStack, names_of
from ..tensor import QuantizedTensor

WINDOW = 2  # layers on the device: the computing one and the next one
ALIGNMENT = 128  # bytes; every stack starts at a multiple of it


@dataclass(frozen=True)
class _Layer:
    """The stacks of one layer.

    Attributes:
        host: uint8 [n], bytes of all stacks; pinned if the device is a GPU.
        stacks: name → the stack on the meta device, and its offset in `host`.
    """

    host: Tensor
    stacks: dict[str, tuple[QuantizedTensor, int]]

    def views(self, raw: Tensor) -> dict[str, QuantizedTensor]:
        """The stacks as views of `raw`: `host`, or a copy of it."""
        return {
            name: QuantizedTensor.from_bytes(raw[begin:], like.format, tuple(like.shape), like.dtype)
            for name, (like, begin) in self.stacks.items()
        }


@dataclass(eq=False)
class _Slot:
    """A device buffer for one layer.

    Attributes:
        layer: index of the layer whose bytes it holds or receives; None: empty.
        stacks: the layer's stacks as views of `memory`.
        copied: CUDA event after the copy to `memory`.
        read: CUDA event after the last kernel that reads `memory`.
    """

    memory: Tensor
    layer: int | None = None
    stacks: dict[str, QuantizedTensor] = field(default_factory=dict)
    copied: Any = None
    read: Any = None


class ExpertWindow:
    """The offloaded stacks of some layers, of which `WINDOW` are on the device at a time.

    Args:
        layers: in the order of the model.
        device: the computing device; a CPU gets copies, too.

    Attributes:
        copies: number of layers copied so far.
    """

    def __init__(self, layers: Sequence[_Layer], device: torch.device):
        self.layers = layers
        self.device = device
        self.copies = 0
        size = max(layer.host.nbytes for layer in layers)
        self.slots = [
            _Slot(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(min(WINDOW, len(layers)))
        ]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._current: int | None = None
        self._step = 1
        if self.stream is not None:
            pinned: list[Tensor] = []
            weakref.finalize(self, HOST.unpin, pinned)
            for layer in layers:
                pinned.append(HOST.pin(layer.host))

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(slot.memory.nbytes for slot in self.slots)

    @property
    def host_bytes(self) -> int:
        return sum(layer.host.nbytes for layer in self.layers)

    def fetch(self, index: int) -> dict[str, QuantizedTensor]:
        """The stacks of layer `index` on the device, and start copying the next layer.

        Kernels launched on the current stream may read them until another layer is fetched.
        """
        compute = None if self.stream is None else torch.cuda.current_stream(self.device)
        if compute is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph cannot capture offloaded experts, which are copied on a separate stream")
        if index != self._current:
            for slot in self.slots:  # all kernels that read the current layer have been launched
                if compute is not None and slot.layer is not None and slot.layer == self._current:
                    slot.read = compute.record_event()
            if self._current is not None:
                self._step = 1 if index > self._current else -1
            self._current = index
        upcoming = [index + self._step * ahead for ahead in range(len(self.slots))]
        needed = [layer for layer in upcoming if 0 <= layer < len(self.layers)]
        first, *_ = [self._load(layer, needed) for layer in needed]
        if compute is not None:
            compute.wait_event(first.copied)
        return first.stacks

    def _load(self, index: int, needed: Collection[int]) -> _Slot:
        """The slot of layer `index`; starts a copy to a slot whose layer is not `needed` if it is not loaded."""
        loaded = next((slot for slot in self.slots if slot.layer == index), None)
        if loaded is not None:
            return loaded
        slot = next(slot for slot in self.slots if slot.layer not in needed)
        layer = self.layers[index]
        slot.layer, slot.stacks = index, layer.views(slot.memory)
        self._copy(layer.host, slot)
        self.copies += 1
        return slot

    def _copy(self, host: Tensor, slot: _Slot) -> None:
        into = slot.memory[: host.numel()]
        if self.stream is None:
            into.copy_(host)
            return
        if slot.read is None:  # allocated on the computing stream, whose earlier work may still use the memory
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        else:
            self.stream.wait_event(slot.read)
        with torch.cuda.stream(self.stream):
            into.copy_(host, non_blocking=True)
            slot.copied = self.stream.record_event()


def layers_of_experts(layers: Sequence[nn.Module]) -> Iterator[tuple[int, Any]]:
    """(index, experts module) of each decoder layer whose stacks are all quantized."""
    for at, layer in enumerate(layers):
        for module in filter(runs_experts, layer.modules()):
            if all(isinstance(getattr(module, name), QuantizedTensor) for name in names_of(module)):
                yield at, module


def offload_experts(layers: Sequence[nn.Module], chosen: Collection[int], device: torch.device) -> ExpertWindow | None:
    """Move the quantized experts of the chosen decoder layers to host memory; None if these layers have no experts.

    Args:
        layers: all decoder layers of a model, in order.
        chosen: indices of the layers to offload.
        device: the computing device; the stacks may be there, or in host memory already.

    Raises:
        TrainingError: the host does not have enough memory, or may not pin it.
    """
    modules = [module for at, module in layers_of_experts(layers) if at in chosen]
    if not modules:
        return None
    packed = [_pack(module) for module in modules]  # one layer at a time exists twice on the host
    window = ExpertWindow(packed, device)
    for at, module in enumerate(modules):
        stacks = packed[at].stacks
        module.__dict__[HOST_STACKS] = {name: HostStack(like, name, at, window) for name, (like, _) in stacks.items()}
    return window


def _pack(module: Any) -> _Layer:
    """Copy the stacks of a module to one host buffer and make its parameters views of it."""
    stacks: dict[str, tuple[QuantizedTensor, int]] = {}
    raws, end = [], 0
    for name in names_of(module):
        stack = getattr(module, name).detach()
        raw = stack.to_bytes()[0]
        stacks[name] = stack.map(lambda tensor: tensor.to("meta")), end
        raws.append(raw)
        end += -(-raw.numel() // ALIGNMENT) * ALIGNMENT
    layer = _Layer(whole_pages(end), stacks)
    for (_, begin), raw in zip(stacks.values(), raws, strict=True):
        layer.host[begin : begin + raw.numel()] = raw.cpu()
    for name, stack in layer.views(layer.host).items():
        setattr(module, name, nn.Parameter(stack, requires_grad=False))
    return layer
