"""bitsandbytes' optimizer updates over `ops.optimizer`: one call per parameter, or all calls of a step in a batch.

`functional.optimizer_update_32bit` and `optimizer_update_8bit_blockwise` update one parameter. Inside `collected`, the
calls are recorded instead, and `UpdateBatch` runs them in one launch for each rule, storage and dtype.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..formats.base import FLOATS
from ..formats.codebooks import dynamic_map
from ..ops.optimizer import (
    RULES,
    SETTINGS,
    TRUSTS,
    Coefficients,
    Parameters,
    prepare_step,
    scale_by_trust,
    update_parameters,
)
from ..ops.optimizer_state import STORAGES
from .utils import gpu_view

RULE_OF = {
    "adam": "adamw",
    "ademamix": "ademamix",
    "lion": "lion",
    "momentum": "momentum",
    "rmsprop": "rmsprop",
    "adagrad": "adagrad",
    "lamb": "adamw",
    "lars": "momentum",
}
States = list[tuple[Tensor, Tensor | None]]  # codes and scales of each state


@dataclass
class Update:
    """One call: a parameter, its gradient and states, and the numbers of the step.

    Attributes:
        rule: name in `ops.optimizer.RULES`.
        weight, gradient: [n] each.
        states: codes and scales [n], on the weight's device.
        settings: columns `ops.optimizer.SETTINGS`.
        step: number of this step, from 1.
        scale: factor of the gradient.
        is_clipped: whether the update's norm is at most the setting alpha times the weight's norm.
        squared_norm: fp32 [1], receives the squared norm of a clipped update; or None.
    """

    rule: str
    weight: Tensor
    gradient: Tensor
    states: States
    settings: tuple[float, ...]
    step: int
    scale: float
    is_clipped: bool = False
    squared_norm: Tensor | None = None

    @property
    def kind(self) -> tuple[Any, ...]:
        """Updates of one kind run in one launch."""
        dtypes = self.weight.dtype, self.gradient.dtype
        return self.rule, self.states[0][1] is not None, *dtypes, self.weight.device, self.is_clipped


class _Collected(threading.local):
    updates: list[Update] | None = None


_collected = _Collected()


@contextlib.contextmanager
def collected() -> Iterator[list[Update]]:
    """Record this thread's updates in the list inside the context, and do not run them."""
    outer, _collected.updates = _collected.updates, []
    try:
        yield _collected.updates
    finally:
        _collected.updates = outer


class _Launch(NamedTuple):
    """Parameters of one launch, and the addresses of their tensors."""

    parameters: Parameters
    states: list[int]
    moving: list[int]


class UpdateBatch:
    """Runs updates, and keeps what kernels computed from the addresses of the tensors for the next step."""

    def __init__(self) -> None:
        self._launches: dict[tuple[Any, ...], _Launch] = {}

    @torch.no_grad()
    def run(self, updates: Sequence[Update]) -> None:
        """Update the parameters, in one launch for each kind."""
        by_kind: dict[tuple[Any, ...], list[Update]] = {}
        for update in updates:
            by_kind.setdefault(update.kind, []).append(update)
        self._launches = {key: self._run(key, updates_of_kind) for key, updates_of_kind in by_kind.items()}

    def _run(self, key: tuple[Any, ...], updates: Sequence[Update]) -> _Launch:
        coefficients, steps = _coefficients(updates, updates[0].weight.device)
        launch = self._launch(key, updates)
        if updates[0].is_clipped:
            squares = scale_by_trust(coefficients, [launch.parameters], "clip")
            for update, row in zip(updates, squares, strict=True):
                if update.squared_norm is not None:
                    update.squared_norm.copy_(row[1:])
        update_parameters(coefficients, steps, launch.parameters, None)
        return launch

    def _launch(self, key: tuple[Any, ...], updates: Sequence[Update]) -> _Launch:
        """Return the launch of the last step with the current weights and gradients, or a new one."""
        weights, gradients = [update.weight for update in updates], [update.gradient for update in updates]
        states = [update.states for update in updates]
        tensors = itertools.chain.from_iterable(state for update in updates for state in update.states)
        addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
        moving = [tensor.data_ptr() for tensor in (*weights, *gradients)]
        last = self._launches.get(key)
        if last is not None and last.states == addresses:
            parameters = last.parameters
            parameters.weights, parameters.gradients = weights, gradients
            parameters.version += moving != last.moving
            return last._replace(moving=moving)
        storage, rows = "dynamic8" if key[1] else "fp32", torch.arange(len(updates), dtype=torch.int32)
        parameters = Parameters(updates[0].rule, storage, "nearest", rows, weights, gradients, states)
        return _Launch(parameters, addresses, moving)


