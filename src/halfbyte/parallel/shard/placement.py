"""What each process keeps of a model whose tensors a host's processes have read in turns.

A tensor is read, and quantized, by one process of a host: its owner. The owner cuts it as the tensor's `Placement` says
and sends each of its host the piece that is theirs, byte for byte; where all keep the same, it is broadcast. One tensor
after another is handed on, of every owner in turn, so that a device holds what it read, what it keeps and two tensors.

A piece stands in the model as a parameter of its own size, on the device, and knows the shape of the whole as
`template`. `shard` takes pieces as it takes what is whole.
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
from ...tensor import QuantizedShard, QuantizedTensor
from ..mesh import Mesh


@dataclass(frozen=True)
class Placement:
    """Which part of a tensor a process keeps.

    Attributes:
        axes: of the mesh, along which processes keep different pieces of it; along all others the same one.
        stages: places along "pipeline" of those that keep any; None: all.
        dim: which pieces are cut along, where they are computed with as they are (`parallel.tensor.layers`).
    """

    axes: tuple[str, ...] = ()
    stages: frozenset[int] | None = None
    dim: int | None = None

    def wanted(self, mesh: Mesh, rank: int) -> int | None:
        """Which of the pieces a process keeps."""
        other = replace(mesh, rank=rank)
        return (
            other.coordinate(*self.axes) if self.stages is None or other.coordinate("pipeline") in self.stages else None
        )

    def cut(self, whole: Tensor, ways: int) -> list[Tensor]:
        """All pieces, as FSDP2 cuts a parameter: rows, or of a quantized tensor its bytes; or along `dim`. On the meta
        device, too.

        Raises:
            ModelError: a format whose blocks do not end where pieces do.
        """
        if ways == 1 or whole.dim() == 0:
            return [whole] * ways
        if self.dim is not None:
            if isinstance(whole, QuantizedTensor):
                return [*whole.split_for(self.dim, ways)]
            return [piece.contiguous() for piece in whole.tensor_split(ways, self.dim)]
        pieces = list(torch.chunk(whole, ways))
        return [*pieces, *(pieces[0].new_empty((0, *pieces[0].shape[1:])) for _ in range(ways - len(pieces)))]


WHOLE = Placement()


@dataclass(frozen=True)
class Crew:
    """The processes of this host, which read a checkpoint together.

    Attributes:
        ranks: theirs, in order.
        place: of this process among them.
        group: process group of them.
    """

    ranks: tuple[int, ...]
    place: int
    group: Any


def crew_of(mesh: Mesh) -> Crew:
    """Every process calls it at once."""
    firsts = mesh.gather(mesh.rank - mesh.local)
    hosts = [[rank for rank, own in enumerate(firsts) if own == first] for first in dict.fromkeys(firsts)]
    group = dist.group.WORLD if len(hosts) == 1 else dist.new_subgroups_by_enumeration(hosts)[0]
    return Crew(tuple(next(host for host in hosts if mesh.rank in host)), mesh.local, group)


@dataclass(frozen=True)
class _Described:
    """What a process says of a tensor that it holds.

    Attributes:
        spec: of its format; None where it is not quantized.
        same_as: name of the parameter that it is tied to.
    """

    spec: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    same_as: str | None

    def template(self) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return whole if self.spec is None else QuantizedTensor.quantize(whole, from_spec(self.spec))


class _Slots:
    """Where the parameters and buffers of a model stand, by name; a tied one under each of its names."""

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

    def described(self) -> dict[str, _Described]:
        """What of the model is not on the meta device."""
        firsts: dict[int, str] = {}
        found = {}
        for name in self.at:
            tensor = self[name]
            first = firsts.setdefault(id(tensor), name)
            if not tensor.is_meta:
                spec = tensor.format.spec if isinstance(tensor, QuantizedTensor) else None
                same_as = None if first == name else first
                found[name] = _Described(spec, tuple(tensor.shape), tensor.dtype, tensor.requires_grad, same_as)
        return found


@dataclass(frozen=True)
class Read:
    """What the processes of a host have read of a model, each a part of it.

    Attributes:
        by: name → what is known of the tensor, and the places in the crew of those that hold it.
        unread: names of what none of them holds.
    """

    by: Mapping[str, tuple[_Described, list[int]]]
    unread: list[str]


def all_read(model: nn.Module, mesh: Mesh, crew: Crew) -> Read:
    """What all have read of `model`; in each process what it has not read is on the meta device."""
    slots = _Slots(model)
    said = mesh.gather(slots.described())
    found: dict[str, tuple[_Described, list[int]]] = {}
    for place, rank in enumerate(crew.ranks):
        for name, described in said[rank].items():
            found.setdefault(name, (described, []))[1].append(place)
    return Read(found, [name for name in slots.at if name not in found])


@torch.no_grad()
def hand_out(
    model: nn.Module, read: Read, mesh: Mesh, crew: Crew, placement: Callable[[str], Placement], device: torch.device
) -> None:
    """Give every process what it keeps of every tensor of `model`, on `device`.

    Args:
        placement: of a parameter, by its name; buffers are whole everywhere.
    """
    slots = _Slots(model)
    if device.type != "cpu":  # NCCL connects everybody in a group's first collective: messages between two come after
        dist.all_reduce(torch.zeros(1, device=device), group=crew.group)
    for name in _in_turns(read):
        described, holders = read.by[name]
        module, key = slots.at[name]
        chosen = placement(name) if key in module._parameters else WHOLE
        held = slots[name]
        kept = _kept(None if held.is_meta else held, described, holders, chosen, mesh, crew, device)
        if key in module._buffers:
            slots[name] = kept
        elif kept is None:
            slots[name] = nn.Parameter(described.template(), requires_grad=described.requires_grad)
        elif kept is not held:
            slots[name] = parameter = nn.Parameter(kept, requires_grad=described.requires_grad)
            if mesh.degree(*chosen.axes) > 1 and described.shape and chosen.dim is None:
                parameter.template = described.template()  # type: ignore[attr-defined]
                if len(described.shape) == 3:  # where PEFT looks for the shape of a stack of which this is a part
                    parameter.ds_shape = described.shape  # type: ignore[attr-defined]
    for name, (described, _) in read.by.items():
        if described.same_as:
            slots[name] = slots[described.same_as]


def _in_turns(read: Read) -> Iterator[str]:
    """Names of all tensors but what is tied to another: the first of every owner, then the second of every one."""
    owned: dict[int, list[str]] = {}
    for name, (described, holders) in read.by.items():
        if described.same_as is None:
            owned.setdefault(holders[0], []).append(name)
    for row in zip_longest(*owned.values()):
        yield from (name for name in row if name is not None)


def _kept(
    held: Tensor | None,
    described: _Described,
    holders: list[int],
    placement: Placement,
    mesh: Mesh,
    crew: Crew,
    device: torch.device,
) -> Any:
    """What this process keeps of a tensor that it holds, or that its owner sends; None: nothing."""
    ways, owner = mesh.degree(*placement.axes), holders[0]
    pieces = placement.cut(described.template() if held is None else held, ways)
    wanted = [placement.wanted(mesh, rank) for rank in crew.ranks]
    own = wanted[crew.place]
    mine = None if own is None else pieces[own]
    if held is not None and mine is not None:
        mine = (mine if ways == 1 else _alone(mine)).to(device)
    elif mine is not None:
        mine = _room(mine, device)
    if len(holders) == len(crew.ranks):
        return mine
    if set(wanted) == {0} and ways == 1:
        for buffer in _buffers(mine):
            dist.broadcast(_bytes(buffer), crew.ranks[owner], crew.group)
    elif crew.place == owner:
        sent = [(rank, pieces[index]) for rank, index in zip(crew.ranks, wanted, strict=True)
                if index is not None and rank != mesh.rank]  # fmt: skip
        _wait([(dist.isend, rank, buffer) for rank, piece in sent for buffer in _buffers(piece)], crew)
    elif mine is not None:
        _wait([(dist.irecv, crew.ranks[owner], buffer) for buffer in _buffers(mine)], crew)
    return mine


def _wait(messages: list[tuple[Any, int, Tensor]], crew: Crew) -> None:
    messages = [message for message in messages if message[2].numel()]
    if messages:
        ops = [dist.P2POp(verb, _bytes(buffer), rank, crew.group) for verb, rank, buffer in messages]
        for work in dist.batch_isend_irecv(ops):
            work.wait()


def _buffers(piece: Any) -> list[Tensor]:
    """The plain tensors that store it, in an order of their names."""
    if isinstance(piece, QuantizedTensor):
        parts = piece.parts
        return [parts[name] for name in sorted(parts)]
    return [piece.raw] if isinstance(piece, QuantizedShard) else [piece]


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.contiguous().view(-1).view(torch.uint8)


def _room(piece: Tensor, device: torch.device) -> Tensor:
    """Memory for a piece that is on the meta device."""
    if isinstance(piece, QuantizedShard):
        raw = torch.empty_like(piece.raw, device=device)
        return QuantizedShard(raw, piece.spec, piece.full_shape, piece.rows, piece.dtype)
    return torch.empty_like(piece, device=device)


def _alone(piece: Tensor) -> Tensor:
    """A piece that does not keep the whole in memory."""
    return piece.clone(memory_format=torch.contiguous_format) if type(piece) is Tensor else piece.clone()
