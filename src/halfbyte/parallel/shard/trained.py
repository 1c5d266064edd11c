"""Trained parameters between a step's last backward and the next forward: reduced, stepped, and whole again.

Modules read whole parameters, and backward leaves whole gradients. Two kinds of what lies between:

- `Whole`: every process steps all of them.
- `Sliced`, along "shard": of each parameter a process steps an equal slice of its elements, and keeps the optimizer's
  state of no more (ZeRO-1). Once a step gradients are reduced into slices and parameters gathered from them: together
  at most the traffic of one all-reduce. That is for optimizers that treat each element alone, and gives bit by bit what
  they would give whole.

What products alone read, as adapters' factors, is whole in the products' dtype only, which is what one process casts it
to: slices hold its own digits, and it is gathered cast. Its gradients stay as wide as the slices (`grad_dtype`). A
slice of anything else is memory of the parameter itself.

Where whole gradients are many bytes (`AT_ONCE`), as of a 70B model's adapters, they are reduced in each backward as
they come, a few layers' together, and added up in slices. All processes must then have gradients of the same
parameters: of experts, which tokens choose, they may not.

Checkpoints hold whole states, so that any mesh reads what another has written.

Source: Rajbhandari et al. 2020 (arXiv:1910.02054).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...config import Parallel
from ..collectives import gathered, scattered_sum
from ..mesh import TOKENS, Mesh
from ..reduction import BUCKET, CUT, buckets, clip_gradients, sum_gradients

AXIS = "shard"
AT_ONCE = 2**29  # bytes of gradients
TOGETHER = 2**25  # bytes of them that are reduced together then

Narrow = Sequence[tuple[nn.Parameter, Tensor]]


def trained_units(
    mesh: Mesh,
    parameters: Sequence[nn.Parameter],
    *,
    elementwise: bool,
    alike: bool = False,
    narrow: Callable[[], Narrow] = list,
) -> Whole:
    """How the `parameters` of a run are reduced and stepped.

    Args:
        elementwise: whether the optimizer treats each element alone, and nothing scales the loss. Stages of a pipeline
            and what is cut along "tensor" are stepped as they are.
        alike: whether each backward gives all parameters a gradient, whatever the tokens, and no graph holds it.
        narrow: gives those that products alone read, each with memory to hold it in the products' dtype; asked for
            where parameters are sliced.
    """
    if slices(mesh.layout, elementwise) == 1:
        return Whole(mesh, parameters)
    at_once = alike and sum(parameter.nbytes for parameter in parameters) >= AT_ONCE
    return Sliced(mesh, parameters, at_once=at_once, narrow=narrow())


def slices(layout: Parallel, elementwise: bool) -> int:
    """Of how many processes each keeps its part of the optimizer's state; the arguments are those of a run."""
    return layout.shard if elementwise and layout.tensor * layout.pipeline == 1 else 1


class Whole:
    """Every process steps all parameters."""

    def __init__(self, mesh: Mesh, parameters: Sequence[nn.Parameter]):
        self.mesh, self.parameters = mesh, list(parameters)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Have a new `optimizer` of the parameters step what this process is to step."""

    def reduce(self, sums: Tensor) -> Tensor:
        """After the last backward of a step; `sums` as in `reduce.sum_gradients`."""
        return sum_gradients(self.mesh, self.parameters, sums)

    def clip(self, max_norm: float) -> Tensor:
        """The norm of all gradients, before they are clipped to `max_norm`."""
        return clip_gradients(self.mesh, self.parameters, max_norm)

    def stepped(self) -> None:
        """After the optimizer's step: parameters are whole, and gradients gone."""
        self.drop_gradients()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Inside, the main process finds in the parameters what is stepped, whole, in its own dtype; all enter."""
        yield

    def drop_gradients(self) -> None:
        for parameter in self.parameters:  # nn.Module.zero_grad walks every frozen module: milliseconds a step
            parameter.grad = None

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimizer of whole parameters, in the main process; all processes call it."""
        return optimizer.state_dict()

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Of a whole `state`, what this process's optimizer loads."""
        return state


