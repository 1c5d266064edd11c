"""Sharding of frozen weights (FSDP): each rank stores a shard, all-gathered while a block computes.

**Unit of gathers.** Fused forwards read the weights of projections without calling their modules, and recomputation
reads them in backward. So blocks (decoder layers) are the units that are gathered, not linears. FSDP2 has hooks on a
block's call and on the gradient of its output: within the call, and within its backward including recomputation, all
frozen weights of the block are unsharded. Training, evaluation, checks and sampling call blocks and need nothing else.
Code that reads weights outside of a call must enter `unsharded`, on all ranks.

All ranks gather together, so they must call the same blocks in the same order. `state_dict()` and `load_state_dict()`
count as calls; after them FSDP2 leaves everything sharded.

A gather moves bytes: of packed weights (`tensor.QuantizedShard`), norms and biases, bit by bit. A block's parameters
are concatenated in one buffer that is split at arbitrary bytes, so that data arrives in place, without copies before
or after. If the ranks of a host can read each other's shards (`peer_memory`), no collective is needed: a shard never
changes, so there is nothing to synchronize, and copy engines move it while all multiprocessors compute.

Trained parameters are in no unit, because a unit that stays unsharded is not gathered again and would hold stale
values. Frozen weights have no gradients, so there is no reduction, and replicas along `data` gather independently.

Source: Zhao et al. 2023 (arXiv:2304.11277); torch's `fully_shard`, 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ...mesh.collectives import all_gather
from ...mesh.mesh import SHARD_AXES, Mesh
from ...mesh.peer_memory import PeerTensors, map_peer_tensors
from ...tensor import STRUCTURAL, QuantizedShard, QuantizedTensor
from ...utils.errors import ModelError
from ...utils.hardware import fixed_segments
from .placement import Placement

# How long a block stays unsharded: during each call; from forward until the end of backward; from the first call on.
Residency = Literal["call", "backward", "always"]

aten = torch.ops.aten
BYTES = "frozen_bytes"  # name of a block's sharded parameter
TOKEN_BYTES = 16  # what FSDP2 gathers of a block
ALIGNMENT = 128  # bytes, a cache line; every parameter in a block's buffer is aligned to it

# renamed in torch 2.13, which warns about the old name
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class GatherStats:
    """Counts of all blocks' gathers; a CUDA graph counts once, at capture.

    Attributes:
        count: number of gathers.
        nbytes: bytes that they produced on this rank, its own shards included.
        stream: the stream that blocks compute on; None on a CPU, and before the first call.
        watch: context manager entered around each gather.
    """

    watch = staticmethod(contextlib.nullcontext)
    count: int = 0
    nbytes: int = 0
    stream: Any = None


class BlockShard(Tensor):
    """One rank's slice of a decoder block's frozen bytes, presented to FSDP2 as one parameter [rows, 1].

    FSDP2 would copy the bytes twice, into and out of its all-gather buffer. Instead it gathers a small token, which
    orders its streams, and `BlockGather` gathers the bytes directly into `gathered` at the same time.

    Args:
        raw: uint8 [length], of equal length on all ranks; on the device of `gathered`, or on the host.
        rows: number of ranks whose slices this represents: all ranks before FSDP2 splits it, one afterwards.
        gathered: uint8 [ranks · length], the bytes that weights are views of. FSDP2 frees its memory on reshard.
        resident: never free the memory of `gathered`, because a CUDA graph reads it.
    """

    def __new__(cls, raw: Tensor, rows: int, gathered: Tensor, resident: bool = False):
        # bf16 is nominal, values are never read: before torch 2.12 FSDP2 fails on uint8 parameters
        return Tensor._make_wrapper_subclass(cls, torch.Size((rows, 1)), dtype=torch.bfloat16, device=gathered.device)

    def __init__(self, raw: Tensor, rows: int, gathered: Tensor, resident: bool = False):
        self.raw = raw
        self.rows = rows
        self.gathered = gathered
        self.resident = resident
        self.token = raw.new_zeros(TOKEN_BYTES, device=gathered.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockShard({self.raw.numel()} bytes of {self.gathered.numel()})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):  # type: ignore[override]
        shard = args[0]
        if function is aten.copy_.default:
            shard.raw.copy_(args[1].raw)  # a no-op in FSDP2's initialization, which copies a shard to itself
            return shard
        if function in STRUCTURAL or function is aten.clone.default:
            return shard._with_rows(shard.rows)
        if function is aten.new_zeros.default:
            return shard._with_rows(args[1][0])
        if function is aten.split.Tensor:  # all chunks are equal: each is this rank's slice
            return [shard._with_rows(args[1]) for _ in range(0, shard.rows, args[1])]
        fix = "read the weights inside the block's call, where they are gathered"
        raise ModelError(f"{function} is not defined on slices of a block's weights", fix)

    def _with_rows(self, rows: int) -> BlockShard:
        return BlockShard(self.raw, rows, self.gathered, self.resident)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        return (self.token,), None

    # FSDP2 inspects the signature at every all-gather; caching it halves the time of this method
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        return None if out is not None else (outputs[0], () if self.resident else (self.gathered,))


class BlockGather:
    """FSDP2's custom all-gather of one block.

    Args:
        shard: uint8 [n], this rank's shard, on the device or in pinned host memory.
        full: uint8 [degree · n] that the block's parameters are views of; it has memory while the block is unsharded.
        group: the ranks that hold the shards.
        coordinate: this rank's index among them.
        stats: shared by all blocks.

    Attributes:
        peer_shards: every rank's shard in peer memory; None: a collective gathers them.
    """

    def __init__(self, shard: Tensor, full: Tensor, group: Any, coordinate: int, stats: GatherStats):
        self.shard = shard
        self.full = full
        self.group = group
        self.coordinate = coordinate
        self.stats = stats
        self.peer_shards: Sequence[Tensor] | None = None
        self._output = full.data  # shares the bytes but has its own version counter for autograd
        self._shards = self._output.view(-1, shard.numel())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)  # for FSDP2's dummy tensors

    @torch.no_grad()
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        """Gather all bytes of the block on the current stream; the arguments are FSDP2's dummy tensors."""
        self.stats.count += 1
        self.stats.nbytes += self.full.nbytes
        self._allocate_full()
        with self.stats.watch():
            self._fill()

    def _fill(self) -> None:
        if self.peer_shards is not None:
            for step in range(1, len(self.peer_shards) + 1):  # start at the next rank, to spread the load over links
                at = (self.coordinate + step) % len(self.peer_shards)
                self._shards[at].copy_(self.peer_shards[at], non_blocking=True)
            return
        shard = self.shard
        if shard.device != self.full.device:
            shard = self._shards[self.coordinate].copy_(shard, non_blocking=True)
        _all_gather(self._output, shard, group=self.group)

    def _allocate_full(self) -> None:
        """Allocate on the compute stream, where the memory is freed at reshard, after the kernels launched so far."""
        memory, device = self.full.untyped_storage(), self.full.device
        if device.type == "cpu":
            memory.resize_(self.full.nbytes)
            return
        module = torch.get_device_module(device)
        current = module.current_stream(device)
        computing = self.stats.stream or current
        with module.stream(computing):
            memory.resize_(self.full.nbytes)
        current.wait_stream(computing)


