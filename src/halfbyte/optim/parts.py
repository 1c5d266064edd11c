"""Parameters that an optimizer steps together: what is read of them, and their launches.

A `Part` is all parameters of an optimizer, or some of them if it updates in the backward. A part has a `Batch` for each
device, and a batch a launch for each kind of storage, rounding and dtype.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.optimizer import (
    RULES,
    SETTINGS,
    Coefficients,
    Parameters,
    apply_trust,
    gradient_norm,
    prepare_step,
    scale_by_trust,
    update_parameters,
)
from ..ops.optimizer_state import STORAGES, Storage
from ..utils.errors import CheckpointError, ConfigError, TrainingError
from ..utils.hardware import is_capturing
from .offload import HostState, Windows

FIRST_ELEMENT = "first_element"  # attribute of a slice of a parameter: number of its first element in the parameter
CORRECTION = "correction"  # key of the bits of a weight that its bf16 does not hold
CORRECTIONS = {"correction8": torch.int8, "correction16": torch.int16}

DTYPE, LAYOUT, DEVICE, SHAPE = map(attrgetter, ("dtype", "layout", "device", "shape"))

Place = tuple[int, int, Tensor]  # number of the parameter's group, index in the group, parameter


class Stepped(Protocol):
    """An optimizer, as far as its parts need it."""

    rule: ClassVar[str]
    trust: ClassVar[str | None]
    param_groups: list[dict[str, Any]]

    def state_of(self, group: dict[str, Any], index: int) -> dict[str, Any]: ...
    def storage_of(self, group: dict[str, Any], index: int) -> Storage: ...
    def windows(self, device: torch.device) -> Windows: ...
    def settings(self, group: dict[str, Any]) -> Mapping[str, Any]: ...
    def options_of(self, number: int, index: int) -> dict[str, Any] | None: ...
    def keep_squares(self, batch: Batch, squares: Tensor) -> None: ...
    @property
    def shard_groups(self) -> Callable[[Tensor], tuple[Any, ...]]: ...


class Values(NamedTuple):
    """Weights and gradients of a part, in the order of `Part.places`."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]

    @classmethod
    def of(cls, parameters: Sequence[Tensor]) -> Values:
        """The parameters themselves and their gradients."""
        return cls(parameters, [parameter.grad for parameter in parameters])


