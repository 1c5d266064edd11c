"""Tensor parallelism: the linears of attention and MLP sharded over ranks that have the same tokens.

A block has linears that read one input (q, k, v; gate, up), whose rows are sharded, and an output linear (o; down),
whose columns are sharded. Between them each rank has some heads or channels and nothing is exchanged. The block's input
is replicated; its outputs are partial and all-reduced. In backward the gradient of the output is replicated and the
gradients of the input are partial and all-reduced. This is one all-reduce of the residual stream per block in forward
and one in backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

Adapters need no all-reduces of their own. With rank i of n, scaling s, and the shapes of `autograd.lora`:

    rows     y_i = x·W_iᵀ + s·(x·Aᵀ)·B_iᵀ      B is sharded like the rows of W, A is replicated. u = x·Aᵀ is equal on
             all ranks, so dB_i = s·dy_iᵀ·u is complete for its rows. v_i = s·dy_i·B_i is a term of v = Σ v_i, so
             dA_i = v_iᵀ·x is partial, and so is v_i·A + dy_i·W_i for dx, which is all-reduced at the block's input.
    columns  y = Σ x_i·W_iᵀ + s·(x_i·A_iᵀ)·Bᵀ  A is sharded like the columns of W, B is replicated. s·(Σ x_i·A_iᵀ)·Bᵀ
             is linear, so its terms are added before the base's all-reduce. v = s·dy·B is equal on all ranks, so
             dA_i = vᵀ·x_i is complete for its columns, and dx_i = v·A_i + dy·W_i is the gradient of x_i.
             dB_i = s·dyᵀ·(x_i·A_iᵀ) is partial.

So the gradient of a sharded factor is complete locally; that of a replicated factor is partial and is summed by the
step's gradient reduction (`mesh.reduction`). One rank adds the bias of a linear with sharded columns.

Hooks are on blocks, not on linears, because fused functions read the linears' weights without calling them.

All-reduces run in the stream's dtype. In fp32 they would move twice the bytes, and only the first step's loss would be
closer to that of one process (docs/several-gpus.md).

The stream between blocks and its norms are replicated. Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2) would move as many bytes, and GEMMs would still save full inputs. If a layer saves the stream only, each
rank saves a shard of it (`ShardedStore`): 1/n of the memory for an all-gather per layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..autograd.checkpointing import Store
from ..autograd.function import OnceFunction
from ..tensor import QuantizedTensor
from .collectives import all_gather, all_reduce_, group_size
from .mesh import Mesh
from .reduction import SHARDED_ALONG

AXIS = "tensor"
SHARD_ATTRIBUTE = "tensor_shard"  # attribute of a sharded parameter: its `TensorShard`


@dataclass(frozen=True)
class TensorShard:
    """Which of `degree` equal shards along a dimension this rank holds."""

    dim: int
    degree: int
    coordinate: int
    group: Any

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's shard of `full`, in its own memory; shards of quantized weights have equal values."""
        if isinstance(full, QuantizedTensor):
            return full.split_for(self.dim, self.degree)[self.coordinate]
        return full.tensor_split(self.degree, self.dim)[self.coordinate].clone(memory_format=torch.contiguous_format)

    def gather(self, shard: Tensor) -> Tensor:
        """All-gather the ranks' shards to the full tensor; all ranks must call it."""
        return all_gather(shard.movedim(self.dim, 0), self.group).movedim(0, self.dim).contiguous()


def shard_of(parameter: Tensor) -> TensorShard | None:
    """Return which shard of the full parameter this rank holds, or None if it is not sharded."""
    return getattr(parameter, SHARD_ATTRIBUTE, None)


def are_unsharded(parameters: Iterable[Tensor]) -> bool:
    """Return whether none of `parameters` is sharded."""
    return all(shard_of(parameter) is None for parameter in parameters)


@contextlib.contextmanager
def full_parameters(parameters: Iterable[nn.Parameter], optimizer: Any = None) -> Iterator[None]:
    """Within the context, sharded parameters and their optimizer state are full on every rank; all ranks must enter it.

    On exit each rank keeps its shard of the current values, so that they may be loaded within the context. Shards keep
    their memory address, which CUDA graphs read.
    """
    sharded = [(p, spec, p.data) for p in parameters if (spec := shard_of(p)) is not None]
    for parameter, spec, shard in sharded:
        _map_state(optimizer, parameter, shard.shape, spec.gather)
        parameter.data = spec.gather(shard)
    try:
        yield
    finally:
        for parameter, spec, shard in sharded:
            _map_state(optimizer, parameter, parameter.shape, spec.shard)
            shard.copy_(spec.shard(parameter.data))
            parameter.data = shard