@dataclass
class ShardedBlocks:
    """Blocks of which each rank stores a shard.

    Attributes:
        blocks: in the order of forward.
        residencies: how long each stays unsharded.
        group: the ranks that hold the shards.
        stats: counts of all gathers.
        block_gathers: the all-gather of each block; None if nothing in it is frozen.
        peers: peer memory of the other ranks; None: a collective gathers.
        fallback_reason: why a collective gathers on GPUs; empty with peer memory.
    """

    blocks: list[Any]
    residencies: list[Residency]
    group: Any
    stats: GatherStats = field(default_factory=GatherStats)
    block_gathers: list[BlockGather | None] = field(default_factory=list)
    fallback_reason: str = ""
    peers: PeerTensors | None = None

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Broadcast `tensor` from the group's first rank, in place, so that all ranks decide by equal values."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    @contextlib.contextmanager
    def unsharded(self, *blocks: nn.Module) -> Iterator[None]:
        """Within the context, the weights of these blocks (default: all) may be read."""
        chosen = [(block, residency) for block, residency in zip(self.blocks, self.residencies, strict=True)
                  if not blocks or block in blocks]  # fmt: skip
        self.note_stream()
        for block, _ in chosen:
            block.unshard()
        try:
            yield
        finally:
            for block, residency in chosen:
                if residency != "always":
                    block.reshard()

    def note_stream(self, *_: Any) -> None:
        """Record the current stream as the one that blocks compute on."""
        device = next((gather.full.device for gather in self.block_gathers if gather is not None), None)
        if device is not None and device.type != "cpu":
            self.stats.stream = torch.get_device_module(device).current_stream(device)

    def read_peers(self) -> None:
        """Read shards from peer memory if all ranks of the group can; collectives gather shards in host memory."""
        gathers = [g for g in self.block_gathers if g is not None and g.shard.device == g.full.device]
        self.peers, self.fallback_reason = map_peer_tensors([gather.shard for gather in gathers], self.group)
        for at, gather in enumerate(gathers):
            gather.peer_shards = self.peers.by_tensor[at] if self.peers else None


