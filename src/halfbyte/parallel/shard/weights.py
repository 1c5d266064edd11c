"""Frozen weights, of which each process keeps a slice, gathered while a block computes.

**Who reads a weight owns its gather.** Fused forwards read the weights of projections past their modules' hooks, and
recomputation reads them in backward. So neither a linear nor a function gathers: a block (a decoder layer) does, as one
unit, whoever calls it. FSDP2 has hooks on a block's call and on the gradient of its output: within the call, and within
its backward with all that it computes again, every frozen weight of the block is whole. Training, evaluation, checks
and answers call blocks, and need to know no more. What reads weights elsewhere enters `whole` around it, in all
processes.

All processes gather together, so all call the same blocks in the same order. `state_dict()` and `load_state_dict()` are
calls of that kind: FSDP2 leaves slices of everything then.

What is gathered are bytes, of packed weights (`tensor.QuantizedShard`) and of norms and biases beside them, bit by bit
what was sliced. A block's bytes lie one parameter after another, and a slice of them is cut anywhere: so what arrives
is where it is read, without a copy before or after. Where a host's processes can read each other's slices (`peers`) no
collective is needed: a slice never changes, so nobody has to wait for its owner, and copy engines carry it while all
multiprocessors compute.

Parameters that are trained are in no unit: one that stays whole is not gathered again, and trained numbers in it would
go stale without an error. Nothing of a unit has a gradient, so nothing is reduced here; and of several shards (`data`)
each gathers for itself.

Source: Zhao et al. 2023 (arXiv:2304.11277); torch's `fully_shard`, 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ...tensor import BlockShard, QuantizedShard, QuantizedTensor
from ...utils.hardware import fixed_segments
from ..collectives import all_gather
from ..mesh import SHARD_AXES, Mesh
from ..peer_memory import PeerTensors, map_peer_tensors
from .placement import Placement

# How long a block stays whole: while it computes; from its forward until after its backward; from the first time on.
Stay = Literal["call", "backward", "always"]

BYTES = "frozen_bytes"  # of a block: its parameter that is sharded
ALIGNMENT = 128  # bytes; every parameter of a block begins at a multiple of it, as lines of caches do

# torch 2.13 renamed it, and warns of the old name
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Gathers:
    """What blocks have gathered; a CUDA graph counts once, as it is captured.

    Attributes:
        count: how often.
        nbytes: that it left on this process, its own slices included.
        stream: on which blocks compute; None on a CPU, and before the first call.
        watch: a context around each.
    """

    watch = staticmethod(contextlib.nullcontext)
    count: int = 0
    nbytes: int = 0
    stream: Any = None


class BlockGather:
    """FSDP2's collective of one block.

    Args:
        raw: uint8 [n], this process's slice; on the device, or in pinned memory of the host.
        whole: uint8 [ways · n], of which the block's parameters are views; it has memory while the block is whole.
        group: the processes that have the other slices.
        place: of this process among them.
        gathers: of all blocks.

    Attributes:
        slices: every process's, as this one reads them; None: a collective gathers them.
    """

    def __init__(self, raw: Tensor, whole: Tensor, group: Any, place: int, gathers: Gathers):
        self.raw, self.whole, self.group, self.place, self.gathers = raw, whole, group, place, gathers
        self.slices: Sequence[Tensor] | None = None
        self._arriving = whole.data  # the same bytes with a version of their own: autograd sees no change
        self._parts = self._arriving.view(-1, raw.numel())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)  # for tokens

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Have all bytes of the block on their way, on the current stream; FSDP2's own tensors are tokens."""
        self.gathers.count += 1
        self.gathers.nbytes += self.whole.nbytes
        self._make_room()
        with self.gathers.watch():
            self._fill()

    def _fill(self) -> None:
        if self.slices is not None:
            for step in range(1, len(self.slices) + 1):  # each process begins with another's
                at = (self.place + step) % len(self.slices)
                self._parts[at].copy_(self.slices[at], non_blocking=True)
            return
        own = self.raw
        if own.device != self.whole.device:
            own = self._parts[self.place].copy_(own, non_blocking=True)
        _all_gather(self._arriving, own, group=self.group)

    def _make_room(self) -> None:
        """Memory of the stream that computes, to which it goes back when the block is let go; what is launched there so
        far may still read from it."""
        memory, device = self.whole.untyped_storage(), self.whole.device
        if device.type == "cpu":
            memory.resize_(self.whole.nbytes)
            return
        module = torch.get_device_module(device)
        here = module.current_stream(device)
        computing = self.gathers.stream or here
        with module.stream(computing):
            memory.resize_(self.whole.nbytes)
        here.wait_stream(computing)


