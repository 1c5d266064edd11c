"""Tensor parallelism: the products of attention and MLP divided over processes that have the same tokens.

A block has linears that read one input (q, k, v; gate, up), whose rows are divided, and one for the output (o; down),
whose columns are: between them each process has some heads, or some channels, and nothing is exchanged. What enters a
block is the same everywhere; what leaves it is a part, and the parts are summed. On the way back it is the other way
round: the gradient of what left is the same everywhere, that of what entered is a sum of parts. Two sums of the stream
a block, one forward, one backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3).

Adapters need no sums of their own. With process i of n, scaling s, and the shapes of `autograd.lora`:

    rows     y_i = x·W_iᵀ + s·(x·Aᵀ)·B_iᵀ      B has the rows of W, A is whole. u = x·Aᵀ is the same everywhere, so
             dB_i = s·dy_iᵀ·u is whole for its rows. v_i = s·dy_i·B_i is a part of v = Σ v_i, so dA_i = v_iᵀ·x is a
             part of dA, and v_i·A + dy_i·W_i one of dx, which are summed where x entered.
    columns  y = Σ x_i·W_iᵀ + s·(x_i·A_iᵀ)·Bᵀ  A has the columns of W, B is whole: s·(Σ x_i·A_iᵀ)·Bᵀ is linear in what
             the sum is over, so the parts ride on the base's sum. v = s·dy·B is the same everywhere, so dA_i = vᵀ·x_i
             is whole for its columns, and dx_i = v·A_i + dy·W_i the gradient of x_i. dB_i = s·dyᵀ·(x_i·A_iᵀ) is a part.

So a factor that is divided has its whole gradient where it is; that of a factor that is not is a part on each process,
and the step's one reduction adds the parts (`reduce`). A bias of a linear with divided columns is added by one process.

Hooks stand on the blocks, not on linears, which fused functions would pass by.

Parts are summed in the stream's dtype, as products write them: sums in fp32 would move twice the bytes, and bring no
loss but the first step's nearer to one process's (docs/several-gpus.md).

The stream between blocks, and its norms, are whole on each process. Slices of its tokens (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2) would move as many bytes, and products save what they read whole. Where the stream is all
that a layer keeps, each process keeps a slice of it (`InSlices`): 1/n for a gather a layer.
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

from ...autograd.checkpointing import Store
from ...autograd.function import OnceFunction
from ...tensor import QuantizedTensor
from ..collectives import gathered, members, summed
from ..mesh import Mesh
from ..reduction import CUT

AXIS = "tensor"
PART = "part_of_whole"  # on a parameter that is cut: which part of it this process has


@dataclass(frozen=True)
class Part:
    """One of equal parts of a tensor along a dimension, one a process."""

    dim: int
    ways: int
    place: int
    group: Any

    def of(self, whole: Tensor) -> Tensor:
        """This process's part, in memory of its own; a quantized weight's has equal values."""
        if isinstance(whole, QuantizedTensor):
            return whole.split_for(self.dim, self.ways)[self.place]
        return whole.tensor_split(self.ways, self.dim)[self.place].clone(memory_format=torch.contiguous_format)

    def whole(self, part: Tensor) -> Tensor:
        """The tensor that the processes' parts make; all of them call it."""
        return gathered(part.movedim(self.dim, 0), self.group).movedim(0, self.dim).contiguous()


def part_of(parameter: Tensor) -> Part | None:
    """Which part of a whole this process has in `parameter`; None: all of it."""
    return getattr(parameter, PART, None)


def are_whole(parameters: Iterable[Tensor]) -> bool:
    """Whether none of them is cut."""
    return all(part_of(parameter) is None for parameter in parameters)


@contextlib.contextmanager
def whole_inside(parameters: Iterable[nn.Parameter], optimizer: Any = None) -> Iterator[None]:
    """Inside, cut parameters are whole in each process, and what `optimizer` keeps of their shape with them; all
    processes enter. Afterwards each has its part of what they are then: what was loaded into them, say.

    A parameter's part stays in its place in memory, which CUDA graphs know.
    """
    cuts = [(parameter, mine, parameter.data) for parameter in parameters if (mine := part_of(parameter)) is not None]
    for parameter, mine, part in cuts:
        _map_state(optimizer, parameter, part.shape, mine.whole)
        parameter.data = mine.whole(part)
    try:
        yield
    finally:
        for parameter, mine, part in cuts:
            _map_state(optimizer, parameter, parameter.shape, mine.of)
            part.copy_(mine.of(parameter.data))
            parameter.data = part


