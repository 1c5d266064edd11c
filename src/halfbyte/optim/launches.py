"""Divide an optimizer's parameters into launches: one for each device, storage, rounding and dtypes.

A `ParameterSet` is all parameters of an optimizer, or those of one layer if it updates in the backward. It has
`DeviceParameters` for each device, and these the launches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.optimizer import (
    SETTINGS,
    Coefficients,
    Parameters,
    apply_trust,
    gradient_norm,
    prepare_step,
    scale_by_trust,
    update_parameters,
)
from ..ops.optimizer_state import Storage
from ..utils.errors import TrainingError
from ..utils.hardware import is_capturing
from .offload import HostState, Windows
from .parameters import check_gradient, first_element, local_of, parameter_name
from .state_dicts import CORRECTION, CORRECTIONS, state_keys, state_tensors

DTYPE, LAYOUT, DEVICE, SHAPE = map(attrgetter, ("dtype", "layout", "device", "shape"))


class GroupMember(NamedTuple):
    """A parameter: the number of its group in the optimizer, its number in the group, and the weight."""

    group: int
    number: int
    weight: Tensor


class Launch(NamedTuple):
    """Parameters that one kernel call updates.

    Attributes:
        parameters: arguments of the kernel.
        positions: of the parameters in their `ParameterSet`.
        host: their state in host memory; None: it is on the device.
    """

    parameters: Parameters
    positions: list[int]
    host: HostState | None


class SteppedOptimizer(Protocol):
    """The interface of `FusedOptimizer` that launches read."""

    rule: ClassVar[str]
    trust: ClassVar[str | None]
    param_groups: list[dict[str, Any]]

    def state_of(self, group: dict[str, Any], index: int) -> dict[str, Any]: ...
    def storage_of(self, group: dict[str, Any], index: int) -> Storage: ...
    def windows(self, device: torch.device) -> Windows: ...
    def settings(self, group: dict[str, Any]) -> Mapping[str, Any]: ...
    def options_of(self, number: int, index: int) -> dict[str, Any] | None: ...
    def on_squared_norms(self, parameters: DeviceParameters, squares: Tensor) -> None: ...
    @property
    def shard_groups(self) -> Callable[[Tensor], tuple[Any, ...]]: ...


class StepTensors(NamedTuple):
    """Weights and gradients of a `ParameterSet`, in the order of its members."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]

    @classmethod
    def current(cls, parameters: Sequence[Tensor]) -> StepTensors:
        """The parameters themselves and their gradients."""
        return cls(parameters, [parameter.grad for parameter in parameters])


