"""Distribution of a loaded model: each host's ranks read a checkpoint in parallel, and each rank keeps its pieces.

One rank per host, the owner, reads and quantizes a tensor. It splits the tensor by its `Placement` and sends each local
rank its piece, byte for byte; replicated tensors are broadcast. Tensors are sent one at a time, round-robin over
owners, so that a device holds what it read, what it keeps and two tensors.

A piece is a parameter of its own size, on the device, with the full tensor's shape as `template`. `shard_model` accepts
pieces as well as full tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...formats import from_spec
from ...mesh.collectives import as_bytes
from ...mesh.mesh import Mesh
from ...tensor import QuantizedShard, QuantizedTensor


@dataclass(frozen=True)
class Placement:
    """Which piece of a tensor a rank keeps.

    Attributes:
        axes: mesh axes along which ranks keep different pieces; the tensor is replicated along the others.
        stages: coordinates along "pipeline" of the ranks that keep a piece; None: all.
        dim: dimension that pieces are split along, if GEMMs read the pieces directly (`mesh.sharded_linears`).
    """

    axes: tuple[str, ...] = ()
    stages: frozenset[int] | None = None
    dim: int | None = None

    def piece_of(self, mesh: Mesh, rank: int) -> int | None:
        """Return the index of the piece that `rank` keeps, or None."""
        rank_mesh = replace(mesh, rank=rank)
        keeps = self.stages is None or rank_mesh.coordinate("pipeline") in self.stages
        return rank_mesh.coordinate(*self.axes) if keeps else None

    def split(self, full: Tensor, degree: int) -> list[Tensor]:
        """Split a tensor, also on the meta device, into `degree` pieces: along `dim`, or as FSDP2 splits rows or bytes.

        Raises:
            ModelError: the format's blocks would cross pieces.
        """
        if degree == 1 or full.dim() == 0:
            return [full] * degree
        if self.dim is not None:
            if isinstance(full, QuantizedTensor):
                return [*full.split_for(self.dim, degree)]
            return [piece.contiguous() for piece in full.tensor_split(degree, self.dim)]
        pieces = list(torch.chunk(full, degree))
        return [*pieces, *(pieces[0].new_empty((0, *pieces[0].shape[1:])) for _ in range(degree - len(pieces)))]


REPLICATED = Placement()


@dataclass(frozen=True)
class LocalGroup:
    """The ranks of this host, which read a checkpoint together.

    Attributes:
        ranks: in order.
        index: this rank's index among them.
        group: their process group.
    """

    ranks: tuple[int, ...]
    index: int
    group: Any


def local_group(mesh: Mesh) -> LocalGroup:
    """Return this host's ranks; all ranks must call it."""
    firsts = mesh.gather(mesh.rank - mesh.local)
    hosts = [[rank for rank, host_first in enumerate(firsts) if host_first == first] for first in dict.fromkeys(firsts)]
    group = dist.group.WORLD if len(hosts) == 1 else dist.new_subgroups_by_enumeration(hosts)[0]
    return LocalGroup(tuple(next(host for host in hosts if mesh.rank in host)), mesh.local, group)


@dataclass(frozen=True)
class _TensorInfo:
    """Description of a tensor that a rank has loaded.

    Attributes:
        spec: of its format; None if it is not quantized.
        same_as: name of the parameter that it is tied to.
    """

    spec: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    same_as: str | None

    def template(self) -> Tensor:
        full = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return full if self.spec is None else QuantizedTensor.quantize(full, from_spec(self.spec))


class _TensorSlots:
    """Parameters and buffers of a model by name; tied ones have an entry for each name."""

    def __init__(self, model: nn.Module):
        self.at = {
            f"{prefix}.{key}" if prefix else key: (module, key)
            for prefix, module in model.named_modules(remove_duplicate=False)
            for held in (module._parameters, module._buffers)
            for key, tensor in held.items()
            if tensor is not None
        }

    def __getitem__(self, name: str) -> Any:
        module, key = self.at[name]
        return getattr(module, key)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        module, key = self.at[name]
        setattr(module, key, tensor)

    def infos(self) -> dict[str, _TensorInfo]:
        """Describe the tensors that are not on the meta device."""
        firsts: dict[int, str] = {}
        infos = {}
        for name in self.at:
            tensor = self[name]
            first = firsts.setdefault(id(tensor), name)
            if not tensor.is_meta:
                spec = tensor.format.spec if isinstance(tensor, QuantizedTensor) else None
                same_as = None if first == name else first
                infos[name] = _TensorInfo(spec, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, same_as)
        return infos


@dataclass(frozen=True)
class LoadedTensors:
    """The tensors of a model that the ranks of a host have loaded.

    Attributes:
        entries: name → description of the tensor, and the local indices of the ranks that hold it.
        missing: names of tensors that no rank holds.
    """

    entries: Mapping[str, tuple[_TensorInfo, list[int]]]
    missing: list[str]