@dataclass
class Sharded:
    """Blocks of which each process has a slice.

    Attributes:
        blocks: in the order in which forward calls them.
        stays: how long each stays whole.
        group: the processes that have the other slices.
        gathers: what was gathered so far.
        each: how each block gathers; None where nothing of it is frozen.
        readable: what this process reads of the others; None: a collective gathers.
        why: a collective gathers, though devices compute; empty where processes read each other's slices.
    """

    blocks: list[Any]
    stays: list[Stay]
    group: Any
    gathers: Gathers = field(default_factory=Gathers)
    each: list[BlockGather | None] = field(default_factory=list)
    why: str = ""
    readable: PeerTensors | None = None

    def agreed(self, tensor: Tensor) -> Tensor:
        """`tensor`, in place, as the first process of the group has it: who decides by it must decide alike, since all
        gather together, and kernels may round differently."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    @contextlib.contextmanager
    def whole(self, *blocks: nn.Module) -> Iterator[None]:
        """Inside, the weights of these blocks, or of all, may be read by whoever wants to."""
        chosen = [(block, stay) for block, stay in zip(self.blocks, self.stays, strict=True)
                  if not blocks or block in blocks]  # fmt: skip
        self.note_stream()
        for block, _ in chosen:
            block.unshard()
        try:
            yield
        finally:
            for block, stay in chosen:
                if stay != "always":
                    block.reshard()

    def note_stream(self, *_: Any) -> None:
        """Blocks compute on the current stream from here on."""
        device = next((each.whole.device for each in self.each if each is not None), None)
        if device is not None and device.type != "cpu":
            self.gathers.stream = torch.get_device_module(device).current_stream(device)

    def read_peers(self) -> None:
        """Read the slices of other processes where they are, if all processes of the group can; not those in memory of
        the host, which each copies from there, and a collective gathers."""
        own = [each for each in self.each if each is not None and each.raw.device == each.whole.device]
        self.readable, self.why = map_peer_tensors([each.raw for each in own], self.group)
        for at, each in enumerate(own):
            each.slices = self.readable.each[at] if self.readable else None


def shard_blocks(
    root: nn.Module, blocks: Sequence[nn.Module], mesh: Mesh, stays: Sequence[Stay], *, on_host: Collection[int] = ()
) -> Sharded:
    """Leave of the frozen parameters of `blocks` this process's slice.

    While a block computes, the next one that is not whole is on its way, in both directions: so two blocks' bytes exist
    at a time.

    Args:
        root: the module that calls the blocks; all of its calls go through `root.__call__`.
        blocks: of `root`, in its order; whole, or with the pieces that loading made (`placement`).
        mesh: slices are as many as processes along `SHARD_AXES`.
        stays: how long each block stays whole.
        on_host: numbers of the blocks whose slices are kept in (pinned) memory of the host, and copied to the device
            for each gather.
    """
    sharded = Sharded(list(blocks), list(stays), mesh.group(*SHARD_AXES))
    options: dict[str, Any] = {"mesh": DeviceMesh.from_group(sharded.group, mesh.kind)}
    for at, (block, stay) in enumerate(zip(blocks, stays, strict=True)):
        sharded.each.append(_leave_slice(block, mesh, sharded.gathers, at in on_host, stay == "always"))
        rest = {parameter for name, parameter in block.named_parameters() if name != BYTES}
        fully_shard(block, reshard_after_forward=stay == "call", ignored_params=rest, **options)
    # torch lets the blocks' streams and order be shared by what lies under one root
    fully_shard(root, ignored_params=set(root.parameters()), **options)
    root.register_forward_pre_hook(sharded.note_stream, prepend=True)
    _prefetch(root, sharded)
    for block, stay, gather in zip(sharded.blocks, stays, sharded.each, strict=True):
        if gather is not None:
            block.set_custom_all_gather(gather)
        block.set_reshard_after_backward(stay != "always", recurse=False)
        if stay == "backward":
            block.register_forward_hook(_without_backward)
    sharded.read_peers()
    return sharded


def _without_backward(block: Any, *_: Any) -> None:
    """A block that stays until its backward does not stay where none will come: in an evaluation, say."""
    if not torch.is_grad_enabled():
        block.reshard()


@dataclass
class _Frozen:
    """A frozen parameter of a block.

    Attributes:
        slots: (module, name) where it stands.
        whole: like it, on the meta device.
    """

    slots: list[tuple[nn.Module, str]]
    whole: Any

    def put(self, tensor: Tensor) -> None:
        for module, name in self.slots:
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))

    def view(self, gathered: Tensor) -> Tensor:
        """The parameter, of all processes' slices one after another."""
        whole = self.whole
        if isinstance(whole, QuantizedTensor):
            return QuantizedTensor.from_bytes(gathered, whole.format, tuple(whole.shape), whole.dtype)
        return gathered[: whole.nbytes].view(whole.dtype).view(whole.shape)