class Tensors(NamedTuple):
    """Addresses of weights and gradients (None: 0; sparse: -1)."""

    weights: list[int]
    gradients: list[int]

    @classmethod
    def of(cls, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensors:
        try:
            addresses = [0 if each is None else each.data_ptr() for each in gradients]
        except RuntimeError:  # a sparse tensor, which `Part.read` refuses
            dense = [each if each is None or each.layout is torch.strided else None for each in gradients]
            addresses = [-1 if each is None else each.data_ptr() for each in dense]
        return cls([*map(Tensor.data_ptr, weights)], addresses)


class Part:
    """Parameters that are stepped together.

    Args:
        optimizer: has their groups and states.
        chosen: ids of the parameters; None: all of the optimizer's.

    Attributes:
        batches: one for each device of parameters with gradients.
        reads: how often `read` found other tensors than before.
        tensors: what `read` has found.
        in_place: whether no tensor is copied to be contiguous or is a DTensor.
    """

    def __init__(self, optimizer: Stepped, chosen: set[int] | None = None):
        self.optimizer, self.chosen = optimizer, chosen
        self.batches: list[Batch] = []
        self.reads, self.in_place, self.tensors = 0, False, Tensors([], [])
        self._traits: list[Any] = []
        self._kinds: list[Any] = []
        self._shapes: list[torch.Size] = []

    def places(self) -> Iterator[Place]:
        """The parameters, in the order of the groups."""
        for number, group in enumerate(self.optimizer.param_groups):
            for index, weight in enumerate(group["params"]):
                if self.chosen is None or id(weight) in self.chosen:
                    yield number, index, weight

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `places`."""
        found = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        return found if self.chosen is None else [weight for weight in found if id(weight) in self.chosen]

    def now(self) -> Values:
        """Return the parameters' current weights and gradients."""
        return Values.of(self.parameters())

    def read(self, values: Values | None = None) -> None:
        """Take the parameters' current weights and gradients, and divide them into launches if that has changed.

        Most steps find tensors at the addresses of the step before; comparing them takes 0.5 ms for 450 matrices (one
        core of an AMD EPYC, November 2026). Tensors that are at the same addresses are on the same devices.

        Args:
            values: to take in place of the parameters' own.

        Raises:
            TrainingError: see `FusedOptimizer.step`.
        """
        parameters = self.parameters()
        weights, gradients = values or Values.of(parameters)
        present = [each for each in gradients if each is not None]
        traits = _traits(parameters, weights, gradients, present)
        tensors = Tensors.of(weights, gradients)
        same = traits == self._traits and self.in_place and tensors == self.tensors
        same = same and all(map(Tensor.is_contiguous, [*weights, *present]))
        kinds = self._kinds
        if not same:
            kinds = [*traits, *map(LAYOUT, present), *map(DEVICE, weights), *map(DEVICE, present)]
            kinds += map(Tensor.numel, present)
            if tensors.weights != self.tensors.weights:
                self._shapes = [*map(SHAPE, weights)]
            kinds += self._shapes
            if kinds != self._kinds:
                self.batches = self._divide([*self.places()], weights, gradients)
        self.tensors = tensors
        for batch in self.batches:
            batch.read(weights, gradients, same)
        if same:
            return
        self.reads += 1
        self.in_place = all(
            local_of(each) is each and each.is_contiguous()
            for weight, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
            for each in (weight, gradient)
        )
        self._traits, self._kinds = traits, kinds

    def release(self) -> None:
        """Drop the references to gradients, so that the caller can free them."""
        for batch in self.batches:
            for parameters, _, host in batch.launches:
                parameters.gradients = []
                if host is not None:
                    host.release()

    def forget(self) -> None:
        """Drop the references to gradients and weights, so that the next `read` takes all of them again."""
        self.release()
        self.tensors = Tensors([], [])
        for batch in self.batches:
            batch.copies = []
            for parameters, _, host in batch.launches:
                parameters.weights = []
                if host is not None:
                    host.forget()

    def free_gradients(self) -> None:
        """Set all gradients to None."""
        self.release()
        for weight in self.parameters():
            weight.grad = None

    def _divide(
        self, places: Sequence[Place], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Batch]:
        """The parameters with gradients, divided by device."""
        by_device: dict[torch.device, list[int]] = {}
        for at, ((number, index, _), weight, gradient) in enumerate(zip(places, weights, gradients, strict=True)):
            if gradient is not None:
                check_gradient(weight, parameter_name(number, index), gradient)
                by_device.setdefault(weight.device, []).append(at)
        return [Batch(self.optimizer, places, gradients, own, device) for device, own in by_device.items()]

    def norm(self, max_norm: float) -> tuple[Tensor, Tensor | None]:
        """Return the 2-norm of the gradients that were read, fp32 [], and the factor that clips them; None: 1."""
        if len(self.batches) == 1:
            norm, factor = self.batches[0].norm(max_norm).unbind()
            return norm, factor
        norms = [batch.norm(math.inf)[0].to(self.batches[0].device) for batch in self.batches]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0) if math.isfinite(max_norm) else None

    def step(self, factor: Tensor | None, found_inf: Tensor | None, following: Part | None = None) -> None:
        """Update the parameters with the gradients that were read, times `factor`, unless `found_inf` is not 0.

        Args:
            following: the part that is probably stepped next, whose offloaded state is fetched.
        """
        for at, batch in enumerate(self.batches):
            after = self.batches[at + 1 :] or (following.batches if following else [])
            batch.step(self.optimizer, factor, found_inf, after[0] if after else None)