class Addresses(NamedTuple):
    """Addresses of weights and gradients (None: 0; sparse: -1)."""

    weights: list[int]
    gradients: list[int]

    @classmethod
    def of(cls, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Addresses:
        try:
            addresses = [0 if g is None else g.data_ptr() for g in gradients]
        except RuntimeError:  # a sparse tensor, which `ParameterSet.read` refuses
            dense = [g if g is None or g.layout is torch.strided else None for g in gradients]
            addresses = [-1 if g is None else g.data_ptr() for g in dense]
        return cls([*map(Tensor.data_ptr, weights)], addresses)


class ParameterSet:
    """Parameters that are stepped together.

    Args:
        optimizer: has their groups and states.
        ids: of the parameters; None: all of the optimizer's.

    Attributes:
        devices: the parameters with gradients, by device.
        version: increases when `read` reads tensors at other addresses than the last time.
        addresses: of the tensors that `read` has read.
        in_place: whether no tensor is copied to be contiguous or is a DTensor.
    """

    devices: list[DeviceParameters]
    version: int
    addresses: Addresses
    in_place: bool

    def __init__(self, optimizer: SteppedOptimizer, ids: set[int] | None = None):
        self.optimizer = optimizer
        self.ids = ids
        self.devices = []
        self.version = 0
        self.addresses = Addresses([], [])
        self.in_place = False
        self._traits: list[Any] = []
        self._divided_by: list[Any] = []
        self._shapes: list[torch.Size] = []

    def members(self) -> Iterator[GroupMember]:
        """The parameters, in the order of the groups."""
        for number, group in enumerate(self.optimizer.param_groups):
            for index, weight in enumerate(group["params"]):
                if self.ids is None or id(weight) in self.ids:
                    yield GroupMember(number, index, weight)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `members`."""
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return weights if self.ids is None else [weight for weight in weights if id(weight) in self.ids]

    def current_tensors(self) -> StepTensors:
        """Return the parameters' current weights and gradients."""
        return StepTensors.current(self.parameters())

    def read(self, tensors: StepTensors | None = None) -> None:
        """Take the parameters' current weights and gradients, and divide them into launches if that has changed.

        Most steps read tensors at the addresses of the step before; comparing them takes 0.5 ms for 450 matrices (one
        core of an AMD EPYC, November 2026). Tensors that are at the same addresses are on the same devices.

        Args:
            tensors: to take in place of the parameters' current ones.

        Raises:
            TrainingError: see `FusedOptimizer.step`.
        """
        parameters = self.parameters()
        weights, gradients = tensors or StepTensors.current(parameters)
        present = [gradient for gradient in gradients if gradient is not None]
        # Values that change when the parameters must be divided again, except devices and sizes of gradients. The list
        # is flat: with a tuple for each parameter, Python's garbage collector would take 1.3 ms for 450 of them.
        traits = [*map(id, parameters), *map(Tensor.numel, weights), *map(is_, gradients, itertools.repeat(None))]
        traits += [*map(DTYPE, weights), *map(DTYPE, present)]
        addresses = Addresses.of(weights, gradients)
        same = traits == self._traits and self.in_place and addresses == self.addresses
        same = same and all(map(Tensor.is_contiguous, [*weights, *present]))
        if not same:
            divided_by = [*traits, *map(LAYOUT, present), *map(DEVICE, weights), *map(DEVICE, present)]
            divided_by += map(Tensor.numel, present)
            if addresses.weights != self.addresses.weights:
                self._shapes = [*map(SHAPE, weights)]
            divided_by += self._shapes
            if divided_by != self._divided_by:
                members = [*self.members()]
                by_device: dict[torch.device, list[int]] = {}
                for position, (member, weight, gradient) in enumerate(zip(members, weights, gradients, strict=True)):
                    if gradient is not None:
                        check_gradient(weight, gradient, parameter_name(member.group, member.number))
                        by_device.setdefault(weight.device, []).append(position)
                self.devices = [
                    DeviceParameters(
                        self.optimizer,
                        device,
                        positions,
                        [members[position] for position in positions],
                        [gradients[position].dtype for position in positions],  # type: ignore[union-attr]
                    )
                    for device, positions in by_device.items()
                ]
        self.addresses = addresses
        for device in self.devices:
            device.read(weights, gradients, same)
        if same:
            return
        self.version += 1
        self.in_place = all(
            local_of(tensor) is tensor and tensor.is_contiguous()
            for weight, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
            for tensor in (weight, gradient)
        )
        self._traits = traits
        self._divided_by = divided_by

    def release(self) -> None:
        """Drop the references to gradients, so that the caller can free them."""
        for device in self.devices:
            for launch in device.launches:
                launch.parameters.gradients = []
                if launch.host is not None:
                    launch.host.release()

    def forget(self) -> None:
        """Drop the references to gradients and weights, so that the next `read` takes all of them again."""
        self.release()
        self.addresses = Addresses([], [])
        for device in self.devices:
            device.copies = []
            for launch in device.launches:
                launch.parameters.weights = []
                if launch.host is not None:
                    launch.host.forget()

    def free_gradients(self) -> None:
        """Set all gradients to None."""
        self.release()
        for weight in self.parameters():
            weight.grad = None

    def norm(self, max_norm: float) -> tuple[Tensor, Tensor | None]:
        """Return the 2-norm of the gradients that were read, fp32 [], and the factor that clips them; None: 1."""
        if len(self.devices) == 1:
            norm, factor = self.devices[0].norm(max_norm).unbind()
            return norm, factor
        norms = [device.norm(math.inf)[0].to(self.devices[0].device) for device in self.devices]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0) if math.isfinite(max_norm) else None

    def step(self, factor: Tensor | None, found_inf: Tensor | None, following: ParameterSet | None = None) -> None:
        """Update the parameters with the gradients that were read, times `factor`, unless `found_inf` is not 0.

        Args:
            following: the set that is probably stepped next, whose offloaded state is fetched.
        """
        order = [*self.devices, *(following.devices[:1] if following else []), None]
        for device, successor in zip(self.devices, order[1:], strict=False):
            device.step(self.optimizer, factor, found_inf, successor)