def _map_state(optimizer: Any, parameter: Tensor, shape: torch.Size, function: Callable[[Tensor], Tensor]) -> None:
    """Replace what an optimizer keeps for a parameter in tensors of `shape`."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape:
            state[name] = function(value)


def cut(module: nn.Module, name: str, dim: int, mesh: Mesh) -> None:
    """Leave this process its part of a module's parameter, along "tensor"."""
    parameter = getattr(module, name)
    mine = Part(dim, mesh.ways(AXIS), mesh.place(AXIS), mesh.group(AXIS))
    part = nn.Parameter(mine.of(parameter.detach()), requires_grad=parameter.requires_grad)
    setattr(part, CUT, (AXIS,))
    setattr(part, PART, mine)
    setattr(module, name, part)


def cut_rows(linear: Any, mesh: Mesh) -> None:
    """Leave this process its rows of a linear, of which there is a multiple of the processes; it may have been loaded
    with these alone."""
    for name in ("weight", "bias"):
        if (held := getattr(linear, name)) is not None and len(held) == linear.out_features:
            cut(linear, name, 0, mesh)
    linear.out_features = linear.weight.shape[0]


def cut_columns(linear: Any, mesh: Mesh) -> None:
    """Leave this process its columns of a linear, which may have been loaded with these alone; the first process adds
    the bias."""
    if linear.weight.shape[1] == linear.in_features:
        cut(linear, "weight", 1, mesh)
    if mesh.place(AXIS):
        linear.bias = None
    linear.in_features = linear.weight.shape[1]


class _Enter(OnceFunction):
    """The input; its gradients are parts, which are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad.clone(), ctx.group), None


class _Leave(OnceFunction):
    """The sum of parts; its gradient is that of each."""

    @staticmethod
    def forward(ctx, part, group):  # in the place of the part, which nothing has saved
        ctx.mark_dirty(part)
        return summed(part, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@dataclass(frozen=True)
class Entering:
    """A forward pre-hook of a block: what enters it, its first argument or the one called `hidden_states`."""

    group: Any

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (_Enter.apply(args[0], self.group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _Enter.apply(kwargs["hidden_states"], self.group)}


@dataclass(frozen=True)
class Leaving:
    """A forward hook of a block: what leaves it, its result or the first of several."""

    group: Any

    def __call__(self, block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("output") is False:  # nobody looks at it
            return output
        if isinstance(output, tuple):
            return (_Leave.apply(_changeable(output[0]), self.group), *output[1:])
        return _Leave.apply(_changeable(output), self.group)


def _changeable(part: Tensor) -> Tensor:
    """`part`, or a copy of it where autograd forbids to change it, or it has gaps."""
    return part.clone() if part._is_view() or not part.is_contiguous() else part


def is_divided(block: nn.Module) -> bool:
    """Whether `sum_around` was called: what computes its products past its own call must sum them."""
    return _group_of(block) is not None


def _group_of(block: nn.Module) -> Any:
    return next((hook.group for hook in block._forward_hooks.values() if isinstance(hook, Leaving)), None)


@dataclass(frozen=True)
class InSlices:
    """The store of what all processes have alike: each keeps a slice until backward, where all ask for the same tensor
    at the same time.

    Args:
        store: of the slices.
    """

    group: Any
    store: Store

    def pack(self, tensor: Tensor) -> tuple[Any, torch.Size]:
        size = -(-tensor.numel() // members(self.group))
        begin = dist.get_rank(self.group) * size
        own = tensor.detach().reshape(-1)[begin : begin + size]
        own = F.pad(own, (0, size - len(own))) if len(own) < size else own.clone()
        return self.store.pack(own), tensor.shape

    def unpack(self, packed: tuple[Any, torch.Size]) -> Tensor:
        own, shape = packed
        return gathered(self.store.unpack(own), self.group)[: shape.numel()].view(shape)


def stream_in_slices(block: nn.Module, store: Store) -> contextlib.AbstractContextManager[Any]:
    """Inside, each process of a divided `block` keeps in `store` a slice of what is saved, which must be the same
    in all: the stream."""
    group = _group_of(block)
    if group is None:
        return contextlib.nullcontext()
    slices = InSlices(group, store)
    return torch.autograd.graph.saved_tensors_hooks(slices.pack, slices.unpack)


def sum_around(block: nn.Module, mesh: Mesh) -> None:
    """Have the processes along "tensor" sum what leaves `block`, and the gradient of what enters it."""
    group = mesh.group(AXIS)
    block.register_forward_pre_hook(Entering(group), with_kwargs=True)
    block.register_forward_hook(Leaving(group), with_kwargs=True)