class Batch:
    """The parameters of one device: their step counts, coefficients and launches.

    Args:
        optimizer: has their groups and states.
        places: of all parameters of the part.
        gradients: of all parameters of the part.
        own: positions in `places` of the parameters of this device with gradients.
        device: of the parameters.
    """

    def __init__(
        self,
        optimizer: Stepped,
        places: Sequence[Place],
        gradients: Sequence[Tensor | None],
        own: Sequence[int],
        device: torch.device,
    ):
        self.device, present = device, [places[at] for at in own]
        self.copies: list[tuple[Tensor, Tensor]] = []  # weights that are not contiguous, with their contiguous copies
        self.states = [optimizer.state_of(optimizer.param_groups[number], index) for number, index, _ in present]
        states = self.states
        self.steps = torch.stack([state["step"].to(device) for state in states])
        for row, state in enumerate(states):
            state["step"] = self.steps[row]
        # (number of a group, None), or with the index of a parameter that has options of its own
        self._options: list[tuple[int, int | None]] = [(at, None) for at in range(len(optimizer.param_groups))]
        rows_of_settings = []
        for number, index, _ in present:
            rows_of_settings.append(number)
            if optimizer.options_of(number, index) is not None:
                rows_of_settings[-1] = len(self._options)
                self._options.append((number, index))
        self.groups = torch.tensor(rows_of_settings, dtype=torch.int32, device=device)
        self.coefficients = torch.empty(len(present), len(Coefficients._fields), device=device)
        self.settings = torch.zeros(len(self._options), len(SETTINGS), dtype=torch.float64, device=device)
        self._set: list[tuple[bool, tuple[float, ...]]] = []  # settings on the device; whether a rate is a tensor
        self._sharded: dict[tuple[Any, ...], Tensor] = {}  # process groups → rows of parameters divided over them
        if optimizer.trust is not None:
            by_groups: dict[tuple[Any, ...], list[int]] = {}
            for row, (*_, weight) in enumerate(present):
                by_groups.setdefault(optimizer.shard_groups(weight), []).append(row)
            by_groups.pop((), None)
            self._sharded = {groups: torch.tensor(rows, device=device) for groups, rows in by_groups.items()}
        self.launches: list[tuple[Parameters, list[int], HostState | None]] = []  # with positions in `places`
        by_kind: dict[tuple[Any, ...], list[int]] = {}
        for row, (number, index, weight) in enumerate(present):
            group = optimizer.param_groups[number]
            rounding = group["rounding"] if weight.dtype == torch.bfloat16 else "nearest"
            storage = optimizer.storage_of(group, index).name
            dtypes = weight.dtype, _present(gradients[own[row]]).dtype
            by_kind.setdefault((storage, rounding, group["offload"], *dtypes), []).append(row)
        for (storage, rounding, offload, *_), rows in by_kind.items():
            parameters = Parameters(
                optimizer.rule,
                storage,
                rounding,
                torch.tensor(rows, dtype=torch.int32),
                [],
                [],
                [state_parts(states[row], optimizer.rule, storage) for row in rows],
                [states[row][CORRECTION].view(-1) for row in rows] if rounding in CORRECTIONS else [],
            )
            if rounding == "stochastic":
                parameters.draws = [self._draw(optimizer, *present[row]) for row in rows]
            sizes = [local_of(present[row][2]).numel() for row in rows]
            host = HostState(parameters, sizes, optimizer.windows(device)) if offload else None
            if host is not None:
                keys = [key for number in range(len(parameters.states[0]))
                        for key in state_keys(optimizer.rule, storage, number)]  # fmt: skip
                for key, views in zip((*keys, CORRECTION), host.tensors, strict=False):
                    for row, view in zip(rows, views, strict=True):
                        states[row][key] = view.view(states[row][key].shape)
                parameters.states, parameters.corrections = [[] for _ in rows], []
            self.launches.append((parameters, [own[row] for row in rows], host))

    @staticmethod
    def _draw(optimizer: Stepped, number: int, index: int, weight: Tensor) -> tuple[int, int]:
        """Return a parameter's entry of `Parameters.draws`."""
        before = sum(len(group["params"]) for group in optimizer.param_groups[:number])
        return before + index, first_element(weight)

    def read(self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None], same: bool) -> None:
        """Take the weights and gradients of all parameters of the part, of which the batch has some.

        Args:
            weights: the part's.
            gradients: the part's.
            same: whether they are contiguous and at the addresses of the last call.
        """
        if not same:
            self.copies = []
        for parameters, own, host in self.launches:
            found = [_present(gradients[at]) for at in own]
            if same:
                parameters.gradients = found
            else:
                locals_ = [local_of(weights[at]) for at in own]
                parameters.weights = [*map(contiguous, locals_)]
                parameters.gradients = [contiguous(local_of(each)) for each in found]
                parameters.version += 1
                pairs = zip(locals_, parameters.weights, strict=True)
                self.copies += [(target, copied) for target, copied in pairs if copied is not target]
            if host is not None:
                host.read(parameters.weights, parameters.gradients, same)

    def norm(self, max_norm: float) -> Tensor:
        """fp32 [2]: norm of this device's gradients and factor that clips them; see `gradient_norm`."""
        return gradient_norm(self.coefficients, [parameters for parameters, *_ in self.launches], max_norm)

    def step(
        self,
        optimizer: Stepped,
        factor: Tensor | None,
        found_inf: Tensor | None,
        following: Batch | None = None,
    ) -> None:
        """Update the parameters; see `Part.step`."""
        self.upload(optimizer)
        factor, found_inf = (each if each is None else each.to(self.device) for each in (factor, found_inf))
        prepare_step(self.settings, self.groups, self.steps, self.coefficients, optimizer.rule, factor, found_inf)
        if optimizer.trust is not None:
            optimizer.keep_squares(self, self._scale_by_trust(optimizer.trust))
        update = partial(self._update, found_inf)
        hosts = self.hosts
        for parameters, _, host in self.launches:
            if host is None:
                update(parameters)
            else:
                later = hosts[hosts.index(host) + 1 :] or (following.hosts if following else [])
                host.step(update, later[0] if later else None)
        for weight, updated in self.copies:
            weight.copy_(updated)

    def _scale_by_trust(self, trust: str) -> Tensor:
        """Multiply the coefficients by the trust ratios of full parameters; returns the squares of `scale_by_trust`.

        Sums of squares of shards are summed over their ranks, in one all-reduce for all parameters with the same ranks.
        """
        launches = [parameters for parameters, *_ in self.launches]
        if not self._sharded:
            return scale_by_trust(self.coefficients, launches, trust)
        squares = scale_by_trust(self.coefficients.clone(), launches, trust)
        for groups, rows in self._sharded.items():
            summed = squares[rows]
            for group in groups:
                dist.all_reduce(summed, group=group)
            squares[rows] = summed
        apply_trust(self.coefficients, squares, torch.arange(len(squares), device=self.device), trust)
        return squares

    def _update(self, found_inf: Tensor | None, parameters: Parameters) -> None:
        update_parameters(self.coefficients, self.steps, parameters, found_inf)

    @property
    def hosts(self) -> list[HostState]:
        """The launches' offloaded states."""
        return [host for *_, host in self.launches if host is not None]

    def upload(self, optimizer: Stepped) -> None:
        """Copy the settings of groups and single parameters to the device where they have changed.

        Learning rates may be tensors there.
        """
        rates, rows = [], []
        for number, index in self._options:
            options = None if index is None else optimizer.options_of(number, index)
            group = optimizer.param_groups[number] if options is None else options
            rate = group["lr"]
            rates.append(rate)
            numbers = {"lr": 0.0 if isinstance(rate, Tensor) else rate, "weight_decay": group["weight_decay"]}
            numbers |= optimizer.settings(group)
            rows.append((isinstance(rate, Tensor), tuple(float(numbers.get(name, 0.0)) for name in SETTINGS)))
        if rows != self._set:
            if is_capturing():
                raise TrainingError(
                    "the optimizer's settings changed since its last step", "call prepare_replay before a capture"
                )
            table = torch.tensor([numbers for _, numbers in rows], dtype=torch.float64)
            self.settings.copy_(table.pin_memory() if self.device.type == "cuda" else table, non_blocking=True)
            self._set = rows
        for number, rate in enumerate(rates):
            if isinstance(rate, Tensor):
                self.settings[number, 0].copy_(rate.reshape(()))