def _leave_slice(block: nn.Module, mesh: Mesh, gathers: Gathers, on_host: bool, stays: bool) -> BlockGather | None:
    """Replace the frozen parameters of a block by one that has this process's slice; None: there are none.

    In their places stand views of what is gathered, whose memory is there while the block is whole.
    """
    found: dict[int, _Frozen] = {}
    raws: list[Tensor] = []
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or parameter.dim() == 0:
                continue
            if id(parameter) not in found:
                whole, raw = _sliced(parameter, mesh)
                found[id(parameter)] = _Frozen([], whole)
                raws.append(raw)
            found[id(parameter)].slots.append((module, name))
    if not found:
        return None
    frozen = list(found.values())
    for each in frozen:
        each.put(each.whole)
    own, spans = _joined(raws, mesh)
    whole = own.new_empty(mesh.degree(*SHARD_AXES) * own.numel())
    for each, span in zip(frozen, spans, strict=True):
        each.put(each.view(whole[span]))
    whole.untyped_storage().resize_(0)
    if on_host:
        own = own.cpu() if whole.device.type == "cpu" else own.cpu().pin_memory()
    shard = BlockShard(own, mesh.degree(*SHARD_AXES), whole, stays)
    block.register_parameter(BYTES, nn.Parameter(shard, requires_grad=False))
    return BlockGather(own, whole, mesh.group(*SHARD_AXES), mesh.coordinate(*SHARD_AXES), gathers)


def _joined(raws: Sequence[Tensor], mesh: Mesh) -> tuple[Tensor, list[slice]]:
    """One slice of all parameters' bytes, one after another, for the slices of each.

    Args:
        raws: uint8, this process's slice of each parameter, of one length in all processes.

    Returns:
        uint8 [n], this process's part of the row of bytes; and where in that row each parameter is.
    """
    ways, end, spans = mesh.degree(*SHARD_AXES), 0, []
    for raw in raws:
        spans.append(slice(end, end + ways * raw.numel()))
        end += _up(ways * raw.numel(), ALIGNMENT)
    size = _up(end, ways * ALIGNMENT) // ways
    with fixed_segments(raws[0].device):  # for `peers`
        own = raws[0].new_zeros(size)
    first = mesh.coordinate(*SHARD_AXES) * size
    columns = (
        all_gather(torch.cat(list(raws)), mesh.group(*SHARD_AXES)).view(ways, -1).split([len(raw) for raw in raws], 1)
    )
    for span, column in zip(spans, columns, strict=True):  # a device that is full has no room for the row
        begin, end = max(span.start, first), min(span.stop, first + size)
        if begin < end:
            own[begin - first : end - first] = column.reshape(-1)[begin - span.start : end - span.start]
    return own, spans


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _sliced(parameter: nn.Parameter, mesh: Mesh) -> tuple[Any, Tensor]:
    """A tensor like a parameter on the meta device, and this process's bytes of it, as many as the others'.

    Args:
        parameter: whole, or the piece that loading made of one.
    """
    whole: Any = getattr(parameter, "template", None)
    piece: Any = parameter.detach()
    if whole is None:
        is_packed = isinstance(piece, QuantizedTensor)
        whole = piece.map(lambda part: part.to("meta")) if is_packed else piece.to("meta")
        piece = Placement(SHARD_AXES).cut(piece, mesh.degree(*SHARD_AXES))[mesh.coordinate(*SHARD_AXES)]
    if isinstance(piece, QuantizedShard):
        return whole, piece.raw.view(-1)
    rows = -(-whole.shape[0] // mesh.degree(*SHARD_AXES))
    raw = torch.zeros(rows * whole[:1].nbytes, dtype=torch.uint8, device=piece.device)
    raw[: piece.nbytes] = piece.contiguous().view(-1).view(torch.uint8)
    return whole, raw


def _prefetch(root: Any, sharded: Sharded) -> None:
    """Each block asks for the next one that has to be gathered: forward before it computes, and in backward too."""
    blocks, stays = sharded.blocks, sharded.stays
    forward = [block for block, stay in zip(blocks, stays, strict=True) if stay != "always"]
    if forward:
        root.set_modules_to_forward_prefetch(forward[:1])
    for at, block in enumerate(blocks):
        after = [other for other, stay in zip(blocks[at + 1 :], stays[at + 1 :], strict=True) if stay != "always"]
        before = [other for other, stay in zip(blocks[:at], stays[:at], strict=True) if stay == "call"]
        block.set_modules_to_forward_prefetch(after[:1])
        # none: itself, which is whole; where nothing is named, FSDP2 would take the last block of a forward before
        block.set_modules_to_backward_prefetch(before[-1:] or [block])