def shard_blocks(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    residencies: Sequence[Residency],
    *,
    on_host: Collection[int] = (),
) -> ShardedBlocks:
    """Shard the frozen parameters of `blocks` over the ranks along `SHARD_AXES`.

    While a block computes, the next one is gathered, in forward and backward, so two blocks are unsharded at a time.

    Args:
        root: the module that calls the blocks; all of its calls go through `root.__call__`.
        blocks: of `root`, in its order; full, or with the pieces that loading made (`placement`).
        residencies: how long each block stays unsharded.
        on_host: indices of blocks whose shards are in (pinned) host memory and copied to the device for each gather.
    """
    sharded = ShardedBlocks(list(blocks), list(residencies), mesh.group(*SHARD_AXES))
    options: dict[str, Any] = {"mesh": DeviceMesh.from_group(sharded.group, mesh.device_type)}
    for at, (block, residency) in enumerate(zip(blocks, residencies, strict=True)):
        sharded.block_gathers.append(_shard_block(block, mesh, sharded.stats, at in on_host, residency == "always"))
        ignored = {parameter for name, parameter in block.named_parameters() if name != BYTES}
        fully_shard(block, reshard_after_forward=residency == "call", ignored_params=ignored, **options)
    # blocks under one root share FSDP2's streams and order of gathers
    fully_shard(root, ignored_params=set(root.parameters()), **options)
    root.register_forward_pre_hook(sharded.note_stream, prepend=True)
    _prefetch(root, sharded)
    for block, residency, gather in zip(sharded.blocks, residencies, sharded.block_gathers, strict=True):
        if gather is not None:
            block.set_custom_all_gather(gather)
        block.set_reshard_after_backward(residency != "always", recurse=False)
        if residency == "backward":
            block.register_forward_hook(_reshard_without_grad)
    sharded.read_peers()
    return sharded


def _reshard_without_grad(block: Any, *_: Any) -> None:
    """Forward hook of blocks with residency "backward": reshard if no backward will follow, as in evaluation."""
    if not torch.is_grad_enabled():
        block.reshard()


@dataclass
class _Frozen:
    """A frozen parameter of a block.

    Attributes:
        slots: (module, name) of every reference to it.
        template: a meta tensor like the full parameter.
    """

    slots: list[tuple[nn.Module, str]]
    template: Any

    def put(self, tensor: Tensor) -> None:
        for module, name in self.slots:
            setattr(module, name, nn.Parameter(tensor, requires_grad=False))

    def view(self, gathered: Tensor) -> Tensor:
        """Return the parameter as a view of the gathered bytes."""
        like = self.template
        if isinstance(like, QuantizedTensor):
            return QuantizedTensor.from_bytes(gathered, like.format, tuple(like.shape), like.dtype)
        return gathered[: like.nbytes].view(like.dtype).view(like.shape)