class DeviceParameters:
    """Parameters of one device with gradients: their step counts, coefficients and launches.

    Args:
        optimizer: has their groups and states.
        device: of the parameters.
        positions: of the parameters in their `ParameterSet`.
        members: the parameters.
        gradient_dtypes: of each parameter.

    Attributes:
        states: of each parameter.
        steps: fp32 [n], of which each state has an element.
        groups: int32 [n]: rows of `settings`.
        coefficients, settings: as in `ops.optimizer.prepare_step`.
        copies: weights that are not contiguous, with the contiguous copies that a step updates.
    """

    states: list[dict[str, Any]]
    steps: Tensor
    groups: Tensor
    coefficients: Tensor
    settings: Tensor
    copies: list[tuple[Tensor, Tensor]]
    launches: list[Launch]

    def __init__(
        self,
        optimizer: SteppedOptimizer,
        device: torch.device,
        positions: Sequence[int],
        members: Sequence[GroupMember],
        gradient_dtypes: Sequence[torch.dtype],
    ):
        self.device = device
        self.copies = []
        self.states = [optimizer.state_of(optimizer.param_groups[m.group], m.number) for m in members]
        self.steps = torch.stack([state["step"].to(device) for state in self.states])
        for row, state in enumerate(self.states):
            state["step"] = self.steps[row]
        # (number of a group, None), or with the number of a parameter whose options are not the group's
        self._options: list[tuple[int, int | None]] = [(at, None) for at in range(len(optimizer.param_groups))]
        rows_of_settings = []
        for member in members:
            rows_of_settings.append(member.group)
            if optimizer.options_of(member.group, member.number) is not None:
                rows_of_settings[-1] = len(self._options)
                self._options.append((member.group, member.number))
        self.groups = torch.tensor(rows_of_settings, dtype=torch.int32, device=device)
        self.coefficients = torch.empty(len(members), len(Coefficients._fields), device=device)
        self.settings = torch.zeros(len(self._options), len(SETTINGS), dtype=torch.float64, device=device)
        self._uploaded: list[tuple[bool, tuple[float, ...]]] = []  # whether a rate is a tensor; settings on the device
        self._sharded: dict[tuple[Any, ...], Tensor] = {}  # process groups → rows of parameters divided over them
        if optimizer.trust is not None:
            by_groups: dict[tuple[Any, ...], list[int]] = {}
            for row, member in enumerate(members):
                by_groups.setdefault(optimizer.shard_groups(member.weight), []).append(row)
            by_groups.pop((), None)
            self._sharded = {groups: torch.tensor(rows, device=device) for groups, rows in by_groups.items()}
        by_launch: dict[tuple[Any, ...], list[int]] = {}
        for row, member in enumerate(members):
            group = optimizer.param_groups[member.group]
            dtype = member.weight.dtype
            rounding = group["rounding"] if dtype == torch.bfloat16 else "nearest"
            storage = optimizer.storage_of(group, member.number).name
            by_launch.setdefault((storage, rounding, group["offload"], dtype, gradient_dtypes[row]), []).append(row)
        self.launches = [
            self._launch(optimizer, storage, rounding, offload, rows, members, positions)
            for (storage, rounding, offload, *_), rows in by_launch.items()
        ]

    def _launch(
        self,
        optimizer: SteppedOptimizer,
        storage: str,
        rounding: str,
        offload: bool,
        rows: Sequence[int],
        members: Sequence[GroupMember],
        positions: Sequence[int],
    ) -> Launch:
        """Return the launch of the members in these rows, with their state moved to host memory if it is offloaded."""
        states = [self.states[row] for row in rows]
        parameters = Parameters(
            optimizer.rule,
            storage,
            rounding,
            torch.tensor(rows, dtype=torch.int32),
            [],
            [],
            [state_tensors(state, optimizer.rule, storage) for state in states],
            [state[CORRECTION].view(-1) for state in states] if rounding in CORRECTIONS else [],
        )
        if rounding == "stochastic":
            sizes = [len(group["params"]) for group in optimizer.param_groups]
            firsts = [0, *itertools.accumulate(sizes)]
            parameters.draws = [
                (firsts[members[row].group] + members[row].number, first_element(members[row].weight)) for row in rows
            ]
        host = None
        if offload:
            elements = [local_of(members[row].weight).numel() for row in rows]
            host = HostState(parameters, elements, optimizer.windows(self.device))
            count = len(parameters.states[0])
            keys = [key for number in range(count) for key in state_keys(optimizer.rule, storage, number)]
            for key, views in zip((*keys, CORRECTION), host.tensors, strict=False):
                for state, view in zip(states, views, strict=True):
                    state[key] = view.view(state[key].shape)
            parameters.states = [[] for _ in rows]
            parameters.corrections = []
        return Launch(parameters, [positions[row] for row in rows], host)

    def read(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], same: bool) -> None:
        """Take weights and gradients of a step.

        Args:
            weights, gradients: of all parameters of the set.
            same: whether they are contiguous and at the addresses of the last call.
        """
        if not same:
            self.copies = []
        for parameters, positions, host in self.launches:
            present = [gradient for position in positions if (gradient := gradients[position]) is not None]
            if same:
                parameters.gradients = present
            else:
                shards = [local_of(weights[position]) for position in positions]
                parameters.weights = [shard.contiguous() for shard in shards]
                parameters.gradients = [local_of(gradient).contiguous() for gradient in present]
                parameters.version += 1
                pairs = zip(shards, parameters.weights, strict=True)
                self.copies += [(shard, copied) for shard, copied in pairs if copied is not shard]
            if host is not None:
                host.read(parameters.weights, parameters.gradients, same)

    def norm(self, max_norm: float) -> Tensor:
        """fp32 [2]: norm of this device's gradients and factor that clips them; see `gradient_norm`."""
        return gradient_norm(self.coefficients, [launch.parameters for launch in self.launches], max_norm)

    def step(
        self,
        optimizer: SteppedOptimizer,
        factor: Tensor | None,
        found_inf: Tensor | None,
        following: DeviceParameters | None = None,
    ) -> None:
        """Update the parameters; see `ParameterSet.step`."""
        self.upload(optimizer)
        factor, found_inf = (t if t is None else t.to(self.device) for t in (factor, found_inf))
        prepare_step(self.settings, self.groups, self.steps, self.coefficients, optimizer.rule, factor, found_inf)
        if optimizer.trust is not None:
            optimizer.on_squared_norms(self, self._scale_by_trust(optimizer.trust))

        def update(parameters: Parameters) -> None:
            update_parameters(self.coefficients, self.steps, parameters, found_inf)

        offloaded = [launch.host for launch in self.launches if launch.host is not None]
        successors = iter([*offloaded, *(following.first_host() if following else []), None][1:])
        for launch in self.launches:
            if launch.host is None:
                update(launch.parameters)
            else:
                launch.host.step(update, next(successors))
        for weight, updated in self.copies:
            weight.copy_(updated)

    def first_host(self) -> list[HostState]:
        """The first launch's state in host memory, if any."""
        return [launch.host for launch in self.launches if launch.host is not None][:1]

    def _scale_by_trust(self, trust: str) -> Tensor:
        """Multiply the coefficients by the trust ratios of full parameters; returns the squares of `scale_by_trust`.

        Sums of squares of shards are summed over their ranks, in one all-reduce for all parameters with the same ranks.
        """
        parameters = [launch.parameters for launch in self.launches]
        if not self._sharded:
            return scale_by_trust(self.coefficients, parameters, trust)
        squares = scale_by_trust(self.coefficients.clone(), parameters, trust)
        for groups, rows in self._sharded.items():
            summed = squares[rows]
            for group in groups:
                dist.all_reduce(summed, group=group)
            squares[rows] = summed
        apply_trust(self.coefficients, squares, torch.arange(len(squares), device=self.device), trust)
        return squares

    def upload(self, optimizer: SteppedOptimizer) -> None:
        """Copy the settings of groups and single parameters to the device where they have changed.

        Learning rates may be tensors there.
        """
        rates = []
        rows = []
        for group_number, number in self._options:
            options = None if number is None else optimizer.options_of(group_number, number)
            if options is None:
                options = optimizer.param_groups[group_number]
            rate = options["lr"]
            rates.append(rate)
            numbers = {"lr": 0.0 if isinstance(rate, Tensor) else rate, "weight_decay": options["weight_decay"]}
            numbers |= optimizer.settings(options)
            rows.append((isinstance(rate, Tensor), tuple(float(numbers.get(name, 0.0)) for name in SETTINGS)))
        if rows != self._uploaded:
            if is_capturing():
                raise TrainingError(
                    "the optimizer's settings changed since its last step", "call prepare_replay before a capture"
                )
            table = torch.tensor([numbers for _, numbers in rows], dtype=torch.float64)
            self.settings.copy_(table.pin_memory() if self.device.type == "cuda" else table, non_blocking=True)
            self._uploaded = rows
        for row, rate in enumerate(rates):
            if isinstance(rate, Tensor):
                self.settings[row, 0].copy_(rate.reshape(()))