def _coefficients(updates: Sequence[Update], device: torch.device) -> tuple[Tensor, Tensor]:
    """Coefficients and step counts of `update_parameters`, computed on the host and copied at once."""
    n, rule = len(updates), updates[0].rule
    settings = torch.tensor([update.settings for update in updates], dtype=torch.float64)
    steps = torch.tensor([update.step - 1.0 for update in updates])
    coefficients = torch.empty(n, len(Coefficients._fields))
    prepare_step(settings, torch.arange(n, dtype=torch.int32), steps, coefficients, rule)
    coefficients[:, Coefficients._fields.index("scale")] = torch.tensor([update.scale for update in updates])
    table = torch.cat([coefficients.flatten(), steps])
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    else:
        table = table.to(device)
    return table[:-n].view(coefficients.shape), table[-n:]


# --- the operators ---------------------------------------------------------------------------------------------------

# Whether a map is the signed or the unsigned dynamic map, for maps that were compared; on a GPU that blocks.
_signs: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _submit(update: Update) -> None:
    if _collected.updates is not None:
        _collected.updates.append(update)
    else:
        UpdateBatch().run([update])


def _states(name: str, device: torch.device, first: Tensor, second: Tensor | None) -> list[Tensor]:
    """The states, flat, in the order of the rule: AdEMAMix's first tensor holds two.

    Paged states are unified or pinned memory, which torch holds as CPU tensors: they become views on `device`.
    """
    if device.type == "cuda":
        first, second = _unpaged(first), None if second is None else _unpaged(second)
    tensors = [*first.unbind(0)] if name == "ademamix" else [first]
    tensors += [] if second is None else [second]
    return [_flat(tensor.detach()) for tensor in tensors]


def _flat(state: Tensor) -> Tensor:
    """View a state's memory as [n], in the order of a contiguous weight.

    bitsandbytes makes the state of a transposed weight before it makes the weight contiguous, and its kernels do not
    read strides.
    """
    if state.is_contiguous():
        return state.view(-1)
    span = 1 + sum((size - 1) * stride for size, stride in zip(state.shape, state.stride(), strict=True))
    if span != state.numel():
        raise ValueError(f"a state of shape {[*state.shape]} has gaps in its memory: pass a contiguous one")
    return state.as_strided((state.numel(),), (1,))


def _unpaged(state: Tensor) -> Tensor:
    if not getattr(state, "is_paged", False):
        return state
    return gpu_view(state.data_ptr(), state.nbytes).view(state.dtype).view(state.shape)


def check_update(g: Tensor, p: Tensor) -> None:
    """Raise a ValueError unless the gradient has the weight's dtype and number of elements."""
    if g.dtype not in FLOATS or g.dtype != p.dtype or g.numel() != p.numel():
        raise ValueError(
            f"g is {g.dtype} with {g.numel()} elements, and p is {p.dtype} with {p.numel()}: pass two tensors of one "
            "size in fp32, fp16 or bf16"
        )


def _checked(name: str, g: Tensor, p: Tensor, state2: Tensor | None, skip_zeros: bool) -> str:
    """Return the rule of an optimizer's name.

    Raises:
        ValueError: unknown name, a missing second state, or tensors of other dtypes or sizes.
        NotImplementedError: `skip_zeros`.
    """
    if name not in RULE_OF:
        raise ValueError(f"there is no optimizer {name!r}: use one of {', '.join(RULE_OF)}")
    if skip_zeros:
        raise NotImplementedError("skip_zeros is not supported: zero gradients update the state")
    check_update(g, p)
    if not p.is_contiguous():
        raise ValueError("p is not contiguous: set p.data = p.data.contiguous() first")
    if (state2 is None) == (len(RULES[RULE_OF[name]].states) > 1):
        raise ValueError(f"{name} has {len(RULES[RULE_OF[name]].states)} states: pass state1 and, for two, state2")
    return RULE_OF[name]