class BackwardCheck:
    """Norms of the gradients of a step whose backward updates parameters, and a flag on the device that stops it.

    The flag is set by the first gradient with NaN or Inf and stays set until the step ends, so that the backward
    updates no parameter after it.

    Args:
        optimizer: its attribute `found_inf`, if it has one that is not None, sets the flag before the first gradient.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._norms: dict[int, tuple[Sequence[Tensor], Tensor]] = {}  # by the key of `add`, in the order of its calls
        self._found_inf: Tensor | None = None  # None: no gradient of this step is checked yet
        self._is_read = False  # whether `gradient_norm` has returned the norm of `_norms`

    def add(self, key: int, weights: Sequence[Tensor]) -> Tensor:
        """Check the gradients of some weights; returns the flag, fp32 []: 1 if this step must update nothing more.

        Args:
            key: of these weights; a second call in a step replaces their norms.
            weights: on one or several devices, in the order in which their gradients were complete.
        """
        flag = self._found_inf
        if flag is None:
            self._norms = {}
            flag = getattr(self.optimizer, "found_inf", None)
        gradients = [contiguous(local_of(weight.grad)) for weight in weights if weight.grad is not None]
        wide = torch.float64 if torch.float64 in map(DTYPE, gradients) else torch.float32
        found = torch._foreach_norm(gradients, dtype=wide)  # one pass with few launches; inf if it overflows
        norms = torch.stack([each.to(gradients[0].device, torch.float32) for each in found])
        broken = (~norms.isfinite().all()).float()
        flag = broken if flag is None else torch.maximum(flag.to(broken).reshape(()), broken)
        self._norms[key], self._found_inf, self._is_read = (weights, norms), flag, False
        return flag

    def end_step(self) -> None:
        """Clear the flag."""
        self._found_inf = None

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of this step, or after `end_step` of the last one, fp32 []; then 0."""
        is_read, self._is_read = self._is_read, True
        if is_read or not self._norms:
            return torch.zeros(())
        norms = [norms for _, norms in self._norms.values()]
        return torch.linalg.vector_norm(torch.cat([each.to(norms[0].device) for each in norms]))

    def first_broken(self) -> Tensor | None:
        """Return the first weight of this step whose gradient has NaN or Inf, or None. Blocks the host."""
        for weights, norms in self._norms.values():
            for weight, is_finite in zip(weights, norms.isfinite().tolist(), strict=True):
                if not is_finite:
                    return weight
        return None


