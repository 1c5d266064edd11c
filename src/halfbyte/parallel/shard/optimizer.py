"""Gradient reduction and optimizer step of the trained parameters, replicated or sharded (ZeRO-1).

The forward reads full parameters and the backward produces full gradients. Between them:

- `ReplicatedOptimizer`: every rank steps all parameters.
- `ShardedOptimizer`, along "shard": each rank steps an equal slice of each parameter's elements and holds the optimizer
  state of that slice only (ZeRO-1). A step reduce-scatters gradients to slices and all-gathers parameters from them,
  which together is at most the traffic of one all-reduce. It requires an optimizer that treats elements, or aligned
  blocks of them, separately; slices are cut at blocks. Its results are bit-equal to those of `ReplicatedOptimizer`.
  The trust ratios of LAMB and LARS take one more all-reduce, of two numbers per parameter, and equal those of one rank
  to fp32 rounding.

Parameters that only GEMMs read, such as adapter factors, are stored in full only in the GEMMs' dtype. Their slices hold
fp32 master weights, the all-gather runs in the compute dtype, and their gradients have the dtype of the slices
(`grad_dtype`). The slices of other parameters are views of the parameter.

If full gradients are large (`AT_ONCE` bytes, such as the adapters of a 70B model), each backward reduces them as they
are produced, in buckets of a few layers, and accumulates them in slices. All ranks must then have gradients of the same
parameters, which is not guaranteed for experts, since the router selects them.

Checkpoints hold full states, so that they can be loaded on any mesh.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import Parallel
from ...mesh.collectives import all_gather, reduce_scatter
from ...mesh.mesh import TOKEN_AXES, Mesh
from ...mesh.reduction import (
    BUCKET,
    SHARDED_ALONG,
    buckets,
    clip_gradients,
    is_norm_distributed,
    sharded_along,
    sum_gradients,
)
from ...optim.fused import FusedOptimizer
from ...optim.parameters import FIRST_ELEMENT, FULL_ELEMENTS
from ...optim.state_dicts import elements_per_entry
from ...utils.errors import CheckpointError

AXIS = "shard"
AT_ONCE = 2**29  # bytes of full gradients from which on each backward reduces them
TOGETHER = 2**25  # bytes of a bucket that is reduced during the backward

Narrow = Sequence[tuple[nn.Parameter, Tensor]]  # parameters that only GEMMs read, and their memory in the GEMMs' dtype


def shard_optimizer(
    mesh: Mesh,
    parameters: Sequence[nn.Parameter],
    *,
    block: int,
    static_gradients: bool = False,
    narrow: Callable[[], Narrow] = list,
) -> ReplicatedOptimizer:
    """Choose how the `parameters` of a run are reduced and stepped.

    Args:
        block: elements that the optimizer treats together; 0: it needs whole parameters, or there is loss scaling. With
            pipeline or tensor parallelism, parameters are not sliced.
        static_gradients: whether every backward produces gradients of all parameters on all ranks, outside of CUDA
            graphs.
        narrow: returns the parameters that only GEMMs read; called only if parameters are sliced.
    """
    if optimizer_shards(mesh.layout, block) == 1:
        return ReplicatedOptimizer(mesh, parameters)
    at_once = static_gradients and sum(parameter.nbytes for parameter in parameters) >= AT_ONCE
    return ShardedOptimizer(mesh, parameters, block=block, at_once=at_once, narrow=narrow())


def optimizer_shards(layout: Parallel, block: int) -> int:
    """Number of ranks that the optimizer state is sharded over; 1: replicated. `block` as in `shard_optimizer`."""
    return layout.shard if block and layout.tensor * layout.pipeline == 1 else 1


def _shard_groups(mesh: Mesh, parameter: Tensor) -> tuple[Any, ...]:
    """Return the process group along the axes that a parameter is sharded along, for the norms of full parameters."""
    group = mesh.group(*sharded_along(parameter))
    return () if group is None else (group,)


class ReplicatedOptimizer:
    """Replicated optimizer: every rank steps all parameters."""

    def __init__(self, mesh: Mesh, parameters: Sequence[nn.Parameter]):
        self.mesh, self.parameters = mesh, list(parameters)
        self.optimizer: torch.optim.Optimizer | None = None

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Use a new `optimizer`; replace its parameters by the slices that this rank steps."""
        self.optimizer = optimizer
        if isinstance(optimizer, FusedOptimizer):
            optimizer.shard_groups = partial(_shard_groups, self.mesh)  # no method: a cycle would keep both

    def reduce(self, sums: Tensor) -> Tensor:
        """Reduce the gradients after the last backward of a step; `sums` as in `reduction.sum_gradients`."""
        return sum_gradients(self.mesh, self.parameters, sums)

    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradients to `max_norm`; returns their norm before clipping.

        A `FusedOptimizer` clips gradients as it reads them, if this rank has all of them.
        """
        if isinstance(self.optimizer, FusedOptimizer) and not is_norm_distributed(self.mesh, self.parameters):
            return self.optimizer.clip(max_norm)
        return clip_gradients(self.mesh, self.parameters, max_norm)

    def after_step(self) -> None:
        """After the optimizer's step, gather the full parameters and drop the gradients."""
        self.drop_gradients()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Within the context, parameters on the main rank hold the full master weights; all ranks must enter it."""
        yield

    def replicated(self) -> ReplicatedOptimizer:
        """Return this optimizer with full parameters on every rank, whose weights must be loaded next."""
        return self

    def drop_gradients(self) -> None:
        for parameter in self.parameters:  # nn.Module.zero_grad walks every frozen module: milliseconds a step
            parameter.grad = None

    def full_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full optimizer state, on the main rank; all ranks must call it."""
        return optimizer.state_dict()

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of a full optimizer `state`."""
        return state


class ShardedOptimizer(ReplicatedOptimizer):
    """Sharded optimizer (ZeRO-1): every rank steps a slice of each parameter."""

    def __init__(
        self,
        mesh: Mesh,
        parameters: Sequence[nn.Parameter],
        *,
        block: int = 1,
        at_once: bool = False,
        narrow: Narrow = (),
    ):
        super().__init__(mesh, parameters)
        degree, self.coordinate = mesh.degree(AXIS), mesh.coordinate(AXIS)
        self.widths = [-(-parameter.numel() // (degree * block)) * block for parameter in self.parameters]
        self.slices = [
            nn.Parameter(p.detach().reshape(-1)[self.coordinate * width : (self.coordinate + 1) * width])
            for p, width in zip(self.parameters, self.widths, strict=True)
        ]
        for shard in self.slices:
            setattr(shard, SHARDED_ALONG, (AXIS,))
        for shard, parameter, width in zip(self.slices, self.parameters, self.widths, strict=True):
            setattr(shard, FULL_ELEMENTS, parameter.numel())
            setattr(shard, FIRST_ELEMENT, self.coordinate * width)
        self.narrow = self._narrow(narrow)
        self.order: list[int] = []  # indices of the parameters, in the optimizer's order
        # Buckets of the backward, the last layers first; all ranks reduce them in this order.
        everything = range(len(self.parameters))
        self._ordered = list(self._buckets(self.slices, everything, TOGETHER // degree))[::-1] if at_once else []
        self._next = 0
        for parameter in self.parameters if at_once else ():
            parameter.register_post_accumulate_grad_hook(self._reduce_complete_buckets)

    def _narrow(self, narrow: Narrow) -> list[int]:
        """Copy the slices of these parameters and replace their full data by a cast copy; returns their indices."""
        numbers = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        chosen = [numbers[id(parameter)] for parameter, _ in narrow]
        for at, (parameter, held) in zip(chosen, narrow, strict=True):
            shard = self.slices[at]
            shard.data = shard.data.clone()
            held.copy_(parameter.detach())
            parameter.data = held
            parameter.grad_dtype = shard.dtype
        return chosen

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        held = {at: self.parameters[at].data for at in self.narrow}
        for at in held:
            (values,) = self._gathered([self.slices[at].detach()], [at])
            if self.mesh.is_main:
                self.parameters[at].data = values.cpu()  # the device may have memory for only one at a time
        try:
            yield
        finally:
            for at, values in held.items():
                self.parameters[at].data = values

    def replicated(self) -> ReplicatedOptimizer:
        self.drop_gradients()
        for at in self.narrow:
            parameter, shard = self.parameters[at], self.slices[at]
            parameter.data = torch.empty_like(parameter.detach(), dtype=shard.dtype)
        return ReplicatedOptimizer(self.mesh, self.parameters)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        super().adopt(optimizer)
        numbers = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        for group in optimizer.param_groups:
            numbers_of_group = [numbers[id(parameter)] for parameter in group["params"]]
            group["params"] = [self.slices[at] for at in numbers_of_group]
            self.order += numbers_of_group
        for parameter, values in list(optimizer.state.items()):  # some optimizers create state in their constructor
            at = numbers[id(parameter)]
            del optimizer.state[parameter]
            local = {key: self._slice_of_state(key, value, at) for key, value in values.items()}
            optimizer.state[self.slices[at]] = local

    @torch.no_grad()
    def reduce(self, sums: Tensor) -> Tensor:
        has_gradient = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.uint8)
        anywhere = self.mesh.max(has_gradient, TOKEN_AXES).tolist()
        reduced = [at for at, has in enumerate(anywhere) if has]
        for bucket in self._buckets(self.slices, reduced, BUCKET // self.mesh.degree(AXIS)):
            self._reduce(bucket)
        self._next = 0
        return self.mesh.sum(sums.clone(), TOKEN_AXES)

    def _reduce_complete_buckets(self, _: Tensor) -> None:
        """Hook on gradients: reduce the next buckets in order while they are complete; `reduce` does the rest."""
        while all(self.parameters[at].grad is not None for at in self._ordered[self._next]):
            self._reduce(self._ordered[self._next])
            self._next = (self._next + 1) % len(self._ordered)

    @torch.no_grad()
    def _reduce(self, bucket: list[int]) -> None:
        """Reduce-scatter the full gradients of a bucket and add them to the gradients of the slices."""
        full = [self._gradient(at) for at in bucket]
        flat = torch.cat(full, dim=1) if len(full) > 1 else full[0]
        del full  # free its memory before the collective
        for at in bucket:
            self.parameters[at].grad = None
        local = reduce_scatter(flat.view(-1), self.mesh.group(AXIS))
        self.mesh.sum(local, tuple(axis for axis in TOKEN_AXES if axis != AXIS))
        for at, padded in zip(bucket, local.split([self.widths[at] for at in bucket]), strict=True):
            gradient, held = padded[: self.slices[at].numel()], self.slices[at].grad
            self.slices[at].grad = gradient if held is None else held.add_(gradient)

    def clip(self, max_norm: float) -> Tensor:
        return clip_gradients(self.mesh, self.slices, max_norm)

    @torch.no_grad()
    def after_step(self) -> None:
        self.drop_gradients()
        for bucket in self._buckets(self.parameters, range(len(self.parameters)), BUCKET):
            parameters: list[Tensor] = [self.parameters[at] for at in bucket]
            full = self._gathered([self.slices[at].to(parameters[0].dtype) for at in bucket], bucket)
            torch._foreach_copy_(parameters, full)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for shard in self.slices:
            shard.grad = None

    @torch.no_grad()
    def full_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        def gather(key: str, value: Any, at: int) -> Any:
            block, full = elements_per_entry(key, value, self.slices[at].numel()), self.parameters[at]
            if not block:
                return value
            padded = _padded(value.reshape(-1), self.widths[at] // block)
            values = all_gather(padded, self.mesh.group(AXIS))[: -(-full.numel() // block)]
            if not self.mesh.is_main:
                return None
            return (values.view(full.shape) if block == 1 else values).cpu()  # the device may have memory for one

        return self._map_state(optimizer.state_dict(), gather)

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self._map_state(state, self._slice_of_state)

    def _map_state(self, state: dict[str, Any], change: Callable[[str, Any, int], Any]) -> dict[str, Any]:
        """An optimizer's `state` with each value replaced by `change(key, value, index of its parameter)`."""

        def changed(values: dict[str, Any], at: int) -> dict[str, Any]:
            return {
                key: changed(value, at) if isinstance(value, dict) else change(key, value, at)
                for key, value in values.items()
            }

        states = {number: changed(values, self.order[number]) for number, values in state["state"].items()}
        return {**state, "state": states}

    def _slice_of_state(self, key: str, value: Any, at: int) -> Any:
        """This rank's slice of a state tensor; values that do not belong to elements or blocks are unchanged."""
        parameter = self.parameters[at]
        block = elements_per_entry(key, value, parameter.numel())
        if not block:
            return value
        if block == 1 and value.shape != parameter.shape:
            raise CheckpointError(
                f"the saved state of parameter {at} has the shape {[*value.shape]}, and the parameter"
                f" {[*parameter.shape]}",
                "resume with the model that saved it",
            )
        width = self.widths[at] // block
        return value.reshape(-1)[self.coordinate * width : (self.coordinate + 1) * width].clone()

    def _gradient(self, at: int) -> Tensor:
        """[degree, width]: the gradient of parameter `at`, one row per rank; zeros if it has none."""
        parameter, width = self.parameters[at], self.widths[at]
        gradient = (
            torch.zeros_like(parameter, dtype=self.slices[at].dtype) if parameter.grad is None else parameter.grad
        )
        return _padded(gradient.reshape(-1), width * self.mesh.degree(AXIS)).view(-1, width)

    def _gathered(self, shards: Sequence[Tensor], bucket: Sequence[int]) -> list[Tensor]:
        """All-gather the ranks' `shards` to tensors with the shapes of the parameters."""
        widths = [self.widths[at] for at in bucket]
        padded = map(_padded, shards, widths)
        columns = all_gather(torch.cat([*padded]), self.mesh.group(AXIS)).view(-1, sum(widths)).split(widths, dim=1)
        shapes = [self.parameters[at].shape for at in bucket]
        return [column.reshape(-1)[: shape.numel()].view(shape) for column, shape in zip(columns, shapes, strict=True)]

    @staticmethod
    def _buckets(tensors: Sequence[Tensor], chosen: Sequence[int], limit: int) -> Iterator[list[int]]:
        """`reduction.buckets` of the chosen `tensors`, as indices."""
        numbers = {id(tensors[at]): at for at in chosen}
        for bucket in buckets([tensors[at] for at in chosen], limit):
            yield [numbers[id(tensor)] for tensor in bucket]


def _padded(flat: Tensor, length: int) -> Tensor:
    """`flat` padded with zeros to [length]; itself without a copy if it has this length."""
    return flat if len(flat) == length else F.pad(flat, (0, length - len(flat)))