def _map_state(optimizer: Any, parameter: Tensor, shape: torch.Size, function: Callable[[Tensor], Tensor]) -> None:
    """Apply `function` to the tensors of `shape` in the optimizer state of `parameter`."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            state[name] = function(value)


def shard_parameter(module: nn.Module, name: str, dim: int, mesh: Mesh) -> None:
    """Replace a module's parameter by this rank's shard along "tensor"."""
    parameter = getattr(module, name)
    spec = TensorShard(dim, mesh.degree(AXIS), mesh.coordinate(AXIS), mesh.group(AXIS))
    shard = nn.Parameter(spec.shard(parameter.detach()), requires_grad=parameter.requires_grad)
    setattr(shard, SHARDED_ALONG, (AXIS,))
    setattr(shard, SHARD_ATTRIBUTE, spec)
    setattr(module, name, shard)


def shard_rows(linear: Any, mesh: Mesh) -> None:
    """Keep this rank's rows of a linear, a multiple of the degree in all; loading may have sharded it already."""
    for name in ("weight", "bias"):
        if (held := getattr(linear, name)) is not None and len(held) == linear.out_features:
            shard_parameter(linear, name, 0, mesh)
    linear.out_features = linear.weight.shape[0]


def shard_columns(linear: Any, mesh: Mesh) -> None:
    """Keep this rank's columns of a linear, which loading may have sharded already; rank 0 keeps the bias."""
    if linear.weight.shape[1] == linear.in_features:
        shard_parameter(linear, "weight", 1, mesh)
    if mesh.coordinate(AXIS):
        linear.bias = None
    linear.in_features = linear.weight.shape[1]


class _CopyToRanks(OnceFunction):
    """Identity in forward; all-reduces the partial gradients in backward (Megatron's f)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return all_reduce_(grad.clone(), ctx.group), None


class _ReduceFromRanks(OnceFunction):
    """All-reduces partial results in forward; identity in backward (Megatron's g)."""

    @staticmethod
    def forward(ctx, partial, group):  # in place: no function has saved the partial result
        ctx.mark_dirty(partial)
        return all_reduce_(partial, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@dataclass(frozen=True)
class InputHook:
    """Forward pre-hook of a block, for its first argument or `hidden_states`: all-reduces its gradient."""

    group: Any

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (_CopyToRanks.apply(args[0], self.group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _CopyToRanks.apply(kwargs["hidden_states"], self.group)}


@dataclass(frozen=True)
class OutputHook:
    """Forward hook of a block: all-reduces its result, or the first of several."""

    group: Any

    def __call__(self, block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("output") is False:  # the caller discards the result
            return output
        if isinstance(output, tuple):
            return (_ReduceFromRanks.apply(_writable(output[0]), self.group), *output[1:])
        return _ReduceFromRanks.apply(_writable(output), self.group)


def _writable(partial: Tensor) -> Tensor:
    """Return `partial`, or a contiguous copy if it is a view or has gaps: autograd forbids to write into views."""
    return partial.clone() if partial._is_view() or not partial.is_contiguous() else partial


def is_tensor_parallel(block: nn.Module) -> bool:
    """Return whether `all_reduce_around` was called; code that bypasses the block's call must all-reduce."""
    return _group_of(block) is not None


def _group_of(block: nn.Module) -> Any:
    return next((hook.group for hook in block._forward_hooks.values() if isinstance(hook, OutputHook)), None)


@dataclass(frozen=True)
class ShardedStore:
    """Saved-tensor store for tensors equal on all ranks: each rank saves a shard, and backward all-gathers it.

    All ranks must unpack the same tensors in the same order.

    Args:
        store: holds the shards.
    """

    group: Any
    store: Store

    def pack(self, tensor: Tensor) -> tuple[Any, torch.Size]:
        size = -(-tensor.numel() // group_size(self.group))
        begin = dist.get_rank(self.group) * size
        shard = tensor.detach().reshape(-1)[begin : begin + size]
        shard = F.pad(shard, (0, size - len(shard))) if len(shard) < size else shard.clone()
        return self.store.pack(shard), tensor.shape

    def unpack(self, packed: tuple[Any, torch.Size]) -> Tensor:
        shard, shape = packed
        return all_gather(self.store.unpack(shard), self.group)[: shape.numel()].view(shape)


def sharded_saved_tensors(block: nn.Module, store: Store) -> contextlib.AbstractContextManager[Any]:
    """Within the context, ranks of a tensor-parallel `block` save shards, in `store`, of tensors equal on all ranks."""
    group = _group_of(block)
    if group is None:
        return contextlib.nullcontext()
    slices = ShardedStore(group, store)
    return torch.autograd.graph.saved_tensors_hooks(slices.pack, slices.unpack)


def all_reduce_around(block: nn.Module, mesh: Mesh) -> None:
    """All-reduce the output of `block`, and the gradient of its input, along "tensor"."""
    group = mesh.group(AXIS)
    block.register_forward_pre_hook(InputHook(group), with_kwargs=True)
    block.register_forward_hook(OutputHook(group), with_kwargs=True)