class BackwardUpdates:
    """Updates each part of an optimizer's parameters in the backward, when its gradients are complete, and frees these.

    A part whose gradients have NaN or Inf is not changed, nor are the parts after it in the same step; see
    `BackwardCheck`.

    Args:
        optimizer: its `step` must do nothing but call `finish`.
        parts: the optimizer's parameters, divided in the order in which their gradients are expected.

    Raises:
        TrainingError: in a backward, if a gradient is complete for the second time since the last `finish`.
    """

    def __init__(self, optimizer: Stepped, parts: Sequence[Sequence[Tensor]]):
        self.optimizer, self.members = optimizer, [[*some] for some in parts]
        self.check = BackwardCheck(optimizer)
        self._arrived: list[dict[int, int]] = [{} for _ in parts]  # id of a weight with a gradient in this step → order
        self.reset()
        arrive = weak_hook(self.arrive)
        self._hooks = [
            weight.register_post_accumulate_grad_hook(partial(arrive, number))
            for number, some in enumerate(parts)
            for weight in some
        ]

    def reset(self) -> None:
        """Divide the parameters into launches again."""
        self.parts = [Part(self.optimizer, {id(weight) for weight in some}) for some in self.members]

    def close(self) -> None:
        """Stop updating in the backward."""
        for hook in self._hooks:
            hook.remove()

    def arrive(self, number: int, weight: Tensor) -> None:
        """Take the complete gradient of a weight; update its part after the last one."""
        arrived = self._arrived[number]
        if id(weight) in arrived:
            raise second_backward(weight)
        arrived[id(weight)] = len(arrived)
        if len(arrived) == len(self.members[number]):
            self._update(number)

    @torch.no_grad()
    def _update(self, number: int) -> None:
        part, following = self.parts[number], self.parts[number + 1 : number + 2]
        part.step(None, self._check(number), following[0] if following else None)
        part.free_gradients()

    def _check(self, number: int) -> Tensor:
        """Read and check the gradients that a part has now; returns the flag that stops the step."""
        self.parts[number].read()
        order, present = self._arrived[number], [each for each in self.members[number] if each.grad is not None]
        return self.check.add(number, sorted(present, key=lambda weight: order.get(id(weight), len(order))))

    def _incomplete(self) -> list[int]:
        """Numbers of the parts of which only some parameters have a gradient."""
        return [
            number
            for number, (arrived, some) in enumerate(zip(self._arrived, self.members, strict=True))
            if 0 < len(arrived) < len(some) and any(weight.grad is not None for weight in some)
        ]

    def finish(self) -> None:
        """End a step: update the parts of which only some parameters have a gradient."""
        for number in self._incomplete():
            self._update(number)
        for arrived in self._arrived:
            arrived.clear()
        self.check.end_step()

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the gradients of this step, or after `finish` of the last one, fp32 []; then 0.

        Gradients that `finish` will use are checked before, so that one with NaN or Inf stops all of them.
        """
        for number in self._incomplete():
            self._check(number)
        return self.check.gradient_norm()


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that calls a method while its object lives, and does not keep it alive.

    Python's garbage collector does not look into hooks of tensors: an optimizer that a hook refers to would never be
    freed, and neither would the weights.
    """
    found = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (alive := found()) is not None:
            alive(*arguments)

    return call


def _traits(
    parameters: Sequence[Tensor],
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    present: Sequence[Tensor],
) -> list[Any]:
    """Return values that change when the parameters must be divided anew, except devices, and sizes of gradients.

    A flat list: with a tuple for each parameter, Python's garbage collector would take 1.3 ms for 450 of them.
    """
    numbers = [*map(id, parameters), *map(Tensor.numel, weights), *map(is_, gradients, itertools.repeat(None))]
    return [*numbers, *map(DTYPE, weights), *map(DTYPE, present)]