def _shard_block(block: nn.Module, mesh: Mesh, stats: GatherStats, on_host: bool, resident: bool) -> BlockGather | None:
    """Replace a block's frozen parameters by one parameter with this rank's shard; None if there are none.

    The modules get views of the gathered bytes, whose memory exists while the block is unsharded.
    """
    by_id: dict[int, _Frozen] = {}
    shards: list[Tensor] = []
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.requires_grad or parameter.dim() == 0:
                continue
            if id(parameter) not in by_id:
                template, shard = _template_and_shard(parameter, mesh)
                by_id[id(parameter)] = _Frozen([], template)
                shards.append(shard)
            by_id[id(parameter)].slots.append((module, name))
    if not by_id:
        return None
    frozen = list(by_id.values())
    for frozen_parameter in frozen:
        frozen_parameter.put(frozen_parameter.template)
    shard, spans = _concatenated_shard(shards, mesh)
    full = shard.new_empty(mesh.degree(*SHARD_AXES) * shard.numel())
    for frozen_parameter, span in zip(frozen, spans, strict=True):
        frozen_parameter.put(frozen_parameter.view(full[span]))
    full.untyped_storage().resize_(0)
    if on_host:
        shard = shard.cpu() if full.device.type == "cpu" else shard.cpu().pin_memory()
    block_shard = BlockShard(shard, mesh.degree(*SHARD_AXES), full, resident)
    block.register_parameter(BYTES, nn.Parameter(block_shard, requires_grad=False))
    return BlockGather(shard, full, mesh.group(*SHARD_AXES), mesh.coordinate(*SHARD_AXES), stats)


def _concatenated_shard(shards: Sequence[Tensor], mesh: Mesh) -> tuple[Tensor, list[slice]]:
    """Convert shards of each parameter to one shard of the concatenated bytes of all parameters.

    Args:
        shards: uint8, this rank's shard of each parameter, with equal lengths on all ranks.

    Returns:
        uint8 [n], this rank's shard of the concatenation, and each parameter's slice in the concatenation.
    """
    degree = mesh.degree(*SHARD_AXES)
    spans: list[slice] = []
    end = 0
    for shard in shards:
        spans.append(slice(end, end + degree * shard.numel()))
        end += _round_up(degree * shard.numel(), ALIGNMENT)
    size = _round_up(end, degree * ALIGNMENT) // degree
    with fixed_segments(shards[0].device):  # required by `peer_memory`
        local = shards[0].new_zeros(size)
    first = mesh.coordinate(*SHARD_AXES) * size
    gathered = all_gather(torch.cat(list(shards)), mesh.group(*SHARD_AXES)).view(degree, -1)
    columns = gathered.split([len(shard) for shard in shards], 1)
    for span, column in zip(spans, columns, strict=True):  # a full device may lack memory for the whole buffer
        begin, end = max(span.start, first), min(span.stop, first + size)
        if begin < end:
            local[begin - first : end - first] = column.reshape(-1)[begin - span.start : end - span.start]
    return local, spans


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


def _template_and_shard(parameter: nn.Parameter, mesh: Mesh) -> tuple[Any, Tensor]:
    """Return a meta tensor like the full parameter, and this rank's bytes of it, padded to equal lengths.

    Args:
        parameter: full, or a piece that loading made.
    """
    template: Any = getattr(parameter, "template", None)
    piece: Any = parameter.detach()
    if template is None:
        is_packed = isinstance(piece, QuantizedTensor)
        template = piece.map(lambda tensor: tensor.to("meta")) if is_packed else piece.to("meta")
        piece = Placement(SHARD_AXES).split(piece, mesh.degree(*SHARD_AXES))[mesh.coordinate(*SHARD_AXES)]
    if isinstance(piece, QuantizedShard):
        return template, piece.raw.view(-1)
    rows = -(-template.shape[0] // mesh.degree(*SHARD_AXES))
    raw = torch.zeros(rows * template[:1].nbytes, dtype=torch.uint8, device=piece.device)
    raw[: piece.nbytes] = piece.contiguous().view(-1).view(torch.uint8)
    return template, raw


def _prefetch(root: Any, sharded: ShardedBlocks) -> None:
    """Have each block prefetch the next one that is not resident, in forward and in backward."""
    blocks, residencies = sharded.blocks, sharded.residencies
    forward = [block for block, residency in zip(blocks, residencies, strict=True) if residency != "always"]
    if forward:
        root.set_modules_to_forward_prefetch(forward[:1])
    for at, block in enumerate(blocks):
        following = [
            candidate
            for candidate, residency in zip(blocks[at + 1 :], residencies[at + 1 :], strict=True)
            if residency != "always"
        ]
        preceding = [b for b, residency in zip(blocks[:at], residencies[:at], strict=True) if residency == "call"]
        block.set_modules_to_forward_prefetch(following[:1])
        # without one, the block itself: given an empty list, FSDP2 would prefetch the last block of an earlier forward
        block.set_modules_to_backward_prefetch(preceding[-1:] or [block])