def _settings(**numbers: float) -> tuple[float, ...]:
    return tuple(float(numbers.get(name, 0.0)) for name in SETTINGS)


def optimizer_update_32bit(
    optimizer_name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    state2: Tensor | None,
    unorm_vec: Tensor | None,
    max_unorm: float,
    param_norm: float,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    step: int,
    lr: float,
    gnorm_scale: float,
    skip_zeros: bool = False,
) -> None:
    """Update a weight and its fp32 states in place; see `functional.optimizer_update_32bit`.

    `param_norm` is not read: the norm of p is computed on its device.
    """
    rule = _checked(optimizer_name, g, p, state2, skip_zeros)
    if state1.dtype != torch.float32 or (state2 is not None and state2.dtype != torch.float32):
        raise ValueError(f"the states are {state1.dtype}: pass fp32 states, or call optimizer_update_8bit_blockwise")
    states: States = [(state, None) for state in _states(optimizer_name, p.device, state1, state2)]
    if any(state.numel() != p.numel() for state, _ in states):
        raise ValueError(
            f"the states of {optimizer_name} do not have {p.numel()} elements, as p; state1 of ademamix is [2, *shape]"
        )
    is_clipped = max_unorm > 0
    if is_clipped and rule not in TRUSTS["clip"].rules:
        raise NotImplementedError(
            f"max_unorm does not limit {optimizer_name}: pass 0, or use adam, momentum, lamb or lars"
        )
    alpha = max_unorm if is_clipped else alpha
    settings = _settings(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2, beta3=beta3, eps=eps, alpha=alpha)
    gradient = g.detach().contiguous().view(-1)
    update = Update(rule, p.detach().view(-1), gradient, states, settings, step, gnorm_scale, is_clipped, unorm_vec)
    _submit(update)


def optimizer_update_8bit_blockwise(
    optimizer_name: str,
    g: Tensor,
    p: Tensor,
    state1: Tensor,
    state2: Tensor | None,
    beta1: float,
    beta2: float,
    beta3: float,
    alpha: float,
    eps: float,
    step: int,
    lr: float,
    qmap1: Tensor,
    qmap2: Tensor | None,
    absmax1: Tensor,
    absmax2: Tensor | None,
    weight_decay: float,
    gnorm_scale: float,
    skip_zeros: bool = False,
) -> None:
    """Update a weight and its 8-bit states, in blocks of 256, in place; see the function of that name."""
    rule = _checked(optimizer_name, g, p, state2, skip_zeros)
    if (state2 is None) != (absmax2 is None) or (state2 is None) != (qmap2 is None):
        raise ValueError("state2, qmap2 and absmax2 belong together: pass all three or none")
    codes = _states(optimizer_name, p.device, state1, state2)
    scales = _states(optimizer_name, p.device, absmax1, absmax2)
    blocks = -(-p.numel() // STORAGES["dynamic8"].block)
    if any(code.dtype != torch.uint8 or code.numel() != p.numel() for code in codes):
        raise ValueError(f"the states are not uint8 with {p.numel()} elements, as p")
    if any(scale.dtype != torch.float32 or scale.numel() != blocks for scale in scales):
        raise ValueError(f"the scales are not fp32 with {blocks} elements, one for each block of 256")
    for qmap, signed in ((qmap1, True), (qmap2, False)):
        if qmap is not None and _signs.get(qmap) is None:
            _signs[qmap] = {sign for sign in (True, False) if torch.equal(qmap.cpu(), dynamic_map(signed=sign))}
        if qmap is not None and signed not in _signs[qmap]:
            raise ValueError("qmap1 and qmap2 must be create_dynamic_map(True) and create_dynamic_map(False)")
    settings = _settings(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2, beta3=beta3, eps=eps, alpha=alpha)
    states: States = [*zip(codes, scales, strict=True)]
    gradient = g.detach().contiguous().view(-1)
    _submit(Update(rule, p.detach().view(-1), gradient, states, settings, step, gnorm_scale))