def gather_loaded(model: nn.Module, mesh: Mesh, local: LocalGroup) -> LoadedTensors:
    """Exchange which tensors of `model` each rank has loaded; the others are on the meta device."""
    slots = _TensorSlots(model)
    infos = mesh.gather(slots.infos())
    entries: dict[str, tuple[_TensorInfo, list[int]]] = {}
    for index, rank in enumerate(local.ranks):
        for name, info in infos[rank].items():
            entries.setdefault(name, (info, []))[1].append(index)
    return LoadedTensors(entries, [name for name in slots.at if name not in entries])


@torch.no_grad()
def distribute_tensors(
    model: nn.Module,
    loaded: LoadedTensors,
    mesh: Mesh,
    local: LocalGroup,
    placement: Callable[[str], Placement],
    device: torch.device,
) -> None:
    """Send every rank its piece of every tensor of `model`, to `device`.

    Args:
        placement: maps a parameter's name to its placement; buffers are replicated.
    """
    slots = _TensorSlots(model)
    if device.type != "cpu":  # NCCL connects all ranks in a group's first collective, which must precede sends
        dist.all_reduce(torch.zeros(1, device=device), group=local.group)
    for name in _round_robin(loaded):
        info, holders = loaded.entries[name]
        module, key = slots.at[name]
        chosen = placement(name) if key in module._parameters else REPLICATED
        held = slots[name]
        piece = _receive(None if held.is_meta else held, info, holders, chosen, mesh, local, device)
        if key in module._buffers:
            slots[name] = piece
        elif piece is None:
            slots[name] = nn.Parameter(info.template(), requires_grad=info.requires_grad)
        elif piece is not held:
            slots[name] = parameter = nn.Parameter(piece, requires_grad=info.requires_grad)
            if mesh.degree(*chosen.axes) > 1 and info.shape and chosen.dim is None:
                parameter.template = info.template()  # type: ignore[attr-defined]
                if len(info.shape) == 3:  # PEFT reads the full shape of a stack of experts here
                    parameter.ds_shape = info.shape  # type: ignore[attr-defined]
    for name, (info, _) in loaded.entries.items():
        if info.same_as:
            slots[name] = slots[info.same_as]


def _round_robin(loaded: LoadedTensors) -> Iterator[str]:
    """Yield the names of untied tensors: the first of every owner, then the second of every owner, and so on."""
    owned: dict[int, list[str]] = {}
    for name, (info, holders) in loaded.entries.items():
        if info.same_as is None:
            owned.setdefault(holders[0], []).append(name)
    for row in zip_longest(*owned.values()):
        yield from (name for name in row if name is not None)


def _receive(
    held: Tensor | None,
    info: _TensorInfo,
    holders: list[int],
    placement: Placement,
    mesh: Mesh,
    local: LocalGroup,
    device: torch.device,
) -> Any:
    """Return this rank's piece of a tensor, from its own copy or from the owner; None if it keeps none."""
    degree, owner = mesh.degree(*placement.axes), holders[0]
    pieces = placement.split(info.template() if held is None else held, degree)
    piece_numbers = [placement.piece_of(mesh, rank) for rank in local.ranks]
    number = piece_numbers[local.index]
    piece = None if number is None else pieces[number]
    if held is not None and piece is not None:
        if degree > 1:  # a copy, which does not keep the full tensor's memory
            piece = piece.clone(memory_format=torch.contiguous_format) if type(piece) is Tensor else piece.clone()
        piece = piece.to(device)
    elif piece is not None:
        piece = _empty_like(piece, device)
    if len(holders) == len(local.ranks):
        return piece
    if set(piece_numbers) == {0} and degree == 1:
        for buffer in _buffers(piece):
            dist.broadcast(as_bytes(buffer), local.ranks[owner], local.group)
    elif local.index == owner:
        sent = [(rank, pieces[index]) for rank, index in zip(local.ranks, piece_numbers, strict=True)
                if index is not None and rank != mesh.rank]  # fmt: skip
        _send_and_receive([(dist.isend, rank, buffer) for rank, piece in sent for buffer in _buffers(piece)], local)
    elif piece is not None:
        _send_and_receive([(dist.irecv, local.ranks[owner], buffer) for buffer in _buffers(piece)], local)
    return piece


def _send_and_receive(messages: list[tuple[Any, int, Tensor]], local: LocalGroup) -> None:
    messages = [message for message in messages if message[2].numel()]
    if messages:
        ops = [dist.P2POp(verb, as_bytes(buffer), rank, local.group) for verb, rank, buffer in messages]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def _buffers(piece: Any) -> list[Tensor]:
    """Return the plain tensors that store a piece, sorted by name."""
    if isinstance(piece, QuantizedTensor):
        tensors = piece.parts
        return [tensors[name] for name in sorted(tensors)]
    return [piece.raw] if isinstance(piece, QuantizedShard) else [piece]


def _empty_like(piece: Tensor, device: torch.device) -> Tensor:
    """Allocate memory for a piece that is on the meta device."""
    if isinstance(piece, QuantizedShard):
        raw = torch.empty_like(piece.raw, device=device)
        return QuantizedShard(raw, piece.spec, piece.full_shape, piece.rows, piece.dtype)
    return torch.empty_like(piece, device=device)