class Sliced(Whole):
    """Every process steps a slice of each parameter."""

    def __init__(self, mesh: Mesh, parameters: Sequence[nn.Parameter], *, at_once: bool = False, narrow: Narrow = ()):
        super().__init__(mesh, parameters)
        ways, self.place = mesh.ways(AXIS), mesh.place(AXIS)
        self.widths = [-(-parameter.numel() // ways) for parameter in self.parameters]
        self.slices = [nn.Parameter(self._own(parameter.detach(), at)) for at, parameter in enumerate(self.parameters)]
        for part in self.slices:
            setattr(part, CUT, (AXIS,))
        self.narrow = self._narrow(narrow)
        self.order: list[int] = []  # of the parameters in the optimizer
        # reduced in this order in every process, the last layers' first, as backward comes to them
        everything = range(len(self.parameters))
        self._waiting = list(self._buckets(self.slices, everything, TOGETHER // ways))[::-1] if at_once else []
        self._next = 0
        for parameter in self.parameters if at_once else ():
            parameter.register_post_accumulate_grad_hook(self._came)

    def _narrow(self, narrow: Narrow) -> list[int]:
        """Let go of what these parameters hold but for this process's slices, and keep them whole as products read
        them; their numbers."""
        numbers = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        chosen = [numbers[id(parameter)] for parameter, _ in narrow]
        for at, (parameter, held) in zip(chosen, narrow, strict=True):
            part = self.slices[at]
            part.data = part.data.clone()
            held.copy_(parameter.detach())
            parameter.data = held
            parameter.grad_dtype = part.dtype
        return chosen

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        held = {at: self.parameters[at].data for at in self.narrow}
        for at in held:
            (values,) = self._gathered([self.slices[at].detach()], [at])
            if self.mesh.is_main:
                self.parameters[at].data = values.cpu()  # a device has room for one at a time
        try:
            yield
        finally:
            for at, values in held.items():
                self.parameters[at].data = values

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        numbers = {id(parameter): at for at, parameter in enumerate(self.parameters)}
        for group in optimizer.param_groups:
            own = [numbers[id(parameter)] for parameter in group["params"]]
            group["params"] = [self.slices[at] for at in own]
            self.order += own
        for parameter, values in list(optimizer.state.items()):  # that an optimizer may begin with
            at = numbers[id(parameter)]
            del optimizer.state[parameter]
            optimizer.state[self.slices[at]] = {key: self._part(value, at) for key, value in values.items()}

    @torch.no_grad()
    def reduce(self, sums: Tensor) -> Tensor:
        here = torch.tensor([parameter.grad is not None for parameter in self.parameters], dtype=torch.uint8)
        anywhere = self.mesh.max(here, TOKENS).tolist()
        found = [at for at, has in enumerate(anywhere) if has]
        for bucket in self._buckets(self.slices, found, BUCKET // self.mesh.ways(AXIS)):
            self._reduce(bucket)
        self._next = 0
        return self.mesh.sum(sums.clone(), TOKENS)

    def _came(self, _: Tensor) -> None:
        """A gradient is there: reduce what is complete, in order; what is not waits for the end of the step."""
        while all(self.parameters[at].grad is not None for at in self._waiting[self._next]):
            self._reduce(self._waiting[self._next])
            self._next = (self._next + 1) % len(self._waiting)

    @torch.no_grad()
    def _reduce(self, bucket: list[int]) -> None:
        """Add the sums of whole gradients to those of the slices."""
        whole = [self._gradient(at) for at in bucket]
        flat = torch.cat(whole, dim=1) if len(whole) > 1 else whole[0]
        del whole  # the sum has no need of its memory
        for at in bucket:
            self.parameters[at].grad = None
        own = scattered_sum(flat.view(-1), self.mesh.group(AXIS))
        self.mesh.sum(own, tuple(axis for axis in TOKENS if axis != AXIS))
        for at, padded in zip(bucket, own.split([self.widths[at] for at in bucket]), strict=True):
            part, held = padded[: self.slices[at].numel()], self.slices[at].grad
            self.slices[at].grad = part if held is None else held.add_(part)

    def clip(self, max_norm: float) -> Tensor:
        return clip_gradients(self.mesh, self.slices, max_norm)

    @torch.no_grad()
    def stepped(self) -> None:
        self.drop_gradients()
        for bucket in self._buckets(self.parameters, range(len(self.parameters)), BUCKET):
            parameters: list[Tensor] = [self.parameters[at] for at in bucket]
            whole = self._gathered([self.slices[at].to(parameters[0].dtype) for at in bucket], bucket)
            torch._foreach_copy_(parameters, whole)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for part in self.slices:
            part.grad = None

    @torch.no_grad()
    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        def whole(value: Any, at: int) -> Any:
            if not isinstance(value, Tensor) or value.shape != self.slices[at].shape:
                return value
            (values,) = self._gathered([value], [at])
            return values.cpu() if self.mesh.is_main else None  # a device has room for one at a time

        return self._each(optimizer.state_dict(), whole)

    def own_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return self._each(state, self._part)

    def _each(self, state: dict[str, Any], change: Callable[[Any, int], Any]) -> dict[str, Any]:
        """An optimizer's `state` with another value in the place of each, by the number of its parameter."""
        changed = {number: {key: change(value, self.order[number]) for key, value in values.items()}
                   for number, values in state["state"].items()}  # fmt: skip
        return {**state, "state": changed}

    def _part(self, value: Any, at: int) -> Any:
        """Of a number of each element of a parameter, those of this process; anything else as it is."""
        if not isinstance(value, Tensor) or value.shape != self.parameters[at].shape:
            return value
        return self._own(value, at).clone()

    def _own(self, whole: Tensor, at: int) -> Tensor:
        """This process's elements of what has a parameter's shape; a view."""
        width = self.widths[at]
        return whole.reshape(-1)[self.place * width : (self.place + 1) * width]

    def _gradient(self, at: int) -> Tensor:
        """[ways, width]: a row for each process, zeros where there is none."""
        parameter, width = self.parameters[at], self.widths[at]
        gradient = (
            torch.zeros_like(parameter, dtype=self.slices[at].dtype) if parameter.grad is None else parameter.grad
        )
        return _padded(gradient.reshape(-1), width * self.mesh.ways(AXIS)).view(-1, width)

    def _gathered(self, parts: Sequence[Tensor], bucket: Sequence[int]) -> list[Tensor]:
        """What all processes' `parts` are together, in the shapes of the parameters."""
        widths = [self.widths[at] for at in bucket]
        padded = map(_padded, parts, widths)
        columns = gathered(torch.cat([*padded]), self.mesh.group(AXIS)).view(-1, sum(widths)).split(widths, dim=1)
        shapes = [self.parameters[at].shape for at in bucket]
        return [column.reshape(-1)[: shape.numel()].view(shape) for column, shape in zip(columns, shapes, strict=True)]

    @staticmethod
    def _buckets(tensors: Sequence[Tensor], chosen: Sequence[int], most: int) -> Iterator[list[int]]:
        """`reduce.buckets` of the chosen ones of `tensors`, by number."""
        numbers = {id(tensors[at]): at for at in chosen}
        for bucket in buckets([tensors[at] for at in chosen], most):
            yield [numbers[id(tensor)] for tensor in bucket]


def _padded(flat: Tensor, length: int) -> Tensor:
    """[length], with zeros after what there is; itself where it is as long, of which `F.pad` makes a copy."""
    return flat if len(flat) == length else F.pad(flat, (0, length - len(flat)))