def local_of(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; other tensors unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def shard_groups(weight: Tensor) -> tuple[Any, ...]:
    """The process groups over which the elements of a DTensor are divided; () for other tensors."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None:
        return ()
    placements: Sequence[Any] = weight.placements  # type: ignore[attr-defined]
    sharded = [at for at, each in enumerate(placements) if not each.is_replicate() and mesh.size(at) > 1]
    return tuple(mesh.get_group(at) for at in sharded)


def first_element(weight: Tensor) -> int:
    """Number of the first element of a slice, or of a DTensor's shard of rows, in the full parameter."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or not weight.dim():
        return getattr(weight, FIRST_ELEMENT, 0)
    placements: Sequence[Any] = weight.placements  # type: ignore[attr-defined]
    first, rows = 0, weight.shape[0]
    for at, placement in enumerate(placements):
        if placement.is_shard(0):
            width = -(-rows // mesh.size(at))
            skipped = min(mesh.get_local_rank(at) * width, rows)
            first += skipped
            rows = min(width, rows - skipped)
    return first * math.prod(weight.shape[1:])


def contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _present(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def parameter_name(group: int, index: int) -> str:
    """Name of a parameter in error messages."""
    return f"parameter {index} of parameter group {group}"


def check_gradient(weight: Tensor, name: str, gradient: Tensor | None = None) -> None:
    """Raise a TrainingError if the gradient is sparse, or of another shape or device than its parameter `name`.

    Args:
        gradient: default: the parameter's own.
    """
    gradient = weight.grad if gradient is None else gradient
    assert gradient is not None
    if gradient.layout is not torch.strided:
        wrong = f"the gradient of {name} has the layout {gradient.layout}"
        raise TrainingError(wrong, "use dense gradients, for example Embedding(sparse=False)")
    if gradient.shape != weight.shape or gradient.device != weight.device:
        raise TrainingError(
            f"the gradient of {name} has shape {[*gradient.shape]} on {gradient.device}, and the parameter"
            f" {[*weight.shape]} on {weight.device}",
            "assign gradients of the parameter's shape and device, and call zero_grad() after changing a parameter",
        )


def second_backward(weight: Tensor) -> TrainingError:
    """Error for a gradient that arrives after the backward has updated its parameter in the same step."""
    return TrainingError(
        f"a second backward before step() gives a gradient to a parameter of shape {[*weight.shape]} that the first one"
        " has updated",
        "call step() after every backward, or do not update in the backward to accumulate gradients",
    )


def check_places(groups: Sequence[Mapping[str, Any]], added: Sequence[Any]) -> None:
    """Raise a ConfigError if one of the added parameters, or pairs of name and parameter, has a place already."""
    places: dict[int, str] = {}
    for number, members in enumerate((*(group["params"] for group in groups), added)):
        for index, each in enumerate(members):
            weight, name = each[1] if isinstance(each, tuple) else each, parameter_name(number, index)
            if (first := places.setdefault(id(weight), name)) is not name:
                raise ConfigError(f"{name} is also {first}", "put each parameter into one group, once")


def check_saved_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise a CheckpointError if a state dict is incomplete, or of groups with other numbers of parameters."""
    if missing := {"param_groups", "state"} - state_dict.keys():
        raise CheckpointError(f"the optimizer state has no {', '.join(missing)}", "load a full state dict")
    saved, own = ([len(group["params"]) for group in each] for each in (state_dict["param_groups"], groups))
    if saved != own:
        wrong = f"the optimizer state has groups of {saved} parameters, and the optimizer {own}"
        raise CheckpointError(wrong, "load the state of this model, with the optimizer's options of its run")


def state_keys(rule: str, storage: str, number: int) -> tuple[str, ...]:
    """Keys of a state, or of its codes and scales: torch's name, with flashoptim's suffixes."""
    name = RULES[rule].states[number]
    return (f"{name}::quantized", f"{name}::scales") if STORAGES[storage].block else (name,)


def state_parts(state: dict[str, Any], rule: str, storage: str) -> list[tuple[Tensor, Tensor | None]]:
    found = []
    for number in range(len(RULES[rule].states)):
        codes, *scales = (state[key] for key in state_keys(rule, storage, number))
        found.append((codes.view(-1), scales[0] if scales else None))
    return found
